// The tile kernel, once for every instruction set (compiled three times; see simd.h).
//
// One tile is 64 output columns. Its packed weights are a stream of steps of 256 bytes: one k of float32, or
// one pair of k of bf16, for all 64.
// Few rows, bound by memory: a chunk of 64 steps stays in the nearest caches while every group of at most six
// activation rows passes over it. Many rows, bound by arithmetic: 256 k of one block of columns are widened
// once to a float32 panel in the first-level cache, over which every group of six rows passes at the rate of
// its fma (wide_panel).
// Between chunks the accumulators wait in memory, which keeps their bits. So weights come from memory once, in
// order, and the fma chain of an output never depends on the rows beside it.
#include "experts/native/simd.h"

#include "experts/native/kernel_table.h"

namespace EAAS_ISA_NS {
namespace {

constexpr uint32_t kTile = EXPERTS_TILE_ROWS;
constexpr uint32_t kStepBytes = 256;
constexpr uint32_t kBlockBytes = 64;
constexpr uint32_t kChunk = 64;       // steps
constexpr uint32_t kStagedRow = 128;  // words: the activations of one row for one chunk
constexpr uint32_t kPanelRows = 24;   // rows staged at once: 12 KB, and 6 KB of accumulators

// One k of float32 weights.
struct StepF32 {
    typedef float Element;
    static constexpr uint32_t kElements = 1, kStaged = 1;  // k in a step; words they are staged in
    static constexpr uint32_t kGroupRows = 6;              // rows that the registers hold
    static constexpr uint32_t kAhead = 2, kCache [[maybe_unused]] = 2;      // chunks fetched ahead, and for which cache
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
    // One block of columns of `steps` steps to [k][16] floats.
    EAAS_INLINE void widen(const uint8_t* w, uint32_t steps, float* out) {
        for (uint32_t s = 0; s < steps; ++s)
            store(out + s * 16, load(reinterpret_cast<const float*>(w + s * kStepBytes)));
    }
};

#if defined(EAAS_ISA_AVX512)
// One pair of k of bf16 weights by VDPBF16PS.
struct StepBf16 {
    typedef uint16_t Element;
    static constexpr uint32_t kElements = 2, kStaged = 1;
    static constexpr uint32_t kGroupRows = 6, kAhead = 1, kCache [[maybe_unused]] = 3;
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
    static constexpr uint32_t kElements = 2, kStaged = 2;
    static constexpr uint32_t kGroupRows = 5, kAhead = 1, kCache [[maybe_unused]] = 3;
    template <int M, int B>
    EAAS_INLINE void run(const uint8_t* w, const float* x, f32x16 (&acc)[M][B]) {
        const uint16_t* pairs = reinterpret_cast<const uint16_t*>(w);
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) {
            const f32x16 even = load_bf16_even(pairs + b * 32);
            EAAS_UNROLL
            for (int i = 0; i < M; ++i) acc[i][b] = fma(splat(x[i * kStagedRow]), even, acc[i][b]);
        }
        // The pairs are read again rather than kept: accumulators need the registers.
        if constexpr (M > 2) asm volatile("" : : : "memory");
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) {
            const f32x16 odd = load_bf16_odd(pairs + b * 32);
            EAAS_UNROLL
            for (int i = 0; i < M; ++i) acc[i][b] = fma(splat(x[i * kStagedRow + 1]), odd, acc[i][b]);
        }
    }
    EAAS_INLINE void stage(const uint16_t* x, uint32_t count, float* staged) {
        uint32_t i = 0;
        for (; i + 16 <= count; i += 16) store(staged + i, load_bf16(x + i));
        for (; i < count; ++i) staged[i] = from_bf16(x[i]);
        if (count % 2) staged[count] = 0.0f;
    }
    EAAS_INLINE void widen(const uint8_t* w, uint32_t steps, float* out) {
        for (uint32_t s = 0; s < steps; ++s) {
            const uint16_t* pairs = reinterpret_cast<const uint16_t*>(w + s * kStepBytes);
            store(out + s * 32, load_bf16_even(pairs));
            store(out + s * 32 + 16, load_bf16_odd(pairs));
        }
    }
};
#define EAAS_CLASS "fma-1"
#endif

// Adds `steps` steps of M rows to blocks [block, block + B) of acc[M][64]. x: staged rows. next: what to
// fetch meanwhile, in order; a pass that takes every fourth line is no stream that the hardware would follow.
template <class Step, int M, int B>
__attribute__((noinline)) void group(const uint8_t* w, const float* x, uint32_t steps, uint32_t block,
                                     const uint8_t* next, float* acc) {
    f32x16 sums[M][B];
    float* const corner = acc + block * 16;
    EAAS_UNROLL
    for (int i = 0; i < M; ++i)
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) sums[i][b] = load(corner + i * kTile + b * 16);
    const uint8_t* from = w + block * kBlockBytes;
    for (uint32_t s = 0; s < steps; ++s, from += kStepBytes, x += Step::kStaged) {
        if constexpr (B == 1) __builtin_prefetch(next + s * kBlockBytes, 0, Step::kCache);
        Step::template run<M, B>(from, x, sums);
    }
    EAAS_UNROLL
    for (int i = 0; i < M; ++i)
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) store(corner + i * kTile + b * 16, sums[i][b]);
}

