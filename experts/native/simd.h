// Sixteen float lanes, one type for three instruction sets, so that every kernel is written once.
//
// Included by `*.isa.cpp` files only: each of those is compiled once per instruction set, and everything here
// lives in a namespace of its own (EAAS_ISA_NS), so that the linker never merges an AVX-512 body into a
// portable caller. For the same reason no C++ library header is included.
//
// Bits: every operation gives the same bits under portable, avx2 and avx512 (NaN payloads aside). fma()
// rounds once everywhere, reductions follow one tree, and conversions to bf16 round to nearest even without
// flushing subnormals (VCVTNEPS2BF16 would flush them).
#pragma once

#include <stdint.h>

#if defined(EAAS_ISA_AVX2) || defined(EAAS_ISA_AVX512)
#include <immintrin.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the packed layouts are little-endian");

#ifndef EAAS_ISA_NS
#error "simd.h belongs in *.isa.cpp files, which are compiled with -DEAAS_ISA_NS=isa_<name>"
#endif

#define EAAS_INLINE static inline __attribute__((always_inline, unused))
// Accumulators live in registers only where every index is a constant.
#define EAAS_UNROLL _Pragma("GCC unroll 8")

namespace EAAS_ISA_NS {

// A part is one machine register; the f32x16 is as many parts as sixteen lanes need, in lane order.
#if defined(EAAS_ISA_AVX512)
constexpr int kPartLanes = 16;
#elif defined(EAAS_ISA_AVX2)
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif
typedef float part __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t ipart __attribute__((vector_size(4 * kPartLanes)));
typedef uint32_t upart __attribute__((vector_size(4 * kPartLanes)));
typedef uint16_t hpart __attribute__((vector_size(2 * kPartLanes)));

// by_part(f, x, ...) is f(0, part 0 of x, ...), f(1, part 1 of x, ...) and so on: as many lanes again.
#if defined(EAAS_ISA_AVX512)
template <class P>
struct Lanes16 {
    P a;
};
template <class F, class... X>
EAAS_INLINE auto by_part(F f, X... x) {
    return Lanes16<decltype(f(0, x.a...))>{f(0, x.a...)};
}
#elif defined(EAAS_ISA_AVX2)
template <class P>
struct Lanes16 {
    P a, b;
};
template <class F, class... X>
EAAS_INLINE auto by_part(F f, X... x) {
    return Lanes16<decltype(f(0, x.a...))>{f(0, x.a...), f(1, x.b...)};
}
#else
template <class P>
struct Lanes16 {
    P a, b, c, d;
};
template <class F, class... X>
EAAS_INLINE auto by_part(F f, X... x) {
    return Lanes16<decltype(f(0, x.a...))>{f(0, x.a...), f(1, x.b...), f(2, x.c...), f(3, x.d...)};
}
#endif
// A lambda for it, with these parameters.
#define EAAS_PART(...) [=](__VA_ARGS__) __attribute__((always_inline))
typedef Lanes16<part> f32x16;

// ---- parts: what differs between instruction sets

#if defined(EAAS_ISA_AVX512)
EAAS_INLINE part part_fma(part x, part y, part z) { return _mm512_fmadd_ps(x, y, z); }
// The maskz forms are the same instructions; the plain ones warn of uninitialized reads in g++ 12's own header.
EAAS_INLINE part part_max(part x, part y) { return _mm512_maskz_max_ps(0xffff, x, y); }
EAAS_INLINE part part_min(part x, part y) { return _mm512_maskz_min_ps(0xffff, x, y); }
EAAS_INLINE part part_sqrt(part x) { return _mm512_maskz_sqrt_ps(0xffff, x); }
#elif defined(EAAS_ISA_AVX2)
EAAS_INLINE part part_fma(part x, part y, part z) { return _mm256_fmadd_ps(x, y, z); }
EAAS_INLINE part part_max(part x, part y) { return _mm256_max_ps(x, y); }
EAAS_INLINE part part_min(part x, part y) { return _mm256_min_ps(x, y); }
EAAS_INLINE part part_sqrt(part x) { return _mm256_sqrt_ps(x); }
#else
#if defined(__FP_FAST_FMAF)
EAAS_INLINE part part_fma(part x, part y, part z) {
    part r;
    for (int i = 0; i < kPartLanes; ++i) r[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return r;
}
#else
typedef float pair_f32 __attribute__((vector_size(8)));
typedef double pair_f64 __attribute__((vector_size(16)));
typedef int64_t pair_i64 __attribute__((vector_size(16)));

// Without the instruction: the product is exact in double; the sum is rounded to odd there, so that the last
// rounding, to float, is the only one that counts (53 >= 24 + 2 bits).
EAAS_INLINE pair_f32 pair_fma(pair_f32 x, pair_f32 y, pair_f32 z) {
    const pair_f64 product = __builtin_convertvector(x, pair_f64) * __builtin_convertvector(y, pair_f64);
    const pair_f64 addend = __builtin_convertvector(z, pair_f64);
    const pair_f64 total = product + addend;
    const pair_f64 shadow = total - product;
    const pair_f64 error = (product - (total - shadow)) + (addend - shadow);
    const pair_i64 above = error > 0.0, below = error < 0.0;
    const pair_i64 even = ((pair_i64)total & 1) - 1;
    const pair_i64 outward = (~(above ^ (total > 0.0)) & 2) - 1;
    // A NaN error (infinite operands) is neither above nor below, and leaves the sum alone.
    const pair_i64 odd = (pair_i64)total + (outward & even & (above | below));
    return __builtin_convertvector((pair_f64)odd, pair_f32);
}
EAAS_INLINE part part_fma(part x, part y, part z) {
    const pair_f32 low = pair_fma(__builtin_shufflevector(x, x, 0, 1), __builtin_shufflevector(y, y, 0, 1),
                                  __builtin_shufflevector(z, z, 0, 1));
    const pair_f32 high = pair_fma(__builtin_shufflevector(x, x, 2, 3), __builtin_shufflevector(y, y, 2, 3),
                                   __builtin_shufflevector(z, z, 2, 3));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3);
}
#endif
EAAS_INLINE part part_max(part x, part y) { return x > y ? x : y; }
EAAS_INLINE part part_min(part x, part y) { return x < y ? x : y; }
EAAS_INLINE part part_sqrt(part x) {
    part r;
    for (int i = 0; i < kPartLanes; ++i) r[i] = __builtin_sqrtf(x[i]);
    return r;
}
#endif

// Memory is read and written part by part: copying the whole struct would send it through the stack.
template <class P, class T>
EAAS_INLINE P part_load(const T* from, int index) {
    P p;
    __builtin_memcpy(&p, from + index * kPartLanes, sizeof p);
    return p;
}
template <class P, class T>
EAAS_INLINE int part_store(T* to, P p, int index) {
    __builtin_memcpy(to + index * kPartLanes, &p, sizeof p);
    return 0;
}

EAAS_INLINE hpart part_to_bf16(part x) {
    const upart bits = (upart)x;
    const upart rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const upart chosen = (ipart)(bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded;
    return __builtin_convertvector(chosen >> 16, hpart);
}

// By name where there is an instruction: g++ 12 converts the halves of a vector apart.
#if defined(EAAS_ISA_AVX512)
EAAS_INLINE upart part_wide(hpart x) { return (upart)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)x); }
#elif defined(EAAS_ISA_AVX2)
EAAS_INLINE upart part_wide(hpart x) { return (upart)_mm256_cvtepu16_epi32((__m128i)x); }
#else
EAAS_INLINE upart part_wide(hpart x) { return __builtin_convertvector(x, upart); }
#endif
EAAS_INLINE part part_from_bf16(hpart x) { return (part)(part_wide(x) << 16); }

