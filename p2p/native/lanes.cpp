#include "p2p/native/lanes.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <new>

#include "p2p/native/wait.h"

namespace {

constexpr uint32_t CREDIT_MOST = 16;
constexpr uint32_t PROBE_EVERY = 16;  // waits without a spin until one is tried again

// What the process may use, asked before any lane is pinned: a pinned caller would answer "one".
cpu_set_t process_cores() {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    sched_getaffinity(0, sizeof cores, &cores);
    return cores;
}
const cpu_set_t PROCESS_CORES = process_cores();

// Whether one lane spins before it parks. It belongs to that lane. Always for the same time: a spin that is cut
// short because it did not pay would pay even less, so what adapts is how often it is tried.
struct alignas(64) Spin {
    bool allowed = false;
    uint32_t credit = 0;
    uint32_t parked = 0;

    bool until_moved(const std::atomic<uint32_t>& value, uint32_t seen) {
        if (!credit && !(allowed && ++parked % PROBE_EVERY == 0)) return false;
        bool moved = p2p::spin_until([&] { return value.load(std::memory_order_acquire) != seen; });
        credit = moved ? std::min(CREDIT_MOST, credit + 2) : credit - (credit ? 1 : 0);
        return moved;
    }
};

// A number that rises, and lanes that wait for it to move.
struct alignas(64) Turn {
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    uint32_t* word() { return reinterpret_cast<uint32_t*>(&value); }

    void advance() {
        // Sequentially consistent against wait_past: either it sees the new value, or its sleeper is counted here.
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) p2p::futex_wake_all(word(), p2p::Scope::PRIVATE);
    }

    void wait_past(uint32_t seen, Spin& spin) {
        if (value.load(std::memory_order_acquire) != seen) return;
        if (spin.until_moved(value, seen)) return;
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (value.load(std::memory_order_seq_cst) == seen)
            p2p::futex_wait(word(), seen, p2p::Scope::PRIVATE, nullptr);
        sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
};
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

struct Lane {
    Spin spin;
    LanePool* pool = nullptr;
    pthread_t thread{};
    uint32_t index = 0;
    int32_t core = -1;
};

// The core was checked when the pool was made; where it was taken away since, that only costs speed.
void pin(int32_t core) {
    cpu_set_t cores = PROCESS_CORES;
    if (core >= 0) {
        CPU_ZERO(&cores);
        CPU_SET(core, &cores);
    }
    sched_setaffinity(0, sizeof cores, &cores);
}

}  // namespace

struct LanePool {
    uint32_t count = 0;
    uint32_t started = 1;
    void (*fn)(void*, uint32_t) = nullptr;
    void* arg = nullptr;
    bool stopping = false;
    bool caller_pinned = false;
    pthread_t caller{};
    cpu_set_t caller_cores{};
    LaneStamp* stamps = nullptr;
    uint32_t stamps_capacity = 0;
    uint32_t* stamps_count = nullptr;
    std::atomic<bool> running{false};
    std::unique_ptr<Lane[]> lanes;
    Turn work;      // advances when a run begins, or the pool stops
    Turn finished;  // advances when the last worker is done
    Turn meeting;   // advances when the last lane reaches the barrier
    alignas(64) std::atomic<uint32_t> left{0};
    alignas(64) std::atomic<uint32_t> arrived{0};
};

namespace {

void* worker(void* argument) {
    Lane& lane = *static_cast<Lane*>(argument);
    LanePool& pool = *lane.pool;
    char name[16];
    std::snprintf(name, sizeof name, "p2p-lane-%u", lane.index);
    pthread_setname_np(pthread_self(), name);
    pin(lane.core);
    for (uint32_t seen = 0;; seen++) {
        pool.work.wait_past(seen, lane.spin);
        if (pool.stopping) return nullptr;
        pool.fn(pool.arg, lane.index);
        if (pool.left.fetch_sub(1, std::memory_order_acq_rel) == 1) pool.finished.advance();
    }
}

bool usable(uint32_t count, const int32_t* cores) {
    for (uint32_t i = 0; cores && i < count; i++)
        if (cores[i] >= CPU_SETSIZE || (cores[i] >= 0 && !CPU_ISSET(cores[i], &PROCESS_CORES))) return false;
    return count >= 1 && count <= P2P_LANES_LIMIT;
}

bool start(LanePool& pool) {
    // Signals belong to the process's own threads: a lane must not run a Python signal wake-up.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    for (; pool.started < pool.count && !error; pool.started += error == 0) {
        Lane& lane = pool.lanes[pool.started];
        error = pthread_create(&lane.thread, nullptr, worker, &lane);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    errno = error;
    return error == 0;
}

// Lane 0 is whoever calls run; its affinity is remembered, to be given back.
void pin_caller(LanePool& pool) {
    if (pool.lanes[0].core < 0) return;
    pthread_t self = pthread_self();
    if (pool.caller_pinned && pthread_equal(self, pool.caller)) return;
    sched_getaffinity(0, sizeof pool.caller_cores, &pool.caller_cores);
    pin(pool.lanes[0].core);
    pool.caller = self;
    pool.caller_pinned = true;
}

}  // namespace

