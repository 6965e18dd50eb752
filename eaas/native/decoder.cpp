// Construction of the decoder, packing of its weights, and the checks that guard a step.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "eaas/native/decoder_state.h"

P2P_BUILT_FROM(eaas_headers)

// ops.isa.cpp defines one for each instruction set of this build.
namespace isa_portable {
extern const eaas::Ops ops;
}
namespace isa_avx2 {
extern const eaas::Ops ops;
}
namespace isa_avx512 {
extern const eaas::Ops ops;
}

namespace eaas {

const Ops* current_ops() {
#if defined(EAAS_HAVE_AVX512)
    if (std::strcmp(experts_isa_name(), "avx512") == 0) return &isa_avx512::ops;
#endif
#if defined(EAAS_HAVE_AVX2)
    if (std::strcmp(experts_isa_name(), "avx2") == 0) return &isa_avx2::ops;
#endif
    return &isa_portable::ops;
}

namespace {

bool shape_is_sound(const DecoderShape& s) {
    const bool sizes = s.hidden && s.layers && s.q_heads && s.kv_heads && s.head_dim && s.vocab &&
                       s.max_rows && s.kv_blocks && s.max_positions && s.q_heads % s.kv_heads == 0 &&
                       s.head_dim % 2 == 0 && s.head_dim <= kMaxHeadDim &&
                       s.rope_pairs <= s.head_dim / 2 && s.block_tokens &&
                       s.block_tokens % kSubtile == 0 && s.hidden <= (1u << 20) && s.vocab <= (1u << 28) &&
                       s.max_rows <= (1u << 20);
    const bool gate = s.experts <= kMaxExperts && s.top_k <= s.experts && (s.experts == 0 || s.top_k > 0);
    const bool groups =
        s.groups <= 1 || (s.experts % s.groups == 0 && s.groups_kept > 0 && s.groups_kept <= s.groups &&
                          s.top_k <= s.groups_kept * (s.experts / s.groups));
    const bool latent = s.kv_rank == 0 || (s.kv_heads == 1 && s.head_dim == s.kv_rank + 2 * s.rope_pairs &&
                                           s.nope_dim && s.value_dim && s.qk_norm == DECODER_NORM_NONE);
    return sizes && gate && groups && latent && s.dtype >= EAAS_F32 && s.dtype <= EAAS_INT8 &&
           s.qk_norm <= DECODER_NORM_FULL && s.clip_qkv >= 0.0f && s.eps >= 0.0f;
}

Packed take_packed(Arena& arena, int dtype, uint32_t rows, uint32_t k) {
    return {arena.take(experts_pack_bytes(dtype, rows, k)), rows, k};
}

PerHead take_per_head(Arena& arena, const DecoderShape& s, uint32_t rows, uint32_t k) {
    // Each head's matrix begins where kernels want one to.
    const uint64_t bytes = (experts_pack_bytes(s.dtype, rows, k) + 63) / 64 * 64;
    return {arena.take(bytes * s.q_heads), rows, k, bytes};
}

Mlp take_mlp(Arena& arena, int dtype, uint32_t intermediate, uint32_t hidden) {
    Mlp mlp;
    mlp.intermediate = intermediate;
    mlp.gate_up = arena.take(experts_gate_up_bytes(dtype, intermediate, hidden));
    mlp.down = take_packed(arena, dtype, hidden, intermediate);
    return mlp;
}

void lay_out_layer(Decoder& d, Layer& layer, Arena& arena) {
    const DecoderShape& s = d.shape;
    if (s.kv_rank) {
        if (s.q_rank) layer.q_a = take_packed(arena, s.dtype, s.q_rank, s.hidden);
        layer.kv_a = take_packed(arena, s.dtype, s.head_dim, s.hidden);
        layer.q_up = take_per_head(arena, s, s.nope_dim + 2 * s.rope_pairs, s.q_rank ? s.q_rank : s.hidden);
        layer.key_up = take_per_head(arena, s, s.kv_rank, s.nope_dim);
        layer.value_up = take_per_head(arena, s, s.value_dim, s.kv_rank);
        layer.q_a_norm = arena.take<float>(s.q_rank);
        layer.kv_a_norm = arena.take<float>(s.kv_rank);
    } else {
        layer.q = take_packed(arena, s.dtype, d.q_width(), s.hidden);
        layer.k = take_packed(arena, s.dtype, d.kv_width(), s.hidden);
        layer.v = take_packed(arena, s.dtype, d.kv_width(), s.hidden);
    }
    layer.o = take_packed(arena, s.dtype, s.hidden, d.out_width());
    layer.q_bias = arena.take<float>(d.q_width());
    layer.k_bias = arena.take<float>(d.kv_width());
    layer.v_bias = arena.take<float>(d.kv_width());
    layer.o_bias = arena.take<float>(s.hidden);
    layer.sinks = arena.take<float>(s.q_heads);
    layer.input_norm = arena.take<float>(s.hidden);
    layer.post_norm = arena.take<float>(s.hidden);
    layer.q_norm = arena.take<float>(d.q_width());
    layer.k_norm = arena.take<float>(d.kv_width());
    if (layer.moe_layer < 0) {
        layer.dense = take_mlp(arena, s.dtype, s.dense_intermediate, s.hidden);
        return;
    }
    // The gate decides which experts run: its product stays in float32.
    layer.gate = take_packed(arena, EAAS_F32, s.experts, s.hidden);
    layer.gate_bias = arena.take<float>(s.experts);
    layer.correction = arena.take<float>(s.experts);
    if (s.shared_intermediate) layer.shared = take_mlp(arena, s.dtype, s.shared_intermediate, s.hidden);
    if (s.shared_gate) layer.shared_gate = arena.take<float>(s.hidden);
}

void lay_out_scratch(Decoder& d, Arena& arena) {
    const DecoderShape& s = d.shape;
    const uint64_t rows = s.max_rows, element = d.element_bytes();
    const uint32_t inter = std::max(s.dense_intermediate, s.shared_intermediate);
    d.x = arena.take<float>(rows * s.hidden);
    d.normed_f32 = arena.take<float>(rows * s.hidden);
    d.normed = arena.take(rows * s.hidden * element);
    d.qkv = arena.take<float>(rows * d.qkv_width());
    d.attended = arena.take(rows * d.out_width() * element);
    d.mixed = s.kv_rank ? arena.take(rows * s.q_heads * s.kv_rank * element) : d.attended;
    d.q_low = arena.take(rows * s.q_rank * element);
    d.out = arena.take<float>(rows * s.hidden);
    d.act = arena.take(rows * inter * element);
    d.shared_out = arena.take<float>(s.shared_intermediate ? rows * s.hidden : 0);
    d.shared_scale = arena.take<float>(rows);
    d.gate_logits = arena.take<float>(rows * s.experts);
    d.expert_ids = arena.take<uint16_t>(rows * s.top_k);
    d.expert_weights = arena.take<float>(rows * s.top_k);
    d.drop = arena.take(rows);
    for (LaneScratch& lane : d.lane_scratch) {
        lane.row = arena.take<float>(s.hidden);
        lane.normed = arena.take(static_cast<uint64_t>(kFewRows) * s.hidden * element);
        lane.heads = arena.take<float>(static_cast<uint64_t>(kQueries) * s.head_dim);
        lane.logits = arena.take<float>(rows * kHeadTiles * EXPERTS_TILE_ROWS);
        lane.best = arena.take<Best>(rows);
        if (!s.kv_rank) continue;
        const uint32_t query = s.nope_dim + 2 * s.rope_pairs;
        lane.head = arena.take<float>(rows * (query > s.value_dim ? query : s.value_dim));
        lane.low = arena.take(rows * s.nope_dim * element);
    }
}

void lay_out(Decoder& d, Arena& arena) {
    const DecoderShape& s = d.shape;
    for (Layer& layer : d.layers) lay_out_layer(d, layer, arena);
    d.head = take_packed(arena, s.dtype, s.vocab, s.hidden);
    d.final_norm = arena.take<float>(s.hidden);
    d.cosines = arena.take<float>(static_cast<uint64_t>(s.max_positions) * s.rope_pairs);
    d.sines = arena.take<float>(static_cast<uint64_t>(s.max_positions) * s.rope_pairs);
    lay_out_scratch(d, arena);
    for (Layer& layer : d.layers) layer.cache = arena.take(s.kv_blocks * d.block_bytes);
}

// Rows that fit one pass over the keys come together; longer runs of one sequence are cut into several groups.
void group_rows(Decoder& d, const DecoderPlan& plan) {
    // Latent attention has one key-value head, whose query heads the lanes divide.
    const uint32_t queries = d.shape.q_heads / (d.shape.kv_rank ? d.lanes : d.shape.kv_heads);
    const uint32_t most = queries >= kQueries ? 1 : queries ? kQueries / queries : kQueries;
    d.groups.clear();
    for (uint32_t row = 0; row < plan.rows; ++row) {
        const bool joins = row && d.groups.back().rows < most && plan.sequences[row] == plan.sequences[row - 1];
        if (joins)
            ++d.groups.back().rows;
        else
            d.groups.push_back({row, 1, row});
    }
    d.wanted.clear();
    if (plan.logits_count < plan.rows)
        for (uint32_t i = 0; i < plan.logits_count; ++i)
            d.wanted.push_back({static_cast<uint32_t>(plan.logits_rows[i]), 1, i});
}

int32_t check_plan(const Decoder& d, const DecoderPlan& plan, uint32_t* where) {
    const DecoderShape& s = d.shape;
    if (plan.rows == 0 || plan.rows > s.max_rows || plan.logits_count > s.max_rows) return DECODER_E_ROWS;
    for (uint32_t row = 0; row < plan.rows; ++row) {
        *where = row;
        if (static_cast<uint32_t>(plan.tokens[row]) >= s.vocab) return DECODER_E_TOKEN;
        const uint32_t position = static_cast<uint32_t>(plan.positions[row]);
        const uint32_t sequence = static_cast<uint32_t>(plan.sequences[row]);
        if (position >= s.max_positions || position / s.block_tokens >= plan.table_blocks)
            return DECODER_E_POSITION;
        if (sequence >= plan.tables_rows) return DECODER_E_SEQUENCE;
        const int32_t* table = plan.tables + static_cast<uint64_t>(sequence) * plan.table_blocks;
        // Rows of one sequence come in rising position: a row need only look at what its predecessor did not.
        uint32_t block = 0;
        if (row && plan.sequences[row - 1] == plan.sequences[row] &&
            plan.positions[row - 1] <= plan.positions[row])
            block = static_cast<uint32_t>(plan.positions[row - 1]) / s.block_tokens;
        for (; block <= position / s.block_tokens; ++block)
            if (static_cast<uint32_t>(table[block]) >= s.kv_blocks) return DECODER_E_BLOCK;
    }
    for (uint32_t i = 0; i < plan.logits_count; ++i) {
        *where = i;
        if (static_cast<uint32_t>(plan.logits_rows[i]) >= plan.rows) return DECODER_E_LOGITS_ROW;
    }
    return DECODER_OK;
}

}  // namespace
}  // namespace eaas

