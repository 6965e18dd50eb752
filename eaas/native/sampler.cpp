// Penalties, filters and the draw. The passes over the whole vocabulary are in ops.isa.cpp.
#include "eaas/native/sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "eaas/native/ops.h"

namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Scratch {
    std::vector<float> logits, weights;
    std::vector<uint32_t> order;
    std::vector<uint64_t> ranked, sorted;
    std::vector<double> sums;
    std::vector<uint32_t> counts;  // all zero between rows
};

uint32_t lowest_at(const float* x, uint32_t n, float value) {
    return static_cast<uint32_t>(std::find(x, x + n, value) - x);
}

bool inside(const int32_t* tokens, uint32_t count, uint32_t vocab) {
    return std::all_of(tokens, tokens + count, [&](int32_t t) { return static_cast<uint32_t>(t) < vocab; });
}

// Takes away tokens whose bits are not set.
void keep_allowed(const uint32_t* allowed, uint32_t vocab, float* x) {
    for (uint32_t base = 0; allowed && base < vocab; base += 32) {
        const uint32_t word = allowed[base / 32], end = std::min(vocab, base + 32);
        if (word == ~0u) continue;
        for (uint32_t i = base; i < end; ++i)
            if (!(word >> (i - base) & 1u)) x[i] = kNone;
    }
}

// Applies what changes logits; `x` is a copy of them.
void penalise(const SampleRow& row, uint32_t vocab, std::vector<uint32_t>& counts, float* x) {
    keep_allowed(row.allowed, vocab, x);
    keep_allowed(row.allowed_too, vocab, x);
    for (uint32_t i = 0; i < row.biased_count; ++i) x[static_cast<uint32_t>(row.biased[i])] += row.biases[i];
    for (uint32_t i = 0; i < row.output_count; ++i) ++counts[static_cast<uint32_t>(row.output[i])];
    constexpr uint32_t kSeen = 1u << 31;
    const auto apply = [&](uint32_t token) {
        uint32_t& count = counts[token];
        if (count & kSeen) return;
        if (row.repetition != 1.0f)
            x[token] = x[token] > 0 ? x[token] / row.repetition : x[token] * row.repetition;
        if (count) x[token] -= row.frequency * static_cast<float>(count) + row.presence;
        count |= kSeen;
    };
    for (uint32_t i = 0; i < row.output_count; ++i) apply(static_cast<uint32_t>(row.output[i]));
    for (uint32_t i = 0; i < row.prompt_count; ++i) apply(static_cast<uint32_t>(row.prompt[i]));
    for (uint32_t i = 0; i < row.output_count; ++i) counts[static_cast<uint32_t>(row.output[i])] = 0;
    for (uint32_t i = 0; i < row.prompt_count; ++i) counts[static_cast<uint32_t>(row.prompt[i])] = 0;
    for (uint32_t i = 0; i < row.forbidden_count; ++i) x[static_cast<uint32_t>(row.forbidden[i])] = kNone;
}

double total_weight(uint32_t vocab, Scratch& scratch) {
    eaas::current_ops()->block_sums(scratch.weights.data(), vocab, scratch.sums.data());
    double total = 0;
    for (uint32_t b = 0; b * eaas::kSampleBlock < vocab; ++b) total += scratch.sums[b];
    return total;
}

// The chosen token's log-probability and the likeliest tokens', from untouched logits.
void report(const SampleRow& row, const float* logits, uint32_t vocab, float top, uint32_t token,
            Scratch& scratch, float* logprob, uint32_t* rank, int32_t* top_ids, float* top_logprobs) {
    eaas::current_ops()->weights(logits, top, 1.0f, vocab, scratch.weights.data());
    const double normaliser = std::log(total_weight(vocab, scratch)) + top;
    *logprob = static_cast<float>(logits[token] - normaliser);
    const uint32_t wanted = std::min<uint32_t>(static_cast<uint32_t>(row.top_count), vocab);
    const auto better = [&](uint32_t a, uint32_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    };
    *rank = 1;
    for (uint32_t i = 0; i < vocab; ++i) *rank += better(i, token);
    std::vector<uint32_t>& order = scratch.order;
    order.clear();
    for (uint32_t i = 0; i < vocab && wanted; ++i) {
        if (order.size() == wanted && !better(i, order.back())) continue;
        if (order.size() == wanted) order.pop_back();
        order.insert(std::upper_bound(order.begin(), order.end(), i, better), i);
    }
    for (uint32_t i = 0; i < wanted; ++i) {
        top_ids[i] = static_cast<int32_t>(order[i]);
        top_logprobs[i] = static_cast<float>(logits[order[i]] - normaliser);
    }
}