// x * 2**n, where `shifted` is 12582912.0f + n; by two factors, so that subnormal results round once.
EAAS_INLINE part part_scale(part x, part shifted) {
    const ipart n = (ipart)shifted - 0x4b400000;
    const ipart half = n >> 1;
    const part low = (part)((half + 127) << 23), high = (part)((n - half + 127) << 23);
    return x * low * high;
}

// ---- sixteen lanes: load, store

EAAS_INLINE f32x16 splat(float x) {
    // Minus zero is the identity that keeps -0.
    return by_part(EAAS_PART(int, part p) { return x - p; }, Lanes16<part>{});
}
EAAS_INLINE f32x16 zero() { return splat(0.0f); }

EAAS_INLINE f32x16 load(const float* from) { return by_part(EAAS_PART(int i) { return part_load<part>(from, i); }); }
EAAS_INLINE void store(float* to, f32x16 x) { by_part(EAAS_PART(int i, part p) { return part_store(to, p, i); }, x); }

// The first `count` (0 to 16) lanes; the others read as zero, and are not written.
EAAS_INLINE f32x16 load_part(const float* from, unsigned count) {
    float lanes[16] = {};
    for (unsigned i = 0; i < count; ++i) lanes[i] = from[i];
    return load(lanes);
}
EAAS_INLINE void store_part(float* to, f32x16 x, unsigned count) {
    float lanes[16];
    store(lanes, x);
    for (unsigned i = 0; i < count; ++i) to[i] = lanes[i];
}

