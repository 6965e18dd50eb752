// The int8 tile kernel, once for every instruction set (compiled three times; see simd.h and kernel_table.h).
//
// A panel of rows is quantised once and stays in the nearest caches while every tile's weights pass over it
// as one stream. Sums of a group are exact integers, so that neither the instructions nor the rows beside it
// show in a row's bits; between groups the float accumulators wait in memory, which keeps theirs.
#include "experts/native/grouped.h"

namespace EAAS_ISA_NS {
namespace {

constexpr uint32_t kTile = EXPERTS_TILE_ROWS;
constexpr uint32_t kGroup = EXPERTS_INT8_GROUP;
constexpr uint32_t kScaleBytes = kTile * sizeof(float);
constexpr uint32_t kStepBytes = 4 * kTile;  // four k of all 64 columns
constexpr uint32_t kBlockBytes = 64;        // of those, sixteen columns
constexpr uint32_t kGroupBytes = kScaleBytes + kGroup * kTile;

// One group of one row.
struct Staged {
    int8_t q[kGroup];
    float scale;
    int32_t start;  // what the sums of this group begin with
};

typedef Lanes16<ipart> i32x16;
typedef int8_t bpart __attribute__((vector_size(kPartLanes)));

EAAS_INLINE i32x16 splat_i32(int32_t x) { return by_part(EAAS_PART(int, ipart p) { return p + x; }, i32x16{}); }

// Sixteen columns and four k: sums + w[column][k] * x[k]. w: 64 bytes; x: the four bytes.
#if defined(EAAS_ISA_AVX512)
// VPDPBUSD takes one unsigned operand: w + 128. What that adds is 128 * (sum of x), known beforehand.
constexpr int32_t kStart = -128;
constexpr int kRows = 6, kPairRows = 6, kFewBlocks = 4, kManyBlocks = 4;
EAAS_INLINE i32x16 dot4(i32x16 sums, const uint8_t* w, int32_t x) {
    const __m512i biased = _mm512_xor_si512(_mm512_loadu_si512(w), _mm512_set1_epi8(-128));
    return {(ipart)_mm512_dpbusd_epi32((__m512i)sums.a, biased, _mm512_set1_epi32(x))};
}
#elif defined(EAAS_ISA_AVX2)
// |w| * (x with the sign of w): pairs stay below 2 * 127 * 127, which int16 holds.
constexpr int32_t kStart = 0;
constexpr int kRows = 4, kPairRows = 2, kFewBlocks = 2, kManyBlocks = 1;
EAAS_INLINE ipart part_dot4(ipart sums, const uint8_t* w, int32_t x) {
    const __m256i weight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(_mm256_set1_epi32(x), weight));
    return sums + (ipart)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
EAAS_INLINE i32x16 dot4(i32x16 sums, const uint8_t* w, int32_t x) {
    return {part_dot4(sums.a, w, x), part_dot4(sums.b, w + 32, x)};
}
#else
constexpr int32_t kStart = 0;
constexpr int kRows = 1, kPairRows = 1, kFewBlocks = 1, kManyBlocks = 1;
// Byte `k` of each lane, with its sign.
EAAS_INLINE ipart part_byte(ipart x, int k) { return (x << (24 - 8 * k)) >> 24; }
EAAS_INLINE ipart part_dot4(ipart sums, const uint8_t* w, int32_t x) {
    const ipart weight = part_load<ipart>(w, 0);
    for (int k = 0; k < 4; ++k) sums += part_byte(weight, k) * static_cast<int8_t>(x >> 8 * k);
    return sums;
}
EAAS_INLINE i32x16 dot4(i32x16 sums, const uint8_t* w, int32_t x) {
    return {part_dot4(sums.a, w, x), part_dot4(sums.b, w + 16, x), part_dot4(sums.c, w + 32, x),
            part_dot4(sums.d, w + 48, x)};
}
#endif

EAAS_INLINE f32x16 to_float(i32x16 x) {
    return by_part(EAAS_PART(int, ipart p) { return __builtin_convertvector(p, part); }, x);
}

// ---- quantisation

// q[0..16) = x * inverse, to the nearest integer; |x * inverse| < 128.
EAAS_INLINE void quantise16(f32x16 x, float inverse, int8_t* q) {
    const f32x16 shifted = x * splat(inverse) + splat(12582912.0f);
    by_part(EAAS_PART(int i, part p) { return part_store(q, __builtin_convertvector((ipart)p - 0x4b400000, bpart), i); },
            shifted);
}

void stage_group(const uint16_t* x, uint32_t count, Staged& to) {
    uint16_t padded[kGroup];
    if (count < kGroup) {
        for (uint32_t i = 0; i < kGroup; ++i) padded[i] = i < count ? x[i] : uint16_t{0};
        x = padded;
    }
    // The order of magnitudes is that of their bits; infinity and NaN come out on top.
    uint16_t top = 0;
    for (uint32_t i = 0; i < kGroup; ++i) {
        const uint16_t magnitude = x[i] & 0x7fff;
        top = magnitude > top ? magnitude : top;
    }
    const float largest = from_bf16(top);
    const bool finite = top < 0x7f80, usable = finite && largest >= EXPERTS_INT8_LEAST;
    const float inverse = usable ? 127.0f / largest : 0.0f;
    to.scale = usable ? largest / 127.0f : finite ? 0.0f : __builtin_nanf("");
    for (uint32_t i = 0; i < kGroup; i += 16) quantise16(load_bf16(x + i), inverse, to.q + i);
    to.start = 0;
    if constexpr (kStart != 0) {
        for (uint32_t i = 0; i < kGroup; ++i) to.start += to.q[i];
        to.start *= kStart;
    }
}

// ---- products

// Adds one group of M rows to blocks [block, block + B) of acc[M][64]. next: what to fetch meanwhile.
template <int M, int B>
__attribute__((noinline)) void group(const uint8_t* w, const Staged* x, uint32_t block,
                                     const uint8_t* next, float* acc) {
    i32x16 sums[M][B];
    EAAS_UNROLL
    for (int i = 0; i < M; ++i)
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) sums[i][b] = splat_i32(x[i].start);
    const uint8_t* from = w + kScaleBytes + block * kBlockBytes;
    for (uint32_t s = 0; s < kGroup / 4; ++s, from += kStepBytes) {
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) __builtin_prefetch(next + (s * B + b) * kBlockBytes);
        EAAS_UNROLL
        for (int i = 0; i < M; ++i) {
            int32_t four;
            __builtin_memcpy(&four, x[i].q + 4 * s, sizeof four);
            EAAS_UNROLL
            for (int b = 0; b < B; ++b) sums[i][b] = dot4(sums[i][b], from + b * kBlockBytes, four);
        }
    }
    const float* scales = reinterpret_cast<const float*>(w) + block * 16;
    EAAS_UNROLL
    for (int b = 0; b < B; ++b)
        EAAS_UNROLL
        for (int i = 0; i < M; ++i) {
            float* const to = acc + i * kTile + (block + b) * 16;
            const f32x16 scale = splat(x[i].scale) * load(scales + b * 16);
            store(to, load(to) + to_float(sums[i][b]) * scale);
        }
}