// group() with M = m, for 1 <= m <= M.
template <class Step, int M, int B>
void group_of(uint32_t m, const uint8_t* w, const float* x, uint32_t steps, uint32_t block,
              const uint8_t* next, float* acc) {
    if (m == M) return group<Step, M, B>(w, x, steps, block, next, acc);
    if constexpr (M > 1) group_of<Step, M - 1, B>(m, w, x, steps, block, next, acc);
}

// Adds one chunk to acc[m][64], B blocks of columns and at most M rows at a time.
template <class Step, int M, int B>
void chunk(const uint8_t* w, const float* staged, uint32_t steps, uint32_t m, float* acc) {
    const uint32_t groups = (m + M - 1) / M;
    for (uint32_t block = 0; block < 4; block += B) {
        const uint8_t* quarter = w + block * kChunk * kBlockBytes;
        for (uint32_t g = 0; g < groups; ++g) {
            // Groups of nearly equal height: 7 rows go as 4 + 3, not as 6 + 1.
            const uint32_t row0 = m * g / groups, row1 = m * (g + 1) / groups;
            const uint8_t* next = quarter + (g == 0 ? Step::kAhead * kChunk * kStepBytes : 0);
            group_of<Step, M, B>(row1 - row0, w, staged + row0 * kStagedRow, steps, block, next,
                                 acc + row0 * kTile);
        }
    }
}

// acc[m][64] = x[m] . the tile, m <= kPanelRows.
template <class Step>
void panel(const uint8_t* tile, uint32_t k, const typename Step::Element* x, uint64_t x_stride, uint32_t m,
           float* acc) {
    alignas(64) float staged[kPanelRows * kStagedRow];
    for (uint32_t i = 0; i < m * kTile; ++i) acc[i] = 0.0f;
    const uint32_t steps = (k + Step::kElements - 1) / Step::kElements;
    for (uint32_t first = 0; first < steps; first += kChunk) {
        const uint32_t now = steps - first < kChunk ? steps - first : kChunk;
        const uint32_t k0 = first * Step::kElements;
        const uint32_t count = k - k0 < now * Step::kElements ? k - k0 : now * Step::kElements;
        for (uint32_t i = 0; i < m; ++i) Step::stage(x + i * x_stride + k0, count, staged + i * kStagedRow);
        const uint8_t* w = tile + static_cast<uint64_t>(first) * kStepBytes;
        if constexpr (kPartLanes == 16) {
            chunk<Step, Step::kGroupRows, 4>(w, staged, now, m, acc);
        } else if (m == 1) {
            chunk<Step, 1, 4>(w, staged, now, m, acc);
        } else {
            chunk<Step, Step::kGroupRows, 1>(w, staged, now, m, acc);
        }
    }
}

// ---- many rows

constexpr uint32_t kWideFrom = 18;   // rows from which widening pays
constexpr uint32_t kWideRows = 96;   // staged at once: 96 KB for one chunk
constexpr uint32_t kWideTiles = 2;   // that share the staged rows: 48 KB of accumulators
constexpr uint32_t kWideK = 256;     // k of a chunk: 16 KB of one block's weights
constexpr uint32_t kWideGroup = 6;   // rows that the registers hold

// Adds `count` k of M rows to one block of columns of acc[M][64]. w: [count][16]; x: rows kWideK apart. next:
// what to fetch meanwhile, `apart` bytes per k.
template <int M>
__attribute__((noinline)) void wide_group(const float* w, const float* x, uint32_t count, const uint8_t* next,
                                          uint32_t apart, float* acc) {
    f32x16 sums[M];
    EAAS_UNROLL
    for (int i = 0; i < M; ++i) sums[i] = load(acc + i * kTile);
    _Pragma("GCC unroll 4")
    for (uint32_t k = 0; k < count; ++k, next += apart) {
        __builtin_prefetch(next, 0, 2);
        const f32x16 weight = load(w + k * 16);
        EAAS_UNROLL
        for (int i = 0; i < M; ++i) sums[i] = fma(splat(x[i * kWideK + k]), weight, sums[i]);
    }
    EAAS_UNROLL
    for (int i = 0; i < M; ++i) store(acc + i * kTile, sums[i]);
}

// wide_group() with M = m, for 1 <= m <= M.
template <int M>
void wide_group_of(uint32_t m, const float* w, const float* x, uint32_t count, const uint8_t* next,
                   uint32_t apart, float* acc) {
    if (m == M) return wide_group<M>(w, x, count, next, apart, acc);
    if constexpr (M > 1) wide_group_of<M - 1>(m, w, x, count, next, apart, acc);
}

