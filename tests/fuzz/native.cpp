// Fuzz targets of the native code: bytes decide what a hostile or broken peer writes, and when. What is judged: no
// sanitizer speaks, every call ends, whole messages get their answer, and no wrong answer is taken.
//
// With clang this is a libFuzzer program. With FUZZ_BLINDLY it brings a main that understands the same
// flags but tries random bytes only: native -max_total_time=10 -seed=1, or native FILE... to replay.
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "experts/native/client.h"
#include "experts/native/kernels.h"
#include "experts/native/server.h"
#include "experts/native/wire.h"
#include "p2p/native/doorbell.h"
#include "p2p/native/window.h"
#if __has_include("p2p/native/channel.h")
#include "p2p/native/channel.h"
#define HAVE_CHANNELS 1
#endif

using namespace experts;

namespace {

void require(bool kept, const char* promise) {
    if (kept) return;
    std::fprintf(stderr, "broken: %s\n", promise);
    __sanitizer_print_stack_trace();
    std::abort();
}

// Decisions, one after another; once the bytes are used up every decision is zero.
class Choices {
  public:
    Choices(const uint8_t* data, size_t size) : data_(data), left_(size) {}
    bool left() const { return left_; }
    uint64_t bits(size_t bytes) {
        uint64_t value = 0;
        size_t taken = std::min(bytes, left_);
        std::memcpy(&value, data_, taken);
        data_ += taken;
        left_ -= taken;
        return value;
    }
    uint32_t below(uint32_t limit) { return limit > 1 ? uint32_t(bits(limit > 256 ? 4 : 1)) % limit : 0; }
    // What a field finds hard: an extreme, a neighbour of one, or any.
    uint64_t value() {
        const uint64_t hard[] = {0, 1, ~0ull, ~0ull >> 1, 1ull << 63, ~0ull - 1};
        uint32_t kind = below(10);
        return kind < 6 ? hard[kind] : bits(1u << (kind - 6));
    }
    void fill(void* to, size_t bytes) {
        auto* at = static_cast<uint8_t*>(to);
        for (size_t i = 0; i < bytes; i++) at[i] = uint8_t(bits(1));
    }

  private:
    const uint8_t* data_;
    size_t left_;
};

// Up to `most` changes; whether there was any.
bool damage(Choices& choices, uint8_t* bytes, uint32_t size, uint32_t most) {
    std::vector<uint8_t> before(bytes, bytes + size);
    for (uint32_t left = size ? choices.below(most + 1) : 0; left; left--) {
        // Half of them to what is read first.
        uint32_t at = choices.below(choices.below(2) ? std::min(size, 64u) : size), width = 2u << choices.below(3);
        uint64_t value;
        switch (choices.below(4)) {
            case 0: bytes[at] ^= uint8_t(1u << choices.below(8)); break;
            case 1:
            case 2:
                at = at / width * width;
                value = choices.value();
                std::memcpy(bytes + at, &value, std::min(width, size - at));
                break;
            case 3: {
                uint32_t from = choices.below(size);
                std::memmove(bytes + at, bytes + from, std::min({64u, size - at, size - from}));
            }
        }
    }
    return std::memcmp(before.data(), bytes, size) != 0;
}

struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

Memory zeros(uint64_t alignment, uint64_t bytes) {
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment));
    std::memset(memory, 0, (bytes + alignment - 1) / alignment * alignment);
    return Memory(memory);
}

// A window whose gaps between slots may not be touched.
struct Window {
    uint32_t slots;
    uint64_t capacity, bytes;
    Memory memory;

    Window(uint32_t slots, uint64_t capacity, uint64_t incarnation)
        : slots(slots), capacity(capacity), bytes(p2p_window_bytes(slots, capacity)), memory(zeros(P2P_PAGE, bytes)) {
        require(p2p_window_init(memory.get(), bytes, incarnation, slots, capacity) == 0, "a window is made");
        for (uint32_t i = 0; i < slots; i++)
            ASAN_POISON_MEMORY_REGION(slot(i) + P2P_FRAME_OFFSET + capacity,
                                      p2p_slot_stride(capacity) - P2P_FRAME_OFFSET - capacity);
    }
    ~Window() { ASAN_UNPOISON_MEMORY_REGION(memory.get(), bytes); }
    uint8_t* slot(uint32_t index) const { return static_cast<uint8_t*>(p2p_slot(memory.get(), index, capacity)); }
    uint8_t* payload(uint32_t index) const { return slot(index) + P2P_FRAME_OFFSET; }
    uint64_t signal(uint32_t index) const { return p2p_signal_load(slot(index)); }
};

