// What this machine can do, and loops around the native kernels that no binding's overhead enters. Compiled by
// benchmarks/probe.py for the machine it runs on.
#include <immintrin.h>

#include <cstdint>

#include "eaas/native/ops.h"

#define PROBE extern "C" __attribute__((visibility("default")))

namespace {

typedef int64_t Words __attribute__((vector_size(64)));

}  // namespace

// Reads n bytes (a multiple of 512) once; the result keeps the reads alive.
PROBE int64_t probe_read(const void* from, uint64_t n) {
    const Words* at = static_cast<const Words*>(from);
    Words sum[4] = {};
    for (uint64_t i = 0; i < n / sizeof(Words); i += 4)
        for (int j = 0; j < 4; ++j) sum[j] += at[i + j];
    for (int j = 1; j < 4; ++j) sum[0] += sum[j];
    return sum[0][0];
}

#if defined(__AVX512F__)
#define PROBE_REGISTER "+v"
#else
#define PROBE_REGISTER "+x"
#endif

namespace {

// Runs `step` over independent chains that fill the pipes; returns the steps done.
template <class Register, class Step>
double steps_of(uint64_t iterations, Register start, Step step) {
    constexpr int kChains = sizeof(Register) == 64 ? 24 : 12;  // of 32 registers, or 16
    Register chains[kChains];
#define PROBE_EACH_CHAIN _Pragma("GCC unroll 24") for (int i = 0; i < kChains; ++i)
    PROBE_EACH_CHAIN chains[i] = start;
    for (uint64_t n = 0; n < iterations; ++n) {
        // Opaque to the compiler, which would compute equal chains once.
        PROBE_EACH_CHAIN asm volatile("" : PROBE_REGISTER(chains[i]));
        PROBE_EACH_CHAIN chains[i] = step(chains[i]);
    }
    PROBE_EACH_CHAIN asm volatile("" : PROBE_REGISTER(chains[i]));
    return static_cast<double>(kChains) * static_cast<double>(iterations);
}

}  // namespace

// Floating-point operations done by what an instruction set's products are made of: with `dot` VDPBF16PS where it is
// there, else fma, in registers of `bits`.
PROBE double probe_rate(uint64_t iterations, uint32_t bits, uint32_t dot) {
#if defined(__AVX512BF16__)
    if (bits == 512 && dot) {
        const __m512bh half = (__m512bh)_mm512_set1_epi16(0x3f00);
        return 64 * steps_of(iterations, _mm512_setzero_ps(),
                             [=](__m512 x) { return _mm512_dpbf16_ps(x, half, half); });
    }
#endif
#if defined(__AVX512F__)
    if (bits == 512) {
        const __m512 scale = _mm512_set1_ps(0.999f);
        return 32 * steps_of(iterations, scale, [=](__m512 x) { return _mm512_fmadd_ps(x, scale, scale); });
    }
#endif
#if defined(__FMA__)
    if (bits == 256) {
        const __m256 scale = _mm256_set1_ps(0.999f);
        return 16 * steps_of(iterations, scale, [=](__m256 x) { return _mm256_fmadd_ps(x, scale, scale); });
    }
#endif
    const __m128 scale = _mm_set1_ps(0.999f);
    return 8 * steps_of(iterations, scale, [=](__m128 x) { return _mm_add_ps(_mm_mul_ps(x, scale), scale); });
}

// Calls so far of each lane: the next one takes other weights or keys than the last.
static thread_local uint32_t turn = 0;

// experts_linear, or with `inter` experts_ffn_gate_up, `calls` times over `copies` of the weights in turn.
PROBE void probe_product(void* kernel, int dtype, const uint8_t* packed, uint64_t apart, uint32_t copies,
                         uint32_t rows, uint32_t k, const void* x, uint32_t m, void* out, uint32_t tile0,
                         uint32_t tile1, uint32_t gate_up, uint32_t calls) {
    typedef void (*Linear)(int, const void*, uint32_t, uint32_t, const void*, uint64_t, uint32_t, float*,
                           uint64_t, uint32_t, uint32_t);
    typedef void (*GateUp)(int, const void*, uint32_t, uint32_t, const void*, uint64_t, uint32_t, void*,
                           uint64_t, uint32_t, uint32_t);
    for (uint32_t i = 0; i < calls; ++i) {
        const uint8_t* w = packed + turn++ % copies * apart;
        if (gate_up)
            reinterpret_cast<GateUp>(kernel)(dtype, w, k, rows, x, k, m, out, rows, tile0, tile1);
        else
            reinterpret_cast<Linear>(kernel)(dtype, w, rows, k, x, k, m, static_cast<float*>(out), rows, tile0,
                                             tile1);
    }
}

