// Passes over a vocabulary; see sampler_ops.h.
#include "eaas/native/sampler_ops.h"
#include "experts/native/simd.h"

namespace EAAS_ISA_NS {

namespace {

float highest(const float* x, uint32_t n, int* finite) {
    f32x16 best = splat(-__builtin_inff()), residue = zero();
    const uint32_t whole = n / 16 * 16;
    for (uint32_t i = 0; i < whole; i += 16) {
        const f32x16 value = load(x + i);
        best = max(value, best);
        residue = fma(value, zero(), residue);
    }
    float top = max_of(best);
    float odd = sum(residue);
    for (uint32_t i = whole; i < n; ++i) {
        top = x[i] > top ? x[i] : top;
        odd += x[i] * 0.0f;
    }
    *finite = odd == 0.0f;
    return top;
}

void weights(const float* x, float top, float scale, uint32_t n, float* out) {
    const uint32_t whole = n / 16 * 16;
    for (uint32_t i = 0; i < whole; i += 16) store(out + i, exp((load(x + i) - splat(top)) * splat(scale)));
    if (whole == n) return;
    store(out + whole, exp((load_part(x + whole, n - whole) - splat(top)) * splat(scale)));
    for (uint32_t i = n; i < whole + 16; ++i) out[i] = 0.0f;
}

void block_sums(const float* x, uint32_t n, double* sums) {
    const uint32_t padded = (n + 15) / 16 * 16;
    for (uint32_t base = 0; base < padded; base += eaas::kSampleBlock) {
        const uint32_t end = base + eaas::kSampleBlock < padded ? base + eaas::kSampleBlock : padded;
        f32x16 total = zero();
        for (uint32_t i = base; i < end; i += 16) total = total + load(x + i);
        sums[base / eaas::kSampleBlock] = sum(total);
    }
}

}  // namespace

extern const eaas::SamplerOps sampler_ops = {highest, weights, block_sums};

}  // namespace EAAS_ISA_NS