P2pHeader header_of(const void* slot) {
    P2pHeader header;
    std::memcpy(&header, static_cast<const uint8_t*>(slot) + P2P_SIGNAL, sizeof header);
    return header;
}

// Seals what lies in the slot, and perhaps damages the frame's header after it or before. True where the frame is
// still the one that `fields` describe.
bool seal(Choices& choices, Window& window, uint32_t slot, const P2pHeader& fields) {
    p2p_frame_seal(window.slot(slot), &fields);
    uint8_t* header = window.slot(slot) + P2P_SIGNAL;
    if (choices.below(3) < 2 || !damage(choices, header, P2P_FRAME_HEADER, 2)) return true;
    P2pHeader now = header_of(window.slot(slot));
    if (choices.below(4) == 0) return false;
    now.checksum = p2p_checksum(&now, window.payload(slot), std::min<uint64_t>(now.length, window.capacity));
    std::memcpy(header, &now, sizeof now);
    return false;
}

// ---- frames, windows, pages

void fuzz_frame(Choices& choices) {
    uint32_t capacity = choices.below(1400);
    Memory slot = zeros(64, P2P_FRAME_OFFSET + capacity), out = zeros(64, capacity);
    // A byte too many is seen: alignment's slack is not theirs.
    uint64_t end = P2P_FRAME_OFFSET + capacity, slack = (end + 63) / 64 * 64 - end;
    ASAN_POISON_MEMORY_REGION(slot.get() + end, slack);
    ASAN_POISON_MEMORY_REGION(out.get() + capacity, (capacity + 63) / 64 * 64 - capacity);
    P2pHeader fields{};
    fields.incarnation = choices.bits(1), fields.sender = choices.bits(1), fields.sequence = choices.value();
    fields.attempt = choices.below(P2P_ATTEMPT_LIMIT), fields.length = choices.below(capacity + 1);
    choices.fill(slot.get() + P2P_FRAME_OFFSET, std::min(fields.length, 32u));
    p2p_frame_seal(slot.get(), &fields);
    bool changed = damage(choices, slot.get() + P2P_SIGNAL, uint32_t(end - P2P_SIGNAL), 3);
    P2pHeader now = header_of(slot.get());
    if (choices.below(2)) {
        now.checksum = p2p_checksum(&now, slot.get() + P2P_FRAME_OFFSET, std::min(now.length, capacity));
        std::memcpy(slot.get() + P2P_SIGNAL, &now, sizeof now);
    }
    P2pHeader got;
    int length = p2p_frame_open(slot.get(), capacity, fields.incarnation, fields.sender, fields.sequence, &got, out.get());
    require(changed || length == int(fields.length), "a whole frame is accepted");
    if (length < 0) return;
    require(std::memcmp(&got, &now, sizeof now) == 0 && uint32_t(length) == now.length && now.length <= capacity &&
                now.incarnation == fields.incarnation && now.sender == fields.sender &&
                now.sequence == fields.sequence && now.attempt < P2P_ATTEMPT_LIMIT && !now.flags && !now.reserved,
            "an accepted frame is the one awaited");
    require(std::memcmp(out.get(), slot.get() + P2P_FRAME_OFFSET, now.length) == 0, "a payload arrives whole");
    require(p2p_checksum(&now, out.get(), now.length) == now.checksum, "an accepted payload has its checksum");
}

