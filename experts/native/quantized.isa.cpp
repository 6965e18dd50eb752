// Tile kernels of weights that are kept as a checkpoint holds them, once for every instruction set (compiled three
// times; see simd.h). kernel_table.h defines the arithmetic, experts/grouped.py the layout.
//
// A block of 64 bytes is sixteen columns of a few k: its codes are decoded to lanes, as the products read them. Few rows
// take them as they are decoded, while the codes pass by; for more, a group is decoded once to the first-level cache.
#include "experts/native/grouped.h"

namespace EAAS_ISA_NS {
namespace {

constexpr uint32_t kBlockBytes = 64;  // sixteen columns, of the codes and of what they are decoded to
constexpr uint32_t kStepBytes = 4 * kBlockBytes;
constexpr uint32_t kAhead = 4096;  // what is fetched early: the hardware alone looks too little ahead

typedef Lanes16<upart> u32x16;

EAAS_INLINE u32x16 load_u32(const uint8_t* from) {
    return by_part(EAAS_PART(int i) { return part_load<upart>(reinterpret_cast<const uint32_t*>(from), i); });
}

// Part `i` of sixteen bytes, each widened. (g++ 12 takes a general conversion apart, byte by byte.)
EAAS_INLINE upart bytes(const uint8_t* from, int i) {
#if defined(EAAS_ISA_AVX512)
    return (upart)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * kPartLanes)));
#elif defined(EAAS_ISA_AVX2)
    return (upart)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i * kPartLanes)));
#else
    typedef uint8_t bpart __attribute__((vector_size(kPartLanes)));
    return __builtin_convertvector(part_load<bpart>(from, i), upart);
#endif
}

// A step is what 64 bytes of decoded weights hold of sixteen columns: kPerStep k. Word: as many k of a row.
#if defined(EAAS_ISA_AVX512)
constexpr uint32_t kPerStep = 2;
constexpr int kRows = 6, kBlocks = 4, kFewRows = 6;
typedef int32_t Word;
EAAS_INLINE f32x16 dot(f32x16 sums, u32x16 weights, Word x) {
    return {_mm512_dpbf16_ps(sums.a, (__m512bh)weights.a, (__m512bh)_mm512_set1_epi32(x))};
}
EAAS_INLINE void stage_words(const uint16_t* x, Word* words, uint32_t k) { __builtin_memcpy(words, x, 2 * k); }
#else
constexpr uint32_t kPerStep = 1;
typedef float Word;
#if defined(EAAS_ISA_AVX2)
constexpr int kRows = 6, kBlocks = 1, kFewRows = 1;
#else
constexpr int kRows = 1, kBlocks = 1, kFewRows = 1;
#endif
EAAS_INLINE f32x16 dot(f32x16 sums, u32x16 weights, Word x) {
    return by_part(EAAS_PART(int, part s, upart w) { return part_fma((part)w, x - part{}, s); }, sums, weights);
}
EAAS_INLINE void stage_words(const uint16_t* x, Word* words, uint32_t k) {
    for (uint32_t i = 0; i < k; i += 16) store(words + i, load_bf16(x + i));
}
#endif

// ---- codes: decode<N>(block) is step N of a block of codes, step(...) of weights that are decoded

#if defined(EAAS_ISA_AVX512)
// Bits of the bf16 that a code stands for.
constexpr uint16_t e4m3_bits(uint32_t code) {
    const uint32_t sign = (code & 0x80) << 8, size = code & 0x7f;
    if (size >= 8) return static_cast<uint16_t>(sign | (size + 0x3c0) << 4);
    // size * 2**-9
    const uint32_t top = size >= 4 ? 2 : size >= 2 ? 1 : 0;
    return static_cast<uint16_t>(size == 0 ? sign : sign | (118 + top) << 7 | ((size << (7 - top)) & 0x7f));
}
constexpr uint16_t e2m1_bits(uint32_t code) {
    constexpr uint16_t kSizes[] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
    return static_cast<uint16_t>(kSizes[code & 7] | (code & 8) << 12);
}
constexpr uint16_t uint4_bits(uint32_t code) {
    const uint32_t top = code >= 8 ? 3 : code >= 4 ? 2 : code >= 2 ? 1 : 0;
    return static_cast<uint16_t>(code == 0 ? 0 : (127 + top) << 7 | ((code << (7 - top)) & 0x7f));
}

