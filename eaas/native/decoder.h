// The decoder: one step over the rows of many sequences, from token ids to logits, in native code. Plain C ABI.
//
// A step is SPMD over the lanes of one LanePool. Bits: a row's logits depend only on its own sequence's
// tokens up to it, the weights and the numerics class; not on batch, chunk, paging or lanes. A step that
// failed may be run again: it writes the same keys and values.
#pragma once
#include <cstdint>

#include "eaas/native/sampler.h"
#include "experts/native/kernels.h"
#include "p2p/native/api.h"
#include "p2p/native/lanes.h"

enum {
    DECODER_OK = 0,
    // Negative codes above -100 are the expert backend's own.
    DECODER_E_ROWS = -101,  // rows, logits rows or table size outside the limits given at construction
    DECODER_E_TOKEN = -102,
    DECODER_E_POSITION = -103,
    DECODER_E_SEQUENCE = -104,
    DECODER_E_BLOCK = -105,
    DECODER_E_LOGITS_ROW = -106,
    DECODER_E_SHAPE = -107,
    DECODER_E_MEMORY = -108,
    DECODER_E_WEIGHT = -109,
};

enum { DECODER_NORM_NONE = 0, DECODER_NORM_HEAD = 1, DECODER_NORM_FULL = 2 };

struct DecoderShape {
    uint32_t hidden, layers, q_heads, kv_heads, head_dim, vocab;
    uint32_t rope_pairs;  // (i, i + rope_pairs) of a head are rotated, at most head_dim / 2
    // Latent attention; kv_rank 0: none. Its one key is the rotated part, then the latent, which is its value, too:
    // head_dim = 2 * rope_pairs + kv_rank. q_rank 0: queries come from the row itself.
    uint32_t q_rank, kv_rank, nope_dim, value_dim;
    uint32_t experts, top_k;
    uint32_t dense_intermediate;   // 0: no dense layer
    uint32_t shared_intermediate;  // 0: no shared experts
    uint32_t shared_gate;          // the shared experts' output is scaled by a sigmoid of the row
    uint32_t qk_norm;
    uint32_t gate_sigmoid, gate_normalise, groups, groups_kept;
    uint32_t kv_blocks, block_tokens, max_rows, max_positions;
    int32_t dtype;                    // of matrix products; rows, keys and values with it (int8: bf16)
    float eps, clip_qkv, gate_scale, query_scale;  // clip_qkv 0: none
};

// As expert_call of experts/native/client.h, whose client is the usual `state`.
typedef int32_t (*ExpertCall)(void* state, LanePool* pool, uint32_t lane, uint32_t layer, const void* rows,
                              uint32_t n, const uint16_t* expert_ids, const float* weights, float* out,
                              uint8_t* drop, uint64_t deadline_ns, void (*overlap)(void*, uint32_t),
                              void* arg);

struct Decoder;

enum DecoderRole {
    ROLE_EMBED,  // kept as given: the caller keeps it mapped while the decoder lives
    ROLE_HEAD, ROLE_FINAL_NORM, ROLE_INPUT_NORM, ROLE_Q, ROLE_K, ROLE_V, ROLE_O, ROLE_Q_BIAS, ROLE_K_BIAS,
    ROLE_V_BIAS, ROLE_O_BIAS, ROLE_Q_NORM, ROLE_K_NORM, ROLE_POST_NORM, ROLE_GATE, ROLE_GATE_CORRECTION,
    ROLE_SHARED_GATE_UP,  // gate projection in `data`, up projection in `second`
    ROLE_SHARED_DOWN_PROJ, ROLE_SHARED_GATE, ROLE_DENSE_GATE_UP, ROLE_DENSE_DOWN_PROJ,
    // Of latent attention, whose ROLE_Q is [q_heads][nope_dim + 2 * rope_pairs][q_rank or hidden].
    ROLE_Q_A,       // [q_rank][hidden]
    ROLE_Q_A_NORM,
    ROLE_KV_A,      // [head_dim][hidden]
    ROLE_KV_A_NORM,
    ROLE_KEY_UP,    // [q_heads][kv_rank][nope_dim]: a query's part that is not rotated, to the latent's space
    ROLE_VALUE_UP,  // [q_heads][value_dim][kv_rank]
    ROLE_SINKS,     // [q_heads]
    ROLE_GATE_BIAS,
};