void fuzz_pages(Choices& choices) {
    uint64_t incarnation = choices.bits(1);
    uint32_t slots = 1 + choices.below(3);
    uint64_t capacity = 1 + choices.below(5000);
    Window window(slots, capacity, incarnation);
    bool changed = damage(choices, window.memory.get(), sizeof(P2pWindowHeader), 3);
    uint64_t bytes = choices.below(2) ? choices.value() % (window.bytes + 1) : window.bytes;
    uint32_t want_slots = choices.below(2) ? uint32_t(choices.value()) : slots;
    uint64_t want_capacity = choices.below(2) ? choices.value() : capacity;
    int verdict = p2p_window_check(window.memory.get(), bytes, incarnation, want_slots, want_capacity);
    bool same = bytes == window.bytes && want_slots == slots && want_capacity == capacity;
    require(changed || !same || verdict == 0, "a window that was agreed on is accepted");
    require(verdict || p2p_window_bytes(want_slots, want_capacity) <= bytes, "an accepted window has all of its slots");
    p2p_window_beat(window.memory.get());
    p2p_window_set_state(window.memory.get(), uint32_t(choices.value()));

    Memory page = zeros(P2P_PAGE, P2P_BELL_PAGE);
    require(p2p_bell_init(page.get(), incarnation, 1 + choices.below(P2P_BELL_LANES)) == 0, "a page is made");
    changed = damage(choices, page.get(), P2P_BELL_PAGE, 3);
    require(changed || p2p_bell_check(page.get(), incarnation) == 0, "a good page is accepted");
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t lane = uint32_t(choices.value());
        p2p_bell_beat(page.get());
        p2p_bell_ring(page.get(), lane);
        p2p_bell_wait(page.get(), lane, uint32_t(choices.value()), choices.bits(1));
        p2p_bell_cancel(page.get(), lane);
    }
}

// ---- both ends of the expert service

constexpr uint32_t LAYERS = 2, EXPERTS = 6, HIDDEN = 40, INTERMEDIATE = 24, TOP_K = 2;
constexpr uint64_t HASH = 0x1234, SERVER = 77, CLIENT = 1000;
constexpr uint32_t SLOTS = 2, PEERS = 2;
constexpr uint64_t SLOT_BYTES = 1500;

struct Weights {
    Memory gate_up, down;
};

const Weights& weights_of(int dtype) {
    static Weights all[3];
    Weights& weights = all[dtype];
    if (weights.down) return weights;
    weights.gate_up = zeros(64, experts_gate_up_bytes(dtype, INTERMEDIATE, HIDDEN));
    weights.down = zeros(64, experts_pack_bytes(dtype, HIDDEN, INTERMEDIATE));
    std::vector<float> plain(INTERMEDIATE * HIDDEN);
    for (size_t i = 0; i < plain.size(); i++) plain[i] = float(int(i * 37 % 101) - 50) / 100;
    experts_pack_gate_up(dtype, plain.data(), plain.data(), EAAS_F32, INTERMEDIATE, HIDDEN, weights.gate_up.get());
    experts_pack_matrix(dtype, plain.data(), EAAS_F32, HIDDEN, INTERMEDIATE, weights.down.get());
    return weights;
}

WireShape shape_of(uint32_t dtype) { return {LAYERS, EXPERTS, HIDDEN, TOP_K, dtype, HASH}; }

// Writes a request that is right in every field; its bytes.
uint32_t write_request(Choices& choices, const WireShape& shape, uint8_t* payload) {
    WireHeader header{};
    header.magic = WIRE_MAGIC, header.version = WIRE_VERSION, header.kind = WIRE_REQUEST;
    header.model_hash = HASH, header.hidden = HIDDEN, header.dtype = uint16_t(shape.dtype);
    header.layer = choices.below(LAYERS), header.rows = 1 + choices.below(3);
    header.pairs = 1 + choices.below(header.rows * TOP_K);
    std::vector<WirePair> pairs(header.pairs);
    for (WirePair& pair : pairs)
        pair = {uint16_t(choices.below(header.rows)), uint16_t(choices.below(EXPERTS)), uint16_t(choices.below(TOP_K)), 0};
    header.routing_hash = routing_hash(pairs.data(), header.pairs);
    uint32_t bytes = uint32_t(request_bytes(shape, header.rows, header.pairs));
    std::memset(payload, 0, bytes);
    std::memcpy(payload, &header, sizeof header);
    std::memcpy(payload + sizeof header, pairs.data(), header.pairs * sizeof(WirePair));
    choices.fill(payload + sizeof header + routing_bytes(header.pairs), choices.below(16));
    return bytes;
}

// So that the checks behind the hash are reached as well.
void hash_again(uint8_t* payload) {
    WireHeader header;
    std::memcpy(&header, payload, sizeof header);
    if (sizeof header + routing_bytes(header.pairs) > SLOT_BYTES) return;
    header.routing_hash = routing_hash(reinterpret_cast<WirePair*>(payload + sizeof header), header.pairs);
    std::memcpy(payload, &header, sizeof header);
}

struct Attached {
    Window request{SLOTS, SLOT_BYTES, SERVER}, reply;
    int32_t index = -1;
    uint64_t top[SLOTS] = {};  // of the signals ever stored
    bool whole[SLOTS] = {};    // the request there is right, and still waits
    bool held[SLOTS] = {};     // and the server has all of its experts