// group() with M = m, for 1 <= m <= M.
template <int M, int B>
void group_of(uint32_t m, const uint8_t* w, const Staged* x, uint32_t block, const uint8_t* next, float* acc) {
    if (m == M) return group<M, B>(w, x, block, next, acc);
    if constexpr (M > 1) group_of<M - 1, B>(m, w, x, block, next, acc);
}

// Adds one group to acc[m][64], B blocks of columns and at most M rows at a time.
template <int M, int B>
void rows_of(const uint8_t* w, const Staged* x, uint32_t m, float* acc) {
    const uint32_t parts = (m + M - 1) / M;
    for (uint32_t block = 0; block < 4; block += B)
        for (uint32_t p = 0; p < parts; ++p) {
            // Parts of nearly equal height: 5 rows go as 3 + 2, not as 4 + 1.
            const uint32_t row0 = m * p / parts, row1 = m * (p + 1) / parts;
            // The next group, a quarter of it for each block: the hardware follows no strided stream.
            const uint8_t* next = w + (p == 0 ? 2 * kGroupBytes + block * (kGroup / 4) * kBlockBytes : 0);
            group_of<M, B>(row1 - row0, w, x + row0, block, next, acc + row0 * kTile);
        }
}

// For grouped_tiles().
struct Int8 {
    typedef ::EAAS_ISA_NS::Staged Staged;
    static constexpr uint32_t kGroup = EXPERTS_INT8_GROUP, kGroupBytes = ::EAAS_ISA_NS::kGroupBytes;
    static constexpr uint32_t kPanelRows = 32;        // most rows quantised at once
    static constexpr uint32_t kStagedGroups = 1024;   // 72 KB
    EAAS_INLINE void stage(const uint16_t* x, uint32_t count, Staged& to) { stage_group(x, count, to); }
    EAAS_INLINE void add(const uint8_t* w, uint32_t count, const Staged* x, uint32_t m, float* acc) {
        for (uint32_t g = 0; g < count; ++g, w += kGroupBytes, x += m) {
            if (m == 1) {
                rows_of<1, 4>(w, x, m, acc);
            } else if (m <= kPairRows) {
                rows_of<kPairRows, kFewBlocks>(w, x, m, acc);
            } else {
                rows_of<kRows, kManyBlocks>(w, x, m, acc);
            }
        }
    }
};

}  // namespace

void int8_tiles(const Product& p, Finish finish) { grouped_tiles<Int8>(p, finish); }

}  // namespace EAAS_ISA_NS
