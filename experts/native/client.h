// The client end of the expert service: dispatch, combine, failover. C ABI, bound by ctypes and called by the decoder.
//
// Threads: `expert_call` is SPMD, made by every lane of one LanePool; everything else may be called from any
// thread at any time. Exceptions never cross this interface.
#pragma once
#include <cstdint>

#include "p2p/native/api.h"
#include "p2p/native/lanes.h"

enum {
    EXPERTS_OK = 0,
    EXPERTS_PENDING = 1,
    EXPERTS_E_LOST = -1,  // no live replica answered before the deadline; the client is usable again at once
    EXPERTS_E_ARGUMENT = -2,  // n, layer or an expert id out of range, or another call is running
    EXPERTS_E_FULL = -3,      // all server places are taken
    EXPERTS_E_MEMORY = -4,
};
constexpr uint32_t EXPERTS_MAX_SERVERS = 64;
constexpr uint32_t EXPERTS_MAX_REPLICAS = 8;
constexpr uint32_t EXPERTS_MAX_LANES = 63;
constexpr uint8_t EXPERTS_NO_SERVER = 255;  // pads a replica list of the routes table
constexpr uint8_t EXPERTS_AWAITED = 254;    // last in a list: one more lives, and is not attached yet
constexpr uint16_t EXPERTS_NO_EXPERT = 65535;  // the id of a pair that nobody computes: its row is zeros
// Of a token: may a term that nobody can compute be left out of its sum, and was one?
enum { EXPERTS_KEEP = 0, EXPERTS_MAY_DROP = 1, EXPERTS_DROPPED = 2 };

struct ExpertClient;

// experts/backend.py says what each field of these structures is.
struct ServerLink {
    void* tx;
    uint64_t tx_bytes;
    void* rx;
    uint64_t rx_bytes;
    void* bell_page;
    uint64_t server_incarnation;
    int32_t liveness_fd;
    uint32_t slots;
    uint64_t slot_bytes;
    uint32_t lane, lanes;
};
struct ServerStats {
    uint64_t rows, pairs, calls, hedges, redispatches, lost, corrupt;
    uint64_t replies, in_flight, latency_sum_ns, service_sum_ns;
    uint64_t extra, quarantined_until_ns, held_slots, lost_slots, state;
    double speed;
};

// `own_page` is this process's doorbell page (null: plain short sleeps). Null result: out of memory or a bad argument.
P2P_API ExpertClient* expert_client_new(uint32_t layers, uint32_t experts, uint32_t hidden, uint32_t top_k,
                                        int32_t dtype, uint64_t model_hash, uint64_t incarnation,
                                        uint32_t lanes, void* own_page, uint32_t max_tokens_per_call);
P2P_API void expert_client_free(ExpertClient* client);

// A call of which some expert has no live replica ends with EXPERTS_E_LOST after so long, its deadline or not: others
// have rows in it whose experts are there. 0, as at first: it waits until its deadline.
P2P_API void expert_client_set_patience(ExpertClient* client, uint64_t patience_ns);
// Before any call: expert_apply runs lane i on the thread to which `parallel_for`, with torch_parallel_for's signature
// (torch/csrc/stable/c/shim.h), gives part i of `lanes` parts, pinned to cores[i] for good where that is not -1. So
// threads that spin between a program's parallel loops, as OpenMP's do, leave their cores to servers while a call lasts.
P2P_API void expert_client_set_team(ExpertClient* client, void* parallel_for, const int32_t* cores);
// Index 0..63 for the routes table, or EXPERTS_E_FULL / EXPERTS_E_ARGUMENT.
P2P_API int32_t expert_client_add_server(ExpertClient* client, const ServerLink* link);
// Takes effect at a call boundary, at once where no call runs. Once expert_client_server_idle says 1, the
// memory may go and the index is free for another server.
P2P_API void expert_client_remove_server(ExpertClient* client, uint32_t index);
P2P_API int32_t expert_client_server_idle(ExpertClient* client, uint32_t index);
// table: [layers][experts][EXPERTS_MAX_REPLICAS] server indexes, padded with EXPERTS_NO_SERVER. Copied;
// adopted at once where no call runs, else at the end of the running call (or within it, when that call waits
// for a replica). EXPERTS_OK, or EXPERTS_E_MEMORY: nothing has changed.
P2P_API int32_t expert_client_publish_routes(ExpertClient* client, uint64_t epoch, const uint8_t* table);
// Nothing that the running call has out was asked by routes older than this epoch's.
P2P_API uint64_t expert_client_adopted_epoch(ExpertClient* client);
P2P_API int32_t expert_client_stats(ExpertClient* client, uint32_t index, ServerStats* out);
// rows, activated: [layers][experts]: rows sent to each logical expert since the last time, and calls that had any.
P2P_API void expert_client_take_routed(ExpertClient* client, uint32_t* rows, uint32_t* activated);