    explicit Attached(uint64_t incarnation) : reply(SLOTS, SLOT_BYTES, incarnation) {}
};

void judge_answers(Attached& client, uint64_t incarnation) {
    for (uint32_t i = 0; i < SLOTS; i++) {
        uint64_t signal = client.reply.signal(i);
        if (!signal) continue;
        P2pHeader frame;
        std::vector<uint8_t> payload(SLOT_BYTES);
        int length = p2p_frame_open(client.reply.slot(i), SLOT_BYTES, incarnation, SERVER, signal, &frame, payload.data());
        WireHeader header;
        std::memcpy(&header, payload.data(), sizeof header);
        require(length >= int(sizeof header) && header.magic == WIRE_MAGIC && header.kind == WIRE_REPLY &&
                    header.status <= STATUS_INVALID, "whatever was asked, a reply is a reply");
        if (!client.whole[i] || signal != client.top[i]) continue;
        client.whole[i] = false;
        require(header.status == (client.held[i] ? STATUS_OK : STATUS_NOT_HELD), "a whole request is served");
        require(length == int(client.held[i] ? sizeof header + header.pairs * HIDDEN * 4 : sizeof header),
                "a reply has a row for each pair");
    }
}

void fuzz_server(Choices& choices) {
    const int dtype = int(choices.below(3));
    const WireShape shape = shape_of(uint32_t(dtype));
    const Weights& weights = weights_of(dtype);
    const int32_t core = -1;
    ExpertServer* server = expert_server_new(LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, dtype, HASH, SERVER, 1, &core,
                                             nullptr, SLOT_BYTES);
    Memory page = zeros(P2P_PAGE, P2P_BELL_PAGE);
    std::vector<std::unique_ptr<Attached>> clients;
    auto attach = [&](uint32_t i) {
        clients[i] = std::make_unique<Attached>(CLIENT + i);
        Attached& client = *clients[i];
        ClientLink link{client.request.memory.get(), client.request.bytes, client.reply.memory.get(),
                        client.reply.bytes, page.get(), CLIENT + i, 1, SLOTS, SLOT_BYTES};
        client.index = expert_server_add_client(server, &link);
        require(client.index >= 0, "a client attaches");
    };
    clients.resize(PEERS);
    for (uint32_t i = 0; i < PEERS; i++) attach(i);
    auto step = [&] {
        int32_t answered = expert_server_step(server, 1);
        require(answered >= 0, "a step ends well");
        for (uint32_t i = 0; i < PEERS; i++) judge_answers(*clients[i], CLIENT + i);
        return answered;
    };
    bool lacks[EXPERTS] = {};
    for (uint32_t expert = 0; expert < EXPERTS; expert++) {
        lacks[expert] = choices.below(8) == 7;
        for (uint32_t layer = 0; layer < LAYERS && !lacks[expert]; layer++)
            expert_server_set_expert(server, layer, expert, weights.gate_up.get(), weights.down.get());
    }
    for (uint32_t turn = 0; choices.left() && turn < 40; turn++) {
        uint32_t number = choices.below(PEERS), slot = choices.below(SLOTS), kind = choices.below(16);
        if (kind == 15) {
            expert_server_remove_client(server, uint32_t(clients[number]->index));
            attach(number);
        }
        Attached& client = *clients[number];
        uint8_t* payload = client.request.payload(slot);
        client.whole[slot] = false;
        if (kind == 14) {
            choices.fill(client.request.slot(slot), P2P_FRAME_OFFSET + choices.below(64));
        } else {
            P2pHeader fields{};
            uint64_t top = client.top[slot];
            fields.incarnation = SERVER, fields.sender = CLIENT + number;
            fields.sequence = top + 1 ? top + 1 : top, fields.attempt = choices.below(4);
            fields.length = write_request(choices, shape, payload);
            WireHeader asked;
            std::memcpy(&asked, payload, sizeof asked);
            auto* pairs = reinterpret_cast<WirePair*>(payload + sizeof asked);
            bool held = std::none_of(pairs, pairs + asked.pairs, [&](WirePair p) { return lacks[p.expert]; });
            bool whole = top + 1 != 0;
            if (kind < 10) {
                whole &= !damage(choices, payload, std::min<uint32_t>(fields.length, 128), 3);
                if (choices.below(2)) hash_again(payload);
            } else if (kind < 12) {
                fields.length = std::min<uint32_t>(uint32_t(choices.value()), SLOT_BYTES);
                whole = false;
            }
            whole &= seal(choices, client.request, slot, fields);
            uint64_t signal = choices.below(8) == 7 ? choices.value() : fields.sequence;
            client.whole[slot] = whole && signal == fields.sequence;
            client.held[slot] = held;
            p2p_signal_store(client.request.slot(slot), signal);
        }
        client.top[slot] = std::max(client.top[slot], client.request.signal(slot));
        if (choices.below(2)) step();
    }
    for (uint32_t i = 0; step(); i++) require(i < 2 * PEERS * SLOTS, "a server comes to rest");
    for (auto& client : clients)
        for (bool waits : client->whole) require(!waits, "a whole request is answered, whatever came before it");
    expert_server_free(server);
}