// moe_layers: per layer its number among MoE layers, or -1: dense. windows: per layer the sliding window in
// positions, or 0. cosines, sines: [max_positions][rope_pairs]. cores: per lane, -1: unpinned.
// Null, with *error: DECODER_E_SHAPE or DECODER_E_MEMORY.
P2P_API Decoder* decoder_new(const DecoderShape* shape, const int32_t* moe_layers, const uint32_t* windows,
                             const float* cosines, const float* sines, uint32_t lanes, const int32_t* cores,
                             ExpertCall call, void* state, int32_t* error);
P2P_API void decoder_free(Decoder* decoder);
// Packs or converts one weight; elements of `data` (and of `second`) must be what the shape says.
P2P_API int32_t decoder_set(Decoder* decoder, uint32_t layer, int32_t role, const void* data,
                            const void* second, int32_t dtype, uint64_t elements);

// In place of a token.
enum { DECODER_NOT_FINITE = -1, DECODER_LEFT = -2 };  // some logit is not finite; the logits are left to the caller

// In place of a forced expert.
enum { DECODER_FREE = 0xFFFF };

// What can be recorded of rows; all but the chosen experts, ids as floats, are what the step computes with.
enum DecoderTap {
    TAP_EMBED,       // hidden: the residual stream before the first layer
    TAP_ATTENTION,   // hidden: what a layer's attention adds to it
    TAP_GATE,        // experts: logits
    TAP_EXPERTS,     // top_k: ids
    TAP_RESIDUAL,    // hidden: the residual stream behind a layer
    TAP_FINAL_NORM,  // hidden
    TAP_LOGITS,      // vocab
    TAP_EXPERT,      // hidden: one expert's output, whoever the gate chose, by a call of its own; NaN: no server has it
};

struct DecoderTaps {
    const int32_t* rows;     // [rows_count], rising
    // [TAP_EXPERT][layers]: where in `frame` a kind of a layer begins, in floats; below 0: it is not recorded. Layer 0
    // for what no layer has. There are rows_count times its width.
    const int64_t* places;
    const int64_t* experts;  // [experts_count][3]: layer, expert, where in `frame`
    float* frame;
    // Of each row only mean, root mean square and greatest magnitude of its finite numbers, and how many are not: 4
    // floats in place of its width; of logits the first 4 of it.
    uint32_t statistics;
    uint32_t rows_count, experts_count;
};

struct DecoderPlan {
    const int32_t* tokens;       // [rows]
    const int32_t* positions;    // [rows]
    const int32_t* sequences;    // [rows], row of `tables`
    const int32_t* tables;       // [tables_rows][table_blocks] block numbers
    const int32_t* logits_rows;  // [logits_count]
    float* logits;               // [logits_count][vocab], but without the rows for which a token is chosen
    // How each logits row is sampled, and what is chosen, [logits_count]: the token of the highest logit, the lowest id
    // on a tie, for rows that want nothing else; or a DECODER_* of below. Null: all logits are wanted.
    const SampleRow* samples;
    int32_t* chosen;
    uint8_t* drop;               // [rows], as expert_call's; or null: nothing may be left out
    // The experts that the gate chose for each cached position, [kv_blocks][block_tokens][MoE layers][top_k]: the step
    // writes its rows' there, beside their keys and values. Null: nowhere.
    uint16_t* routed;
    // Experts that take the place of the gate's choice, [rows][MoE layers][top_k]; DECODER_FREE first: the gate chooses.
    // Null: it does everywhere.
    const uint16_t* forced;
    const DecoderTaps* taps;     // null: nothing is recorded
    uint64_t deadline_ns;        // CLOCK_MONOTONIC
    uint32_t rows, tables_rows, table_blocks, logits_count;
};

// Phases of a step, as a traced decoder's lanes stamp them; those of the expert backend are beside them.
// PHASE_MEET is time at barriers, waiting for the other lanes.
enum {
    PHASE_BEGIN, PHASE_NORM, PHASE_PROJECT, PHASE_ATTEND, PHASE_OUTPUT, PHASE_GATE, PHASE_DENSE, PHASE_GATHER,
    PHASE_GATE_UP, PHASE_DOWN, PHASE_COMBINE, PHASE_HEAD, PHASE_MEET,
};
// p2p_lanes_trace for the decoder's lanes.
P2P_API void decoder_trace(Decoder* decoder, LaneStamp* stamps, uint32_t capacity, uint32_t* counts);

// DECODER_OK, a code of the expert backend, or DECODER_E_* with *where the index in the offending array.
P2P_API int32_t decoder_step(Decoder* decoder, const DecoderPlan* plan, uint32_t* where);

// The row operations in use, as ops.h describes them; for benchmarks.
namespace eaas {
struct Ops;
}
P2P_API const eaas::Ops* decoder_ops(void);
