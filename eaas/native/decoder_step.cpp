// One decoder step, as every lane runs it. Reading order: run_lane at the end, then upwards.
//
// Lanes split matrix products by tiles of output columns and everything else by rows or heads; each element
// is computed by one lane in one order, so the number of lanes changes no bit.
#include <algorithm>
#include <cstring>
#include <limits>

#include "eaas/native/decoder_state.h"
#include "experts/native/client.h"

namespace eaas {
namespace {

struct Lane {
    Step& step;
    Decoder& d;
    const DecoderShape& s;
    const DecoderPlan& plan;
    uint32_t index;
    LaneScratch& scratch;

    void barrier() const {
        if (d.lanes == 1) return;
        p2p_lanes_barrier(d.pool, index);
        ended(PHASE_MEET);
    }
    void ended(uint64_t phase) const { p2p_lanes_stamp(d.pool, index, phase); }
    Span share(uint64_t count) const { return Span(count, index, d.lanes); }
    // In the last layer, once its keys and values are stored, only rows whose logits are wanted live on: side
    // by side, in the order of plan.logits_rows; all, where the experts of each are to be noted or are given, or rows
    // are recorded.
    bool narrows(const Layer& layer) const {
        return &layer == &d.layers.back() && plan.logits_count < plan.rows && !plan.routed && !plan.forced &&
               !plan.taps;
    }
    uint32_t live_rows(const Layer& layer) const { return narrows(layer) ? plan.logits_count : plan.rows; }
    uint64_t hidden_bytes() const { return static_cast<uint64_t>(s.hidden) * d.element_bytes(); }
};

Lane lane_of(Step& step, uint32_t index) {
    return {step, step.decoder, step.decoder.shape, step.plan, index, step.decoder.lane_scratch[index]};
}

// ---- taps
//
// Each is behind a barrier that completes what it reads, and before the next, after which that may be written again.

float* place_of(const Lane& lane, DecoderTap kind, uint64_t layer) {
    const DecoderTaps* taps = lane.plan.taps;
    const int64_t place = taps ? taps->places[kind * lane.s.layers + layer] : -1;
    return place < 0 ? nullptr : taps->frame + place;
}

uint64_t number_of(const Lane& lane, const Layer& layer) { return static_cast<uint64_t>(&layer - lane.d.layers.data()); }

void record(const Lane& lane, const float* from, uint32_t width, float* to, uint64_t number) {
    if (lane.plan.taps->statistics)
        lane.d.ops->statistics(from, width, to + 4 * number);
    else
        std::memcpy(to + width * number, from, width * sizeof(float));
}

// This lane's part of the recorded rows, of [rows][hidden].
void record_share(const Lane& lane, const float* from, float* to) {
    if (!to) return;
    const DecoderTaps& taps = *lane.plan.taps;
    const Span part = lane.share(taps.rows_count);
    for (uint32_t i = part.begin; i < part.end; ++i)
        record(lane, from + static_cast<uint64_t>(taps.rows[i]) * lane.s.hidden, lane.s.hidden, to, i);
}

void embed(const Lane& lane) {
    const Decoder& d = lane.d;
    const uint64_t row_bytes = static_cast<uint64_t>(lane.s.hidden) * (d.embed_dtype == EAAS_BF16 ? 2 : 4);
    const Span rows = lane.share(lane.plan.rows);
    for (uint32_t row = rows.begin; row < rows.end; ++row) {
        const uint64_t token = static_cast<uint64_t>(lane.plan.tokens[row]);
        d.ops->to_float(d.embed_dtype, d.embed + token * row_bytes,
                        d.x + static_cast<uint64_t>(row) * lane.s.hidden, lane.s.hidden);
    }
}

// Norms of `count` rows of the residual stream, as products read them. `pick` names them; null: rows 0..count-1.
const uint8_t* normed(const Lane& lane, const float* weight, uint32_t count, const int32_t* pick) {
    const Decoder& d = lane.d;
    const bool few = count < kFewRows;
    uint8_t* out = few ? lane.scratch.normed : d.normed;
    const Span rows = few ? Span(count, 0, 1) : lane.share(count);
    for (uint32_t row = rows.begin; row < rows.end; ++row) {
        const uint64_t from = pick ? static_cast<uint64_t>(pick[row]) : row;
        d.ops->rms_norm(d.x + from * lane.s.hidden, weight, lane.s.hidden, lane.s.eps, lane.scratch.row);
        experts_to_dtype(lane.s.dtype, lane.scratch.row, out + row * lane.hidden_bytes(), lane.s.hidden);
    }
    lane.ended(PHASE_NORM);
    if (!few) lane.barrier();
    return out;
}

void product(const Lane& lane, const Packed& weight, const void* x, uint32_t rows, float* out,
             uint64_t out_stride, uint32_t tile0, uint32_t tile1) {
    if (tile0 < tile1)
        experts_linear(lane.s.dtype, weight.data, weight.rows, weight.k, x, weight.k, rows, out, out_stride,
                       tile0, tile1);
}

// This lane's columns of `weight` times x, plus the bias where there is one, added to the residual stream.
void product_to_residual(const Lane& lane, const Packed& weight, const void* x, uint32_t rows, const float* bias) {
    const Decoder& d = lane.d;
    const Span tiles = lane.share(weight.tiles());
    product(lane, weight, x, rows, d.out, lane.s.hidden, tiles.begin, tiles.end);
    const uint32_t begin = tiles.begin * EXPERTS_TILE_ROWS;
    const uint32_t end = std::min(tiles.end * EXPERTS_TILE_ROWS, lane.s.hidden);
    for (uint32_t row = 0; begin < end && row < rows; ++row) {
        const uint64_t at = static_cast<uint64_t>(row) * lane.s.hidden + begin;
        if (bias) d.ops->add_scaled(d.out + at, bias + begin, 1.0f, end - begin);
        d.ops->add_scaled(d.x + at, d.out + at, 1.0f, end - begin);
    }
    lane.ended(PHASE_OUTPUT);
}

// ---- attention

// Columns of q, k and v, or of the latents: whole heads of this lane, or an even part of all tiles.
void project(const Lane& lane, const Layer& layer, const uint8_t* x) {
    const Decoder& d = lane.d;
    const bool latent = lane.s.kv_rank > 0;
    const Packed* weights[3] = {&layer.q, latent ? &layer.kv_a : &layer.k, latent ? &layer.q_a : &layer.v};
    const uint64_t offsets[3] = {0, d.q_width(), static_cast<uint64_t>(d.q_width()) + d.kv_width()};
    const uint32_t all = weights[0]->tiles() + weights[1]->tiles() + weights[2]->tiles();
    const Span part = lane.share(all);
    uint32_t before = 0;
    for (int i = 0; i < 3; ++i) {
        const uint32_t tiles = weights[i]->tiles();
        Span own = lane.share(tiles);
        if (!d.owns_heads) {
            own.begin = part.begin > before ? part.begin - before : 0;
            own.end = part.end > before ? part.end - before : 0;
            if (own.end > tiles) own.end = tiles;
            before += tiles;
        }
        product(lane, *weights[i], x, lane.plan.rows, d.qkv + offsets[i], d.qkv_width(), own.begin, own.end);
    }
    lane.ended(PHASE_PROJECT);
}

void clip(float* x, uint32_t n, float bound) {
    for (uint32_t i = 0; i < n; ++i) x[i] = x[i] < -bound ? -bound : x[i] > bound ? bound : x[i];
}

// Where the cache holds a row's position, for key-value head 0.
uint8_t* subtile_of(const Lane& lane, const Layer& layer, uint32_t row) {
    const uint32_t position = static_cast<uint32_t>(lane.plan.positions[row]), size = lane.s.block_tokens;
    const int32_t* table = lane.plan.tables + static_cast<uint64_t>(lane.plan.sequences[row]) * lane.plan.table_blocks;
    return layer.cache + static_cast<uint64_t>(table[position / size]) * lane.d.block_bytes +
           position % size / kSubtile * lane.d.subtile_bytes();
}

void rotate(const Lane& lane, uint32_t row, float* head) {
    const uint64_t angles = static_cast<uint64_t>(lane.plan.positions[row]) * lane.s.rope_pairs;
    lane.d.ops->rope(head, lane.d.cosines + angles, lane.d.sines + angles, lane.s.rope_pairs);
}

void scale_query(const Lane& lane, float* head) {
    for (uint32_t i = 0; i < lane.s.head_dim; ++i) head[i] *= lane.s.query_scale;
}

// Bias, norm, clip and rotation of one row's heads [head0, head1) of k and their heads of q; keys and values stored.
void prepare(const Lane& lane, const Layer& layer, uint32_t row, uint32_t head0, uint32_t head1) {
    const Decoder& d = lane.d;
    const DecoderShape& s = lane.s;
    const uint32_t dim = s.head_dim, queries = s.q_heads / s.kv_heads, count = head1 - head0;
    float* base = d.qkv + static_cast<uint64_t>(row) * d.qkv_width();
    float* q = base + head0 * queries * dim;
    float* k = base + d.q_width() + head0 * dim;
    float* v = k + d.kv_width();
    if (layer.has_q_bias)
        d.ops->add_scaled(q, layer.q_bias + head0 * queries * dim, 1.0f, count * queries * dim);
    if (layer.has_k_bias) d.ops->add_scaled(k, layer.k_bias + head0 * dim, 1.0f, count * dim);
    if (layer.has_v_bias) d.ops->add_scaled(v, layer.v_bias + head0 * dim, 1.0f, count * dim);
    if (s.qk_norm == DECODER_NORM_FULL) {
        d.ops->rms_norm(q, layer.q_norm, d.q_width(), s.eps, q);
        d.ops->rms_norm(k, layer.k_norm, d.kv_width(), s.eps, k);
    } else if (s.qk_norm == DECODER_NORM_HEAD) {
        for (uint32_t h = 0; h < count * queries; ++h)
            d.ops->rms_norm(q + h * dim, layer.q_norm, dim, s.eps, q + h * dim);
        for (uint32_t h = 0; h < count; ++h)
            d.ops->rms_norm(k + h * dim, layer.k_norm, dim, s.eps, k + h * dim);
    }
    if (s.clip_qkv > 0.0f) {
        clip(q, count * queries * dim, s.clip_qkv);
        clip(k, count * dim, s.clip_qkv);
        clip(v, count * dim, s.clip_qkv);
    }
    const uint32_t slot = static_cast<uint32_t>(lane.plan.positions[row]) % kSubtile;
    for (uint32_t h = 0; h < count * queries; ++h) {
        rotate(lane, row, q + h * dim);
        scale_query(lane, q + h * dim);
    }
    uint8_t* subtile = subtile_of(lane, layer, row);
    for (uint32_t h = 0; h < count; ++h) {
        rotate(lane, row, k + h * dim);
        d.ops->store_kv(s.dtype, subtile + (head0 + h) * d.head_bytes, slot, dim, dim, k + h * dim, v + h * dim);
    }
}

// Attention of one group of rows through the query heads [head0, head1), which share a key-value head.
void attend_group(const Lane& lane, const Layer& layer, const RowGroup& group, uint32_t head0, uint32_t head1) {
    const Decoder& d = lane.d;
    const DecoderShape& s = lane.s;
    const uint32_t dim = s.head_dim, value_dim = d.value_width();
    Attend attend{};
    attend.head_dim = dim;
    attend.value_dim = value_dim;
    attend.dtype = s.dtype;
    attend.cache = layer.cache;
    attend.table = lane.plan.tables + static_cast<uint64_t>(lane.plan.sequences[group.row]) * lane.plan.table_blocks;
    attend.block_tokens = s.block_tokens;
    attend.block_bytes = d.block_bytes;
    attend.head_bytes = head0 / (s.q_heads / s.kv_heads) * d.head_bytes;
    uint8_t* out[kQueries];
    const auto flush = [&] {
        d.ops->attend(&attend);
        for (uint32_t i = 0; i < attend.queries; ++i)
            experts_to_dtype(s.dtype, attend.out[i], out[i], value_dim);
        attend.queries = 0;
    };
    for (uint32_t row = group.row; row < group.row + group.rows; ++row) {
        const uint32_t last = static_cast<uint32_t>(lane.plan.positions[row]);
        for (uint32_t head = head0; head < head1; ++head) {
            const uint32_t i = attend.queries++;
            attend.query[i] = d.qkv + static_cast<uint64_t>(row) * d.qkv_width() + head * dim;
            attend.out[i] = lane.scratch.heads + i * dim;
            attend.sink[i] = layer.sinks[head];
            attend.last[i] = last;
            attend.first[i] = layer.window && last >= layer.window ? last - layer.window + 1 : 0;
            const uint64_t to = group.to + row - group.row;
            out[i] = d.mixed + (to * s.q_heads + head) * value_dim * d.element_bytes();
            if (attend.queries == kQueries) flush();
        }
    }
    if (attend.queries) flush();
}

// Where lanes do not own heads, (group, head) pairs are cut into parts of about equal cost.
void attend_part(const Lane& lane, const Layer& layer, const std::vector<RowGroup>& groups) {
    const Decoder& d = lane.d;
    const auto cost = [&](const RowGroup& group) {
        return group.rows * (static_cast<uint64_t>(lane.plan.positions[group.row + group.rows - 1]) + kKeyTile);
    };
    uint64_t total = 0, before = 0;
    for (const RowGroup& group : groups) total += cost(group) * lane.s.kv_heads;
    const uint32_t queries = lane.s.q_heads / lane.s.kv_heads;
    for (const RowGroup& group : groups)
        for (uint32_t head = 0; head < lane.s.kv_heads; ++head) {
            if (before * d.lanes / total == lane.index)
                attend_group(lane, layer, group, head * queries, (head + 1) * queries);
            before += cost(group);
        }
}

// ---- latent attention (DeepSeek-V2)
//
// Definition: a row's latent c, normed, gives each head h its key K_h c and its value V_h c; beside it stands one
// rotated key r for all heads. A query [n, p] of head h scores n . K_h c + p . r. Absorbed: n . K_h c = (K_h^T n) . c,
// and a weighted sum of values V_h c is V_h times the sum of the c. So the cache holds [r, c] as the key and c as the
// value of one head for all queries, in prefill and decode alike: one order of additions. Cost: 2 * (head_dim +
// kv_rank) flops per query and position; each lane owns whole query heads, from their projection to their output.

// Norms of one row's latents and rotation of its key, which is stored; its value is the latent.
void prepare_latents(const Lane& lane, const Layer& layer, uint32_t row) {
    const Decoder& d = lane.d;
    const DecoderShape& s = lane.s;
    float* key = d.qkv + static_cast<uint64_t>(row) * d.qkv_width() + d.q_width();
    float* latent = key + 2 * s.rope_pairs;
    d.ops->rms_norm(latent, layer.kv_a_norm, s.kv_rank, kLatentEps, latent);
    rotate(lane, row, key);
    d.ops->store_kv(s.dtype, subtile_of(lane, layer, row), static_cast<uint32_t>(lane.plan.positions[row]) % kSubtile,
                    s.head_dim, s.kv_rank, key, latent);
    if (!s.q_rank) return;
    float* low = key + s.head_dim;
    d.ops->rms_norm(low, layer.q_a_norm, s.q_rank, kLatentEps, low);
    experts_to_dtype(s.dtype, low, d.q_low + static_cast<uint64_t>(row) * s.q_rank * d.element_bytes(), s.q_rank);
}

// The query of one head for all rows, from x of the width of layer.q_up, in the space of keys.
void absorb_queries(const Lane& lane, const Layer& layer, const uint8_t* x, uint32_t head) {
    const Decoder& d = lane.d;
    const DecoderShape& s = lane.s;
    const uint32_t rotated = 2 * s.rope_pairs, query = s.nope_dim + rotated;
    const Packed up = layer.q_up.of(head), key_up = layer.key_up.of(head);
    float* out = d.qkv + static_cast<uint64_t>(head) * s.head_dim;
    product(lane, up, x, lane.plan.rows, lane.scratch.head, query, 0, up.tiles());
    for (uint64_t row = 0; row < lane.plan.rows; ++row) {
        const float* from = lane.scratch.head + row * query;
        experts_to_dtype(s.dtype, from, lane.scratch.low + row * s.nope_dim * d.element_bytes(), s.nope_dim);
        std::memcpy(out + row * d.qkv_width(), from + s.nope_dim, rotated * sizeof(float));
    }
    product(lane, key_up, lane.scratch.low, lane.plan.rows, out + rotated, d.qkv_width(), 0, key_up.tiles());
    for (uint32_t row = 0; row < lane.plan.rows; ++row) {
        float* to = out + static_cast<uint64_t>(row) * d.qkv_width();
        rotate(lane, row, to);
        scale_query(lane, to);
    }
}

// A head's output, from the sums of latents that it attended to.
void expand_values(const Lane& lane, const Layer& layer, uint32_t head) {
    const Decoder& d = lane.d;
    const DecoderShape& s = lane.s;
    const Packed up = layer.value_up.of(head);
    const uint32_t rows = lane.live_rows(layer);
    const uint64_t element = d.element_bytes();
    experts_linear(s.dtype, up.data, up.rows, up.k, d.mixed + head * s.kv_rank * element,
                   static_cast<uint64_t>(s.q_heads) * s.kv_rank, rows, lane.scratch.head, s.value_dim, 0, up.tiles());
    for (uint64_t row = 0; row < rows; ++row)
        experts_to_dtype(s.dtype, lane.scratch.head + row * s.value_dim,
                         d.attended + (row * s.q_heads + head) * s.value_dim * element, s.value_dim);
}

void attend_latents(const Lane& lane, const Layer& layer, const uint8_t* normed, const std::vector<RowGroup>& groups) {
    const Decoder& d = lane.d;
    const Span rows = lane.share(lane.plan.rows), heads = lane.share(lane.s.q_heads);
    for (uint32_t row = rows.begin; row < rows.end; ++row) prepare_latents(lane, layer, row);
    lane.barrier();
    for (uint32_t head = heads.begin; head < heads.end; ++head)
        absorb_queries(lane, layer, lane.s.q_rank ? d.q_low : normed, head);
    for (const RowGroup& group : groups) attend_group(lane, layer, group, heads.begin, heads.end);
    if (lane.live_rows(layer))
        for (uint32_t head = heads.begin; head < heads.end; ++head) expand_values(lane, layer, head);
}

// Moves the wanted rows of the residual stream to its beginning, by way of scratch: they may come in any order.
void keep_wanted(const Lane& lane) {
    const Decoder& d = lane.d;
    const uint64_t hidden = lane.s.hidden;
    const Span rows = lane.share(lane.plan.logits_count);
    for (uint64_t i = rows.begin; i < rows.end; ++i)
        std::memcpy(d.out + i * hidden, d.x + static_cast<uint64_t>(lane.plan.logits_rows[i]) * hidden,
                    hidden * sizeof(float));
    lane.barrier();
    if (rows.begin < rows.end)
        std::memcpy(d.x + rows.begin * hidden, d.out + rows.begin * hidden,
                    (rows.end - rows.begin) * hidden * sizeof(float));
    lane.barrier();
}

void attention(const Lane& lane, const Layer& layer) {
    const Decoder& d = lane.d;
    const std::vector<RowGroup>& groups = lane.narrows(layer) ? d.wanted : d.groups;
    const uint8_t* x = normed(lane, layer.input_norm, lane.plan.rows, nullptr);
    project(lane, layer, x);
    if (lane.s.kv_rank) {
        lane.barrier();
        attend_latents(lane, layer, x, groups);
    } else if (d.owns_heads) {
        const uint32_t queries = lane.s.q_heads / lane.s.kv_heads;
        const Span heads = lane.share(lane.s.kv_heads);
        for (uint32_t row = 0; row < lane.plan.rows; ++row) prepare(lane, layer, row, heads.begin, heads.end);
        for (const RowGroup& group : groups)
            for (uint32_t head = heads.begin; head < heads.end; ++head)
                attend_group(lane, layer, group, head * queries, (head + 1) * queries);
    } else {
        lane.barrier();
        const Span rows = lane.share(lane.plan.rows);
        for (uint32_t row = rows.begin; row < rows.end; ++row) prepare(lane, layer, row, 0, lane.s.kv_heads);
        lane.barrier();
        attend_part(lane, layer, groups);
    }
    lane.ended(PHASE_ATTEND);
    lane.barrier();
    if (lane.narrows(layer)) keep_wanted(lane);
    product_to_residual(lane, layer.o, d.attended, lane.live_rows(layer), layer.has_o_bias ? layer.o_bias : nullptr);
    lane.barrier();
    record_share(lane, d.out, place_of(lane, TAP_ATTENTION, number_of(lane, layer)));
}

// ---- feed-forward: dense, or experts with shared ones beside them

void dense(const Lane& lane, const Layer& layer) {
    const Decoder& d = lane.d;
    const Mlp& mlp = layer.dense;
    const uint32_t rows = lane.live_rows(layer);
    const uint8_t* x = normed(lane, layer.post_norm, rows, nullptr);
    const Span tiles = lane.share(mlp.gate_up_tiles());
    experts_ffn_gate_up(lane.s.dtype, mlp.gate_up, lane.s.hidden, mlp.intermediate, x, lane.s.hidden,
                        rows, d.act, mlp.intermediate, tiles.begin, tiles.end);
    lane.ended(PHASE_DENSE);
    lane.barrier();
    product_to_residual(lane, mlp.down, d.act, rows, nullptr);
    lane.barrier();
}

// Runs while the rows are away at the expert servers: the shared experts' output, apart from the residual stream.
void run_shared(void* arg, uint32_t index) {
    Step& step = *static_cast<Step*>(arg);
    const Lane lane = lane_of(step, index);
    const Decoder& d = lane.d;
    const Mlp& mlp = step.layers[index]->shared;
    const uint32_t rows = lane.live_rows(*step.layers[index]);
    const Span up = lane.share(mlp.gate_up_tiles()), down = lane.share(mlp.down.tiles());
    experts_ffn_gate_up(lane.s.dtype, mlp.gate_up, lane.s.hidden, mlp.intermediate, d.normed, lane.s.hidden,
                        rows, d.act, mlp.intermediate, up.begin, up.end);
    lane.barrier();
    product(lane, mlp.down, d.act, rows, d.shared_out, lane.s.hidden, down.begin, down.end);
}

// The experts chosen for a row, beside its keys and values.
void note_experts(const Lane& lane, const Layer& layer, uint64_t row) {
    const DecoderPlan& plan = lane.plan;
    const uint32_t position = static_cast<uint32_t>(plan.positions[row]), size = lane.s.block_tokens;
    const int32_t* table = plan.tables + static_cast<uint64_t>(plan.sequences[row]) * plan.table_blocks;
    const uint64_t place = static_cast<uint64_t>(table[position / size]) * size + position % size;
    const uint32_t top_k = lane.s.top_k;
    std::memcpy(plan.routed + (place * lane.d.moe_layers + static_cast<uint32_t>(layer.moe_layer)) * top_k,
                lane.d.expert_ids + row * top_k, top_k * sizeof(uint16_t));
}

// The experts that a row is to have in place of the gate's; null: none.
const uint16_t* forced_experts(const Lane& lane, const Layer& layer, uint64_t row) {
    if (!lane.plan.forced) return nullptr;
    const uint64_t place = row * lane.d.moe_layers + static_cast<uint32_t>(layer.moe_layer);
    const uint16_t* forced = lane.plan.forced + place * lane.s.top_k;
    return *forced == DECODER_FREE ? nullptr : forced;
}

void record_choices(const Lane& lane, const Layer& layer, const Span& rows) {
    const Decoder& d = lane.d;
    const uint32_t top_k = lane.s.top_k, experts = lane.s.experts;
    float* logits = place_of(lane, TAP_GATE, number_of(lane, layer));
    float* chosen = place_of(lane, TAP_EXPERTS, number_of(lane, layer));
    for (uint32_t i = 0; (logits || chosen) && i < lane.plan.taps->rows_count; ++i) {
        const uint32_t row = static_cast<uint32_t>(lane.plan.taps->rows[i]);
        if (row < rows.begin || row >= rows.end) continue;
        if (logits) record(lane, d.gate_logits + static_cast<uint64_t>(row) * experts, experts, logits, i);
        if (!chosen) continue;
        const uint16_t* ids = d.expert_ids + static_cast<uint64_t>(row) * top_k;
        std::copy_n(ids, top_k, lane.scratch.row);
        record(lane, lane.scratch.row, top_k, chosen, i);
    }
}

// Norms, gate scores and choices of this lane's rows; lane 0 takes few rows alone, for it plans the call.
void choose_experts(const Lane& lane, const Layer& layer) {
    const Decoder& d = lane.d;
    const DecoderShape& s = lane.s;
    const uint32_t live = lane.live_rows(layer);
    const bool few = live < kFewRows;
    const Span rows = few ? Span(lane.index ? 0 : live, 0, 1) : lane.share(live);
    if (rows.begin == rows.end) return;
    for (uint32_t row = rows.begin; row < rows.end; ++row) {
        float* to = d.normed_f32 + static_cast<uint64_t>(row) * s.hidden;
        d.ops->rms_norm(d.x + static_cast<uint64_t>(row) * s.hidden, layer.post_norm, s.hidden, s.eps, to);
        experts_to_dtype(s.dtype, to, d.normed + row * lane.hidden_bytes(), s.hidden);
        if (s.shared_gate) d.shared_scale[row] = d.ops->sigmoid(d.ops->dot(to, layer.shared_gate, s.hidden));
    }
    experts_linear(EAAS_F32, layer.gate.data, s.experts, s.hidden,
                   d.normed_f32 + static_cast<uint64_t>(rows.begin) * s.hidden, s.hidden,
                   rows.end - rows.begin, d.gate_logits + static_cast<uint64_t>(rows.begin) * s.experts,
                   s.experts, 0, layer.gate.tiles());
    GateRule rule{
        s.experts, s.top_k,       s.gate_sigmoid, s.gate_normalise,
        s.groups,  s.groups_kept, s.gate_scale,   layer.has_correction ? layer.correction : nullptr};
    for (uint64_t row = rows.begin; row < rows.end; ++row) {
        if (layer.has_gate_bias) d.ops->add_scaled(d.gate_logits + row * s.experts, layer.gate_bias, 1.0f, s.experts);
        d.ops->gate(&rule, d.gate_logits + row * s.experts, forced_experts(lane, layer, row),
                    d.expert_ids + row * s.top_k, d.expert_weights + row * s.top_k);
        if (lane.plan.routed) note_experts(lane, layer, row);
    }
    record_choices(lane, layer, rows);
}

// What may be left out of the layer's rows; the call writes there, and only lane 0 of it.
uint8_t* droppable(const Lane& lane, const Layer& layer) {
    const DecoderPlan& plan = lane.plan;
    if (!plan.drop || !lane.narrows(layer)) return plan.drop;
    for (uint32_t i = 0; lane.index == 0 && i < plan.logits_count; ++i)
        lane.d.drop[i] = plan.drop[plan.logits_rows[i]];
    return lane.d.drop;
}

void keep_dropped(const Lane& lane, const Layer& layer) {
    const DecoderPlan& plan = lane.plan;
    if (!plan.drop || !lane.narrows(layer) || lane.index) return;
    for (uint32_t i = 0; i < plan.logits_count; ++i)
        if (lane.d.drop[i] == EXPERTS_DROPPED) plan.drop[plan.logits_rows[i]] = EXPERTS_DROPPED;
}

// What experts that are recorded make of the recorded rows, as a call of their own says it. Nobody else depends on it: an
// expert that no server holds is left out, and not a number stands in its place.
int32_t record_experts(const Lane& lane, const Layer& layer) {
    const Decoder& d = lane.d;
    const DecoderTaps& taps = *lane.plan.taps;
    const uint32_t rows = lane.plan.rows, top_k = lane.s.top_k;
    for (uint32_t e = 0; e < taps.experts_count; ++e) {
        const int64_t* tap = taps.experts + 3 * e;
        if (static_cast<uint64_t>(tap[0]) != number_of(lane, layer)) continue;
        const Span part = lane.share(rows);
        lane.barrier();
        for (uint64_t row = part.begin; row < part.end; ++row) {
            std::fill_n(d.expert_ids + row * top_k, top_k, EXPERTS_NO_EXPERT);
            std::fill_n(d.expert_weights + row * top_k, top_k, 0.0f);
            std::fill_n(d.out + row * lane.s.hidden, lane.s.hidden, 0.0f);
            d.drop[row] = EXPERTS_MAY_DROP;
            if (!std::binary_search(taps.rows, taps.rows + taps.rows_count, static_cast<int32_t>(row))) continue;
            d.expert_ids[row * top_k] = static_cast<uint16_t>(tap[1]);
            d.expert_weights[row * top_k] = 1.0f;
        }
        lane.barrier();
        const int32_t status =
            d.call(d.state, d.pool, lane.index, static_cast<uint32_t>(layer.moe_layer), d.normed, rows, d.expert_ids,
                   d.expert_weights, d.out, d.drop, lane.plan.deadline_ns, nullptr, nullptr);
        if (status != DECODER_OK) return status;
        lane.barrier();
        for (uint64_t row = part.begin; row < part.end; ++row)
            if (d.drop[row] == EXPERTS_DROPPED)
                std::fill_n(d.out + row * lane.s.hidden, lane.s.hidden, std::numeric_limits<float>::quiet_NaN());
        lane.barrier();
        record_share(lane, d.out, taps.frame + tap[2]);
    }
    return DECODER_OK;
}

void add_shared(const Lane& lane, const Layer& layer) {
    const Decoder& d = lane.d;
    const uint32_t rows = lane.live_rows(layer);
    const Span tiles = lane.share(layer.shared.down.tiles());
    const uint32_t begin = tiles.begin * EXPERTS_TILE_ROWS;
    const uint32_t end = std::min(tiles.end * EXPERTS_TILE_ROWS, lane.s.hidden);
    for (uint32_t row = 0; begin < end && row < rows; ++row) {
        const uint64_t at = static_cast<uint64_t>(row) * lane.s.hidden + begin;
        d.ops->add_scaled(d.x + at, d.shared_out + at, lane.s.shared_gate ? d.shared_scale[row] : 1.0f, end - begin);
    }
    lane.barrier();
}

int32_t experts(const Lane& lane, const Layer& layer) {
    const Decoder& d = lane.d;
    const uint32_t rows = lane.live_rows(layer);
    choose_experts(lane, layer);
    const bool shared = lane.s.shared_intermediate > 0;
    lane.step.layers[lane.index] = &layer;
    lane.ended(PHASE_GATE);
    // A call begins with lane 0's plan, for which the other lanes wait.
    if (lane.live_rows(layer) >= kFewRows) lane.barrier();
    const int32_t status = d.call(d.state, d.pool, lane.index, static_cast<uint32_t>(layer.moe_layer),
                                  d.normed, rows, d.expert_ids, d.expert_weights, d.x,
                                  droppable(lane, layer), lane.plan.deadline_ns,
                                  shared ? run_shared : nullptr, &lane.step);
    keep_dropped(lane, layer);
    if (status != DECODER_OK) return status;
    if (shared) add_shared(lane, layer);
    return lane.plan.taps ? record_experts(lane, layer) : DECODER_OK;
}

// The head's product a few tiles at a time, which stay in the nearest cache: a row of which only the highest logit
// matters is not written to memory.
void choose(const Lane& lane, const uint8_t* x, const Span& tiles) {
    const Decoder& d = lane.d;
    const DecoderPlan& plan = lane.plan;
    constexpr uint32_t kWidth = kHeadTiles * EXPERTS_TILE_ROWS;
    const uint64_t tile_bytes = experts_pack_bytes(lane.s.dtype, EXPERTS_TILE_ROWS, d.head.k);
    std::fill_n(lane.scratch.best, plan.logits_count, Best{-std::numeric_limits<float>::infinity(), 0, true});
    for (uint32_t tile = tiles.begin; tile < tiles.end; tile += kHeadTiles) {
        const uint32_t first = tile * EXPERTS_TILE_ROWS, end = tiles.end * EXPERTS_TILE_ROWS;
        const uint32_t count = std::min({kWidth, end - first, lane.s.vocab - first});
        const Packed part{d.head.data + tile * tile_bytes, count, d.head.k};
        product(lane, part, x, plan.logits_count, lane.scratch.logits, kWidth, 0, part.tiles());
        uint64_t left = 0;
        for (uint32_t row = 0; row < plan.logits_count; ++row) {
            const float* logits = lane.scratch.logits + static_cast<uint64_t>(row) * kWidth;
            if (plan.chosen[row] == DECODER_LEFT) {
                std::memcpy(plan.logits + left++ * lane.s.vocab + first, logits, count * sizeof(float));
                continue;
            }
            Best& best = lane.scratch.best[row];
            int finite = 0;
            const float top = d.ops->highest(logits, count, &finite);
            best.finite &= finite != 0;
            if (!(top > best.logit)) continue;
            best.logit = top;
            best.token = static_cast<int32_t>(first + (std::find(logits, logits + count, top) - logits));
        }
    }
}

void head(const Lane& lane) {
    const Decoder& d = lane.d;
    const DecoderPlan& plan = lane.plan;
    if (!plan.logits_count) return;
    const bool kept = lane.narrows(d.layers.back());
    const uint8_t* x = normed(lane, d.final_norm, plan.logits_count, kept ? nullptr : plan.logits_rows);
    const Span tiles = lane.share(d.head.tiles());
    if (lane.step.chooses)
        choose(lane, x, tiles);
    else
        product(lane, d.head, x, plan.logits_count, plan.logits, lane.s.vocab, tiles.begin, tiles.end);
    lane.ended(PHASE_HEAD);
}

// The final norm and the logits of recorded rows, whether or not the step is asked for these.
void record_head(const Lane& lane) {
    const Decoder& d = lane.d;
    const DecoderTaps& taps = *lane.plan.taps;
    const uint64_t hidden = lane.s.hidden, vocab = lane.s.vocab;
    const Span part = lane.share(taps.rows_count);
    float* to = place_of(lane, TAP_FINAL_NORM, 0);
    for (uint32_t i = part.begin; to && i < part.end; ++i) {
        d.ops->rms_norm(d.x + static_cast<uint64_t>(taps.rows[i]) * hidden, d.final_norm, lane.s.hidden, lane.s.eps,
                        lane.scratch.row);
        record(lane, lane.scratch.row, lane.s.hidden, to, i);
    }
    float* logits = place_of(lane, TAP_LOGITS, 0);
    if (!logits) return;
    // The step's own logits are computed from the same scratch.
    lane.barrier();
    const uint8_t* x = normed(lane, d.final_norm, taps.rows_count, taps.rows);
    const Span tiles = lane.share(d.head.tiles());
    product(lane, d.head, x, taps.rows_count, logits, vocab, tiles.begin, tiles.end);
    lane.barrier();
    for (uint32_t i = part.begin; taps.statistics && i < part.end; ++i) {
        float found[4];
        d.ops->statistics(logits + i * vocab, lane.s.vocab, found);
        std::copy_n(found, 4, logits + i * vocab);
    }
}

}  // namespace

void settle_choices(const Step& step) {
    const Decoder& d = step.decoder;
    for (uint32_t row = 0; row < step.plan.logits_count; ++row) {
        if (step.plan.chosen[row] == DECODER_LEFT) continue;
        Best best = d.lane_scratch[0].best[row];
        for (uint32_t lane = 1; lane < d.lanes; ++lane) {
            // Ids rise with the lanes.
            const Best& other = d.lane_scratch[lane].best[row];
            const bool finite = best.finite && other.finite;
            if (other.logit > best.logit) best = other;
            best.finite = finite;
        }
        step.plan.chosen[row] = best.finite ? best.token : DECODER_NOT_FINITE;
    }
}

void run_lane(void* arg, uint32_t index) {
    Step& step = *static_cast<Step*>(arg);
    Decoder& d = step.decoder;
    const Lane lane = lane_of(step, index);
    lane.ended(PHASE_BEGIN);
    embed(lane);
    lane.barrier();
    record_share(lane, d.x, place_of(lane, TAP_EMBED, 0));
    for (const Layer& layer : d.layers) {
        attention(lane, layer);
        if (lane.live_rows(layer) == 0) return;
        if (layer.moe_layer < 0) {
            dense(lane, layer);
        } else if (const int32_t status = experts(lane, layer); status != DECODER_OK) {
            // The same on every lane, so all of them leave here.
            if (index == 0) step.status = status;
            return;
        }
        record_share(lane, d.x, place_of(lane, TAP_RESIDUAL, number_of(lane, layer)));
    }
    head(lane);
    if (step.plan.taps) record_head(lane);
}

}  // namespace eaas
