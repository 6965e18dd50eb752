// The decoder's memory. Everything lives in one arena; scratch is reused by every layer and step.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "eaas/native/decoder.h"
#include "eaas/native/ops.h"

namespace eaas {

// One private mapping for many arrays, in huge pages where the host has them: a decode step is a walk over weights.
class Arena {
  public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        if (base_) munmap(base_, mapped_);
    }

    // Runs `layout(*this)` twice: once to count, once to hand out zeroed memory. False: the host has too little.
    template <class Layout>
    bool build(Layout layout) {
        layout(*this);
        mapped_ = (used_ + kHuge - 1) / kHuge * kHuge + kHuge;
        void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return false;
        base_ = static_cast<uint8_t*>(memory);
        madvise(base_, mapped_, MADV_HUGEPAGE);
        used_ = (kHuge - reinterpret_cast<uintptr_t>(base_) % kHuge) % kHuge;
        layout(*this);
        return true;
    }

    template <class T = uint8_t>
    T* take(uint64_t count) {
        T* taken = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
        return taken;
    }

  private:
    static constexpr uint64_t kHuge = 2u << 20;
    static constexpr uint64_t kAlign = 128;
    uint8_t* base_ = nullptr;
    uint64_t mapped_ = 0;
    uint64_t used_ = 0;
};

inline uint64_t span_begin(uint64_t count, uint32_t lane, uint32_t lanes) { return count * lane / lanes; }

// The part of `count` items that one lane takes: static and contiguous, so that a lane meets the same weights
// each step.
struct Span {
    uint32_t begin, end;
    Span(uint64_t count, uint32_t lane, uint32_t lanes)
        : begin(static_cast<uint32_t>(span_begin(count, lane, lanes))),
          end(static_cast<uint32_t>(span_begin(count, lane + 1, lanes))) {}
};

// Below this many rows every lane computes the norms of all rows for itself: cheaper than a barrier.
constexpr uint32_t kFewRows = 4;
constexpr uint32_t kMaxLanes = 64;
constexpr float kLatentEps = 1e-6f;  // of the norms of latents, whatever rms_norm_eps is: as transformers has it

struct Packed {
    uint8_t* data = nullptr;
    uint32_t rows = 0, k = 0;
    uint32_t tiles() const { return (rows + EXPERTS_TILE_ROWS - 1) / EXPERTS_TILE_ROWS; }
};

// One matrix for each query head, so that a lane can own heads of any size.
struct PerHead {
    uint8_t* data = nullptr;
    uint32_t rows = 0, k = 0;
    uint64_t head_bytes = 0;
    Packed of(uint32_t head) const { return {data + head * head_bytes, rows, k}; }
};

// gate and up interleaved, and down.
struct Mlp {
    uint8_t* gate_up = nullptr;
    Packed down;
    uint32_t intermediate = 0;
    uint32_t gate_up_tiles() const { return (intermediate + EXPERTS_GATE_UP_COLUMNS - 1) / EXPERTS_GATE_UP_COLUMNS; }
};

struct Layer {
    int32_t moe_layer = -1;
    uint32_t window = 0;
    Packed q, k, v, o, gate;
    // Of latent attention, in place of q, k and v.
    Packed q_a, kv_a;
    PerHead q_up, key_up, value_up;
    float *q_a_norm, *kv_a_norm;
    // Biases are null until set: most models have none.
    float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *correction;
    bool has_q_bias, has_k_bias, has_v_bias, has_o_bias, has_gate_bias, has_correction;
    float* sinks;  // per query head; minus infinity until set
    float *input_norm, *post_norm, *q_norm, *k_norm, *shared_gate;
    Mlp shared, dense;
    uint8_t* cache = nullptr;
};

// Consecutive rows of one sequence whose queries share passes over the keys; results go to rows `to` and on.
struct RowGroup {
    uint32_t row, rows, to;
};

// The highest of the logits that a lane has computed of a row, and where.
struct Best {
    float logit;
    int32_t token;
    bool finite;  // all of them
};
constexpr uint32_t kHeadTiles = 4;  // of a row's logits that are in memory at a time, unless the caller wants them

struct LaneScratch {
    float* row;       // hidden floats
    uint8_t* normed;  // kFewRows x hidden of dtype
    float* heads;     // kQueries x head_dim
    float* logits;    // max_rows x kHeadTiles tiles
    Best* best;       // max_rows
    // Of latent attention: one head of all rows, max_rows each.
    float* head;   // its whole query, or its output
    uint8_t* low;  // nope_dim of dtype: what of its query is not rotated
};

}  // namespace eaas

struct Decoder {
    DecoderShape shape;
    eaas::Arena arena;
    const eaas::Ops* ops = nullptr;
    LanePool* pool = nullptr;
    uint32_t lanes = 1, moe_layers = 0;
    ExpertCall call = nullptr;
    void* state = nullptr;

    std::vector<eaas::Layer> layers;
    eaas::Packed head;
    float *final_norm, *cosines, *sines;
    const uint8_t* embed = nullptr;
    int32_t embed_dtype = 0;
    uint64_t block_bytes = 0, head_bytes = 0;
    // Lanes own whole key-value heads: no barrier between projections and attention.
    bool owns_heads = false;

    // Scratch, [max_rows] rows each.
    float* x;               // residual stream, hidden
    float* normed_f32;      // hidden
    uint8_t* normed;        // hidden, dtype
    float* qkv;             // q, k, v side by side; of latent attention q, key and the query's latent
    uint8_t* q_low;         // q_rank, dtype: the query's latent, normed
    uint8_t* mixed;         // q_heads * value_width, dtype: weighted sums of values, which may be `attended`
    uint8_t* attended;      // out_width, dtype
    float* out;             // hidden: a product before it joins the residual stream
    uint8_t* act;           // widest dense or shared intermediate, dtype
    float* shared_out;      // hidden
    float* shared_scale;    // 1
    float* gate_logits;     // experts
    uint16_t* expert_ids;   // top_k
    float* expert_weights;  // top_k
    uint8_t* drop;          // 1: the plan's, of the last layer's rows
    std::vector<eaas::LaneScratch> lane_scratch;
    std::vector<eaas::RowGroup> groups;
    std::vector<eaas::RowGroup> wanted;  // those of the last layer, where only some rows' logits are wanted

    uint32_t element_bytes() const { return shape.dtype == EAAS_F32 ? 4 : 2; }
    uint32_t q_width() const { return shape.q_heads * shape.head_dim; }
    uint32_t kv_width() const { return shape.kv_heads * shape.head_dim; }
    uint32_t qkv_width() const { return q_width() + kv_width() + (shape.kv_rank ? shape.q_rank : kv_width()); }
    // Of one value in the cache, and of what all heads give to the output projection.
    uint32_t value_width() const { return shape.kv_rank ? shape.kv_rank : shape.head_dim; }
    uint32_t out_width() const { return shape.q_heads * (shape.kv_rank ? shape.value_dim : shape.head_dim); }
    uint64_t subtile_bytes() const { return eaas::subtile_elements(shape.head_dim, value_width()) * element_bytes(); }
};

namespace eaas {
// The step's body, run by every lane.
struct Step {
    Decoder& decoder;
    const DecoderPlan& plan;
    int32_t status;                  // of the expert calls; every lane sees the same, lane 0 writes it
    bool chooses;                    // some tokens
    const Layer* layers[kMaxLanes];  // where each lane is
};
void run_lane(void* step, uint32_t lane);
// Once all lanes have run: the tokens chosen.
void settle_choices(const Step& step);
}  // namespace eaas