// Zeroes the weights below the k-th highest logit.
void keep_top_k(const float* x, uint32_t vocab, uint32_t k, Scratch& scratch) {
    std::vector<uint32_t>& order = scratch.order;
    order.clear();
    for (uint32_t i = 0; i < vocab; ++i)
        if (scratch.weights[i] > 0.0f) order.push_back(i);
    if (order.size() <= k) return;
    const auto kth = order.begin() + (k - 1);
    std::nth_element(order.begin(), kth, order.end(), [&](uint32_t a, uint32_t b) { return x[a] > x[b]; });
    const float bound = x[*kth];
    for (uint32_t i = 0; i < vocab; ++i)
        if (x[i] < bound) scratch.weights[i] = 0.0f;
}

// Ascending numbers are descending logits, and among equals ascending ids.
uint64_t rank_of(float logit, uint32_t id) {
    const float x = logit + 0.0f;  // -0 equals 0
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rising = bits >> 31 ? ~bits : bits | 1u << 31;
    return static_cast<uint64_t>(~rising) << 32 | id;
}

constexpr uint32_t kDigitBits = 11, kDigits = 1u << kDigitBits;

// Sorts ranks that stand in ascending order of ids: by three digits, the lowest first, each time stably.
void sort_ranks(std::vector<uint64_t>& ranks, std::vector<uint64_t>& other) {
    if (ranks.size() < 512) return std::sort(ranks.begin(), ranks.end());
    other.resize(ranks.size());
    for (uint32_t shift = 32; shift < 64; shift += kDigitBits) {
        uint32_t starts[kDigits + 1] = {};
        for (const uint64_t rank : ranks) ++starts[(rank >> shift & (kDigits - 1)) + 1];
        for (uint32_t digit = 1; digit < kDigits; ++digit) starts[digit] += starts[digit - 1];
        for (const uint64_t rank : ranks) other[starts[rank >> shift & (kDigits - 1)]++] = rank;
        ranks.swap(other);
    }
}

// Keeps the likeliest tokens while those before them sum to less than top_p of the total; always the likeliest.
void keep_top_p(const float* x, uint32_t vocab, float top_p, Scratch& scratch) {
    const double total = total_weight(vocab, scratch), wanted = total * top_p;
    // All tokens below this bound together weigh less than the share that goes.
    const float bound = static_cast<float>((total - wanted) / vocab * 0.99);
    constexpr uint32_t kTop = 64 - kDigitBits;
    float* const weights = scratch.weights.data();
    std::vector<uint64_t>& ranked = scratch.ranked;
    double mass[kDigits] = {};
    ranked.clear();
    for (uint32_t i = 0; i < vocab; ++i) {
        if (!(weights[i] > 0.0f && weights[i] >= bound)) continue;
        ranked.push_back(rank_of(x[i], i));
        mass[ranked.back() >> kTop] += weights[i];
    }
    // Only the first digits that together surely hold the mass are sorted; the margin covers the rounding of sums.
    if (ranked.empty()) return;
    uint64_t last = 0;
    // At least the first digit that anything has: the likeliest token stays, however small the share.
    for (double before = mass[0]; (before <= 0 || before < wanted * (1 + 1e-6)) && last + 1 < kDigits;)
        before += mass[++last];
    std::erase_if(ranked, [&](uint64_t rank) { return rank >> kTop > last; });
    sort_ranks(ranked, scratch.sorted);
    size_t kept = 0;
    for (double before = 0; kept < ranked.size() && (kept == 0 || before < wanted); ++kept)
        before += weights[static_cast<uint32_t>(ranked[kept])];
    const uint32_t lowest = static_cast<uint32_t>(ranked[kept - 1]);
    for (uint32_t i = 0; i < vocab; ++i)
        weights[i] = x[i] > x[lowest] || (x[i] == x[lowest] && i <= lowest) ? weights[i] : 0.0f;
}

double uniform(const SampleRow& row) {
    const uint32_t counter[4] = {static_cast<uint32_t>(row.index), static_cast<uint32_t>(row.index >> 32),
                                 row.choice, 0};
    const uint32_t key[2] = {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)};
    uint32_t bits[4];
    sampler_philox(counter, key, bits);
    return ((bits[0] >> 5) * 67108864.0 + (bits[1] >> 6)) / 9007199254740992.0;
}

