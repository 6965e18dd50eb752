// The kernels of one instruction set. kernels.isa.cpp defines a table in each namespace, kernels.cpp picks
// one.
#pragma once

#include <stdint.h>

struct ExpertForm;

struct KernelTable {
    const char* name;
    const char* bf16_class;
    void (*linear)(int dtype, const void* packed, uint32_t rows, uint32_t k, const void* x, uint64_t x_stride,
                   uint32_t m, float* out, uint64_t out_stride, uint32_t tile0, uint32_t tile1);
    void (*gate_up)(int dtype, const void* packed, uint32_t hidden, uint32_t inter, const void* x,
                    uint64_t x_stride, uint32_t m, void* act, uint64_t act_stride, uint32_t tile0,
                    uint32_t tile1);
    void (*to_bf16)(const float* x, uint16_t* out, uint64_t n);
    void (*int8_linear)(const void* packed, uint32_t rows, uint32_t k, const void* x, uint64_t x_stride,
                        uint32_t m, float* out, uint64_t out_stride, uint32_t tile0, uint32_t tile1);
    void (*int8_gate_up)(const void* packed, uint32_t hidden, uint32_t inter, const void* x,
                         uint64_t x_stride, uint32_t m, void* act, uint64_t act_stride, uint32_t tile0,
                         uint32_t tile1);
    // biases: those of the whole matrix, or null.
    void (*gate_up_formed)(const ExpertForm& form, const float* biases, int dtype, const void* packed,
                           uint32_t hidden, uint32_t inter, const void* x, uint64_t x_stride, uint32_t m,
                           void* act, uint64_t act_stride, uint32_t tile0, uint32_t tile1);
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
