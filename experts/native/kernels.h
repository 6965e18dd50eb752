// Matrix products of the CPU data path, on packed weights. Plain C ABI; nothing here allocates, locks or throws.
//
// Packed matrix W[rows, k], used as out = x @ W^T. Tiles of 64 rows, each four interleaved blocks of 16 rows,
// so that one tile is one sequential stream; rows are padded to 64 and k to 2 with zeros:
//     bf16  [tile][ceil(k / 2)][4 blocks][16 rows][2]      256 bytes per pair of k
//     f32   [tile][k padded to 2][4 blocks][16 rows]       256 bytes per k
//     int8  [tile][group] of 64 k each, padded with zeros: 64 float32 scales, then
//           [16][4 blocks][16 rows][4]                     256 bytes per four k
//     fp8, mxfp4, int4, int4_g32: as experts/grouped.py says, which packs them
// A gate_up matrix holds blocks of 16 rows in the order gate, up, gate, up: one tile is 32 columns of the activation.
//
// Exactness: each output element has one accumulator, fed in ascending k, whatever m, the tile range, the
// instruction set's register tile or the caller's lanes. So the bits of a row are the same alone and in any
// batch. Portable and avx2 agree bit for bit: float32 fma, even k then odd k. avx512 agrees for f32; its bf16
// products use VDPBF16PS per pair of k and are a numerics class of their own (experts_numerics_class); so with
// the types kept as stored, whose rows are bf16. int8, whose rows are bf16 too, has the same bits everywhere.
// kernel_table.h defines the arithmetic of both.
#pragma once

#include <stdint.h>

#include "p2p/native/api.h"

// From int8 on they are of weights; rows are bf16. From fp8 on they are kept as a checkpoint holds them: E4M3, E2M1 with
// scales of powers of two, and 4 bits with scale and offset.
enum { EAAS_F32, EAAS_BF16, EAAS_INT8, EAAS_FP8, EAAS_MXFP4, EAAS_INT4, EAAS_INT4_G32, EAAS_DTYPES };
enum { EXPERTS_TILE_ROWS = 64, EXPERTS_GATE_UP_COLUMNS = 32 };

// ---- instruction sets: "portable", "avx2", "avx512"

enum { EXPERTS_E_ISA_ABSENT = -2 };
// Choose by name; with a null or empty name by $EAAS_ISA, or where that is unset the best that this CPU has.
// Returns 0; EXPERTS_E_ISA_ABSENT, and the choice stands: this CPU or this build lacks it, or nobody has it.
// Not to be called while a kernel runs. Before any call the best one is chosen.
P2P_API int experts_isa_select(const char* name);
P2P_API const char* experts_isa_name(void);
// 1 where this CPU and this build have it, 0 where not.
P2P_API int experts_isa_available(const char* name);
// "cpu-f32-fma-1", "cpu-bf16-fma-1", "cpu-bf16-vdpbf16-1", "cpu-int8-g64-1" and so on: equal strings promise equal bits.
P2P_API const char* experts_numerics_class(int dtype);

// ---- packing, but of the types kept as stored, of which only the bytes are told here; `out` holds experts_pack_bytes()
// bytes, 64-byte aligned. w: row-major, w_dtype its own element type.

P2P_API uint64_t experts_pack_bytes(int dtype, uint32_t rows, uint32_t k);
P2P_API void experts_pack_matrix(int dtype, const void* w, int w_dtype, uint32_t rows, uint32_t k, void* out);
// gate, up: [inter, hidden] each. Bytes: experts_gate_up_bytes().
P2P_API uint64_t experts_gate_up_bytes(int dtype, uint32_t inter, uint32_t hidden);
P2P_API void experts_pack_gate_up(int dtype, const void* gate, const void* up, int w_dtype, uint32_t inter,
                                  uint32_t hidden, void* out);

// ---- products; strides count elements. Any number of threads may share the inputs and split the tiles.

// out[i][r] = sum_k x[i][k] W[r][k] for i < m and the rows r of tiles [tile0, tile1); x holds `dtype`'s
// rows, out floats.
P2P_API void experts_linear(int dtype, const void* packed, uint32_t rows, uint32_t k, const void* x, uint64_t x_stride,
                            uint32_t m, float* out, uint64_t out_stride, uint32_t tile0, uint32_t tile1);
// act[i][c] = round(silu(gate_c . x[i]) * (up_c . x[i])) for the 32-column tiles [tile0, tile1) of ceil(inter / 32).
P2P_API void experts_ffn_gate_up(int dtype, const void* packed, uint32_t hidden, uint32_t inter,
                                 const void* x, uint64_t x_stride, uint32_t m, void* act,
                                 uint64_t act_stride, uint32_t tile0, uint32_t tile1);
// What an expert computes beside its products: act = g * sigmoid(alpha * g) * (u + shift), where g = min(gate, limit) and
// u = up within -limit to limit. Where it is biased, 64 floats for each tile lie behind the tiles of a packed matrix, in
// the order of the tile's rows: what is added to each product. alpha 1, limit infinite, shift 0, not biased: SwiGLU.
struct ExpertForm {
    float alpha;
    float limit;
    float shift;
    uint32_t biased;
};
// As experts_ffn_gate_up; a null form: SwiGLU. int8 has no other.
P2P_API void experts_ffn_gate_up_formed(const struct ExpertForm* form, int dtype, const void* packed, uint32_t hidden,
                                        uint32_t inter, const void* x, uint64_t x_stride, uint32_t m, void* act,
                                        uint64_t act_stride, uint32_t tile0, uint32_t tile1);
// Adds the biases behind down's tiles to out[m][hidden], for tiles [tile0, tile1).
P2P_API void experts_add_down_biases(int dtype, const void* packed, uint32_t hidden, uint32_t inter, uint32_t m,
                                     float* out, uint64_t out_stride, uint32_t tile0, uint32_t tile1);
// Floats to rows of `dtype`: bf16 by round to nearest even, f32 by copy. n elements; x and out may not overlap.
P2P_API void experts_to_dtype(int dtype, const float* x, void* out, uint64_t n);