uint32_t draw(const SampleRow& row, uint32_t vocab, Scratch& scratch) {
    const double target = uniform(row) * total_weight(vocab, scratch);
    const float* weights = scratch.weights.data();
    double passed = 0;
    uint32_t last = 0;
    for (uint32_t base = 0; base < vocab; base += eaas::kSampleBlock) {
        const double after = passed + scratch.sums[base / eaas::kSampleBlock];
        // The walk adds one by one, the block's sum pairwise: where the walk ends just short, its last token it is.
        for (uint32_t i = base; target < after && i < std::min(vocab, base + eaas::kSampleBlock); ++i) {
            if (weights[i] <= 0.0f) continue;
            last = i;
            passed += weights[i];
            if (passed > target) return i;
        }
        if (target < after) return last;
        passed = after;
    }
    return static_cast<uint32_t>(std::find_if(std::make_reverse_iterator(weights + vocab),
                                              std::make_reverse_iterator(weights),
                                              [](float weight) { return weight > 0.0f; })
                                     .base() -
                                 weights - 1);
}

int32_t sample_row(const float* logits, uint32_t vocab, const SampleRow& row, Scratch& scratch,
                   int32_t* token, float* logprob, uint32_t* rank, int32_t* top_ids,
                   float* top_logprobs) {
    int finite = 0;
    const float raw_top = eaas::current_ops()->highest(logits, vocab, &finite);
    if (!finite) return SAMPLER_E_NOT_FINITE;
    if (!inside(row.prompt, row.prompt_count, vocab) || !inside(row.output, row.output_count, vocab) ||
        !inside(row.forbidden, row.forbidden_count, vocab) || !inside(row.biased, row.biased_count, vocab) ||
        row.given > vocab)
        return SAMPLER_E_TOKEN;
    const float* x = logits;
    float top = raw_top;
    if (!eaas::takes_logits_as_they_are(row)) {
        scratch.logits.assign(logits, logits + vocab);
        scratch.counts.resize(vocab);
        penalise(row, vocab, scratch.counts, scratch.logits.data());
        x = scratch.logits.data();
        int unused = 0;
        top = eaas::current_ops()->highest(x, vocab, &unused);
        if (!(top > kNone)) return SAMPLER_E_NOTHING_LEFT;
    }
    uint32_t chosen = 0;
    if (row.given) {
        chosen = row.given - 1;
    } else if (row.temperature < eaas::kGreedyBelow) {
        chosen = lowest_at(x, vocab, top);
    } else {
        eaas::current_ops()->weights(x, top, 1.0f / row.temperature, vocab, scratch.weights.data());
        if (row.min_p > 0.0f)
            for (uint32_t i = 0; i < vocab; ++i)
                if (scratch.weights[i] < row.min_p) scratch.weights[i] = 0.0f;
        if (row.top_k > 0 && static_cast<uint32_t>(row.top_k) < vocab)
            keep_top_k(x, vocab, static_cast<uint32_t>(row.top_k), scratch);
        if (row.top_p < 1.0f) keep_top_p(x, vocab, row.top_p, scratch);
        chosen = draw(row, vocab, scratch);
    }
    *token = static_cast<int32_t>(chosen);
    if (row.top_count >= 0)
        report(row, logits, vocab, raw_top, chosen, scratch, logprob, rank, top_ids, top_logprobs);
    return SAMPLER_OK;
}

}  // namespace

int32_t sampler_sample(const float* logits, uint32_t rows, uint32_t vocab, const SampleRow* plan,
                       int32_t* tokens, float* logprobs, uint32_t* ranks, int32_t* top_ids,
                       float* top_logprobs, uint32_t top_stride, int32_t* statuses) try {
    // Kept between calls: fresh pages for a vocabulary cost more than the passes over it.
    static thread_local Scratch scratch;
    scratch.weights.resize((static_cast<uint64_t>(vocab) + 15) / 16 * 16);
    scratch.sums.resize(vocab / eaas::kSampleBlock + 1);
    for (uint32_t row = 0; row < rows; ++row) {
        const uint64_t tops = static_cast<uint64_t>(row) * top_stride;
        statuses[row] =
            sample_row(logits + static_cast<uint64_t>(row) * vocab, vocab, plan[row], scratch, tokens + row,
                       logprobs + row, ranks + row, top_ids + tops, top_logprobs + tops);
        if (statuses[row] != SAMPLER_OK) tokens[row] = 0;
    }
    return SAMPLER_OK;
} P2P_CATCH(SAMPLER_E_MEMORY)

void sampler_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c[0], b = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
        std::copy(next, next + 4, c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    std::copy(c, c + 4, out);
}
