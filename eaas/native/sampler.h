// From logits to tokens. Deterministic: a row's token depends on its logits and its SampleRow only. Plain C ABI.
//
// Order, as vLLM has it: log-probabilities from the untouched logits; tokens that are not allowed, biases; repetition,
// then frequency and presence penalties; forbidden tokens; temperature; min-p; top-k; top-p; one draw.
#pragma once
#include <cstdint>

#include "p2p/native/api.h"

enum {
    SAMPLER_OK = 0,
    SAMPLER_E_NOT_FINITE = -1,  // a logit is NaN or infinite
    SAMPLER_E_TOKEN = -2,       // a listed token is outside the vocabulary
    SAMPLER_E_NOTHING_LEFT = -3,
    SAMPLER_E_MEMORY = -4,
};

struct SampleRow {
    const int32_t* prompt;     // for the repetition penalty
    const int32_t* output;     // for all penalties
    const int32_t* forbidden;  // never chosen
    const uint32_t* allowed;   // bit i % 32 of word i / 32: whether token i may be chosen; null: all may
    const uint32_t* allowed_too;  // the same; a token must be allowed by both
    const int32_t* biased;     // tokens to whose logits are added
    const float* biases;       // these
    uint64_t seed;
    uint64_t index;  // of the token in the output
    uint32_t prompt_count, output_count, forbidden_count, biased_count;
    uint32_t choice;
    uint32_t given;             // 1 + the token that is chosen whatever its logits, such as a prompt's own; 0: none
    float temperature;          // below 1e-5: the highest logit, lowest id on a tie
    float top_p;                // 1: off
    float min_p;                // 0: off
    float repetition;           // 1: off
    float presence, frequency;  // 0: off
    int32_t top_k;              // 0: off; ties with the last are kept
    int32_t top_count;  // likeliest tokens to report beside the chosen one; -1: no log-probability at all
};

namespace eaas {
constexpr float kGreedyBelow = 1e-5f;
// Whether a row's logits are looked at as they are.
inline bool takes_logits_as_they_are(const SampleRow& row) {
    return !row.prompt_count && !row.output_count && !row.forbidden_count && !row.biased_count && !row.allowed &&
           !row.allowed_too;
}
// Whether of all its logits only the highest one's token matters.
inline bool wants_highest_only(const SampleRow& row) {
    return takes_logits_as_they_are(row) && !row.given && row.temperature < kGreedyBelow && row.top_count < 0;
}
}  // namespace eaas

// logits [rows][vocab]. tokens [rows]; logprobs [rows] and ranks [rows] (1: the likeliest), written where
// top_count >= 0; top_ids and top_logprobs [rows][top_stride], the first top_count of a row written. statuses [rows]:
// why nothing could be chosen for a row, whose token is 0 then; the others are chosen all the same. Returns SAMPLER_OK
// or, with nothing written that counts, SAMPLER_E_MEMORY.
P2P_API int32_t sampler_sample(const float* logits, uint32_t rows, uint32_t vocab, const SampleRow* plan,
                               int32_t* tokens, float* logprobs, uint32_t* ranks, int32_t* top_ids,
                               float* top_logprobs, uint32_t top_stride, int32_t* statuses);

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
P2P_API void sampler_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
