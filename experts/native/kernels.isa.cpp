// The tile kernel, once for every instruction set (compiled three times; see simd.h).
//
// One tile is 64 output columns. Its packed weights are a stream of steps of 256 bytes: one k of float32, or one pair
// of k of bf16, for all 64. Rows are staged a chunk of k at a time, for a few tiles; groups of at most six pass over
// the chunk while it stays in the nearest caches. Weights of bf16 are widened in the registers by every group: that is
// cheaper than widening them once to memory, and reading them there. Between chunks the accumulators wait in memory,
// which keeps their bits. So weights come from memory once, in order, and the fma chain of an output never depends on
// the rows beside it.
#include "experts/native/simd.h"

#include "experts/native/kernel_table.h"

namespace EAAS_ISA_NS {
namespace {

constexpr uint32_t kTile = EXPERTS_TILE_ROWS;
constexpr uint32_t kStepBytes = 256;
constexpr uint32_t kBlockBytes = 64;
constexpr uint32_t kGroupRows = 6;  // that the registers hold
// With 32 registers of sixteen lanes a group holds all four blocks of a tile, and needs no panel.
constexpr bool kWhole = kPartLanes == 16;
constexpr uint32_t kStagedRow = kWhole ? 128 : 256;  // words: the activations of one row for one chunk
constexpr uint32_t kPanelRows = kWhole ? 24 : 48;    // staged at once: 12 KB, or 48
constexpr uint32_t kTiles = kWhole ? 1 : 4;          // that share them: 6 KB of accumulators, or 48
constexpr uint32_t kNear = 2048;                     // bytes from the second cache to the first, beforehand

// One k of float32 weights.
struct StepF32 {
    typedef float Element;
    static constexpr uint32_t kElements = 1, kStaged = 1;  // k in a step; words they are staged in
    static constexpr uint32_t kChunk = kWhole ? 64 : 256;  // steps
    template <int M, int B>
    EAAS_INLINE void run(const uint8_t* w, const float* x, f32x16 (&acc)[M][B]) {
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) {
            const f32x16 weight = load(reinterpret_cast<const float*>(w + b * kBlockBytes));
            EAAS_UNROLL
            for (int i = 0; i < M; ++i) acc[i][b] = fma(splat(x[i * kStagedRow]), weight, acc[i][b]);
        }
    }
    EAAS_INLINE void stage(const float* x, uint32_t count, float* staged) {
        __builtin_memcpy(staged, x, count * sizeof(float));
    }
};

#if defined(EAAS_ISA_AVX512)
// One pair of k of bf16 weights by VDPBF16PS.
struct StepBf16 {
    typedef uint16_t Element;
    static constexpr uint32_t kElements = 2, kStaged = 1, kChunk = 64;
    template <int M, int B>
    EAAS_INLINE void run(const uint8_t* w, const float* x, f32x16 (&acc)[M][B]) {
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) {
            const __m512bh weight = (__m512bh)_mm512_loadu_si512(w + b * kBlockBytes);
            EAAS_UNROLL
            for (int i = 0; i < M; ++i) {
                int32_t pair;
                __builtin_memcpy(&pair, x + i * kStagedRow, sizeof pair);
                acc[i][b].a = _mm512_dpbf16_ps(acc[i][b].a, weight, (__m512bh)_mm512_set1_epi32(pair));
            }
        }
    }
    EAAS_INLINE void stage(const uint16_t* x, uint32_t count, float* staged) {
        staged[count / 2] = 0.0f;  // an odd count leaves half a pair
        __builtin_memcpy(staged, x, count * sizeof(uint16_t));
    }
};
#define EAAS_CLASS "vdpbf16-1"
#else
// One pair of k of bf16 weights, widened by shifts: even k, then odd k.
struct StepBf16 {
    typedef uint16_t Element;
    static constexpr uint32_t kElements = 2, kStaged = 2, kChunk = 128;
    template <int M, int B>
    EAAS_INLINE void run(const uint8_t* w, const float* x, f32x16 (&acc)[M][B]) {
        const uint16_t* pairs = reinterpret_cast<const uint16_t*>(w);
        // What stands between two barriers is read again rather than kept: accumulators need the registers.
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) {
            const f32x16 even = load_bf16_even(pairs + b * 32);
            EAAS_UNROLL
            for (int i = 0; i < M; ++i) fma_into(acc[i][b], even, splat(x[i * kStagedRow]));
            if constexpr (M > 2) asm volatile("" : : : "memory");
        }
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) {
            const f32x16 odd = load_bf16_odd(pairs + b * 32);
            EAAS_UNROLL
            for (int i = 0; i < M; ++i) fma_into(acc[i][b], odd, splat(x[i * kStagedRow + 1]));
            if constexpr (M > 2) asm volatile("" : : : "memory");
        }
    }
    EAAS_INLINE void stage(const uint16_t* x, uint32_t count, float* staged) {
        uint32_t i = 0;
        for (; i + 16 <= count; i += 16) store(staged + i, load_bf16(x + i));
        for (; i < count; ++i) staged[i] = from_bf16(x[i]);
        if (count % 2) staged[count] = 0.0f;
    }
};
#define EAAS_CLASS "fma-1"
#endif

