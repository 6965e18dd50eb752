#include "p2p/native/doorbell.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "p2p/native/wait.h"

P2P_BUILT_FROM(p2p_headers)

namespace {

static_assert(std::endian::native == std::endian::little, "doorbell pages are little-endian");

struct PageHeader {
    uint32_t magic;
    uint32_t version;
    uint64_t incarnation;
    uint64_t heartbeat;
    uint32_t zero;
    uint32_t lanes;
};
static_assert(sizeof(PageHeader) == 32);

struct alignas(64) Bell {
    uint32_t bell;
    uint32_t sleeping;
};
static_assert(sizeof(PageHeader) <= sizeof(Bell) && (1 + P2P_BELL_LANES) * sizeof(Bell) == P2P_BELL_PAGE);

// Null where there is no such lane: every operation on it is then a short sleep or nothing.
Bell* bell_of(const void* page, uint32_t lane) {
    if (!page || lane >= P2P_BELL_LANES) return nullptr;
    return static_cast<Bell*>(const_cast<void*>(page)) + 1 + lane;
}

timespec duration(uint64_t ns) { return {time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)}; }

}  // namespace

P2P_API int p2p_bell_init(void* page, uint64_t incarnation, uint32_t lanes) {
    if (lanes < 1 || lanes > P2P_BELL_LANES) return -1;
    PageHeader header{P2P_BELL_MAGIC, P2P_BELL_VERSION, incarnation, 0, 0, lanes};
    std::memcpy(page, &header, sizeof header);
    return 0;
}

P2P_API void p2p_bell_beat(void* page) {
    if (page) __atomic_fetch_add(&static_cast<PageHeader*>(page)->heartbeat, 1, __ATOMIC_RELEASE);
}

P2P_API uint64_t p2p_bell_heartbeat(const void* page) {
    return page ? __atomic_load_n(&static_cast<const PageHeader*>(page)->heartbeat, __ATOMIC_ACQUIRE) : 0;
}

P2P_API void p2p_bell_ring(void* page, uint32_t lane) {
    Bell* bell = bell_of(page, lane);
    if (!bell) return;
    // Sequentially consistent against the waiter's store to `sleeping` and its look at `bell`: one of the two
    // sees the other's write, so either the waiter does not park or it is woken.
    __atomic_fetch_add(&bell->bell, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&bell->sleeping, __ATOMIC_SEQ_CST) == 0) return;
    // The first ringer pays for the wake; the others need not.
    if (__atomic_exchange_n(&bell->sleeping, 0, __ATOMIC_SEQ_CST))
        p2p::futex_wake_all(&bell->bell, p2p::Scope::SHARED);
}

P2P_API uint32_t p2p_bell_read(const void* page, uint32_t lane) {
    Bell* bell = bell_of(page, lane);
    return bell ? __atomic_load_n(&bell->bell, __ATOMIC_SEQ_CST) : 0;
}

P2P_API uint32_t p2p_bell_prepare(void* page, uint32_t lane) {
    Bell* bell = bell_of(page, lane);
    if (!bell) return 0;
    __atomic_store_n(&bell->sleeping, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&bell->bell, __ATOMIC_SEQ_CST);
}

P2P_API void p2p_bell_cancel(void* page, uint32_t lane) {
    if (Bell* bell = bell_of(page, lane)) __atomic_store_n(&bell->sleeping, 0, __ATOMIC_RELAXED);
}

P2P_API int p2p_bell_sleep(void* page, uint32_t lane, uint32_t seen, uint64_t timeout_ns) {
    Bell* bell = bell_of(page, lane);
    if (!bell) {
        timespec blind = duration(std::min(timeout_ns, P2P_BLIND_WAIT_NS));
        nanosleep(&blind, nullptr);
        return 0;
    }
    timespec timeout = duration(std::min(timeout_ns, P2P_WAIT_NS));
    // A false wake returns too: the caller scans again anyway.
    p2p::futex_wait(&bell->bell, seen, p2p::Scope::SHARED, &timeout);
    __atomic_store_n(&bell->sleeping, 0, __ATOMIC_RELAXED);
    return __atomic_load_n(&bell->bell, __ATOMIC_SEQ_CST) != seen;
}

P2P_API int p2p_bell_wait(void* page, uint32_t lane, uint32_t seen, uint64_t timeout_ns) {
    // No rescan is needed in between: `seen` was read before the caller's scan, and the kernel compares again.
    if (bell_of(page, lane) && p2p_bell_prepare(page, lane) != seen) {
        p2p_bell_cancel(page, lane);
        return 1;
    }
    return p2p_bell_sleep(page, lane, seen, timeout_ns);
}
