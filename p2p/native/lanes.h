// Lanes: a pool of worker threads, one per core, that run one function together (SPMD) and meet at barriers.
//
// Waiting is a short spin and then a futex. The spin adapts: it is used only where the pool's lanes fit the cores that
// the process may use, and tried but rarely while it does not pay, as when another process keeps a core busy.
#pragma once
#include <atomic>
#include <cstdint>

#include "p2p/native/api.h"

struct LanePool;

constexpr uint32_t P2P_LANES_LIMIT = 256;

enum {
    P2P_E_LANES_BUSY = -30,  // another run of this pool has not returned
};

// cores: one for each lane, -1 leaves that lane unpinned; null leaves all unpinned. Starts count - 1 threads.
// Null, with errno set, where count is not in 1..P2P_LANES_LIMIT, a core may not be used, or threads run out.
P2P_API LanePool* p2p_lanes_new(uint32_t count, const int32_t* cores);
// Stops and joins the threads; gives the caller's affinity back where run had pinned it. Null is fine.
P2P_API void p2p_lanes_free(LanePool* pool);

// fn(arg, lane) on every lane; the caller becomes lane 0 (and stays pinned to its core). Returns 0 when all lanes are
// done, with all that they wrote visible, or P2P_E_LANES_BUSY. fn must not throw, nor run the same pool.
P2P_API int p2p_lanes_run(LanePool* pool, void (*fn)(void* arg, uint32_t lane), void* arg);

// Called by every lane within run: returns when all have come, with all that they wrote before visible to each.
P2P_API void p2p_lanes_barrier(LanePool* pool, uint32_t lane);

// Spins as a barrier would until *value is no longer `seen`; whether it moved in that time.
P2P_API bool p2p_lanes_spin(LanePool* pool, uint32_t lane, const std::atomic<uint32_t>* value, uint32_t seen);

// Where lanes spend their time: each stamp says that a lane ended a phase, which began at its stamp before.
struct LaneStamp {
    uint64_t ns;  // CLOCK_MONOTONIC
    uint64_t phase;
};
// Until it is called again, with null to end, between runs: lane i writes stamps[i * capacity ...] and counts
// them in counts[i]; what exceeds the capacity is dropped.
P2P_API void p2p_lanes_trace(LanePool* pool, LaneStamp* stamps, uint32_t capacity, uint32_t* counts);
// A few nanoseconds unless traced. A null pool is fine.
P2P_API void p2p_lanes_stamp(LanePool* pool, uint32_t lane, uint64_t phase);