// Adds `steps` steps of M rows to blocks [block, block + B) of acc[M][64]. x: staged rows. next: what to
// fetch meanwhile, `apart` bytes per step and block: left to itself the hardware fetches too little of one row's stream (72%
// of the bandwidth on a Xeon, 92% so), nothing of the next chunk while several groups pass over this one, and does not follow a pass
// that takes every fourth line.
template <class Step, int M, int B>
__attribute__((noinline)) void group(const uint8_t* w, const float* x, uint32_t steps, uint32_t block,
                                     const uint8_t* next, uint32_t apart, float* acc) {
    f32x16 sums[M][B];
    float* const corner = acc + block * 16;
    EAAS_UNROLL
    for (int i = 0; i < M; ++i)
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) sums[i][b] = load(corner + i * kTile + b * 16);
    const uint8_t* from = w + block * kBlockBytes;
    for (uint32_t s = 0; s < steps; ++s, from += kStepBytes, x += Step::kStaged) {
        EAAS_UNROLL
        for (int b = 0; b < B; ++b, next += apart) {
            __builtin_prefetch(next, 0, 2);
            __builtin_prefetch(from + kNear + b * kBlockBytes);
        }
        Step::template run<M, B>(from, x, sums);
    }
    EAAS_UNROLL
    for (int i = 0; i < M; ++i)
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) store(corner + i * kTile + b * 16, sums[i][b]);
}

// Blocks that M rows take at once: enough sums to hide the latency of the fma, and no more than there are registers for.
template <int M>
constexpr int kBlocksOf = kWhole || M == 1 ? 4 : M <= 3 ? 2 : 1;

// Adds one chunk to acc[m][64], for 1 <= m <= M.
template <class Step, int M = kGroupRows>
void group_of(uint32_t m, const uint8_t* w, const float* x, uint32_t steps, const uint8_t* next, uint32_t apart,
              float* acc) {
    if constexpr (M > 1)
        if (m < M) return group_of<Step, M - 1>(m, w, x, steps, next, apart, acc);
    constexpr int B = kBlocksOf<M>;
    for (uint32_t block = 0; block < 4; block += B)
        group<Step, M, B>(w, x, steps, block, next + block * steps * apart, apart, acc);
}

// Adds one chunk to acc[m][64].
template <class Step>
void chunk(const uint8_t* w, const float* staged, uint32_t steps, uint32_t m, const uint8_t* next, float* acc) {
    const uint32_t groups = (m + kGroupRows - 1) / kGroupRows;
    // Each group fetches its part of it, so that memory and arithmetic share the time evenly.
    const uint32_t apart = (kBlockBytes + groups - 1) / groups;
    for (uint32_t g = 0; g < groups; ++g) {
        // Groups of nearly equal height: 7 rows go as 4 + 3, not as 6 + 1.
        const uint32_t row0 = m * g / groups, row1 = m * (g + 1) / groups;
        group_of<Step>(row1 - row0, w, staged + row0 * kStagedRow, steps, next + g * 4 * steps * apart, apart,
                       acc + row0 * kTile);
    }
}

// Rows x[0, m) times `count` tiles from `tile`; m <= kPanelRows, count <= kTiles.
template <class Step, class Finish>
void panel(const uint8_t* packed, uint64_t tile_bytes, uint32_t k, const typename Step::Element* x, uint64_t x_stride,
           uint32_t m, uint32_t tile, uint32_t count, Finish finish) {
    alignas(64) float staged[kPanelRows * kStagedRow];
    alignas(64) float acc[kTiles][kPanelRows * kTile];
    const uint8_t* const first = packed + tile * tile_bytes;
    for (uint32_t t = 0; t < count; ++t) __builtin_memset(acc[t], 0, m * kTile * sizeof(float));
    constexpr uint32_t kMost = Step::kChunk * Step::kElements;
    for (uint32_t k0 = 0; k0 < k; k0 += kMost) {
        const uint32_t now = k - k0 < kMost ? k - k0 : kMost;
        const uint32_t steps = (now + Step::kElements - 1) / Step::kElements;
        const uint64_t offset = uint64_t{k0} / Step::kElements * kStepBytes;
        for (uint32_t i = 0; i < m; ++i) Step::stage(x + i * x_stride + k0, now, staged + i * kStagedRow);
        for (uint32_t t = 0; t < count; ++t) {
            const uint8_t* const w = first + t * tile_bytes + offset;
            // The chunk after this one: of the next tile, else of the next k, else what most likely follows.
            const uint8_t* const next = t + 1 < count ? w + tile_bytes
                                        : k0 + now < k ? first + offset + steps * kStepBytes
                                                       : first + count * tile_bytes;
            chunk<Step>(w, staged, steps, m, next, acc[t]);
        }
    }
    for (uint32_t t = 0; t < count; ++t)
        for (uint32_t i = 0; i < m; ++i) finish(tile + t, i, acc[t] + i * kTile);
}

