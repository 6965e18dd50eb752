// Int8 products of one instruction set; kernels.h describes the layout. Included by `*.isa.cpp` files too.
//
// Arithmetic: a group is EXPERTS_INT8_GROUP consecutive k, padded with zeros. Of a row of activations (bf16,
// widened) or of weights, each group is quantised alone: scale = largest / 127, q = x * (127 / largest) to
// the nearest integer, ties to even. An output starts at 0 and takes the groups in ascending k:
//     out = out + float(sum of qx * qw) * (scale_x * scale_w)
// with each operation rounded to float32; the sum is exact (at most 64 * 127 * 127 < 2^24). A group whose
// largest magnitude is below EXPERTS_INT8_LEAST counts as zero; one with an infinity or a NaN has scale NaN.
#pragma once

#include <stdint.h>

enum { EXPERTS_INT8_GROUP = 64 };
#define EXPERTS_INT8_LEAST 0x1p-100f  // so that 127 / largest is finite

#ifdef EAAS_ISA_NS
namespace EAAS_ISA_NS {
// As experts_linear and experts_ffn_gate_up; x and act hold bf16.
void int8_linear(const void* packed, uint32_t rows, uint32_t k, const void* x, uint64_t x_stride, uint32_t m,
                 float* out, uint64_t out_stride, uint32_t tile0, uint32_t tile1);
void int8_gate_up(const void* packed, uint32_t hidden, uint32_t inter, const void* x, uint64_t x_stride,
                  uint32_t m, void* act, uint64_t act_stride, uint32_t tile0, uint32_t tile1);
}  // namespace EAAS_ISA_NS
#endif