using eaas::Layer;

Decoder* decoder_new(const DecoderShape* shape, const int32_t* moe_layers, const uint32_t* windows,
                     const float* cosines, const float* sines, uint32_t lanes, const int32_t* cores,
                     ExpertCall call, void* state, int32_t* error) try {
    *error = DECODER_E_SHAPE;
    if (!eaas::shape_is_sound(*shape) || lanes == 0 || lanes > eaas::kMaxLanes) return nullptr;
    for (uint32_t i = 0; i < shape->layers; ++i)
        if (moe_layers[i] < 0 ? shape->dense_intermediate == 0 : shape->experts == 0 || !call) return nullptr;
    *error = DECODER_E_MEMORY;
    auto d = std::make_unique<Decoder>();
    d->shape = *shape;
    d->ops = eaas::current_ops();
    d->lanes = lanes;
    d->call = call;
    d->state = state;
    d->layers.resize(shape->layers);
    d->lane_scratch.resize(lanes);
    d->groups.reserve(shape->max_rows);
    d->wanted.reserve(shape->max_rows);
    for (uint32_t i = 0; i < shape->layers; ++i) {
        d->layers[i].moe_layer = moe_layers[i];
        d->layers[i].window = windows[i];
        d->moe_layers += moe_layers[i] >= 0;
    }
    d->owns_heads = shape->head_dim % EXPERTS_TILE_ROWS == 0 && shape->kv_heads % lanes == 0 &&
                    shape->qk_norm != DECODER_NORM_FULL && shape->kv_rank == 0;
    d->head_bytes = shape->block_tokens / eaas::kSubtile * d->subtile_bytes();
    d->block_bytes = shape->kv_heads * d->head_bytes;
    if (!d->arena.build([&](eaas::Arena& arena) { eaas::lay_out(*d, arena); })) return nullptr;
    for (Layer& layer : d->layers) std::fill_n(layer.sinks, shape->q_heads, -INFINITY);
    const uint64_t angles = static_cast<uint64_t>(shape->max_positions) * shape->rope_pairs;
    std::memcpy(d->cosines, cosines, angles * sizeof(float));
    std::memcpy(d->sines, sines, angles * sizeof(float));
    d->pool = p2p_lanes_new(lanes, cores);
    if (!d->pool) return nullptr;
    *error = DECODER_OK;
    return d.release();
} P2P_CATCH(*error = DECODER_E_MEMORY, nullptr)

