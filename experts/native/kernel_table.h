// The kernels of one instruction set. kernels.isa.cpp defines a table in each namespace, kernels.cpp picks
// one. Included by `*.isa.cpp` files too.
#pragma once

#include <stdint.h>

#include "experts/native/kernels.h"

// The arguments of experts_linear and experts_ffn_gate_up. rows: of the matrix, or columns of the activation.
struct Product {
    int dtype;
    const void* packed;
    uint32_t k, rows;
    const void* x;
    uint64_t x_stride;
    uint32_t m;
    void* out;
    uint64_t out_stride;
    uint32_t tile0, tile1;
};

// What is done with the 64 sums of one row and one tile.
struct Finish {
    const void* state;
    void (*call)(const void* state, uint32_t tile, uint32_t row, const float* sums);
    void operator()(uint32_t tile, uint32_t row, const float* sums) const { call(state, tile, row, sums); }
};

struct KernelTable {
    const char* name;
    const char* classes[EAAS_DTYPES];
    void (*linear)(const Product& product);
    // form: null for SwiGLU; biases: those of the whole matrix, or null.
    void (*gate_up)(const Product& product, const ExpertForm* form, const float* biases);
    void (*to_bf16)(const float* x, uint16_t* out, uint64_t n);
};

namespace isa_portable {
extern const KernelTable kernel_table;
}
#if EAAS_HAVE_AVX2
namespace isa_avx2 {
extern const KernelTable kernel_table;
}
#endif
#if EAAS_HAVE_AVX512
namespace isa_avx512 {
extern const KernelTable kernel_table;
}
#endif

// Int8 arithmetic: a group is EXPERTS_INT8_GROUP consecutive k, padded with zeros. Of a row of activations (bf16,
// widened) or of weights, each group is quantised alone: scale = largest / 127, q = x * (127 / largest) to
// the nearest integer, ties to even. An output starts at 0 and takes the groups in ascending k:
//     out = out + float(sum of qx * qw) * (scale_x * scale_w)
// with each operation rounded to float32; the sum is exact (at most 64 * 127 * 127 < 2^24). A group whose
// largest magnitude is below EXPERTS_INT8_LEAST counts as zero; one with an infinity or a NaN has scale NaN.
enum { EXPERTS_INT8_GROUP = 64 };
#define EXPERTS_INT8_LEAST 0x1p-100f  // so that 127 / largest is finite

// Types kept as stored: codes become bfloat16, exactly. Of a row and a group (that of the layout, k ascending, padded with
// zeros) the products are summed in float32 from 0 on, as bf16's are; an output starts at 0 and takes the groups in
// ascending k, with each operation rounded to float32:
//     out = fma(sum of x * code, scale, out), then where there are offsets out = fma(sum of x, offset, out)
// The sum of x has sixteen lanes, each of every sixteenth k, added up by simd.h's tree.

#ifdef EAAS_ISA_NS
namespace EAAS_ISA_NS {
void int8_tiles(const Product& product, Finish finish);
void quantized_tiles(const Product& product, Finish finish);
}  // namespace EAAS_ISA_NS
#endif
