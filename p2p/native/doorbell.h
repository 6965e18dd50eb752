// Doorbells: how a sender wakes the lane that waits. A doorbell is only a hint; correctness rests on signals,
// and every wait ends after at most P2P_WAIT_NS, because a sender may die between signal and wake.
//
//   page:   offset  size  field
//                0     4  magic "P2PB"
//                4     4  version (1)
//                8     8  incarnation of the endpoint
//               16     8  heartbeat
//               24     4  zero
//               28     4  lanes
//    64 * (1 + i)     4  bell of lane i: a futex word, shared between processes
//    64 * (1 + i) + 4 4  sleeping: 1 while the lane is, or is about to be, parked
//
// Waiter: seen = p2p_bell_read(...); scan the signals; nothing there: p2p_bell_wait(..., seen, timeout_ns).
//   or:   seen = p2p_bell_prepare(...); rescan; then p2p_bell_sleep(..., seen, timeout_ns) or p2p_bell_cancel.
// Sender: p2p_signal_store(...), then p2p_bell_ring(...).
// A null page (a transport without doorbells) is legal: ring does nothing, wait is a short sleep.
#pragma once
#include <cstdint>

#include "p2p/native/api.h"

constexpr uint64_t P2P_BELL_PAGE = 4096;
constexpr uint32_t P2P_BELL_MAGIC = 0x42503250;
constexpr uint32_t P2P_BELL_VERSION = 1;
constexpr uint32_t P2P_BELL_LANES = 63;         // what the page has room for
constexpr uint64_t P2P_WAIT_NS = 5'000'000;     // no wait is longer
constexpr uint64_t P2P_BLIND_WAIT_NS = 50'000;  // a wait without a doorbell

// 0, or -1 where lanes is not in 1..P2P_BELL_LANES. `page` is zeroed memory of P2P_BELL_PAGE bytes.
P2P_API int p2p_bell_init(void* page, uint64_t incarnation, uint32_t lanes);
P2P_API void p2p_bell_beat(void* page);
P2P_API uint64_t p2p_bell_heartbeat(const void* page);

// Wakes nobody, and costs no system call, while the lane is awake. A lane out of range is ignored: its number
// may have come from a peer.
P2P_API void p2p_bell_ring(void* page, uint32_t lane);
P2P_API uint32_t p2p_bell_read(const void* page, uint32_t lane);
// Park until the bell differs from `seen` or the time is over. 1 where the bell rang, 0 where not.
P2P_API int p2p_bell_wait(void* page, uint32_t lane, uint32_t seen, uint64_t timeout_ns);

// The same wait in parts. prepare returns the bell and says that the lane is about to sleep; then exactly one
// of sleep and cancel follows.
P2P_API uint32_t p2p_bell_prepare(void* page, uint32_t lane);
P2P_API int p2p_bell_sleep(void* page, uint32_t lane, uint32_t seen, uint64_t timeout_ns);
P2P_API void p2p_bell_cancel(void* page, uint32_t lane);
