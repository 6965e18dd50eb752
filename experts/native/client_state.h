// What the parts of the client share. One call runs at a time; within it each server belongs to one lane, and
// lane 0 plans while the other lanes stand at a barrier. That is why most fields need no lock.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "experts/native/client.h"
#include "experts/native/latency.h"
#include "experts/native/memory.h"
#include "experts/native/waterfill.h"
#include "experts/native/wire.h"

namespace experts {

constexpr uint32_t MAX_SLOTS = 16;
constexpr uint64_t CHUNK_BYTES = 512 * 1024;  // incast hurts only above that
// What a reply's time is measured by, of replies of its size: 2 x q99 and it is hedged, if there is credit; 4 x q99
// and its server is suspect. Both at most a quarter of the time left. A server's q99 counts up to LONG_TIMES that of
// the best: who freezes often earns no patience by it.
constexpr uint64_t LONG_TIMES = 4;
constexpr uint64_t HEDGE_FLOOR_NS = 1'000'000;
constexpr uint64_t SUSPECT_FLOOR_NS = 20'000'000;
constexpr uint64_t UNKNOWN_NS = 250'000'000;  // while no server has answered yet: pages may be cold
// Hedges are at most 5% of the requests, over calls; in thousandths of a request.
constexpr int32_t HEDGE_EARNED = 50, HEDGE_COST = 1000, HEDGE_MOST = 8000;
// Probes carry a copy of one row that a better server has as well: nobody waits for them.
constexpr uint64_t PROBE_FIRST_NS = 1'000'000'000;
constexpr uint64_t PROBE_LAST_NS = 30'000'000'000;
constexpr uint64_t PROBE_SLOW_NS = 250'000'000;  // of a server too slow to be given rows
constexpr uint32_t CORRUPT_MOST = 3;  // replies within CORRUPT_NS; then only where no other replica exists
constexpr uint64_t CORRUPT_NS = 60'000'000'000;
constexpr uint32_t MAX_REFUSALS = 3;  // so many of an expert by a server, and it is not asked again
// A slot whose reply was of no use rests so long: nobody is asked again and again without a pause, and whoever wrote
// it may still be writing.
constexpr uint64_t COOLDOWN_NS = 50'000'000;
// An activated expert costs its weights' read plus a part for each row; about five rows weigh as much as the read.
constexpr uint32_t EXPERT_COST = 5;
constexpr double UNIT_BASE = 16;  // pairs that a chunk seems to have on top of its own: its fixed cost

enum ServerState : uint32_t { SERVER_EMPTY = 0, SERVER_LIVE = 1, SERVER_GONE = 2, SERVER_LEFT = 3 };
// Lost: still late when a request sent after that was answered. Its reply may yet come and is waited for, but says
// nothing against the server. Cooldown: COOLDOWN_NS, or until the call is over.
enum SlotState : uint8_t { SLOT_FREE, SLOT_BUSY, SLOT_LATE, SLOT_LOST, SLOT_COOLDOWN };
constexpr uint32_t SLOT_STATES = 5;
enum ChunkState : uint8_t { CHUNK_PLANNED, CHUNK_SENT, CHUNK_LATE, CHUNK_DONE, CHUNK_FAILED };

struct Slot {
    SlotState state = SLOT_FREE;
    uint32_t chunk = 0;
    uint32_t pairs = 0;  // of its chunk
    uint32_t experts = 0;
    uint32_t units = 0;  // pairs in flight when it was sent, its own included
    bool probe = false;
    uint64_t call = 0;
    uint64_t sequence = 0;
    uint64_t posted_ns = 0;
    uint64_t due_ns = 0;      // then it is late, and hedged; in cooldown, when it is free
    uint64_t suspect_ns = 0;  // then its server is suspect, while it is late

