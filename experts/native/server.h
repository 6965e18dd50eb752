// The expert server's loop: scans the windows of all clients, batches what is ready, computes, replies. C ABI.
//
// Threads: one thread at a time is in expert_server_run or expert_server_step; everything else may be called from any
// other thread at any time, and takes effect between two batches. Exceptions never cross this interface.
#pragma once
#include <cstdint>

#include "p2p/native/api.h"
#include "p2p/native/lanes.h"

enum {
    EXPERT_SERVER_OK = 0,
    EXPERT_SERVER_E_ARGUMENT = -2,
    EXPERT_SERVER_E_FULL = -3,
    EXPERT_SERVER_E_MEMORY = -4,
    EXPERT_SERVER_E_BUSY = -5,
};
constexpr uint32_t EXPERT_SERVER_MAX_CLIENTS = 64;
constexpr uint32_t EXPERT_SERVER_MAX_WEIGHT = 1000;
constexpr uint32_t EXPERT_SERVER_MAX_MODELS = 16;

struct ExpertForm;  // kernels.h
struct ExpertServer;

// experts/backend.py says what each field of these structures is.
struct ClientLink {
    void* rx;
    uint64_t rx_bytes;
    void* tx;
    uint64_t tx_bytes;
    void* bell_page;
    uint64_t client_incarnation;
    uint32_t client_lanes, bell_lanes, slots, weight;
    uint64_t slot_bytes;
    uint32_t model;
};
struct ServerCounters {
    uint64_t batches, requests, rows, pairs, experts, busy_ns, not_held, invalid, work, received_bytes, sent_bytes;
};

// A server of one model, index 0. cores: one for each lane, -1 where unpinned. max_slot_bytes bounds what a client may
// attach with. form: what experts compute beside their products, null for SwiGLU without biases. Null: out of memory or
// a bad argument.
P2P_API ExpertServer* expert_server_new(uint32_t layers, uint32_t experts, uint32_t hidden, uint32_t intermediate,
                                        uint32_t top_k, int32_t dtype, uint64_t model_hash, uint64_t incarnation,
                                        uint32_t lanes, const int32_t* cores, void* own_page, uint64_t max_slot_bytes,
                                        const struct ExpertForm* form);
// Not while a thread is in expert_server_run.
P2P_API void expert_server_free(ExpertServer* server);

// Index 1..15 of one more model, whose requests share batches, lanes and time with the others', or a negative code. A
// pair counts as hidden x intermediate of its model.
P2P_API int32_t expert_server_add_model(ExpertServer* server, uint32_t layers, uint32_t experts, uint32_t hidden,
                                        uint32_t intermediate, uint32_t top_k, int32_t dtype, uint64_t model_hash,
                                        const struct ExpertForm* form);
// Its index may be another's from now on. EXPERT_SERVER_E_BUSY: it has clients or experts. The first one stays.
P2P_API int32_t expert_server_remove_model(ExpertServer* server, uint32_t model);

// Index 0..63, or a negative code.
P2P_API int32_t expert_server_add_client(ExpertServer* server, const ClientLink* link);
// On return the server no longer touches the client's memory.
P2P_API void expert_server_remove_client(ExpertServer* server, uint32_t index);

// Packed weights (experts/native/kernels.h) that stay mapped until cleared. Null gate_up clears; on return
// the old weights are no longer read.
P2P_API int32_t expert_server_set_expert(ExpertServer* server, uint32_t model, uint32_t layer, uint32_t expert,
                                         const void* gate_up, const void* down);

// The server answers only before this CLOCK_BOOTTIME instant; 0 fences it for good. A process that slept past
// its lease wakes to a loop that refuses by itself.
P2P_API void expert_server_set_lease(ExpertServer* server, uint64_t boottime_ns);
// Makes expert_server_run return within one batch, now and from then on.
P2P_API void expert_server_stop(ExpertServer* server);

// Serves for at most max_ns, parked on the doorbell where idle. The caller becomes lane 0. Returns 1 when
// stopped, EXPERT_SERVER_E_MEMORY when there was no memory for a batch: its requests stay unanswered.
P2P_API int32_t expert_server_run(ExpertServer* server, uint64_t max_ns);
// One batch at most, never waits; for servers of one lane. Returns the number of requests answered, or
// EXPERT_SERVER_E_MEMORY.
P2P_API int32_t expert_server_step(ExpertServer* server, uint64_t now_ns);
// layer * experts + expert of one that gave a row that is not finite since it was last taken, or -1: its weights may be
// damaged, or what came in was not finite either.
P2P_API int64_t expert_server_take_doubtful(ExpertServer* server, uint32_t model);
P2P_API void expert_server_counters(ExpertServer* server, ServerCounters* out);