// ---- sixteen lanes: arithmetic

EAAS_INLINE f32x16 operator+(f32x16 x, f32x16 y) {
    return by_part(EAAS_PART(int, part p, part q) { return p + q; }, x, y);
}
EAAS_INLINE f32x16 operator-(f32x16 x, f32x16 y) {
    return by_part(EAAS_PART(int, part p, part q) { return p - q; }, x, y);
}
EAAS_INLINE f32x16 operator*(f32x16 x, f32x16 y) {
    return by_part(EAAS_PART(int, part p, part q) { return p * q; }, x, y);
}
EAAS_INLINE f32x16 operator/(f32x16 x, f32x16 y) {
    return by_part(EAAS_PART(int, part p, part q) { return p / q; }, x, y);
}
EAAS_INLINE f32x16 operator-(f32x16 x) { return by_part(EAAS_PART(int, part p) { return -p; }, x); }

// x * y + z, rounded once.
EAAS_INLINE f32x16 fma(f32x16 x, f32x16 y, f32x16 z) {
    return by_part(EAAS_PART(int, part p, part q, part r) { return part_fma(p, q, r); }, x, y, z);
}
// z = x * y + z, rounded once. Left to choose which operand the sum takes the place of, g++ moves accumulators about,
// and spills them where all registers are taken.
EAAS_INLINE void fma_into(f32x16& z, f32x16 x, f32x16 y) {
#if defined(EAAS_ISA_AVX2)
    asm("vfmadd231ps %1, %2, %0" : "+x"(z.a) : "x"(x.a), "x"(y.a));
    asm("vfmadd231ps %1, %2, %0" : "+x"(z.b) : "x"(x.b), "x"(y.b));
#else
    z = fma(x, y, z);
#endif
}
// x > y ? x : y, lane by lane: where either is NaN, the second.
EAAS_INLINE f32x16 max(f32x16 x, f32x16 y) {
    return by_part(EAAS_PART(int, part p, part q) { return part_max(p, q); }, x, y);
}
// x < y ? x : y, lane by lane: where either is NaN, the second.
EAAS_INLINE f32x16 min(f32x16 x, f32x16 y) {
    return by_part(EAAS_PART(int, part p, part q) { return part_min(p, q); }, x, y);
}
EAAS_INLINE f32x16 sqrt(f32x16 x) { return by_part(EAAS_PART(int, part p) { return part_sqrt(p); }, x); }

