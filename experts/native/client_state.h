// What the parts of the client share. One call runs at a time; within it each server belongs to one lane, and
// lane 0 plans while the other lanes stand at a barrier. That is why most fields need no lock.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "experts/native/client.h"
#include "experts/native/waterfill.h"
#include "experts/native/wire.h"

namespace experts {

constexpr uint32_t MAX_SLOTS = 16;
constexpr uint64_t CHUNK_BYTES = 512 * 1024;  // incast hurts only above that
constexpr uint64_t OVERDUE_FLOOR_NS = 20'000'000;
constexpr uint64_t OVERDUE_UNKNOWN_NS =
    1'000'000'000;  // before a server's first reply: its pages may be cold
constexpr uint64_t PROBE_FIRST_NS = 1'000'000'000;
constexpr uint64_t PROBE_LAST_NS = 30'000'000'000;
constexpr uint32_t MAX_REFUSALS = 3;  // in a row, of an expert by a server; then it is not asked again
// An activated expert costs its weights' read plus a part for each row; about five rows weigh as much as the read.
constexpr uint32_t EXPERT_COST = 5;
constexpr double UNIT_BASE = 16;  // pairs that a chunk seems to have on top of its own: its fixed cost

enum ServerState : uint32_t { SERVER_EMPTY = 0, SERVER_LIVE = 1, SERVER_GONE = 2, SERVER_LEFT = 3 };
// Torn: signalled, but its reply does not validate. Neither read again nor reused while the call lasts: whoever
// wrote it may still be writing.
enum SlotState : uint8_t { SLOT_FREE, SLOT_BUSY, SLOT_LATE, SLOT_TORN };
enum ChunkState : uint8_t { CHUNK_PLANNED, CHUNK_SENT, CHUNK_LATE, CHUNK_DONE, CHUNK_FAILED };

struct Slot {
    SlotState state = SLOT_FREE;
    uint32_t chunk = 0;
    uint32_t pairs = 0;  // of its chunk
    uint32_t units = 0;  // pairs in flight when it was sent, its own included
    uint64_t call = 0;
    uint64_t sequence = 0;
    uint64_t posted_ns = 0;
    uint64_t due_ns = 0;

    bool awaited_by(uint64_t running) const {
        return call == running && (state == SLOT_BUSY || state == SLOT_LATE);
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
    bool refused = false;   // just now: not held, or not understood by either end
    uint32_t refusals = 0;  // of its experts by this server, in a row
    uint64_t routing = 0;
    uint8_t* reply = nullptr;  // private memory: wire header, then one row for each pair

    // A reply may still come.
    bool out() const { return state == CHUNK_PLANNED || state == CHUNK_SENT || state == CHUNK_LATE; }
};

struct Server {
    std::atomic<uint32_t> state{SERVER_EMPTY};
    std::atomic<bool> leaving{false};
    ServerLink link{};
    Slot slots[MAX_SLOTS];
    uint64_t sequence = 0;
    uint32_t busy = 0;   // slots in SLOT_BUSY
    uint32_t late = 0;   // slots in SLOT_LATE or SLOT_TORN
    uint32_t units = 0;  // pairs in busy slots
    double peak_ns_per_unit = 0;
    ServiceTime service;
    uint64_t probe_at_ns = 0;
    uint64_t replan_at_ns = 0;  // of a call that waits for a late reply from here
    uint64_t probe_wait_ns = PROBE_FIRST_NS;
    std::vector<uint32_t> queue;  // chunks planned, not yet sent
    size_t queue_head = 0;
    ServerStats stats{};

    bool drained() const { return busy + late == 0; }
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
    uint64_t deadline_ns = 0;
    uint32_t attempt = 0;
    uint32_t routes_since = 0;  // the first attempt that was planned by the routes in use
    int32_t status = EXPERTS_OK;
    std::atomic<bool> in_doubt{false};  // some pairs wait for a replica, or for a late server
    std::atomic<uint32_t> missing{0};
    std::atomic<uint32_t> replan{0};
    uint64_t shared = 0;  // of the plan made last: servers with chunks whose lanes run beside this client's
    std::vector<Chunk> chunks;
    std::vector<uint32_t> order;                      // pair numbers t * top_k + k, chunk after chunk
    std::unique_ptr<std::atomic<uint64_t>[]> filled;  // one bit for each pair: the first valid reply wins
    std::vector<const float*> row;                    // of each filled pair
    LaneWord outstanding[EXPERTS_MAX_LANES];          // chunks of each lane that a reply may still come for
};

// Private memory for the replies of one call; blocks stay for the next.
class Arena {
  public:
    uint8_t* take(uint64_t bytes);
    void reset();