    bool pending_in(uint64_t running) const {
        return call == running && (state == SLOT_BUSY || state == SLOT_LATE || state == SLOT_LOST);
    }
};

struct Chunk {
    uint32_t server = 0;
    uint32_t first = 0;  // of its pairs in Call::order
    uint32_t pairs = 0;
    uint32_t rows = 0;
    uint32_t experts = 0;  // distinct, once it is sent
    uint32_t attempt = 0;
    ChunkState state = CHUNK_PLANNED;
    bool probe = false;
    bool refused = false;   // just now: not held, or not understood by either end
    bool not_held = false;  // that was why
    uint32_t refusals = 0;  // of its experts by this server
    uint64_t routing = 0;
    uint8_t* reply = nullptr;  // private memory: wire header, then one row for each pair

    // A reply may still come.
    bool out() const { return state == CHUNK_PLANNED || state == CHUNK_SENT || state == CHUNK_LATE; }
};

// All that begins anew with a server's link.
struct Link {
    ServerLink link{};
    Slot slots[MAX_SLOTS];
    uint64_t sequence = 0;
    uint32_t in_state[SLOT_STATES] = {};  // slots
    uint32_t units = 0;  // pairs in busy slots
    Block stale;         // payload of a reply that is only drained
    Latency latency;
    ServiceTime service;
    uint64_t corrupt_ns[CORRUPT_MOST] = {};  // when the latest corrupt replies came
    uint64_t asked_ns = 0;                   // last request
    uint64_t probe_at_ns = 0;
    uint64_t replan_at_ns = 0;  // of a call that waits for a late reply from here
    uint64_t probe_wait_ns = PROBE_FIRST_NS;
    std::vector<uint32_t> queue;  // chunks planned, not yet sent, from queue_head on
    size_t queue_head = 0;
    ServerStats stats{};
};

struct Server : Link {
    std::atomic<uint32_t> state{SERVER_EMPTY};
    std::atomic<bool> leaving{false};

    bool attached() const { return state.load(std::memory_order_acquire) == SERVER_LIVE && !leaving.load(); }
    bool drained() const { return in_state[SLOT_FREE] == link.slots; }
    bool has_queue() const { return queue_head < queue.size(); }
    bool has_slot() const { return in_state[SLOT_FREE] > 0; }
    // Gets no rows that another can take.
    bool is_late() const { return in_state[SLOT_LATE] || in_state[SLOT_LOST] == link.slots; }
    // A reply is missing for so long that sending its rows elsewhere is no hedge.
    bool suspect(uint64_t now_ns) const {
        auto missing = [&](const Slot& slot) { return slot.state == SLOT_LATE && now_ns >= slot.suspect_ns; };
        return in_state[SLOT_LATE] && std::any_of(slots, slots + link.slots, missing);
    }
};

// A value that several lanes write, each its own.
struct alignas(64) LaneWord {
    uint32_t value = 0;
};

struct Call {
    uint64_t id = 0;
    uint32_t layer = 0;
    uint32_t n = 0;
    const uint8_t* rows = nullptr;
    const uint16_t* ids = nullptr;
    const float* weights = nullptr;
    float* out = nullptr;
    uint8_t* drop = nullptr;
    // Of the caller, and with what this process stood still since that was given: a step gives all its calls the same.
    uint64_t said_deadline_ns = 0;
    std::atomic<uint64_t> deadline_ns{0};
    // While some pair has no live replica: when the call ends for it, after the client's patience.
    std::atomic<uint64_t> lost_ns{UINT64_MAX};

