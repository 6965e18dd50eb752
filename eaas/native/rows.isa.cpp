// Row operations: norm, rope, gate. Their definitions are in ops.h.
#include "eaas/native/ops.h"
#include "eaas/native/ops_isa.h"
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

void store_kv(int dtype, void* subtile, uint32_t slot, uint32_t head_dim, const float* key,
              const float* value) {
    const uint32_t padded = (head_dim + 15) / 16 * 16;
    const uint64_t values =
        static_cast<uint64_t>(eaas::kSubtile) * head_dim + static_cast<uint64_t>(slot) * padded;
    if (dtype) {
        uint16_t* to = static_cast<uint16_t*>(subtile);
        for (uint32_t i = 0; i < head_dim; ++i) to[i * eaas::kSubtile + slot] = to_bf16(key[i]);
        for (uint32_t i = 0; i < head_dim; ++i) to[values + i] = to_bf16(value[i]);
    } else {
        float* to = static_cast<float*>(subtile);
        for (uint32_t i = 0; i < head_dim; ++i) to[i * eaas::kSubtile + slot] = key[i];
        for (uint32_t i = 0; i < head_dim; ++i) to[values + i] = value[i];
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
        // As the models were trained: sigmoid scores rank a group by its two best, softmax scores by its
        // best.
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

void gate(const eaas::GateRule* rule, const float* logits, uint16_t* ids, float* weights) {
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
    if (rule->groups > 1) keep_groups(*rule, choice);
    float total = 0.0f;
    for (uint32_t k = 0; k < rule->top_k; ++k) {
        uint32_t id = highest(choice, n);
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

}  // namespace

extern const eaas::Ops ops = {rms_norm, rope, store_kv, attend, gate, dot, sigmoid, add_scaled, to_float};

}  // namespace EAAS_ISA_NS
