// Exposes simd.h to the tests: each function applies one operation to `n` floats, n a multiple of 16.
#include "experts/native/simd.h"

using namespace EAAS_ISA_NS;

#define PROBE extern "C" __attribute__((visibility("default"))) void
#define EACH for (uint64_t i = 0; i < n; i += 16)

PROBE probe_exp(const float* x, float* out, uint64_t n) { EACH store(out + i, exp(load(x + i))); }
PROBE probe_silu(const float* x, float* out, uint64_t n) { EACH store(out + i, silu(load(x + i))); }
PROBE probe_sqrt(const float* x, float* out, uint64_t n) { EACH store(out + i, sqrt(load(x + i))); }
PROBE probe_splat(const float* x, float* out, uint64_t n) {
    for (uint64_t i = 0; i + 16 <= n; i += 16) store(out + i, splat(x[i]));
}
PROBE probe_fma(const float* x, const float* y, const float* z, float* out, uint64_t n) {
    EACH store(out + i, fma(load(x + i), load(y + i), load(z + i)));
}
PROBE probe_max(const float* x, const float* y, float* out, uint64_t n) {
    EACH store(out + i, max(load(x + i), load(y + i)));
}
PROBE probe_min(const float* x, const float* y, float* out, uint64_t n) {
    EACH store(out + i, min(load(x + i), load(y + i)));
}
PROBE probe_divide(const float* x, const float* y, float* out, uint64_t n) {
    EACH store(out + i, (load(x + i) - load(y + i)) / (-load(y + i)));
}
PROBE probe_sum(const float* x, float* out, uint64_t n) { EACH out[i / 16] = sum(load(x + i)); }
PROBE probe_max_of(const float* x, float* out, uint64_t n) { EACH out[i / 16] = max_of(load(x + i)); }
PROBE probe_bf16_pairs(const uint16_t* x, float* even, float* odd, uint64_t n) {
    EACH {
        store(even + i, load_bf16_even(x + 2 * i));
        store(odd + i, load_bf16_odd(x + 2 * i));
    }
}
// The first `count` of 16, through floats and through bf16; what lies behind must stay as it was.
PROBE probe_part(const float* x, float* out, uint16_t* half, unsigned count) {
    store_part(out, load_part(x, count), count);
    store_bf16_part(half, load(x), count);
}