// The rows that an honest server of this world sends.
float row_value(uint32_t expert, const uint8_t* row) { return float(1 + expert) * float(1 + row[0]); }

struct Called {
    uint32_t n;
    std::vector<uint8_t> rows;
    std::vector<uint16_t> ids;
    std::vector<float> weights, before, out;

    Called(Choices& choices, uint64_t row_bytes)
        : n(1 + choices.below(6)), rows(n * row_bytes), ids(n * TOP_K), weights(n * TOP_K), before(n * HIDDEN, 0.5f) {
        for (uint32_t t = 0; t < n; t++) rows[t * row_bytes] = uint8_t(choices.bits(1));
        for (uint16_t& id : ids) id = uint16_t(choices.below(EXPERTS));
        for (float& weight : weights) weight = float(choices.bits(1)) / 4;
        out = before;
    }
    bool right(uint64_t row_bytes) const {
        for (uint32_t t = 0; t < n; t++) {
            float sum = 0;
            for (uint32_t k = 0; k < TOP_K; k++)
                sum += weights[t * TOP_K + k] * row_value(ids[t * TOP_K + k], &rows[t * row_bytes]);
            for (uint32_t j = 0; j < HIDDEN; j++)
                if (out[t * HIDDEN + j] != 0.5f + sum) return false;
        }
        return true;
    }
};

// Writes the honest reply to what the client asked in that slot; its bytes.
uint32_t write_reply(const WireShape& shape, const uint8_t* request, uint8_t* reply) {
    WireHeader header;
    std::memcpy(&header, request, sizeof header);
    const auto* pairs = reinterpret_cast<const WirePair*>(request + sizeof header);
    const uint8_t* rows = request + sizeof header + routing_bytes(header.pairs);
    auto* out = reinterpret_cast<float*>(reply + sizeof header);
    for (uint32_t i = 0; i < header.pairs; i++)
        std::fill_n(out + i * HIDDEN, HIDDEN, row_value(pairs[i].expert, rows + pairs[i].row * shape.row_bytes()));
    header.kind = WIRE_REPLY;
    std::memcpy(reply, &header, sizeof header);
    return uint32_t(reply_bytes(shape, header.pairs));
}

void publish(Choices& choices, ExpertClient* client, uint64_t epoch) {
    std::vector<uint8_t> table(LAYERS * EXPERTS * EXPERTS_MAX_REPLICAS, EXPERTS_NO_SERVER);
    for (size_t i = 0; i < table.size(); i += EXPERTS_MAX_REPLICAS)
        for (uint32_t peer = 0; peer < PEERS; peer++)
            if (choices.below(4) < 3) table[i + peer] = uint8_t(peer);
    expert_client_publish_routes(client, epoch, table.data());
}