// e**x within 1.1 ulp; 0 below the smallest subnormal, infinity above the largest float, NaN for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial is (e**r - 1 - r) / r**2 (Cephes, expf).
EAAS_INLINE f32x16 exp(f32x16 x) {
    // The bound goes first: max and min return the second operand where one is NaN.
    const f32x16 bounded = min(splat(89.0f), max(splat(-104.0f), x));
    const f32x16 magic = splat(12582912.0f);
    const f32x16 shifted = fma(bounded, splat(1.44269504088896341f), magic);
    const f32x16 n = shifted - magic;
    const f32x16 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), bounded));
    f32x16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    return by_part(EAAS_PART(int, part q, part n) { return part_scale(q, n); }, p, shifted);
}

// x / (1 + e**-x): -0 at very negative x, x itself at large x.
EAAS_INLINE f32x16 silu(f32x16 x) { return x / (splat(1.0f) + exp(-x)); }

// ---- sixteen lanes: reductions, always by the tree i + (i + 8), + 4, + 2, + 1. In registers: attention and norms wait for
// every one.

template <class Op>
EAAS_INLINE float reduced(f32x16 x, Op op) {
#if defined(EAAS_ISA_AVX512)
    const auto eight = op(__builtin_shufflevector(x.a, x.a, 0, 1, 2, 3, 4, 5, 6, 7),
                          __builtin_shufflevector(x.a, x.a, 8, 9, 10, 11, 12, 13, 14, 15));
#elif defined(EAAS_ISA_AVX2)
    const auto eight = op(x.a, x.b);
#endif
#if defined(EAAS_ISA_AVX512) || defined(EAAS_ISA_AVX2)
    const auto four = op(__builtin_shufflevector(eight, eight, 0, 1, 2, 3), __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
#else
    const auto four = op(op(x.a, x.c), op(x.b, x.d));
#endif
    const auto two = op(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
    return op(two[0], two[1]);
}
EAAS_INLINE float sum(f32x16 x) {
    return reduced(x, [](auto p, auto q) __attribute__((always_inline)) { return p + q; });
}
EAAS_INLINE float max_of(f32x16 x) {
    return reduced(x, [](auto p, auto q) __attribute__((always_inline)) { return p > q ? p : q; });
}

// ---- bf16: the upper half of a float

EAAS_INLINE float from_bf16(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float r;
    __builtin_memcpy(&r, &bits, sizeof r);
    return r;
}
// Nearest, ties to even; NaN stays NaN (made quiet).
EAAS_INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits | 0x400000u) >> 16);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

EAAS_INLINE f32x16 load_bf16(const uint16_t* from) {
    return by_part(EAAS_PART(int i) { return part_from_bf16(part_load<hpart>(from, i)); });
}
EAAS_INLINE void store_bf16(uint16_t* to, f32x16 x) {
    by_part(EAAS_PART(int i, part p) { return part_store(to, part_to_bf16(p), i); }, x);
}
EAAS_INLINE void store_bf16_part(uint16_t* to, f32x16 x, unsigned count) {
    uint16_t lanes[16];
    store_bf16(lanes, x);
    for (unsigned i = 0; i < count; ++i) to[i] = lanes[i];
}

// Sixteen interleaved pairs (even, odd), as packed weights and keys hold them.
EAAS_INLINE f32x16 load_bf16_even(const uint16_t* pairs) {
    return by_part(EAAS_PART(int i) { return (part)(part_load<upart>(pairs, 2 * i) << 16); });
}
EAAS_INLINE f32x16 load_bf16_odd(const uint16_t* pairs) {
    return by_part(EAAS_PART(int i) { return (part)(part_load<upart>(pairs, 2 * i) & 0xffff0000u); });
}

}  // namespace EAAS_ISA_NS
