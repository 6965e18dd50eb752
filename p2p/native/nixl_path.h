// A path over one NIXL agent of its own, which is either the end of a window's owner or of its writer.
//
// Freeing the owner's end is the fence: nothing that was sent to it lands any more, however long the network
// kept it. (Freeing the writer's is none: bytes that lie in its kernel's buffers still arrive.)
//
// An address, as the other end needs it, little-endian:
//   offset  size  field
//        0     8  where the memory lies in its process
//        8     8  its bytes
//       16     4  0: host memory, 1: a GPU's
//       20     4  which GPU, as that process counts; else 0
//       24     -  the agent's metadata, NIXL's own format
#pragma once
#include <cstdint>

#include "p2p/native/api.h"
#include "p2p/native/path.h"

constexpr uint32_t P2P_NIXL_ADDRESS_BYTES = 4096;  // longest
constexpr uint64_t P2P_NIXL_SILENCE_NS = 400'000'000;

struct P2pGpu;
struct P2pNixlPath;

// An end on that rail (a name for UCX_NET_DEVICES; empty: UCX's choice) whose memory the other may write to
// (`owns`: the window) or is read from (the image). On a `gpu`, null for host memory, it is called inside an OnGpu,
// here and later. 10 to 40 ms. Null: see `error`. Needs p2p_nixl_load.
P2P_API P2pNixlPath* p2p_nixl_path_new(const char* rail, void* memory, uint64_t nbytes, int owns,
                                       const P2pGpu* gpu, char* error, uint64_t error_bytes);
// 5 to 10 ms. Null is fine.
P2P_API void p2p_nixl_path_free(P2pNixlPath* path);
// This end's address: its bytes. `out` holds P2P_NIXL_ADDRESS_BYTES.
P2P_API uint32_t p2p_nixl_path_address(const P2pNixlPath* path, void* out);
// Who the other end is; from now on nobody else is heard. 0, or -1: this is no address. Once.
P2P_API int p2p_nixl_path_join(P2pNixlPath* path, const void* address, uint32_t bytes);
// Sends a byte every 20 ms, less often to an end that is silent: without traffic the transport does not say
// that the other end has gone.
P2P_API void p2p_nixl_path_beat(P2pNixlPath* path, uint64_t now_ns);
// How often the other end has been heard; one that lives beats at least every P2P_NIXL_SILENCE_NS.
P2P_API uint64_t p2p_nixl_path_heard(const P2pNixlPath* path);
P2P_API P2pPath p2p_nixl_path_ends(P2pNixlPath* path);