void fuzz_client(Choices& choices) {
    const WireShape shape = shape_of(choices.below(3));
    const uint64_t row_bytes = HIDDEN * (shape.dtype == 0 ? 4 : 2);
    ExpertClient* client = expert_client_new(LAYERS, EXPERTS, HIDDEN, TOP_K, int32_t(shape.dtype), HASH, CLIENT, 1, nullptr, 6);
    Memory page = zeros(P2P_PAGE, P2P_BELL_PAGE);
    std::vector<std::unique_ptr<Attached>> servers;
    for (uint32_t i = 0; i < PEERS; i++) {
        Attached& server = *servers.emplace_back(std::make_unique<Attached>(CLIENT));
        ServerLink link{server.request.memory.get(), server.request.bytes, server.reply.memory.get(), server.reply.bytes,
                        page.get(), SERVER, -1, SLOTS, SLOT_BYTES, 0, 1};
        require(expert_client_add_server(client, &link) == int32_t(i), "a server attaches");
    }
    publish(choices, client, 1);
    bool forged = false;  // a false reply was sealed as a true one: what it says may be believed
    uint64_t now_ns = 1'000'000'000;
    for (uint32_t count = 0; count < 3 && (choices.left() || !count); count++) {
        Called call(choices, row_bytes);
        uint64_t deadline_ns = now_ns + 1 + choices.bits(5);
        int32_t status = expert_client_begin(client, choices.below(LAYERS), call.rows.data(), call.n, call.ids.data(),
                                             call.weights.data(), call.out.data(), now_ns, deadline_ns);
        require(status == EXPERTS_OK, "a call begins");
        status = EXPERTS_PENDING;
        for (uint32_t turn = 0; choices.left() && turn < 30 && status == EXPERTS_PENDING; turn++) {
            Attached& server = *servers[choices.below(PEERS)];
            uint32_t slot = choices.below(SLOTS), kind = choices.below(16);
            P2pHeader asked = header_of(server.request.slot(slot));
            if (kind == 15) {
                publish(choices, client, 2 + turn);
            } else if (kind == 14) {
                choices.fill(server.reply.slot(slot), P2P_FRAME_OFFSET + choices.below(64));
            } else if (asked.magic) {
                uint8_t* payload = server.reply.payload(slot);
                P2pHeader fields{};
                fields.incarnation = CLIENT, fields.sender = SERVER;
                fields.sequence = asked.sequence, fields.attempt = asked.attempt;
                fields.length = write_reply(shape, server.request.payload(slot), payload);
                bool whole = true;
                if (kind > 9) {
                    uint16_t refusal = uint16_t(choices.below(4));
                    std::memcpy(payload + 42, &refusal, sizeof refusal);
                    if (refusal && choices.below(2)) fields.length = sizeof(WireHeader);
                } else if (kind > 4) {
                    whole &= !damage(choices, payload, fields.length, 3);
                    if (choices.below(4) == 0) fields.length = std::min<uint32_t>(uint32_t(choices.value()), SLOT_BYTES);
                }
                whole &= seal(choices, server.reply, slot, fields);
                forged |= !whole;
                p2p_signal_store(server.reply.slot(slot), choices.below(8) == 7 ? choices.value() : asked.sequence);
            }
            now_ns += choices.below(4) == 3 ? 1 + choices.bits(4) : 1000;
            status = expert_client_step(client, now_ns);
        }
        now_ns = std::max(now_ns, deadline_ns);
        if (status == EXPERTS_PENDING) status = expert_client_step(client, now_ns);
        require(status == EXPERTS_OK || status == EXPERTS_E_LOST, "a call ends by its deadline");
        require(status == EXPERTS_OK || call.out == call.before, "a lost call leaves its output as it was");
        require(status != EXPERTS_OK || forged || call.right(row_bytes), "no wrong reply is accepted");
        for (uint32_t i = 0; i < PEERS; i++) {
            ServerStats stats;
            require(expert_client_stats(client, i, &stats) == EXPERTS_OK && stats.late_slots <= SLOTS, "counts hold");
        }
    }
    expert_client_free(client);
}

#ifdef HAVE_CHANNELS
// ---- notes, at both ends of a channel

// A path whose other end is the fuzzer.
struct Rail {
    struct Event {
        P2pPathEvent event;
        std::unique_ptr<uint8_t[]> note;  // of exactly its size
    };
    const uint8_t* image = nullptr;
    uint64_t nbytes = 0;
    bool broken = false;
    std::vector<Event> events;
    Event current;

    static Rail& of(void* self) { return *static_cast<Rail*>(self); }
    static int write(void* self, uint64_t ticket, uint64_t offset, const void* source, uint64_t bytes, const void*,
                     uint32_t note_bytes) {
        Rail& rail = of(self);
        require(offset <= rail.nbytes && bytes <= rail.nbytes - offset && source == rail.image + offset &&
                    note_bytes <= P2P_NOTE_BYTES, "a write lies in the window");
        if (!rail.broken) rail.events.push_back({{P2P_PATH_DONE, 0, ticket, nullptr}, nullptr});
        return rail.broken ? -1 : 0;
    }
    static int tell(void* self, const void*, uint32_t bytes) {
        require(bytes <= P2P_NOTE_BYTES, "a note has its bounds");
        return of(self).broken ? -1 : 0;
    }
    static int poll(void* self, P2pPathEvent* event) {
        Rail& rail = of(self);
        if (rail.broken) return -1;
        if (rail.events.empty()) return 0;
        rail.current = std::move(rail.events.front());
        rail.events.erase(rail.events.begin());
        *event = rail.current.event;
        return 1;
    }
    static constexpr P2pPathOps OPS{write, tell, poll};
    P2pPath ends() { return {&OPS, this}; }