// What codes stand for, from bit `shift` on.
template <class T, uint32_t kEntries>
struct Table {
    alignas(64) T at[kEntries] = {};
    constexpr Table(uint16_t (*bits)(uint32_t), uint32_t codes, uint32_t shift) {
        for (uint32_t i = 0; i < kEntries; ++i) at[i] = static_cast<T>(bits(i % codes) >> shift);
    }
};

// A word holds four codes. VPERMW reads five bits of an index, so that a table of two equal halves needs no mask.
template <uint16_t (*Bits)(uint32_t)>
struct FourBits {
    static constexpr uint32_t kBits = 4;
    static constexpr int kSteps = 4;
    static constexpr Table<uint16_t, 32> kTable{Bits, 16, 0};
    template <int N>
    EAAS_INLINE u32x16 decode(u32x16 block) {
        const __m512i codes = _mm512_maskz_srli_epi16(~0u, (__m512i)block.a, 4 * N);
        return {(upart)_mm512_maskz_permutexvar_epi16(~0u, codes, _mm512_load_si512(kTable.at))};
    }
};
typedef FourBits<e2m1_bits> E2m1;
typedef FourBits<uint4_bits> Uint4;

// A word holds two codes: VPERMI2B looks up either byte of what they stand for, by seven bits of an index.
struct E4m3 {
    static constexpr uint32_t kBits = 8;
    static constexpr int kSteps = 2;
    static constexpr Table<uint8_t, 128> kLow{e4m3_bits, 128, 0}, kHigh{e4m3_bits, 128, 8};
    EAAS_INLINE __m512i looked_up(const uint8_t* table, __m512i codes) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
    }
    template <int N>
    EAAS_INLINE u32x16 decode(u32x16 block) {
        const __m512i codes = (__m512i)block.a;
        const __m512i low = looked_up(kLow.at, codes);
        // a | b & c
        const __m512i high = _mm512_ternarylogic_epi32(looked_up(kHigh.at, codes), codes, _mm512_set1_epi8(-128), 0xf8);
        const __m512i lows = _mm512_set1_epi16(0xff);
        // low & lows | (high << 8), or (low >> 8) | high & ~lows
        if constexpr (N == 0) return {(upart)_mm512_ternarylogic_epi32(low, lows, _mm512_slli_epi16(high, 8), 0xea)};
        return {(upart)_mm512_ternarylogic_epi32(high, lows, _mm512_srli_epi16(low, 8), 0xba)};
    }
};
template <class Code>
using Coded = Code;
#else
// value<Shift>(words): the bits of the floats that the codes from bit Shift on stand for.
struct E4m3 {
    static constexpr uint32_t kBits = 8;
    template <int Shift>
    EAAS_INLINE upart value(upart words) {
        // Sign, exponent and mantissa to where a float has them: its sign fills what is between, and is masked.
        const upart bits = (upart)((ipart)(words << (24 - Shift)) >> 4) & 0x87f00000;
        // The exponent's bias is 7 here and 127 there; a product by a power of two is exact for subnormals too.
        return (upart)((part)bits * 0x1p120f);
    }
};
struct E2m1 {
    static constexpr uint32_t kBits = 4;
    template <int Shift>
    EAAS_INLINE upart value(upart words) {
#if defined(EAAS_ISA_AVX2)
        // VPERMPS reads three bits of an index.
        const __m256 sizes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
        const upart bits = (upart)_mm256_permutevar8x32_ps(sizes, (__m256i)(words >> Shift));
#else
        const upart size = words >> Shift & 7;
        // 0 and 0.5 are the subnormals.
        const upart bits = (ipart)size < 2 ? size * 0x3f000000 : (size << 22) + 0x3f000000;
#endif
        return bits | (words << (28 - Shift) & 0x80000000);
    }
};
struct Uint4 {
    static constexpr uint32_t kBits = 4;
    template <int Shift>
    EAAS_INLINE upart value(upart words) {
        return (upart)__builtin_convertvector((ipart)(words >> Shift & 15), part);
    }
};
template <class Code>
struct Coded : Code {
    static constexpr int kSteps = 32 / Code::kBits;  // in a block
    template <int N>
    EAAS_INLINE u32x16 decode(u32x16 block) {
        constexpr int kShift = 16 * (N % 2) + Code::kBits * (N / 2);
        return by_part(EAAS_PART(int, upart p) { return Code::template value<kShift>(p); }, block);
    }
};
#endif