// Rows x[0, m) times `count` tiles from `tile`; m <= kWideRows, count <= kWideTiles.
template <class Step, class Finish>
void wide_panel(const uint8_t* packed, uint64_t tile_bytes, uint32_t k, const typename Step::Element* x,
                uint64_t x_stride, uint32_t m, uint32_t tile, uint32_t count, Finish finish) {
    alignas(64) float staged[kWideRows * kWideK];
    alignas(64) float weights[kWideK * 16];
    alignas(64) float acc[kWideTiles][kWideRows * kTile];
    const uint32_t groups = (m + kWideGroup - 1) / kWideGroup;
    const uint8_t* const first = packed + tile * tile_bytes;
    for (uint32_t t = 0; t < count; ++t) __builtin_memset(acc[t], 0, m * kTile * sizeof(float));
    for (uint32_t k0 = 0; k0 < k; k0 += kWideK) {
        const uint32_t now = k - k0 < kWideK ? k - k0 : kWideK;
        const uint32_t steps = (now + Step::kElements - 1) / Step::kElements;
        const uint64_t offset = uint64_t{k0} / Step::kElements * kStepBytes;
        for (uint32_t i = 0; i < m; ++i) Step::stage(x + i * x_stride + k0, now, staged + i * kWideK);
        for (uint32_t t = 0; t < count; ++t) {
            const uint8_t* const chunk = first + t * tile_bytes + offset;
            // The chunk after this one: of the next tile, else of the next k, else of what follows.
            const uint8_t* const next = t + 1 < count ? chunk + tile_bytes
                                        : k0 + now < k ? first + offset + steps * kStepBytes
                                                       : first + count * tile_bytes;
            for (uint32_t block = 0; block < 4; ++block) {
                Step::widen(chunk + block * kBlockBytes, steps, weights);
                for (uint32_t g = 0; g < groups; ++g) {
                    const uint32_t row0 = m * g / groups, row1 = m * (g + 1) / groups;
                    // Each pass fetches its part of it, so that memory and arithmetic share the time evenly.
                    const uint32_t part = (block * groups + g) * (steps * kBlockBytes / groups);
                    wide_group_of<kWideGroup>(row1 - row0, weights, staged + row0 * kWideK, now, next + part,
                                              (kBlockBytes / Step::kElements + groups - 1) / groups,
                                              acc[t] + row0 * kTile + block * 16);
                }
            }
        }
    }
    for (uint32_t t = 0; t < count; ++t)
        for (uint32_t i = 0; i < m; ++i) finish(tile + t, i, acc[t] + i * kTile);
}

template <class Step, class Finish>
void wide(const Product& p, uint64_t tile_bytes, Finish finish) {
    const auto* const x = static_cast<const typename Step::Element*>(p.x);
    const uint32_t panels = (p.m + kWideRows - 1) / kWideRows;
    for (uint32_t tile = p.tile0; tile < p.tile1; tile += kWideTiles) {
        const uint32_t count = p.tile1 - tile < kWideTiles ? p.tile1 - tile : kWideTiles;
        for (uint32_t panel = 0; panel < panels; ++panel) {
            const uint64_t row0 = uint64_t{p.m} * panel / panels, row1 = uint64_t{p.m} * (panel + 1) / panels;
            wide_panel<Step>(static_cast<const uint8_t*>(p.packed), tile_bytes, p.k, x + row0 * p.x_stride, p.x_stride,
                             static_cast<uint32_t>(row1 - row0), tile, count,
                             [&](uint32_t to, uint32_t row, const float* acc) {
                                 finish(to, static_cast<uint32_t>(row0) + row, acc);
                             });
        }
    }
}

template <class Step, class Finish>
void tiles(const Product& p, Finish finish) {
    const uint64_t tile_bytes = (uint64_t{p.k} + 1) / 2 * 2 / Step::kElements * kStepBytes;
    // With 32 registers of sixteen lanes the groups below hold four blocks at once, and need no panel.
    if constexpr (kPartLanes < 16)
        if (p.m >= kWideFrom) return wide<Step>(p, tile_bytes, finish);
    const auto* rows = static_cast<const typename Step::Element*>(p.x);
    alignas(64) float acc[kPanelRows * kTile];
    for (uint32_t tile = p.tile0; tile < p.tile1; ++tile) {
        const uint8_t* from = static_cast<const uint8_t*>(p.packed) + tile * tile_bytes;
        for (uint32_t row = 0; row < p.m; row += kPanelRows) {
            const uint32_t now = p.m - row < kPanelRows ? p.m - row : kPanelRows;
            panel<Step>(from, p.k, rows + row * p.x_stride, p.x_stride, now, acc);
            for (uint32_t i = 0; i < now; ++i) finish(tile, row + i, acc + i * kTile);
        }
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