  private:
    struct Free {
        void operator()(uint8_t* memory) const;
    };
    struct Block {
        std::unique_ptr<uint8_t, Free> memory;
        uint64_t bytes;
    };
    std::vector<Block> blocks_;
    size_t block_ = 0;
    uint64_t used_ = 0;
};

struct Routes {
    uint64_t epoch = 0;
    std::vector<uint8_t> table;
};

// Planning scratch, all of it lane 0's.
struct Plan {
    std::vector<Want> wants;
    std::vector<uint32_t> count;     // pairs to place, of each expert
    std::vector<uint32_t> touched;   // experts with pairs to place
    std::vector<uint8_t> server_of;  // of each expert
    std::vector<uint32_t> want_of;   // of each touched expert, in wants
    Waterfill fill;
    // refused[i][expert]: a mask of the servers that in this call refused it more than i times in a row
    std::vector<uint64_t> refused[MAX_REFUSALS];
    bool any_refused = false;
    std::vector<uint8_t> pair_state;
    std::vector<uint64_t> pair_late;  // servers whose late reply may still bring the pair
    std::vector<uint32_t> list[EXPERTS_MAX_SERVERS];
};

struct LaneScratch {
    std::vector<uint64_t> keys;
    std::vector<WirePair> pairs;
};

struct FreeLanes {
    void operator()(LanePool* pool) const { p2p_lanes_free(pool); }
};

}  // namespace experts

struct ExpertClient {
    experts::WireShape shape{};
    uint64_t incarnation = 0;
    uint32_t lanes = 1;
    uint32_t max_tokens = 0;
    void* page = nullptr;
    uint64_t checked_ns = 0;  // liveness, in steps

    std::mutex mutex;  // guards in_call, pending, adoption and the coming and going of servers
    bool in_call = false;
    std::unique_ptr<experts::Routes> pending;
    std::atomic<uint32_t> routes_pending{0};
    std::atomic<uint64_t> adopted_epoch{0};
    experts::Routes routes;

    std::atomic<uint64_t> used{0};  // places that are not empty
    experts::Server servers[EXPERTS_MAX_SERVERS];
    double speed[EXPERTS_MAX_SERVERS];  // relative, as the plan takes it
    // Of each (layer, expert) since they were last taken: rows, and calls that had any.
    std::vector<uint32_t> routed_rows, routed_calls;
    experts::Call call;
    experts::Plan plan;
    experts::Arena arena;
    experts::LaneScratch scratch[EXPERTS_MAX_LANES];
    std::unique_ptr<LanePool, experts::FreeLanes> own_pool;  // of expert_exchange
};

namespace experts {

// Counters are read by other threads while a lane writes them.
inline void add(uint64_t& field, uint64_t amount) {
    std::atomic_ref ref(field);
    ref.store(ref.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}
inline void set(uint64_t& field, uint64_t value) {
    std::atomic_ref(field).store(value, std::memory_order_relaxed);
}

// client_plan.cpp, lane 0 only
void plan_first(ExpertClient* client, uint64_t now_ns);
void plan_again(ExpertClient* client, uint64_t now_ns);
void adopt_locked(ExpertClient* client);

// client_exchange.cpp, each lane for its own servers
void post_chunks(ExpertClient* client, uint32_t lane, uint64_t now_ns);
void progress(ExpertClient* client, uint32_t lane, uint64_t now_ns);
// Wakes the lanes of servers that other lanes send to, from the cores that they will run on. Whether there were any.
bool ring_shared(ExpertClient* client, uint32_t lane);
// Servers of the lane that it waits for, or all of the lane's where `idle_too`.
void check_liveness(ExpertClient* client, uint32_t lane, uint64_t now_ns, bool idle_too);
bool lane_finished(ExpertClient* client, uint32_t lane, uint64_t now_ns);
void combine(ExpertClient* client, uint32_t lane, uint32_t lanes);

}  // namespace experts