    uint64_t end_ns() const { return std::min(deadline_ns.load(), lost_ns.load()); }
    uint32_t attempt = 0;
    uint32_t routes_since = 0;  // the first attempt that was planned by the routes in use
    int32_t status = EXPERTS_OK;
    std::atomic<bool> unplaced{false};  // some pairs wait for a replica, or for a late server
    std::atomic<uint32_t> missing{0};
    uint32_t filled_by_plan = 0;  // pairs that the plan itself filled, still counted as missing
    std::atomic<uint32_t> replan{0};
    uint64_t shared = 0;  // of the plan made last: servers with chunks whose lanes run beside this client's
    std::vector<Chunk> chunks;
    std::vector<uint32_t> order;                      // pair numbers t * top_k + k, chunk after chunk
    std::unique_ptr<std::atomic<uint64_t>[]> filled;  // one bit for each pair: the first valid reply wins
    std::vector<const float*> row;                    // of each filled pair
    LaneWord outstanding[EXPERTS_MAX_LANES];          // chunks of each lane that a reply may still come for
};

struct Routes {
    uint64_t epoch = 0;
    std::vector<uint8_t> table;
};

constexpr uint32_t NO_DOUBT = UINT32_MAX;

// A reply's row that is not finite, and that only an equal one can confirm: another server's, where one can be asked.
struct Doubt {
    uint32_t pair;
    uint32_t server;
    uint64_t seen_ns;
    const float* row;
    uint32_t before = NO_DOUBT;  // in Plan::doubts, of the same pair
};

// Planning scratch, all of it lane 0's.
struct Plan {
    std::vector<Want> wants;
    std::vector<uint32_t> count;     // pairs to place, of each expert
    std::vector<uint32_t> touched;   // experts with pairs to place
    std::vector<uint8_t> server_of;  // of each expert
    std::vector<uint32_t> want_of;   // of each touched expert, in wants
    Waterfill waterfill;
    // refused[i][expert]: a mask of the servers that in this call refused it more than i times
    std::vector<uint64_t> refused[MAX_REFUSALS];
    std::vector<uint64_t> not_held;  // [expert]: a mask of those that lack it, or one that was asked for beside it
    bool any_refused = false;
    std::vector<uint8_t> pair_state;
    std::vector<uint64_t> pair_late;  // servers whose late reply may still bring the pair
    uint64_t suspects = 0;            // of those, the ones beyond which asking elsewhere is no hedge
    std::vector<Doubt> doubts;        // of all lanes
    std::vector<uint32_t> doubt_of;   // [pair]: the latest of them, or NO_DOUBT
    std::vector<uint32_t> list[EXPERTS_MAX_SERVERS];

    // Rows in doubt that a server has given for a pair, of those that were collected.
    uint32_t doubts_by(uint32_t pair, uint32_t server) const {
        uint32_t count = 0;
        if (doubts.empty()) return 0;
        for (uint32_t at = doubt_of[pair]; at != NO_DOUBT; at = doubts[at].before) count += doubts[at].server == server;
        return count;
    }
};

// Of expert_apply: one call's inputs in the client's types, and all its sums.
struct Staging {
    std::vector<uint8_t> rows;
    std::vector<uint16_t> ids;
    std::vector<float> weights, sums;
};

struct LaneScratch {
    std::vector<uint64_t> keys;
    std::vector<WirePair> pairs;
    std::vector<Doubt> doubts;  // of the call, since they were last collected
};

using ParallelFor = int32_t(int64_t begin, int64_t end, int64_t grain, void (*)(int64_t, int64_t, void*), void*);

}  // namespace experts

struct ExpertClient {
    experts::WireShape shape{};
    uint64_t incarnation = 0;
    uint32_t lanes = 1;
    uint32_t max_tokens = 0;
    std::atomic<uint64_t> patience_ns{0};  // 0: lost experts are waited for until the deadline
    void* page = nullptr;
    uint64_t checked_ns = 0;  // liveness, in steps

    std::mutex mutex;  // guards in_call, pending, adoption and the coming and going of servers
    bool in_call = false;
    std::unique_ptr<experts::Routes> pending;
    std::atomic<uint32_t> routes_pending{0};
    std::atomic<uint64_t> adopted_epoch{0};
    experts::Routes routes;