// Attention of rows [0, rows) at positions first_row + row, heads [head0, head1) of one sequence, `calls` times
// over `copies` block tables of `blocks` blocks each.
PROBE void probe_attend(const eaas::Ops* ops, const uint8_t* cache, const int32_t* tables, uint32_t blocks,
                        uint32_t copies, uint32_t block_tokens, uint64_t head_bytes, uint32_t kv_heads,
                        uint32_t q_heads, uint32_t dim, uint32_t rows, uint32_t first_row, const float* queries,
                        float* out, uint32_t head0, uint32_t head1, uint32_t calls) {
    const uint32_t heads = q_heads / kv_heads;
    for (uint32_t call = 0; call < calls; ++call, ++turn)
        for (uint32_t head = head0; head < head1; ++head) {
            eaas::Attend attend{};
            attend.head_dim = attend.value_dim = dim;
            attend.dtype = 1;
            attend.cache = cache;
            attend.table = tables + turn % copies * blocks;
            attend.block_tokens = block_tokens;
            attend.block_bytes = head_bytes * kv_heads;
            attend.head_bytes = head * head_bytes;
            for (uint32_t row = 0; row < rows; ++row)
                for (uint32_t q = head * heads; q < (head + 1) * heads; ++q) {
                    const uint32_t i = attend.queries++;
                    const uint64_t at = (uint64_t{row} * q_heads + q) * dim;
                    attend.query[i] = queries + at;
                    attend.out[i] = out + at;
                    attend.sink[i] = -__builtin_inff();
                    attend.last[i] = first_row + row;
                    const bool ends = q + 1 == (head + 1) * heads && row + 1 == rows;
                    if (attend.queries == eaas::kQueries || ends) {
                        ops->attend(&attend);
                        attend.queries = 0;
                    }
                }
        }
}

// What a decoder does to each of its rows between products: input norm; then norm and rotation of q_heads and
// kv_heads heads, and their keys and values stored as bf16. Rows [row0, row1).
PROBE void probe_rows(const eaas::Ops* ops, const float* x, const float* weight, uint32_t hidden, float* normed,
                      const float* qkv, float* rotated, uint32_t q_heads, uint32_t kv_heads, uint32_t dim,
                      const float* cosines, const float* sines, uint8_t* cache, uint64_t subtile_bytes,
                      uint32_t row0, uint32_t row1, uint32_t calls) {
    const uint64_t width = (uint64_t{q_heads} + 2 * kv_heads) * dim;
    for (uint32_t call = 0; call < calls; ++call)
        for (uint32_t row = row0; row < row1; ++row) {
            ops->rms_norm(x + uint64_t{row} * hidden, weight, hidden, 1e-6f, normed + uint64_t{row} * hidden);
            float* to = rotated + row * width;
            __builtin_memcpy(to, qkv + row * width, width * sizeof(float));
            for (uint32_t h = 0; h < q_heads + kv_heads; ++h) {
                ops->rms_norm(to + h * dim, weight, dim, 1e-6f, to + h * dim);
                ops->rope(to + h * dim, cosines + row * (dim / 2), sines + row * (dim / 2), dim / 2);
            }
            for (uint32_t h = 0; h < kv_heads; ++h)
                ops->store_kv(1, cache + (uint64_t{row / eaas::kSubtile} * kv_heads + h) * subtile_bytes,
                              row % eaas::kSubtile, dim, dim, to + (q_heads + h) * dim,
                              to + (q_heads + kv_heads + h) * dim);
        }
}

// Softmax and the normalised top-k of rows [row0, row1).
PROBE void probe_gate(const eaas::Ops* ops, const float* logits, uint32_t experts, uint32_t top_k, uint16_t* ids,
                      float* weights, uint32_t row0, uint32_t row1, uint32_t calls) {
    const eaas::GateRule rule{experts, top_k, 0, 1, 0, 0, 1.0f, nullptr};
    for (uint32_t call = 0; call < calls; ++call)
        for (uint64_t row = row0; row < row1; ++row)
            ops->gate(&rule, logits + row * experts, nullptr, ids + row * top_k, weights + row * top_k);
}
