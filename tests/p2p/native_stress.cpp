// Run under sanitizers: lanes that share plain memory across barriers, two lanes that hand a frame to and fro by
// doorbell, and frames made of noise. Ends with 0, or says what went wrong and ends with 1.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "p2p/native/doorbell.h"
#include "p2p/native/lanes.h"
#include "p2p/native/window.h"

namespace {

constexpr uint32_t MOST_LANES = 4;

void require(bool kept, const char* promise) {
    if (kept) return;
    std::fprintf(stderr, "broken: %s\n", promise);
    std::exit(1);
}

struct Shared {
    LanePool* pool;
    uint32_t lanes;
    uint32_t rounds;
    uint64_t value[MOST_LANES];  // plain: only the barrier orders access
};

void add_up(void* arg, uint32_t lane) {
    auto* shared = static_cast<Shared*>(arg);
    for (uint64_t round = 1; round <= shared->rounds; round++) {
        shared->value[lane] += round;
        p2p_lanes_barrier(shared->pool, lane);
        for (uint32_t other = 0; other < shared->lanes; other++)
            require(shared->value[other] == round * (round + 1) / 2, "a barrier shows what every lane wrote before it");
        p2p_lanes_barrier(shared->pool, lane);
    }
}

void test_lanes(uint32_t lanes, const int32_t* cores) {
    LanePool* pool = p2p_lanes_new(lanes, cores);
    require(pool, "a pool starts");
    for (uint32_t run = 0; run < 20; run++) {
        Shared shared{pool, lanes, 100, {}};
        require(p2p_lanes_run(pool, add_up, &shared) == 0, "a run ends well");
        for (uint32_t lane = 0; lane < lanes; lane++)
            require(shared.value[lane] == 5050, "run returns when every lane is done");
    }
    p2p_lanes_free(pool);
}

struct Table {
    alignas(64) unsigned char page[P2P_BELL_PAGE];
    std::vector<unsigned char> window[2];
    uint64_t capacity;
    uint32_t turns;
};

// Lane 0 asks, lane 1 answers: payloads of every size, each frame in the same slot.
void converse(void* arg, uint32_t lane) {
    auto* table = static_cast<Table*>(arg);
    void* mine = p2p_slot(table->window[lane].data(), 0, table->capacity);
    void* yours = p2p_slot(table->window[1 - lane].data(), 0, table->capacity);
    std::vector<unsigned char> payload(table->capacity);
    for (uint64_t turn = 1; turn <= table->turns; turn++) {
        for (uint32_t step = 0; step < 2; step++) {
            if (step == lane) {
                P2pHeader fields{};
                fields.receiver = 1 - lane;
                fields.sender = lane;
                fields.sequence = turn;
                fields.length = uint32_t(turn % table->capacity);
                std::memset(p2p_payload(yours), int(turn + lane), fields.length);
                p2p_frame_seal(yours, &fields);
                p2p_signal_store(yours, turn);
                p2p_bell_ring(table->page, 1 - lane);
            } else {
                for (;;) {
                    uint32_t seen = p2p_bell_read(table->page, lane);
                    if (p2p_signal_load(mine) == turn) break;
                    p2p_bell_wait(table->page, lane, seen, P2P_WAIT_NS);
                }
                P2pHeader header;
                int length = p2p_frame_open(mine, table->capacity, lane, 1 - lane, turn, &header, payload.data());
                require(length == int(turn % table->capacity), "a frame that was signalled is whole");
                for (int i = 0; i < length; i++)
                    require(payload[i] == (unsigned char)(turn + (1 - lane)), "a payload arrives as it was sent");
            }
        }
    }
}

void test_conversation() {
    Table table{};
    table.capacity = 1500;
    table.turns = 3000;
    require(p2p_bell_init(table.page, 1, 2) == 0, "a page is made");
    for (auto& window : table.window) {
        window.resize(p2p_window_bytes(1, table.capacity));
        require(p2p_window_init(window.data(), window.size(), 1, 1, table.capacity) == 0, "a window is made");
    }
    LanePool* pool = p2p_lanes_new(2, nullptr);
    require(p2p_lanes_run(pool, converse, &table) == 0, "the conversation ends");
    p2p_lanes_free(pool);
}

// Exactly sized heap memory, so that a byte too many is seen.
void test_noise(uint32_t seed) {
    std::mt19937 random(seed);
    for (uint64_t capacity = 1; capacity < 300; capacity++) {
        std::vector<unsigned char> slot(P2P_FRAME_OFFSET + capacity), payload(capacity);
        for (auto& byte : slot) byte = (unsigned char)random();
        P2pHeader header;
        require(p2p_frame_open(slot.data(), capacity, 1, 2, 3, &header, payload.data()) < 0, "noise is refused");
        P2pHeader fields{};
        fields.receiver = 1;
        fields.sender = 2;
        fields.sequence = 3;
        fields.length = uint32_t(random() % (capacity + 1));
        p2p_frame_seal(slot.data(), &fields);
        uint32_t length = uint32_t(random() % 4 ? fields.length : random());
        std::memcpy(slot.data() + P2P_SIGNAL + 28, &length, sizeof length);
        int result = p2p_frame_open(slot.data(), capacity, 1, 2, 3, &header, payload.data());
        require(result == (length == fields.length ? int(length) : P2P_E_LENGTH) || result == P2P_E_CHECKSUM,
                "a length is judged before anything is copied");
    }
}

}  // namespace

int main() {
    const int32_t cores[MOST_LANES] = {0, -1, -1, -1};
    for (uint32_t lanes : {1u, 2u, 4u}) {
        test_lanes(lanes, nullptr);
        test_lanes(lanes, cores);
    }
    test_conversation();
    for (uint32_t seed = 0; seed < 20; seed++) test_noise(seed);
    return 0;
}