template <class Step, class Finish>
void tiles(const Product& p, Finish finish) {
    const uint64_t tile_bytes = (uint64_t{p.k} + 1) / 2 * 2 / Step::kElements * kStepBytes;
    const auto* const packed = static_cast<const uint8_t*>(p.packed);
    const auto* const x = static_cast<const typename Step::Element*>(p.x);
    // Panels of nearly equal height, in whole groups but for the last.
    const uint32_t panels = (p.m + kPanelRows - 1) / kPanelRows;
    const uint32_t height = panels ? ((p.m - 1) / panels / kGroupRows + 1) * kGroupRows : 1;
    // Few rows are bound by memory, which is fastest tile after tile.
    const uint32_t most = p.m > kGroupRows ? kTiles : 1;
    for (uint32_t tile = p.tile0; tile < p.tile1; tile += most) {
        const uint32_t count = p.tile1 - tile < most ? p.tile1 - tile : most;
        for (uint32_t row = 0; row < p.m; row += height)
            panel<Step>(packed, tile_bytes, p.k, x + row * p.x_stride, p.x_stride, p.m - row < height ? p.m - row : height,
                        tile, count, [&](uint32_t to, uint32_t i, const float* acc) { finish(to, row + i, acc); });
    }
}

// tiles() of the types whose rows are those of Step.
template <class Step, class F>
void every_tile(const Product& p, F finish) {
    if (sizeof(typename Step::Element) == 4 || p.dtype == EAAS_BF16) return tiles<Step>(p, finish);
    const Finish called = {&finish, [](const void* state, uint32_t tile, uint32_t row, const float* acc) {
                               (*static_cast<const F*>(state))(tile, row, acc);
                           }};
    p.dtype == EAAS_INT8 ? int8_tiles(p, called) : quantized_tiles(p, called);
}

void linear(const Product& p) {
    const auto finish = [&](uint32_t tile, uint32_t row, const float* acc) {
        const uint32_t column = tile * kTile, count = p.rows - column < kTile ? p.rows - column : kTile;
        __builtin_memcpy(static_cast<float*>(p.out) + row * p.out_stride + column, acc, count * sizeof(float));
    };
    p.dtype == EAAS_F32 ? every_tile<StepF32>(p, finish) : every_tile<StepBf16>(p, finish);
}

void store_act(float* to, f32x16 x, uint32_t count) {
    count == 16 ? store(to, x) : store_part(to, x, count);
}
void store_act(uint16_t* to, f32x16 x, uint32_t count) {
    count == 16 ? store_bf16(to, x) : store_bf16_part(to, x, count);
}

// activate(place, gate, up): sixteen columns; the gates of the first have row `place` of the packed matrix.
template <class Step, class Activate>
void gate_up_of(const Product& p, Activate activate) {
    every_tile<Step>(p, [&](uint32_t tile, uint32_t row, const float* acc) {
        auto* const to = static_cast<typename Step::Element*>(p.out) + row * p.out_stride;
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t column = tile * EXPERTS_GATE_UP_COLUMNS + half * 16;
            if (column >= p.rows) return;
            const f32x16 product =
                activate(uint64_t{tile} * kTile + half * 32, load(acc + half * 32), load(acc + half * 32 + 16));
            store_act(to + column, product, p.rows - column < 16 ? p.rows - column : 16);
        }
    });
}

template <class Activate>
void gate_up_in(const Product& p, Activate activate) {
    p.dtype == EAAS_F32 ? gate_up_of<StepF32>(p, activate) : gate_up_of<StepBf16>(p, activate);
}

void gate_up(const Product& p, const ExpertForm* form, const float* biases) {
    if (!form) return gate_up_in(p, [](uint64_t, f32x16 gate, f32x16 up) { return silu(gate) * up; });
    const float alpha = form->alpha, limit = form->limit, shift = form->shift;
    gate_up_in(p, [=](uint64_t place, f32x16 gate, f32x16 up) {
        if (biases) {
            gate = gate + load(biases + place);
            up = up + load(biases + place + 16);
        }
        // Whatever is compared comes second: that is what a NaN is passed on from.
        gate = min(splat(limit), gate);
        up = max(splat(-limit), min(splat(limit), up));
        return gate / (splat(1.0f) + exp(-(splat(alpha) * gate))) * (up + splat(shift));
    });
}

void rows_to_bf16(const float* x, uint16_t* out, uint64_t n) {
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16(out + i, load(x + i));
    for (; i < n; ++i) out[i] = to_bf16(x[i]);
}

#if defined(EAAS_ISA_AVX512)
constexpr const char* kName = "avx512";
#elif defined(EAAS_ISA_AVX2)
constexpr const char* kName = "avx2";
#else
constexpr const char* kName = "portable";
#endif

}  // namespace

extern const KernelTable kernel_table = {
    kName,
    {"cpu-f32-fma-1", "cpu-bf16-" EAAS_CLASS, "cpu-int8-g64-1", "cpu-fp8-" EAAS_CLASS, "cpu-mxfp4-" EAAS_CLASS,
     "cpu-int4-" EAAS_CLASS, "cpu-int4g32-" EAAS_CLASS},
    linear,
    gate_up,
    rows_to_bf16,
};

}  // namespace EAAS_ISA_NS