void decoder_free(Decoder* decoder) {
    if (!decoder) return;
    p2p_lanes_free(decoder->pool);
    delete decoder;
}

int32_t decoder_set(Decoder* decoder, uint32_t index, int32_t role, const void* data, const void* second,
                    int32_t dtype, uint64_t elements) {
    Decoder& d = *decoder;
    const DecoderShape& s = d.shape;
    if (index >= s.layers || !data || (dtype != EAAS_F32 && dtype != EAAS_BF16)) return DECODER_E_WEIGHT;
    Layer& layer = d.layers[index];
    const auto pack = [&](int packed_dtype, const eaas::Packed& to) {
        if (!to.data || elements != static_cast<uint64_t>(to.rows) * to.k) return DECODER_E_WEIGHT;
        experts_pack_matrix(packed_dtype, data, dtype, to.rows, to.k, to.data);
        return DECODER_OK;
    };
    const auto pack_per_head = [&](const eaas::PerHead& to) {
        const uint64_t each = static_cast<uint64_t>(to.rows) * to.k;
        if (!to.data || elements != s.q_heads * each) return DECODER_E_WEIGHT;
        const uint64_t bytes = each * (dtype == EAAS_F32 ? 4 : 2);
        for (uint32_t head = 0; head < s.q_heads; ++head)
            experts_pack_matrix(s.dtype, static_cast<const uint8_t*>(data) + head * bytes, dtype, to.rows, to.k,
                                to.of(head).data);
        return DECODER_OK;
    };
    const auto convert = [&](float* to, uint64_t wanted) {
        if (!to || elements != wanted) return DECODER_E_WEIGHT;
        d.ops->to_float(dtype, data, to, elements);
        return DECODER_OK;
    };
    const auto optional = [&](float* to, uint64_t wanted, bool& present) {
        const auto status = convert(to, wanted);
        present = status == DECODER_OK;
        return status;
    };
    const auto pack_pair = [&](const eaas::Mlp& to) {
        if (!to.gate_up || !second || elements != static_cast<uint64_t>(to.intermediate) * s.hidden)
            return DECODER_E_WEIGHT;
        experts_pack_gate_up(s.dtype, data, second, dtype, to.intermediate, s.hidden, to.gate_up);
        return DECODER_OK;
    };
    const bool full = s.qk_norm == DECODER_NORM_FULL;
    switch (role) {
        case ROLE_EMBED:
            if (elements != static_cast<uint64_t>(s.vocab) * s.hidden) return DECODER_E_WEIGHT;
            d.embed = static_cast<const uint8_t*>(data);
            d.embed_dtype = dtype;
            return DECODER_OK;
        case ROLE_HEAD: return pack(s.dtype, d.head);
        case ROLE_FINAL_NORM: return convert(d.final_norm, s.hidden);
        case ROLE_INPUT_NORM: return convert(layer.input_norm, s.hidden);
        case ROLE_POST_NORM: return convert(layer.post_norm, s.hidden);
        case ROLE_Q: return s.kv_rank ? pack_per_head(layer.q_up) : pack(s.dtype, layer.q);
        case ROLE_K: return pack(s.dtype, layer.k);
        case ROLE_V: return pack(s.dtype, layer.v);
        case ROLE_O: return pack(s.dtype, layer.o);
        case ROLE_Q_BIAS: return optional(layer.q_bias, d.q_width(), layer.has_q_bias);
        case ROLE_K_BIAS: return optional(layer.k_bias, d.kv_width(), layer.has_k_bias);
        case ROLE_V_BIAS: return optional(layer.v_bias, d.kv_width(), layer.has_v_bias);
        case ROLE_O_BIAS: return optional(layer.o_bias, s.hidden, layer.has_o_bias);
        case ROLE_Q_NORM: return convert(layer.q_norm, full ? d.q_width() : s.head_dim);
        case ROLE_K_NORM: return convert(layer.k_norm, full ? d.kv_width() : s.head_dim);
        case ROLE_GATE: return pack(EAAS_F32, layer.gate);
        case ROLE_SINKS: return convert(layer.sinks, s.q_heads);
        case ROLE_GATE_BIAS: return optional(layer.gate_bias, s.experts, layer.has_gate_bias);
        case ROLE_GATE_CORRECTION: return optional(layer.correction, s.experts, layer.has_correction);
        case ROLE_SHARED_GATE_UP: return pack_pair(layer.shared);
        case ROLE_SHARED_DOWN_PROJ: return pack(s.dtype, layer.shared.down);
        case ROLE_SHARED_GATE: return convert(layer.shared_gate, s.hidden);
        case ROLE_DENSE_GATE_UP: return pack_pair(layer.dense);
        case ROLE_DENSE_DOWN_PROJ: return pack(s.dtype, layer.dense.down);
        case ROLE_Q_A: return pack(s.dtype, layer.q_a);
        case ROLE_Q_A_NORM: return convert(layer.q_a_norm, s.q_rank);
        case ROLE_KV_A: return pack(s.dtype, layer.kv_a);
        case ROLE_KV_A_NORM: return convert(layer.kv_a_norm, s.kv_rank);
        case ROLE_KEY_UP: return pack_per_head(layer.key_up);
        case ROLE_VALUE_UP: return pack_per_head(layer.value_up);
        default: return DECODER_E_WEIGHT;
    }
}

const eaas::Ops* decoder_ops(void) { return eaas::current_ops(); }

int32_t decoder_step(Decoder* decoder, const DecoderPlan* plan, uint32_t* where) {
    *where = 0;
    if (!decoder->embed) return DECODER_E_WEIGHT;
    if (const int32_t status = eaas::check_plan(*decoder, *plan, where)) return status;
    eaas::group_rows(*decoder, *plan);
    eaas::Step step{*decoder, *plan, DECODER_OK, false, {}};
    bool chooses = false;
    for (uint32_t i = 0; plan->samples && i < plan->logits_count; ++i) {
        const bool chosen = eaas::wants_highest_only(plan->samples[i]);
        plan->chosen[i] = chosen ? 0 : DECODER_LEFT;
        chooses |= chosen;
    }
    step.chooses = chooses;
    p2p_lanes_run(decoder->pool, eaas::run_lane, &step);
    if (step.chooses && step.status == DECODER_OK) eaas::settle_choices(step);
    return step.status;
}

void decoder_trace(Decoder* decoder, LaneStamp* stamps, uint32_t capacity, uint32_t* counts) {
    p2p_lanes_trace(decoder->pool, stamps, capacity, counts);
}
