// Experts in the decoder's own process: the kernels and the order of additions of the expert servers, hence
// their bits.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "eaas/native/decoder_state.h"
#include "experts/native/client.h"
#include "eaas/native/decoder.h"

namespace {

struct Expert {
    uint8_t *gate_up, *down;
};

// Pairs of one expert, side by side in the gathered rows.
struct Run {
    uint32_t expert, first, pairs;
};

}  // namespace

struct LocalExperts {
    uint32_t layers, experts, hidden, intermediate, top_k;
    int32_t dtype;
    ExpertForm form{};
    bool formed = false;  // experts are more than SwiGLU without biases
    uint32_t lanes, max_rows;
    eaas::Arena arena;
    std::vector<Expert> weights;
    uint8_t *gathered, *act;
    float* results;
    std::vector<uint32_t> place;  // per (token, k): its pair
    std::vector<uint32_t> token;  // per pair: its token
    std::vector<uint32_t> counts;
    std::vector<Run> runs;

    uint64_t element_bytes() const { return dtype == EAAS_F32 ? 4 : 2; }
    uint32_t up_tiles() const {
        return (intermediate + EXPERTS_GATE_UP_COLUMNS - 1) / EXPERTS_GATE_UP_COLUMNS;
    }
    uint32_t down_tiles() const { return (hidden + EXPERTS_TILE_ROWS - 1) / EXPERTS_TILE_ROWS; }
    // Of a packed matrix and, behind it, the biases of its rows.
    uint64_t bytes(uint64_t packed, uint32_t tiles) const {
        return packed + (form.biased ? tiles * EXPERTS_TILE_ROWS * sizeof(float) : 0);
    }
    uint64_t gate_up_bytes() const { return bytes(experts_gate_up_bytes(dtype, intermediate, hidden), up_tiles()); }
    uint64_t down_bytes() const { return bytes(experts_pack_bytes(dtype, hidden, intermediate), down_tiles()); }
};

namespace {

void plan_runs(LocalExperts& local, uint32_t n, const uint16_t* ids) {
    const uint32_t pairs = n * local.top_k;
    // Where nobody computes a pair, its weight is 0.
    const auto id_of = [&](uint32_t pair) { return ids[pair] == EXPERTS_NO_EXPERT ? 0 : ids[pair]; };
    std::fill(local.counts.begin(), local.counts.end(), 0);
    for (uint32_t i = 0; i < pairs; ++i) ++local.counts[id_of(i)];
    local.runs.clear();
    uint32_t first = 0;
    for (uint32_t expert = 0; expert < local.experts; ++expert) {
        if (!local.counts[expert]) continue;
        local.runs.push_back({expert, first, local.counts[expert]});
        const uint32_t after = first + local.counts[expert];
        local.counts[expert] = first;
        first = after;
    }
    for (uint32_t i = 0; i < pairs; ++i) {
        local.place[i] = local.counts[id_of(i)]++;
        local.token[local.place[i]] = i / local.top_k;
    }
}

// Calls work(run, tile0, tile1) for this lane's part of all tiles of all runs.
template <class Work>
void over_tiles(const LocalExperts& local, uint32_t lane, uint32_t tiles, Work work) {
    const eaas::Span part(static_cast<uint64_t>(local.runs.size()) * tiles, lane, local.lanes);
    for (uint32_t at = part.begin; at < part.end;) {
        const uint32_t tile = at % tiles, end = std::min(tiles, tile + (part.end - at));
        work(local.runs[at / tiles], tile, end);
        at += end - tile;
    }
}

void combine(const LocalExperts& local, uint32_t row, const float* weights, float* out) {
    const uint64_t hidden = local.hidden;
    for (uint64_t h = 0; h < hidden; ++h) {
        float sum = 0.0f;
        for (uint32_t k = 0; k < local.top_k; ++k) {
            const uint64_t pair = local.place[static_cast<uint64_t>(row) * local.top_k + k];
            const float term =
                weights[static_cast<uint64_t>(row) * local.top_k + k] * local.results[pair * hidden + h];
            sum = k ? sum + term : term;
        }
        out[row * hidden + h] += sum;
    }
}

}  // namespace