// Weights that are decoded already.
struct Decoded {
    static constexpr int kSteps = 1;
    template <int N>
    EAAS_INLINE u32x16 decode(u32x16 block) { return block; }
};

// ---- groups

template <class Code_, uint32_t kGroup_, bool kExponents, bool kOffsets>
struct Kind {
    typedef Code_ Code;
    struct Staged {
        Word words[kGroup_ / kPerStep];
        float sum;
    };
    static constexpr uint32_t kGroup = kGroup_, kSteps = kGroup / kPerStep;
    static constexpr uint32_t kScaleBytes = kTile * (kExponents ? 1 : sizeof(float));
    static constexpr uint32_t kHeadBytes = kScaleBytes + (kOffsets ? kTile * sizeof(float) : 0);
    static constexpr uint32_t kGroupBytes = kHeadBytes + kTile * kGroup * Code::kBits / 8;
    static constexpr uint32_t kPanelRows = 48;
    static constexpr uint32_t kStagedGroups = (192u << 10) / sizeof(Staged);

    EAAS_INLINE void stage(const uint16_t* x, uint32_t count, Staged& to) {
        uint16_t padded[kGroup];
        if (count < kGroup) {
            for (uint32_t i = 0; i < kGroup; ++i) padded[i] = i < count ? x[i] : uint16_t{0};
            x = padded;
        }
        stage_words(x, to.words, kGroup);
        if constexpr (kOffsets) {
            f32x16 sums = zero();
            for (uint32_t i = 0; i < kGroup; i += 16) sums = sums + load_bf16(x + i);
            to.sum = sum(sums);
        }
    }

    // Of sixteen columns.
    EAAS_INLINE f32x16 scales(const uint8_t* w, uint32_t block) {
        if constexpr (kExponents) {
            return by_part(EAAS_PART(int i) {
                const upart bits = bytes(w + block * 16, i) << 23;
                return (part)((ipart)bits == 0 ? upart{} + 0x400000 : bits);
            });
        } else {
            return load(reinterpret_cast<const float*>(w) + block * 16);
        }
    }

    // Reads the scales before the codes, though they are used after: the hardware fetches only what is read in order.
    EAAS_INLINE void touch_head(const uint8_t* w) {
        for (uint32_t at = 0; at < kHeadBytes; at += kBlockBytes) {
            __builtin_prefetch(w + kAhead + at);
            asm volatile("" : : "r"(*reinterpret_cast<const uint32_t*>(w + at)));
        }
    }

    // Adds M rows of blocks [block, block + B) of `count` groups to acc[M][64]. from: their codes, or what those of one are
    // decoded to.
    template <class Source, int M, int B>
    __attribute__((noinline)) static void groups(const uint8_t* w, uint32_t count, const uint8_t* from, const Staged* x,
                                                 uint32_t block, float* acc) {
        f32x16 outs[M][B];
        EAAS_UNROLL
        for (int i = 0; i < M; ++i)
            EAAS_UNROLL
            for (int b = 0; b < B; ++b) outs[i][b] = load(acc + i * kTile + (block + b) * 16);
        for (uint32_t g = 0; g < count; ++g, w += kGroupBytes, from += kGroupBytes, x += M)
            group<Source, M, B>(w, from, x, block, outs);
        EAAS_UNROLL
        for (int i = 0; i < M; ++i)
            EAAS_UNROLL
            for (int b = 0; b < B; ++b) store(acc + i * kTile + (block + b) * 16, outs[i][b]);
    }

