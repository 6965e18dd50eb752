// What ops.h describes, for one instruction set. All have the same bits.
#include "eaas/native/ops.h"
#include "experts/native/simd.h"

namespace EAAS_ISA_NS {

namespace {

constexpr float kNone = -__builtin_inff();

f32x16 load_up_to(const float* from, uint32_t left) {
    return left >= 16 ? load(from) : load_part(from, left);
}

void store_up_to(float* to, f32x16 x, uint32_t left) {
    if (left >= 16)
        store(to, x);
    else
        store_part(to, x, left);
}

float dot(const float* x, const float* y, uint32_t n) {
    f32x16 total = zero();
    for (uint32_t i = 0; i < n; i += 16)
        total = fma(load_up_to(x + i, n - i), load_up_to(y + i, n - i), total);
    return sum(total);
}

void rms_norm(const float* x, const float* weight, uint32_t n, float eps, float* out) {
    const float mean = dot(x, x, n) / static_cast<float>(n);
    const f32x16 inverse = splat(1.0f / __builtin_sqrtf(mean + eps));
    for (uint32_t i = 0; i < n; i += 16)
        store_up_to(out + i, load_up_to(x + i, n - i) * inverse * load_up_to(weight + i, n - i), n - i);
}

void rope(float* head, const float* cosines, const float* sines, uint32_t half) {
    for (uint32_t i = 0; i < half; ++i) {
        const float low = head[i], high = head[i + half];
        head[i] = low * cosines[i] - high * sines[i];
        head[i + half] = high * cosines[i] + low * sines[i];
    }
}

float sigmoid(float x) {
    float lanes[16];
    store(lanes, splat(1.0f) / (splat(1.0f) + exp(splat(-x))));
    return lanes[0];
}

void add_scaled(float* x, const float* y, float scale, uint64_t n) {
    for (uint64_t i = 0; i < n; ++i) x[i] += scale * y[i];
}

void to_float(int dtype, const void* from, float* out, uint64_t n) {
    if (dtype) {
        // Rows of a mapped checkpoint lie at any byte.
        for (uint64_t i = 0; i < n; ++i) {
            uint16_t half;
            __builtin_memcpy(&half, static_cast<const char*>(from) + 2 * i, 2);
            out[i] = from_bf16(half);
        }
    } else {
        __builtin_memcpy(out, from, 4 * n);
    }
}

void store_kv(int dtype, void* subtile, uint32_t slot, uint32_t head_dim, uint32_t value_dim,
              const float* key, const float* value) {
    const uint32_t padded = (value_dim + 15) / 16 * 16;
    const uint64_t values = static_cast<uint64_t>(eaas::kSubtile) * head_dim + static_cast<uint64_t>(slot) * padded;
    if (dtype) {
        uint16_t* to = static_cast<uint16_t*>(subtile);
        for (uint32_t i = 0; i < head_dim; ++i) to[i * eaas::kSubtile + slot] = to_bf16(key[i]);
        for (uint32_t i = 0; i < value_dim; ++i) to[values + i] = to_bf16(value[i]);
    } else {
        float* to = static_cast<float*>(subtile);
        for (uint32_t i = 0; i < head_dim; ++i) to[i * eaas::kSubtile + slot] = key[i];
        for (uint32_t i = 0; i < value_dim; ++i) to[values + i] = value[i];
    }
}

void softmax(const float* logits, uint32_t n, float* scores) {
    const uint32_t padded = (n + 15) / 16 * 16;
    for (uint32_t i = 0; i < padded; ++i) scores[i] = i < n ? logits[i] : kNone;
    float highest = kNone;
    for (uint32_t i = 0; i < n; ++i) highest = logits[i] > highest ? logits[i] : highest;
    f32x16 total = zero();
    for (uint32_t i = 0; i < padded; i += 16) {
        const f32x16 power = exp(load(scores + i) - splat(highest));
        store(scores + i, power);
        total = total + power;
    }
    const f32x16 divisor = splat(sum(total));
    for (uint32_t i = 0; i < padded; i += 16) store(scores + i, load(scores + i) / divisor);
}

// Index of the highest value above minus infinity, the lowest on a tie; n where there is none.
uint32_t highest(const float* values, uint32_t n) {
    uint32_t best = n;
    float value = kNone;
    for (uint32_t i = 0; i < n; ++i)
        if (values[i] > value) value = values[best = i];
    return best;
}

uint32_t lowest_unused(const uint16_t* ids, uint32_t used) {
    uint32_t id = 0;
    for (uint32_t i = 0; i < used; ++i)
        if (ids[i] == id) {
            ++id;
            i = ~0u;
        }
    return id;
}

// Leaves minus infinity in the choice scores of the groups that are not kept.
void keep_groups(const eaas::GateRule& rule, float* choice) {
    float groups[eaas::kMaxExperts];
    const uint32_t size = rule.experts / rule.groups;
    for (uint32_t g = 0; g < rule.groups; ++g) {
        float first = kNone, second = kNone;
        for (uint32_t i = g * size; i < (g + 1) * size; ++i) {
            if (choice[i] > first) {
                second = first;
                first = choice[i];
            } else if (choice[i] > second) {
                second = choice[i];
            }
        }
        // As the models were trained: sigmoid scores rank a group by its two best, softmax scores by its best.
        groups[g] = rule.sigmoid && size > 1 ? first + second : first;
    }
    uint8_t kept[eaas::kMaxExperts] = {};
    for (uint32_t k = 0; k < rule.groups_kept; ++k) {
        const uint32_t g = highest(groups, rule.groups);
        if (g == rule.groups) break;
        kept[g] = 1;
        groups[g] = kNone;
    }
    for (uint32_t i = 0; i < rule.experts; ++i)
        if (!kept[i / size]) choice[i] = kNone;
}

void gate(const eaas::GateRule* rule, const float* logits, const uint16_t* forced, uint16_t* ids, float* weights) {
    float scores[eaas::kMaxExperts + 16], choice[eaas::kMaxExperts];
    const uint32_t n = rule->experts;
    if (rule->sigmoid) {
        for (uint32_t i = 0; i < n; i += 16)
            store(scores + i, splat(1.0f) / (splat(1.0f) + exp(-load_up_to(logits + i, n - i))));
    } else {
        softmax(logits, n, scores);
    }
    for (uint32_t i = 0; i < n; ++i)
        choice[i] = rule->correction ? scores[i] + rule->correction[i] : scores[i];
    if (rule->groups > 1 && !forced) keep_groups(*rule, choice);
    float total = 0.0f;
    for (uint32_t k = 0; k < rule->top_k; ++k) {
        uint32_t id = forced ? forced[k] : highest(choice, n);
        // Scores that are not numbers leave nothing to choose: any other expert will do, the weights say NaN.
        if (id == n) id = lowest_unused(ids, k);
        ids[k] = static_cast<uint16_t>(id);
        weights[k] = scores[id];
        total += scores[id];
        choice[id] = kNone;
    }
    if (rule->normalise) {
        if (rule->sigmoid) total += 1e-20f;
        for (uint32_t k = 0; k < rule->top_k; ++k) weights[k] /= total;
    }
    for (uint32_t k = 0; k < rule->top_k; ++k) weights[k] *= rule->scale;
}

// ---- attention
//
// Attention of a few queries over one key-value head of a paged cache: decode and prefill alike.
//
// Definition, per query: online softmax over tiles of 64 keys counted from position 0. In a tile: scores by
// fma over head_dim in order; the running maximum; weights exp(score - maximum); per-lane sums and the
// weighted values, keys in order. A sink comes before all keys, in lane 0. Keys outside [first, last] weigh
// exactly zero, so the bits do not depend on who shares the pass. Cost: each key and value is read once per
// group of up to six queries; 2 * (head_dim + value_dim) flops per query and key.

using eaas::kKeyTile;
using eaas::kSubtile;

constexpr uint32_t kSubtiles = kKeyTile / kSubtile;

struct Bf16 {
    typedef uint16_t element;
    EAAS_INLINE f32x16 read(const element* from) { return load_bf16(from); }
};
struct F32 {
    typedef float element;
    EAAS_INLINE f32x16 read(const element* from) { return load(from); }
};

// Vectors that N queries take at once, each a sum: enough of them to hide the latency of the fma.
template <int N>
constexpr uint32_t kAtOnce = N <= 3 ? 2 : 1;

// Scores of S times 16 keys for N queries, from the subtiles at `keys`. Every read fetches its like of `next`.
template <class T, int N, uint32_t S>
EAAS_INLINE void score(const eaas::Attend& group, const typename T::element* const* keys,
                       const typename T::element* const* next, float* scores) {
    const float* query[N];
    f32x16 total[N][S];
    for (int i = 0; i < N; ++i) {
        query[i] = group.query[i];
        for (uint32_t s = 0; s < S; ++s) total[i][s] = zero();
    }
    for (uint32_t d = 0; d < group.head_dim; ++d)
        for (uint32_t s = 0; s < S; ++s) {
            __builtin_prefetch(next[s] + d * kSubtile);
            const f32x16 key = T::read(keys[s] + d * kSubtile);
            for (int i = 0; i < N; ++i) fma_into(total[i][s], key, splat(query[i][d]));
        }
    for (int i = 0; i < N; ++i)
        for (uint32_t s = 0; s < S; ++s) store(scores + i * kKeyTile + s * 16, total[i][s]);
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
    float factor[16] = {1.0f};
    // Not a test for equality, which two infinities would pass.
    if (raised - *maximum != 0.0f) store(factor, exp(splat(*maximum - raised)));
    *maximum = raised;
    *total = *total * splat(factor[0]);
    for (uint32_t t = from; t < to; t += 16) {
        const f32x16 weight = exp(load(scores + t) - splat(raised));
        store(scores + t, weight);
        *total = *total + weight;
    }
    return factor[0];
}

// Adds the weighted values of keys [from, to) of one tile to D times 16 columns of sums, [N][kMaxHeadDim]; `values` and
// `next` point to those columns.
template <class T, int N, uint32_t D>
EAAS_INLINE void add_values(const float (*weights)[kKeyTile], const float* factor, uint32_t from, uint32_t to,
                            const typename T::element* const* values, const typename T::element* const* next,
                            uint32_t column, uint32_t padded, float (*sums)[eaas::kMaxHeadDim]) {
    f32x16 sum[N][D];
    for (int i = 0; i < N; ++i)
        for (uint32_t e = 0; e < D; ++e) sum[i][e] = load(&sums[i][column + e * 16]) * splat(factor[i]);
    for (uint32_t s = from / 16; s * 16 < to; ++s) {
        const typename T::element *value = values[s] + column, *later = next[s] + column;
        const uint32_t past = to - s * 16 < 16 ? to : s * 16 + 16;
        for (uint32_t t = s * 16; t < past; ++t, value += padded, later += padded)
            for (uint32_t e = 0; e < D; ++e) {
                __builtin_prefetch(later + e * 16);
                const f32x16 read = T::read(value + e * 16);
                for (int i = 0; i < N; ++i) fma_into(sum[i][e], read, splat(weights[i][t]));
            }
    }
    for (int i = 0; i < N; ++i)
        for (uint32_t e = 0; e < D; ++e) store(&sums[i][column + e * 16], sum[i][e]);
}

template <class T, int N>
void attend_group(const eaas::Attend& group) {
    typedef typename T::element element;
    const uint32_t dim = group.head_dim, padded = (group.value_dim + 15) / 16 * 16;
    const uint64_t subtile_bytes = eaas::subtile_elements(dim, group.value_dim) * sizeof(element);
    float maximum[N];
    f32x16 total[N];
    float sums[N][eaas::kMaxHeadDim];
    uint32_t first = group.first[0], last = group.last[0];
    const float one = 1.0f;
    for (int i = 0; i < N; ++i) {
        // Where there is no sink, the first key's maximum makes nothing of it.
        maximum[i] = group.sink[i];
        total[i] = load_part(&one, 1);
        for (uint32_t d = 0; d < padded; ++d) sums[i][d] = 0.0f;
        first = group.first[i] < first ? group.first[i] : first;
        last = group.last[i] > last ? group.last[i] : last;
    }
    // Where the subtile of a position is, or of the nearest one that a query sees.
    const auto find = [&](uint32_t position) {
        position = position < first ? first : position > last ? last : position;
        const uint8_t* block = group.cache + group.head_bytes +
                               static_cast<uint64_t>(group.table[position / group.block_tokens]) * group.block_bytes;
        return reinterpret_cast<const element*>(block + position % group.block_tokens / kSubtile * subtile_bytes);
    };
    // Keys of the tile at `base`, and of the one after it; the values are behind them.
    const element *keys[kSubtiles], *next[kSubtiles], *values[kSubtiles], *later[kSubtiles];
    const uint32_t start = first / kKeyTile * kKeyTile;
    for (uint32_t s = 0; s < kSubtiles; ++s) next[s] = find(start + s * kSubtile);
    for (uint32_t base = start; base <= last; base += kKeyTile) {
        const uint32_t from = first > base ? (first - base) & ~15u : 0;
        const uint32_t seen = last - base + 1 < kKeyTile ? last - base + 1 : kKeyTile;
        const uint32_t to = (seen + 15) / 16 * 16;
        // Each subtile of a sequence lies elsewhere, so that the hardware does not see what comes next.
        for (uint32_t s = 0; s < kSubtiles; ++s) {
            keys[s] = next[s];
            next[s] = find(base + kKeyTile + s * kSubtile);
            values[s] = keys[s] + static_cast<uint64_t>(kSubtile) * dim;
            later[s] = next[s] + static_cast<uint64_t>(kSubtile) * dim;
        }
        float scores[N][kKeyTile], factor[N];
        constexpr uint32_t kMost = kAtOnce<N>;
        uint32_t t = from;
        for (; t + kMost * 16 <= to; t += kMost * 16) score<T, N, kMost>(group, keys + t / 16, next + t / 16, &scores[0][t]);
        if (t < to) score<T, N, 1>(group, keys + t / 16, next + t / 16, &scores[0][t]);
        for (int i = 0; i < N; ++i) {
            const uint32_t low = group.first[i] > base ? group.first[i] - base : 0;
            const uint32_t past = group.last[i] + 1 > base ? group.last[i] + 1 - base : 0;
            factor[i] = weigh(scores[i], from, to, low, past < kKeyTile ? past : kKeyTile, &maximum[i], &total[i]);
        }
        // Not past `seen`: those slots may hold another request's values.
        uint32_t d = 0;
        for (; d + kMost * 16 <= padded; d += kMost * 16)
            add_values<T, N, kMost>(scores, factor, from, seen, values, later, d, padded, sums);
        if (d < padded) add_values<T, N, 1>(scores, factor, from, seen, values, later, d, padded, sums);
    }
    for (int i = 0; i < N; ++i) {
        const float divisor = sum(total[i]);
        for (uint32_t d = 0; d < group.value_dim; ++d) group.out[i][d] = sums[i][d] / divisor;
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

void attend(const eaas::Attend* group) {
    if (group->dtype)
        attend_any<Bf16>(*group);
    else
        attend_any<F32>(*group);
}

// ---- passes of the sampler over a vocabulary

float highest_logit(const float* x, uint32_t n, int* finite) {
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

void exp_weights(const float* x, float top, float scale, uint32_t n, float* out) {
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

void statistics(const float* x, uint32_t n, float* out) {
    // A number is added in column i % 16, whatever the instruction set.
    float sums[16] = {}, squares[16] = {}, greatest[16] = {};
    uint32_t broken[16] = {};
    const auto add = [&](uint32_t column, float value) {
        uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        const bool finite = (bits & 0x7fffffff) < 0x7f800000;
        const float kept = finite ? value : 0.0f, size = kept < 0.0f ? -kept : kept;
        sums[column] += kept;
        squares[column] += kept * kept;
        greatest[column] = size > greatest[column] ? size : greatest[column];
        broken[column] += !finite;
    };
    uint32_t i = 0;
    int finite = 0;
    highest_logit(x, n, &finite);
    // As almost always: without a test of each, which no compiler makes vectors of, it takes a tenth of the time.
    if (finite) {
        f32x16 total = zero(), power = zero(), top = zero();
        for (; i + 16 <= n; i += 16) {
            const f32x16 value = load(x + i);
            total = total + value;
            power = power + value * value;
            top = max(max(value, -value), top);
        }
        store(sums, total);
        store(squares, power);
        store(greatest, top);
    }
    for (; i + 16 <= n; i += 16)
        for (uint32_t column = 0; column < 16; ++column) add(column, x[i + column]);
    for (uint32_t column = 0; i < n; ++i, ++column) add(column, x[i]);
    float sum = 0.0f, square = 0.0f, most = 0.0f;
    uint32_t bad = 0;
    for (uint32_t column = 0; column < 16; ++column) {
        sum += sums[column];
        square += squares[column];
        most = greatest[column] > most ? greatest[column] : most;
        bad += broken[column];
    }
    const float count = static_cast<float>(n - bad > 1 ? n - bad : 1);
    out[0] = sum / count;
    out[1] = __builtin_sqrtf(square / count);
    out[2] = most;
    out[3] = static_cast<float>(bad);
}

}  // namespace

extern const eaas::Ops ops = {rms_norm,   rope,     store_kv,      attend,      gate,       dot,       sigmoid,
                              add_scaled, to_float, highest_logit, exp_weights, statistics, block_sums};

}  // namespace EAAS_ISA_NS