    void receive(Choices& choices, uint64_t incarnation, uint32_t generation) {
        constexpr uint8_t KINDS[] = {P2P_NOTE_WROTE, P2P_NOTE_SIGNAL, P2P_NOTE_STATE, P2P_NOTE_DOUBT, P2P_NOTE_CLOSED,
                                     P2P_NOTE_OFFER, P2P_NOTE_PROBE,  P2P_NOTE_ECHO,  P2P_NOTE_HELLO, P2P_NOTE_WELCOME};
        auto number = [&] { return choices.below(4) ? choices.below(40) : choices.value(); };
        P2pNote fields{};
        uint8_t note[P2P_NOTE_BYTES], blob[256];
        fields.kind = choices.below(12) ? KINDS[choices.below(std::size(KINDS))] : uint8_t(choices.bits(1));
        fields.path = uint16_t(choices.below(8) ? choices.below(2) : choices.value());
        fields.generation = choices.below(8) ? generation + choices.below(2) : uint32_t(choices.value());
        fields.incarnation = incarnation, fields.number = number(), fields.first = number();
        fields.offset = choices.below(2) ? 8 * choices.below(600) : choices.value(), fields.value = number();
        fields.blob_bytes = choices.below(4) ? choices.below(16) : choices.below(sizeof blob);
        choices.fill(blob, fields.blob_bytes);
        uint32_t bytes = p2p_note_seal(&fields, blob, note);
        if (choices.below(4) == 3 && damage(choices, note, bytes, 2) && choices.below(4)) {
            std::memcpy(&fields, note, sizeof fields);
            fields.checksum = p2p_checksum(&fields, note + P2P_NOTE_HEADER, bytes - P2P_NOTE_HEADER);
            std::memcpy(note, &fields, sizeof fields);
        }
        if (choices.below(16) == 15) bytes = choices.below(bytes + 1);
        events.push_back({{P2P_PATH_NOTE, bytes, 0, nullptr}, std::make_unique<uint8_t[]>(bytes)});
        std::memcpy(events.back().note.get(), note, bytes);
        events.back().event.note = events.back().note.get();
    }
};

constexpr P2pChannelConfig CHANNEL = [] {
    P2pChannelConfig config{};
    config.paths = 2, config.piece_bytes = 512, config.silence_ns = 1'000'000, config.grace_ns = 1'000'000;
    config.reopen_first_ns = 1'000'000, config.reopen_last_ns = 8'000'000;
    return config;
}();