    template <class Source, int M, int B>
    EAAS_INLINE void group(const uint8_t* w, const uint8_t* from, const Staged* x, uint32_t block, f32x16 (&outs)[M][B]) {
        f32x16 sums[M][B];
        EAAS_UNROLL
        for (int i = 0; i < M; ++i)
            EAAS_UNROLL
            for (int b = 0; b < B; ++b) sums[i][b] = zero();
        from += block * kBlockBytes;
        if constexpr (Source::kSteps > 1) touch_head(w);
        for (uint32_t s = 0; s < kSteps; s += Source::kSteps, from += kStepBytes) {
            u32x16 blocks[B];
            EAAS_UNROLL
            for (int b = 0; b < B; ++b) {
                if constexpr (Source::kSteps > 1) __builtin_prefetch(from + kAhead + b * kBlockBytes);
                blocks[b] = load_u32(from + b * kBlockBytes);
            }
            steps<Source, M, B>(blocks, x, s, sums);
        }
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) {
            const f32x16 scale = scales(w, block + b);
            EAAS_UNROLL
            for (int i = 0; i < M; ++i) {
                outs[i][b] = fma(sums[i][b], scale, outs[i][b]);
                if constexpr (kOffsets) {
                    const auto* offsets = reinterpret_cast<const float*>(w + kScaleBytes) + (block + b) * 16;
                    outs[i][b] = fma(splat(x[i].sum), load(offsets), outs[i][b]);
                }
            }
        }
    }

    // Block by block within a step: who follows in the code does not wait for who goes before.
    template <class Source, int M, int B, int N = 0>
    EAAS_INLINE void steps(const u32x16 (&blocks)[B], const Staged* x, uint32_t s, f32x16 (&sums)[M][B]) {
        EAAS_UNROLL
        for (int b = 0; b < B; ++b) {
            const u32x16 weights = Source::template decode<N>(blocks[b]);
            EAAS_UNROLL
            for (int i = 0; i < M; ++i) sums[i][b] = dot(sums[i][b], weights, x[i].words[s + N]);
        }
        if constexpr (N + 1 < Source::kSteps) steps<Source, M, B, N + 1>(blocks, x, s, sums);
    }

    // groups() with M = m, for 1 <= m <= M.
    template <class Source, int M, int B>
    static void groups_of(uint32_t m, const uint8_t* w, uint32_t count, const uint8_t* from, const Staged* x,
                          uint32_t block, float* acc) {
        if (m == M) return groups<Source, M, B>(w, count, from, x, block, acc);
        if constexpr (M > 1) groups_of<Source, M - 1, B>(m, w, count, from, x, block, acc);
    }

    template <int N = 0>
    EAAS_INLINE void decode_block(u32x16 codes, uint8_t* to) {
        const u32x16 weights = Code::template decode<N>(codes);
        by_part(EAAS_PART(int i, upart p) { return part_store(reinterpret_cast<uint32_t*>(to), p, i); }, weights);
        if constexpr (N + 1 < Code::kSteps) decode_block<N + 1>(codes, to + kStepBytes);
    }

    static void add(const uint8_t* w, uint32_t count, const Staged* x, uint32_t m, float* acc) {
        if (m <= kFewRows) return groups_of<Code, kFewRows, 4>(m, w, count, w + kHeadBytes, x, 0, acc);
        for (uint32_t g = 0; g < count; ++g) add_decoded(w + g * kGroupBytes, x + g * m, m, acc);
    }

    static void add_decoded(const uint8_t* w, const Staged* x, uint32_t m, float* acc) {
        const uint8_t* const codes = w + kHeadBytes;
        alignas(64) uint8_t decoded[kSteps * kStepBytes];
        touch_head(w);
        for (uint32_t s = 0; s < kSteps / Code::kSteps; ++s)
            for (uint32_t block = 0; block < 4; ++block) {
                const uint8_t* const from = codes + s * kStepBytes + block * kBlockBytes;
                __builtin_prefetch(from + kAhead);
                decode_block(load_u32(from), decoded + s * Code::kSteps * kStepBytes + block * kBlockBytes);
            }
        const uint32_t parts = (m + kRows - 1) / kRows;
        for (uint32_t block = 0; block < 4; block += kBlocks)
            for (uint32_t part = 0; part < parts; ++part) {
                // Parts of nearly equal height: 7 rows go as 4 + 3, not as 6 + 1.
                const uint32_t row0 = m * part / parts, row1 = m * (part + 1) / parts;
                groups_of<Decoded, kRows, kBlocks>(row1 - row0, w, 1, decoded, x + row0, block, acc + row0 * kTile);
            }
    }
};

}  // namespace

void quantized_tiles(const Product& p, Finish finish) {
    switch (p.dtype) {
        case EAAS_FP8: return grouped_tiles<Kind<Coded<E4m3>, 128, false, false>>(p, finish);
        case EAAS_MXFP4: return grouped_tiles<Kind<Coded<E2m1>, 32, true, false>>(p, finish);
        case EAAS_INT4: return grouped_tiles<Kind<Coded<Uint4>, 128, false, true>>(p, finish);
        default: return grouped_tiles<Kind<Coded<Uint4>, 32, false, true>>(p, finish);
    }
}

}  // namespace EAAS_ISA_NS
