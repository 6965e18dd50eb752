// Attention of a few queries over one key-value head of a paged cache: decode and prefill alike.
//
// Definition, per query: online softmax over tiles of 64 keys counted from position 0. In a tile: scores by
// fma over head_dim in order; the running maximum; weights exp(score - maximum); per-lane sums and the
// weighted values, keys in order. Keys outside [first, last] weigh exactly zero, so the bits do not depend on
// who shares the pass. Cost: each key and value is read once per group of up to six queries; 4 * head_dim
// flops per query and key.
#include "eaas/native/ops_isa.h"
#include "experts/native/simd.h"

namespace EAAS_ISA_NS {

namespace {

using eaas::kKeyTile;
using eaas::kSubtile;

constexpr float kNone = -__builtin_inff();
constexpr uint32_t kSubtiles = kKeyTile / kSubtile;

struct Bf16 {
    typedef uint16_t element;
    EAAS_INLINE f32x16 read(const element* from) { return load_bf16(from); }
};
struct F32 {
    typedef float element;
    EAAS_INLINE f32x16 read(const element* from) { return load(from); }
};

// Scores of 16 keys for N queries.
template <class T, int N>
EAAS_INLINE void score(const eaas::Attend& group, const typename T::element* keys, float* scores) {
    f32x16 total[N];
    for (int i = 0; i < N; ++i) total[i] = zero();
    for (uint32_t d = 0; d < group.head_dim; ++d) {
        const f32x16 key = T::read(keys + d * kSubtile);
        for (int i = 0; i < N; ++i) total[i] = fma(splat(group.query[i][d]), key, total[i]);
    }
    for (int i = 0; i < N; ++i) store(scores + i * kKeyTile, total[i]);
}

// Scores of one query in one tile to weights; returns the factor of what was summed before.
EAAS_INLINE float weigh(float* scores, uint32_t from, uint32_t to, uint32_t low, uint32_t high,
                        float* maximum, f32x16* total) {
    // [from, to): subtiles computed; [low, high): keys that this query sees.
    for (uint32_t t = from; t < to && t < low; ++t) scores[t] = kNone;
    for (uint32_t t = high > from ? high : from; t < to; ++t) scores[t] = kNone;
    if (low >= high) {
        for (uint32_t t = from; t < to; t += 16) store(scores + t, zero());
        return 1.0f;
    }
    f32x16 best = splat(*maximum);
    for (uint32_t t = from; t < to; t += 16) best = max(best, load(scores + t));
    const float raised = max_of(best);
    float factor[16];
    store(factor, exp(splat(*maximum - raised)));
    *maximum = raised;
    *total = *total * splat(factor[0]);
    for (uint32_t t = from; t < to; t += 16) {
        const f32x16 weight = exp(load(scores + t) - splat(raised));
        store(scores + t, weight);
        *total = *total + weight;
    }
    return factor[0];
}

template <class T, int N>
void attend_group(const eaas::Attend& group) {
    typedef typename T::element element;
    const uint32_t dim = group.head_dim, padded = (dim + 15) / 16 * 16;
    const uint64_t subtile_bytes = eaas::subtile_elements(dim) * sizeof(element);
    float maximum[N];
    f32x16 total[N];
    float sums[N][eaas::kMaxHeadDim];
    uint32_t first = group.first[0], last = group.last[0];
    for (int i = 0; i < N; ++i) {
        maximum[i] = kNone;
        total[i] = zero();
        for (uint32_t d = 0; d < padded; ++d) sums[i][d] = 0.0f;
        first = group.first[i] < first ? group.first[i] : first;
        last = group.last[i] > last ? group.last[i] : last;
    }
    for (uint32_t base = first / kKeyTile * kKeyTile; base <= last; base += kKeyTile) {
        const uint32_t from = first > base ? (first - base) / 16 * 16 : 0;
        const uint32_t seen = last - base + 1 < kKeyTile ? last - base + 1 : kKeyTile;
        const uint32_t to = (seen + 15) / 16 * 16;
        const element* subtile[kSubtiles] = {};
        float scores[N][kKeyTile], factor[N];
        for (uint32_t t = from; t < to; t += 16) {
            const uint32_t position = base + t;
            const uint8_t* block =
                group.cache + group.head_bytes +
                static_cast<uint64_t>(group.table[position / group.block_tokens]) * group.block_bytes;
            block += position % group.block_tokens / kSubtile * subtile_bytes;
            subtile[t / 16] = reinterpret_cast<const element*>(block);
            score<T, N>(group, subtile[t / 16], &scores[0][t]);
        }
        for (int i = 0; i < N; ++i) {
            const uint32_t low = group.first[i] > base ? group.first[i] - base : 0;
            const uint32_t past = group.last[i] + 1 > base ? group.last[i] + 1 - base : 0;
            factor[i] =
                weigh(scores[i], from, to, low, past < kKeyTile ? past : kKeyTile, &maximum[i], &total[i]);
        }
        for (uint32_t d = 0; d < padded; d += 16) {
            f32x16 sum[N];
            for (int i = 0; i < N; ++i) sum[i] = load(&sums[i][d]) * splat(factor[i]);
            for (uint32_t s = from / 16; s < to / 16; ++s) {
                const element* values = subtile[s] + static_cast<uint64_t>(kSubtile) * dim + d;
                // Not past `seen`: those slots may hold another request's values.
                const uint32_t count = seen - s * 16 < 16 ? seen - s * 16 : 16;
                for (uint32_t t = 0; t < count; ++t) {
                    const f32x16 value = T::read(values + t * padded);
                    for (int i = 0; i < N; ++i) sum[i] = fma(splat(scores[i][s * 16 + t]), value, sum[i]);
                }
            }
            for (int i = 0; i < N; ++i) store(&sums[i][d], sum[i]);
        }
    }
    for (int i = 0; i < N; ++i) {
        const float divisor = sum(total[i]);
        for (uint32_t d = 0; d < dim; ++d) group.out[i][d] = sums[i][d] / divisor;
    }
}

template <class T>
void attend_any(const eaas::Attend& group) {
    switch (group.queries) {
        case 1: return attend_group<T, 1>(group);
        case 2: return attend_group<T, 2>(group);
        case 3: return attend_group<T, 3>(group);
        case 4: return attend_group<T, 4>(group);
        case 5: return attend_group<T, 5>(group);
        default: return attend_group<T, 6>(group);
    }
}

}  // namespace

void attend(const eaas::Attend* group) {
    if (group->dtype)
        attend_any<Bf16>(*group);
    else
        attend_any<F32>(*group);
}

}  // namespace EAAS_ISA_NS