P2P_API LanePool* p2p_lanes_new(uint32_t count, const int32_t* cores) {
    if (!usable(count, cores)) {
        errno = EINVAL;
        return nullptr;
    }
    std::unique_ptr<LanePool> pool(new (std::nothrow) LanePool);
    if (pool) pool->lanes.reset(new (std::nothrow) Lane[count]);
    if (!pool || !pool->lanes) {
        errno = ENOMEM;
        return nullptr;
    }
    pool->count = count;
    bool fits = int(count) <= CPU_COUNT(&PROCESS_CORES);
    for (uint32_t i = 0; i < count; i++) {
        Lane& lane = pool->lanes[i];
        lane.spin.allowed = fits;
        lane.spin.credit = fits ? CREDIT_MOST : 0;
        lane.pool = pool.get();
        lane.index = i;
        lane.core = cores ? cores[i] : -1;
    }
    if (start(*pool)) return pool.release();
    int error = errno;
    p2p_lanes_free(pool.release());
    errno = error;
    return nullptr;
}

P2P_API void p2p_lanes_free(LanePool* pool) {
    if (!pool) return;
    pool->stopping = true;
    pool->work.advance();
    for (uint32_t i = 1; i < pool->started; i++) pthread_join(pool->lanes[i].thread, nullptr);
    if (pool->caller_pinned && pthread_equal(pthread_self(), pool->caller))
        sched_setaffinity(0, sizeof pool->caller_cores, &pool->caller_cores);
    delete pool;
}

P2P_API int p2p_lanes_run(LanePool* pool, void (*fn)(void* arg, uint32_t lane), void* arg) {
    if (pool->running.exchange(true, std::memory_order_acquire)) return P2P_E_LANES_BUSY;
    pin_caller(*pool);
    pool->fn = fn;
    pool->arg = arg;
    uint32_t seen = pool->finished.value.load(std::memory_order_relaxed);
    pool->left.store(pool->count - 1, std::memory_order_relaxed);
    if (pool->count > 1) pool->work.advance();
    fn(arg, 0);
    if (pool->count > 1) pool->finished.wait_past(seen, pool->lanes[0].spin);
    pool->running.store(false, std::memory_order_release);
    return 0;
}

P2P_API void p2p_lanes_barrier(LanePool* pool, uint32_t lane) {
    if (pool->count == 1) return;
    uint32_t seen = pool->meeting.value.load(std::memory_order_relaxed);
    if (pool->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == pool->count) {
        // Reset before the turn: a lane may be back at the barrier as soon as the turn moves.
        pool->arrived.store(0, std::memory_order_relaxed);
        pool->meeting.advance();
    } else {
        pool->meeting.wait_past(seen, pool->lanes[lane].spin);
    }
}

P2P_API bool p2p_lanes_spin(LanePool* pool, uint32_t lane, const std::atomic<uint32_t>* value, uint32_t seen) {
    return value->load(std::memory_order_acquire) != seen || pool->lanes[lane].spin.until_moved(*value, seen);
}

P2P_API void p2p_lanes_trace(LanePool* pool, LaneStamp* stamps, uint32_t capacity, uint32_t* counts) {
    pool->stamps = stamps;
    pool->stamps_capacity = capacity;
    pool->stamps_count = counts;
}

P2P_API void p2p_lanes_stamp(LanePool* pool, uint32_t lane, uint64_t phase) {
    if (!pool || !pool->stamps || pool->stamps_count[lane] == pool->stamps_capacity) return;
    uint64_t at = uint64_t(lane) * pool->stamps_capacity + pool->stamps_count[lane]++;
    pool->stamps[at] = {p2p::now_ns(), phase};
}
