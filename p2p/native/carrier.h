// A carrier: what an endpoint of the nixl transport does by itself. It joins windows and peers, steps their
// channels, and opens and closes the paths that the channels ask for.
//
// Two threads. The pump steps all channels in turn; it parks on its own doorbell page and looks again after
// 20 microseconds while something is under way, 200 after 2 milliseconds without, and 1,000 after a second.
// The builder makes and destroys agents, which takes milliseconds. One lock guards all; no agent is made,
// destroyed or waited for under it.
//
// Joining: the writer makes an agent on each rail and says HELLO on each path every 20 ms, with the token, its
// incarnation, a number of its own for this connection, and its agent's address; the owner answers the first connection
// alone, with WELCOME and the window's header. Whatever makes no sense is dropped and counted.
#pragma once
#include <cstdint>

#include "p2p/native/api.h"
#include "p2p/native/channel.h"

constexpr uint32_t P2P_TOKEN_BYTES = 32;
constexpr uint32_t P2P_LINK_ADDRESS_BYTES = 16384;  // of a window, over all its rails

struct P2pCarrier;
struct P2pGpu;
struct P2pMonitor;
struct P2pLink;  // a window of this endpoint, or a peer's as this side writes it

// `page` (doorbell.h) is rung, lanes 0 to lanes - 1, after each signal that lands; it stays until _free. `rails`: 1 to
// P2P_PATHS names (nixl_path.h). `gpu`: where windows lie (gpu.h), null for host memory; images of peers' windows lie
// in host memory always. Null where threads run out or an argument is out of range.
P2P_API P2pCarrier* p2p_carrier_new(uint64_t incarnation, const char* const* rails, uint32_t rail_count,
                                    void* page, uint32_t lanes, const P2pGpu* gpu);
// Whoever waits for a peer in p2p_link_connect leaves, and so does who comes later.
P2P_API void p2p_carrier_leave(P2pCarrier* carrier);
// Every link has been closed, and every call on the carrier has returned, before.
P2P_API void p2p_carrier_free(P2pCarrier* carrier);
// The doorbell page whose lane 0 wakes the pump: ring it after writing a slot of an image.
P2P_API void* p2p_carrier_page(P2pCarrier* carrier);
// One round on the caller's thread, unless another is at it; the pump stays away for the next millisecond. 1
// where anything is under way.
P2P_API int p2p_carrier_progress(P2pCarrier* carrier);
// Hellos and notes that made no sense or came from the wrong side.
P2P_API uint64_t p2p_carrier_refused(P2pCarrier* carrier);

// Memory stays until the link is closed. Null: see `error`.
P2P_API P2pLink* p2p_link_export(P2pCarrier* carrier, void* window, uint64_t nbytes, uint64_t incarnation,
                                 const void* token, char* error, uint64_t error_bytes);
// Where a peer finds the window: its bytes. `out` holds P2P_LINK_ADDRESS_BYTES.
P2P_API uint32_t p2p_link_address(P2pLink* link, void* out);
// Returns when each of the owner's rails is welcomed, or broken, or 400 ms after the first of them was, or at
// the timeout. The owner offers later those that are missing.
P2P_API P2pLink* p2p_link_connect(P2pCarrier* carrier, void* image, uint64_t nbytes, uint64_t incarnation,
                                  const void* token, const void* address, uint32_t address_bytes,
                                  uint64_t timeout_ns, char* error, uint64_t error_bytes);
// Says BYE and destroys the link's agents; from then on nothing lands in its memory. A writer's puts go
// before, as long as they move; `bound_ns` for everything.
P2P_API void p2p_link_close(P2pLink* link, uint64_t bound_ns);

// Of a peer's link; -1 where the range does not lie in the window, P2P_E_MEMORY: the link ends.
P2P_API int p2p_link_put(P2pLink* link, uint64_t offset, uint64_t bytes);
P2P_API int p2p_link_signal(P2pLink* link, uint64_t offset, uint64_t value);
// 1 while the other side is there or still awaited, 0 once it is gone and can write no more.
P2P_API int p2p_link_alive(P2pLink* link);
// Hangs up (POLLRDHUP) when the link is no longer alive; the link's own, do not close it.
P2P_API int p2p_link_fd(P2pLink* link);
P2P_API uint64_t p2p_link_peer_incarnation(P2pLink* link);  // 0 before
// Of a peer's link: what its writes show (monitor.h); lives as long as the link. Null without memory for it.
P2P_API P2pMonitor* p2p_link_monitor(P2pLink* link);
P2P_API void p2p_link_counts(P2pLink* link, P2pChannelCounts* out);
// Of a peer's link. -1 where there is no such rail.
P2P_API int p2p_link_rail_counts(P2pLink* link, uint32_t rail, P2pPathCounts* out);