P2P_API LocalExperts* local_experts_new(uint32_t layers, uint32_t experts, uint32_t hidden, uint32_t intermediate,
                                        uint32_t top_k, int32_t dtype, const ExpertForm* form, uint32_t lanes,
                                        uint32_t max_rows) try {
    if (!layers || !experts || !hidden || !intermediate || !top_k || !lanes || !max_rows) return nullptr;
    auto local = std::make_unique<LocalExperts>();
    local->layers = layers;
    local->experts = experts;
    local->hidden = hidden;
    local->intermediate = intermediate;
    local->top_k = top_k;
    local->dtype = dtype;
    local->formed = form;
    if (form) local->form = *form;
    local->lanes = lanes;
    local->max_rows = max_rows;
    local->weights.resize(static_cast<uint64_t>(layers) * experts);
    const uint64_t pairs = static_cast<uint64_t>(max_rows) * top_k;
    local->place.resize(pairs);
    local->token.resize(pairs);
    local->counts.resize(experts);
    local->runs.reserve(experts);
    const bool built = local->arena.build([&](eaas::Arena& arena) {
        for (Expert& expert : local->weights) {
            expert.gate_up = arena.take(local->gate_up_bytes());
            expert.down = arena.take(local->down_bytes());
        }
        local->gathered = arena.take(pairs * hidden * local->element_bytes());
        local->act = arena.take(pairs * intermediate * local->element_bytes());
        local->results = arena.take<float>(pairs * hidden);
    });
    return built ? local.release() : nullptr;
} P2P_CATCH(nullptr)

P2P_API void local_experts_free(LocalExperts* local) { delete local; }

// gate_up, down: packed, and biases behind them.
P2P_API int32_t local_experts_set(LocalExperts* local, uint32_t layer, uint32_t expert, const void* gate_up,
                          uint64_t gate_up_bytes, const void* down, uint64_t down_bytes) {
    if (layer >= local->layers || expert >= local->experts || gate_up_bytes != local->gate_up_bytes() ||
        down_bytes != local->down_bytes())
        return DECODER_E_WEIGHT;
    const Expert& to = local->weights[static_cast<uint64_t>(layer) * local->experts + expert];
    std::memcpy(to.gate_up, gate_up, gate_up_bytes);
    std::memcpy(to.down, down, down_bytes);
    return DECODER_OK;
}

// State of an ExpertCall.
P2P_API int32_t local_experts_call(void* state, LanePool* pool, uint32_t lane, uint32_t layer, const void* rows,
                           uint32_t n, const uint16_t* expert_ids, const float* weights, float* out,
                           uint8_t* drop, uint64_t deadline_ns, void (*overlap)(void*, uint32_t),
                           void* arg) {
    (void)deadline_ns;
    (void)drop;  // Every expert is here.
    LocalExperts& local = *static_cast<LocalExperts*>(state);
    const auto ended = [&](uint64_t phase) {
        p2p_lanes_stamp(pool, lane, phase);
        if (local.lanes == 1) return;
        p2p_lanes_barrier(pool, lane);
        p2p_lanes_stamp(pool, lane, PHASE_MEET);
    };
    if (n > local.max_rows || layer >= local.layers) return DECODER_E_ROWS;
    const Expert* layer_weights = &local.weights[static_cast<uint64_t>(layer) * local.experts];
    const uint64_t row_bytes = local.hidden * local.element_bytes();
    const uint64_t act_bytes = local.intermediate * local.element_bytes();
    if (lane == 0) plan_runs(local, n, expert_ids);
    ended(PHASE_GATHER);
    if (overlap) overlap(arg, lane);
    const eaas::Span pairs(static_cast<uint64_t>(n) * local.top_k, lane, local.lanes);
    for (uint32_t pair = pairs.begin; pair < pairs.end; ++pair)
        std::memcpy(local.gathered + pair * row_bytes,
                    static_cast<const uint8_t*>(rows) + local.token[pair] * row_bytes, row_bytes);
    ended(PHASE_GATHER);
    over_tiles(local, lane, local.up_tiles(), [&](const Run& run, uint32_t tile0, uint32_t tile1) {
        experts_ffn_gate_up_formed(local.formed ? &local.form : nullptr, local.dtype,
                                   layer_weights[run.expert].gate_up, local.hidden, local.intermediate,
                                   local.gathered + run.first * row_bytes, local.hidden, run.pairs,
                                   local.act + run.first * act_bytes, local.intermediate, tile0, tile1);
    });
    ended(PHASE_GATE_UP);
    over_tiles(local, lane, local.down_tiles(), [&](const Run& run, uint32_t tile0, uint32_t tile1) {
        const uint8_t* down = layer_weights[run.expert].down;
        float* results = local.results + static_cast<uint64_t>(run.first) * local.hidden;
        experts_linear(local.dtype, down, local.hidden, local.intermediate, local.act + run.first * act_bytes,
                       local.intermediate, run.pairs, results, local.hidden, tile0, tile1);
        if (local.form.biased)
            experts_add_down_biases(local.dtype, down, local.hidden, local.intermediate, run.pairs, results,
                                    local.hidden, tile0, tile1);
    });
    ended(PHASE_DOWN);
    const eaas::Span own(n, lane, local.lanes);
    for (uint32_t row = own.begin; row < own.end; ++row) combine(local, row, weights, out);
    ended(PHASE_COMBINE);
    return DECODER_OK;
}
