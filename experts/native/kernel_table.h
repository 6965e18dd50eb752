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

struct KernelTable {
    const char* name;
    const char* bf16_class;
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

#ifdef EAAS_ISA_NS
namespace EAAS_ISA_NS {
void int8_linear(const Product& product);
void int8_gate_up(const Product& product);
}  // namespace EAAS_ISA_NS
#endif