    std::atomic<uint64_t> used{0};  // places that are not empty
    experts::Bits attached() const { return {used.load(std::memory_order_acquire)}; }
    experts::Server servers[EXPERTS_MAX_SERVERS];
    double speed[EXPERTS_MAX_SERVERS];  // relative, as the plan takes it
    std::atomic<int32_t> hedge_credit{experts::HEDGE_MOST};
    uint64_t least_q99_ns[experts::Latency::SIZES] = {};  // of the servers, by size; 0: unknown
    // Of each (layer, expert) since they were last taken: rows, and calls that had any.
    std::vector<uint32_t> routed_rows, routed_calls;
    std::vector<float> nothing;  // the row of a pair that was dropped, or has no expert
    experts::Call call;
    experts::Plan plan;
    experts::Arena arena;  // of the call's replies
    experts::LaneScratch scratch[EXPERTS_MAX_LANES];
    experts::Staging staging;
    experts::ParallelFor* parallel_for = nullptr;  // of the caller's threads, where expert_apply uses those
    int32_t cores[EXPERTS_MAX_LANES] = {};
    LanePool* own_pool = nullptr;  // of expert_apply
    ~ExpertClient() { p2p_lanes_free(own_pool); }
};

namespace experts {

// Whether a row in the type that rows are sent in is finite.
inline bool finite_source(const WireShape& shape, const void* row) {
    if (shape.dtype == 0) return finite_row(static_cast<const float*>(row), shape.hidden);
    const auto* bits = static_cast<const uint16_t*>(row);
    uint32_t over = 0;
    for (uint32_t j = 0; j < shape.hidden; j++) over |= (bits[j] & 0x7FFFu) + 0x80;
    return !(over >> 15);
}

inline bool pair_filled(const Call& call, uint32_t pair) {
    return call.filled[pair / 64].load(std::memory_order_relaxed) >> (pair % 64) & 1;
}
// 1 where the pair had no row yet.
inline uint32_t fill_pair(Call& call, uint32_t pair, const float* row) {
    uint64_t bit = 1ull << (pair % 64);
    if (call.filled[pair / 64].fetch_or(bit, std::memory_order_relaxed) & bit) return 0;
    call.row[pair] = row;
    return 1;
}
// What the plan filled is missing no longer. Lane 0, once all lanes have read `missing` to decide that it must plan: else
// they would decide differently.
inline void count_filled_by_plan(Call& call) {
    if (call.filled_by_plan) call.missing.fetch_sub(call.filled_by_plan);
    call.filled_by_plan = 0;
}
inline void count_corrupt(Server& server, uint64_t now_ns) {
    add(server.stats.corrupt, 1);
    *std::min_element(server.corrupt_ns, server.corrupt_ns + CORRUPT_MOST) = now_ns;
    uint64_t first = *std::min_element(server.corrupt_ns, server.corrupt_ns + CORRUPT_MOST);
    if (first) set(server.stats.quarantined_until_ns, first + CORRUPT_NS);
}

// client.cpp
void adopt_locked(ExpertClient* client);

// client_plan.cpp, lane 0 only
void plan_first(ExpertClient* client, uint64_t now_ns);
void plan_again(ExpertClient* client, uint64_t now_ns);
// Counts against each server the rows that another one gave differently. Once, when the call is complete.
void blame(ExpertClient* client);

// client_exchange.cpp, each lane for its own servers
void post_chunks(ExpertClient* client, uint32_t lane, uint64_t now_ns);
void progress(ExpertClient* client, uint32_t lane, uint64_t now_ns);
// Wakes the lanes of servers that other lanes send to, from the cores that they will run on. Whether there were any.
bool ring_shared(ExpertClient* client, uint32_t lane);
// Servers of the lane that it waits for, or all of the lane's where `idle_too`.
void check_liveness(ExpertClient* client, uint32_t lane, uint64_t now_ns, bool idle_too);
bool lane_finished(ExpertClient* client, uint32_t lane, uint64_t now_ns);
// When the first of the lane's requests will be overdue.
uint64_t next_due_ns(ExpertClient* client, uint32_t lane);
void combine(ExpertClient* client, uint32_t lane, uint32_t lanes);

}  // namespace experts
