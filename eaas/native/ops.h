// What the decoder does to one row or one head between matrix products, and the sampler to one row of logits, once per
// instruction set.
//
// Included by `*.isa.cpp` files too, so it holds declarations only. Bits: every operation has one order of
// additions, whatever the batch, the chunk or the lanes; all instruction sets agree.
#pragma once

#include <stdint.h>

namespace eaas {

constexpr uint32_t kSubtile = 16;  // positions of one cache subtile: one vector of scores
constexpr uint32_t kKeyTile = 64;  // positions between two rescalings of the online softmax, counted from 0
constexpr uint32_t kQueries = 6;   // (row, query head) pairs that share one pass over the keys
constexpr uint32_t kMaxHeadDim = 576;
constexpr uint32_t kMaxExperts = 4096;
constexpr uint32_t kSampleBlock = 1024;

// Cache subtile of one key-value head: keys transposed [head_dim][16], then values [16][value_dim padded to 16].
inline uint64_t subtile_elements(uint32_t head_dim, uint32_t value_dim) {
    return static_cast<uint64_t>(kSubtile) * (head_dim + (value_dim + 15) / 16 * 16);
}

// Queries that see keys [first, last] of one sequence through one key-value head.
struct Attend {
    const float* query[kQueries];  // head_dim floats, rotated and scaled
    float* out[kQueries];          // value_dim floats
    float sink[kQueries];          // a logit that adds to the sum of weights, and no value; minus infinity: none
    uint32_t first[kQueries];
    uint32_t last[kQueries];
    uint32_t queries;
    uint32_t head_dim, value_dim;
    int dtype;
    const uint8_t* cache;  // this layer's, from block 0
    const int32_t* table;  // blocks of the sequence
    uint32_t block_tokens;
    uint64_t block_bytes;  // from one block to the next
    uint64_t head_bytes;   // offset of this key-value head in a block
};

struct GateRule {
    uint32_t experts;
    uint32_t top_k;
    uint32_t sigmoid;  // else softmax
    uint32_t normalise;
    uint32_t groups;  // 0 or 1: no group limit
    uint32_t groups_kept;
    float scale;
    const float* correction;  // per expert, steers the choice only; null: none
};

struct Ops {
    // out = x / sqrt(mean(x^2) + eps) * weight; out may be x.
    void (*rms_norm)(const float* x, const float* weight, uint32_t n, float eps, float* out);
    // Rotates the pairs (i, i + half) of one head by the angles of its position.
    void (*rope)(float* head, const float* cosines, const float* sines, uint32_t half);
    // One position of one head into its subtile at `slot` 0..15.
    void (*store_kv)(int dtype, void* subtile, uint32_t slot, uint32_t head_dim, uint32_t value_dim,
                     const float* key, const float* value);
    void (*attend)(const Attend* group);
    // Top-k of one row: ids and weights in falling order of score, ties to the lowest id. Or the experts that are
    // `forced`, in their order, with the weights that their scores give; null: none.
    void (*gate)(const GateRule* rule, const float* logits, const uint16_t* forced, uint16_t* ids, float* weights);
    float (*dot)(const float* x, const float* y, uint32_t n);
    float (*sigmoid)(float x);
    // x[i] += scale * y[i], product and sum rounded apart.
    void (*add_scaled)(float* x, const float* y, float scale, uint64_t n);
    void (*to_float)(int dtype, const void* from, float* out, uint64_t n);
    // The highest of n values; *finite: 0 where any is NaN or infinite.
    float (*highest)(const float* x, uint32_t n, int* finite);
    // out[i] = exp((x[i] - top) * scale); zeros up to the next multiple of 16.
    void (*weights)(const float* x, float top, float scale, uint32_t n, float* out);
    // Mean, root mean square and greatest magnitude of the finite ones of n values, and how many are not finite.
    void (*statistics)(const float* x, uint32_t n, float* out);
    // sums[b] of blocks of kSampleBlock values; x is padded with zeros to a multiple of 16.
    void (*block_sums)(const float* x, uint32_t n, double* sums);
};

// The table of the instruction set that experts_isa_name() names now.
const Ops* current_ops();

}  // namespace eaas