// Of the call made last: 1 in rows for each token that some pair was missing of when it ended. Its tokens; 0, and
// nothing written, where these are more than `capacity`.
P2P_API uint32_t expert_client_missing(ExpertClient* client, uint8_t* rows, uint32_t capacity);

// Phases of a call, as a traced pool's lanes stamp them (p2p/native/lanes.h). Numbers from 100 on are these.
enum { EXPERTS_PHASE_PLAN = 100, EXPERTS_PHASE_SEND, EXPERTS_PHASE_AWAY, EXPERTS_PHASE_REPLY,
       EXPERTS_PHASE_COMBINE, EXPERTS_PHASE_MEET };

// One expert call. Every lane of `pool` calls it with the same arguments; `pool` may be null for a client of one lane.
//   layer       0..layers-1, counted over MoE layers
//   rows        n x hidden in the client's dtype; expert_ids and weights n x top_k; 1 <= n <= max_tokens_per_call;
//               a pair with the id EXPERTS_NO_EXPERT counts as zeros
//   out         n x hidden float32: out[t] += s, s = w[0]*row[0], then s += w[k]*row[k]
//   for k = 1.. in order; each
//               product and each sum is rounded to float32 on its own, so every instruction set gives the
//               same bits
//   drop        null, or n of EXPERTS_KEEP or EXPERTS_MAY_DROP: where the latter stands, a term whose expert has
//               no live replica by the routes counts as zeros, at once, and EXPERTS_DROPPED stands there on return
//   deadline_ns CLOCK_MONOTONIC nanoseconds
//   overlap     called once by each lane between dispatch and the first wait; may be null
// Inputs must be lane 0's to see; for the others a barrier within is enough. `out` is complete for all on return.
// Returns EXPERTS_OK or a negative code, the same on every lane; `out` is untouched on failure.
P2P_API int32_t expert_call(ExpertClient* client, LanePool* pool, uint32_t lane, uint32_t layer, const void* rows,
                            uint32_t n, const uint16_t* expert_ids, const float* weights, float* out, uint8_t* drop,
                            uint64_t deadline_ns, void (*overlap)(void*, uint32_t), void* arg);

// The same call in steps that never block, for one thread that owns all lanes (simulators, event loops).
P2P_API int32_t expert_client_begin(ExpertClient* client, uint32_t layer, const void* rows, uint32_t n,
                                    const uint16_t* expert_ids, const float* weights, float* out,
                                    uint8_t* drop, uint64_t now_ns, uint64_t deadline_ns);
// EXPERTS_PENDING, or the result of the call.
P2P_API int32_t expert_client_step(ExpertClient* client, uint64_t now_ns);

// Calls for as many rows as there are, of which nothing may be dropped, by one thread that has no lanes of its own: a
// client of several lanes brings an unpinned pool. One thread at a time. Sizes that were seen before allocate nothing.
//   rows, out   n x hidden float32 (type 0) or bfloat16 (1); `out` is overwritten last, and may be `rows`
//   ids         n x top_k integers of id_bytes 2, 4 or 8; -1 is no expert, and its weight is not read
//   wait_ns     of each call, of at most max_tokens_per_call rows
// A row that is not finite in the client's dtype is not sent: what comes of it is NaN. A sum is rounded once, to out's type.
P2P_API int32_t expert_apply(ExpertClient* client, uint32_t layer, const void* rows, uint32_t rows_type, uint32_t n,
                             const void* ids, uint32_t id_bytes, const float* weights, void* out, uint32_t out_type,
                             uint64_t wait_ns);
