// Passes of the sampler over a vocabulary, once per instruction set, with the same bits on all.
#pragma once

#include <stdint.h>

namespace eaas {

constexpr uint32_t kSampleBlock = 1024;

struct SamplerOps {
    // The highest of n values; *finite: 0 where any is NaN or infinite.
    float (*highest)(const float* x, uint32_t n, int* finite);
    // out[i] = exp((x[i] - top) * scale); zeros up to the next multiple of 16.
    void (*weights)(const float* x, float top, float scale, uint32_t n, float* out);
    // sums[b] of blocks of kSampleBlock values; x is padded with zeros to a multiple of 16.
    void (*block_sums)(const float* x, uint32_t n, double* sums);
};

}  // namespace eaas