void fuzz_channel(Choices& choices) {
    const uint64_t nbytes = choices.below(2) ? 8 + choices.below(4000) : p2p_window_bytes(1, 600);
    Memory memory = zeros(8, nbytes);
    if (nbytes % 8) ASAN_POISON_MEMORY_REGION(memory.get() + nbytes, 8 - nbytes % 8);
    if (nbytes == p2p_window_bytes(1, 600)) p2p_window_init(memory.get(), nbytes, SERVER, 1, 600);
    Rail rails[2];
    uint32_t generations[2] = {};
    for (Rail& rail : rails) rail.image = memory.get(), rail.nbytes = nbytes;
    bool owns = choices.below(2);
    P2pOwner* owner = owns ? p2p_owner_new(memory.get(), nbytes, SERVER, nullptr, 0, &CHANNEL) : nullptr;
    P2pWriter* writer = owns ? nullptr : p2p_writer_new(memory.get(), nbytes, SERVER, &CHANNEL);
    require(owner || writer, "an end is made");
    auto open = [&](uint32_t path, uint64_t now_ns) {
        rails[path].broken = false;
        if (owns) p2p_owner_path_open(owner, path, generations[path], rails[path].ends(), now_ns);
        if (!owns) p2p_writer_path_open(writer, path, generations[path], rails[path].ends(), now_ns);
    };
    uint64_t now_ns = 1'000'000'000;
    for (uint32_t path = 0; path < 2; path++) open(path, now_ns);
    if (!owns && nbytes >= sizeof(P2pWindowHeader)) p2p_writer_watch_slots(writer);
    for (uint32_t turn = 0; choices.left() && turn < 60; turn++) {
        uint32_t path = choices.below(2), kind = choices.below(16);
        if (kind < 10) {
            rails[path].receive(choices, SERVER, generations[path]);
        } else if (kind == 10) {
            rails[path].broken = true;
        } else if (!owns && kind < 13) {
            p2p_writer_put(writer, choices.value() % (nbytes + 8), choices.value() % (nbytes + 8), now_ns);
        } else if (!owns && kind < 15) {
            p2p_writer_signal(writer, choices.below(2) ? 8 * choices.below(600) : choices.value(), turn, now_ns);
        } else if (!owns && nbytes >= P2P_PAGE + P2P_FRAME_OFFSET) {
            choices.fill(memory.get() + P2P_PAGE, P2P_FRAME_OFFSET);  // its own program's frame
        }
        now_ns += choices.below(4) == 3 ? choices.bits(5) : 1000;
        if (owns) p2p_owner_step(owner, now_ns);
        if (!owns) p2p_writer_step(writer, now_ns);
        P2pCommand command;
        for (uint32_t count = 0; owns ? p2p_owner_command(owner, &command) : p2p_writer_command(writer, &command);
             count++) {
            require(count < 4 * P2P_PATHS * (turn + 1), "commands do not breed");
            if (command.kind == P2P_COMMAND_LOST) continue;
            if (command.path >= 2) {
                require(command.path < P2P_PATHS, "a command names a path");
                if (owns) p2p_owner_path_closed(owner, command.path, command.generation, now_ns);
                continue;
            }
            generations[command.path] = command.generation;
            if (command.kind == P2P_COMMAND_CLOSE) {
                rails[command.path].events.clear();
                if (owns) p2p_owner_path_closed(owner, command.path, command.generation, now_ns);
            } else if (choices.below(4)) {
                if (owns) p2p_owner_offer(owner, command.path, command.generation, "address", 7, now_ns);
                open(command.path, now_ns);
            } else if (!owns) {
                p2p_writer_path_closed(writer, command.path, command.generation);
            }
        }
    }
    p2p_owner_free(owner);
    p2p_writer_free(writer);
}
#else
void fuzz_channel(Choices&) {}
#endif

// In this order forever: the first byte of a recorded input is an index here.
constexpr void (*TARGETS[])(Choices&) = {fuzz_frame, fuzz_pages, fuzz_server, fuzz_client, fuzz_channel};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (!size) return 0;
    Choices choices(data + 1, size - 1);
    TARGETS[data[0] % std::size(TARGETS)](choices);
    return 0;
}

#ifdef FUZZ_BLINDLY
#include <chrono>
#include <csignal>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

namespace {

std::vector<uint8_t> input;

void keep_input() {
    std::ofstream("crash-input", std::ios::binary).write(reinterpret_cast<const char*>(input.data()), long(input.size()));
    std::fprintf(stderr, "the input is kept in ./crash-input\n");
}

void try_input() { LLVMFuzzerTestOneInput(input.data(), input.size()); }

}  // namespace

int main(int count, char** arguments) {
    __sanitizer_set_death_callback(keep_input);
    std::signal(SIGABRT, [](int) { keep_input(); });
    uint64_t seed = 1, runs = 0;
    double seconds = 0;
    for (int i = 1; i < count; i++) {
        std::string argument = arguments[i];
        if (argument.starts_with("-seed=")) {
            seed = std::stoull(argument.substr(6));
        } else if (argument.starts_with("-max_total_time=")) {
            seconds = std::stod(argument.substr(16));
        } else {
            std::ifstream file(argument, std::ios::binary);
            require(bool(file), "a file to replay can be read");
            input.assign(std::istreambuf_iterator<char>(file), {});
            try_input();
            runs++;
        }
    }
    auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (std::mt19937_64 random(seed); std::chrono::steady_clock::now() < end; runs++) {
        input.resize(1 + random() % 600);
        for (uint8_t& byte : input) byte = uint8_t(random());
        try_input();
    }
    std::fprintf(stderr, "stat::number_of_executed_units: %llu\n", (unsigned long long)runs);
}
#endif
