// Chooses the instruction set at run time and forwards the C ABI to its kernels.
#include "experts/native/kernels.h"

#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <initializer_list>

#include "experts/native/kernel_table.h"
#include "p2p/native/cpu.h"

namespace {

const KernelTable* find(const char* name) {
    if (!strcmp(name, "portable")) return &isa_portable::kernel_table;
#if EAAS_HAVE_AVX2
    if (!strcmp(name, "avx2") && p2p::cpu().avx2) return &isa_avx2::kernel_table;
#endif
#if EAAS_HAVE_AVX512
    if (!strcmp(name, "avx512") && p2p::cpu().avx512_dot) return &isa_avx512::kernel_table;
#endif
    return nullptr;
}

const KernelTable* best() {
    for (const char* name : {"avx512", "avx2"})
        if (const KernelTable* table = find(name)) return table;
    return &isa_portable::kernel_table;
}

std::atomic<const KernelTable*> chosen{nullptr};

const KernelTable& table() {
    const KernelTable* now = chosen.load(std::memory_order_acquire);
    if (now == nullptr) chosen.store(now = best(), std::memory_order_release);
    return *now;
}

}  // namespace

P2P_API int experts_isa_select(const char* name) {
    if (name == nullptr || !*name) name = getenv("EAAS_ISA");
    const KernelTable* found = name == nullptr || !*name ? best() : find(name);
    if (found == nullptr) return EXPERTS_E_ISA_ABSENT;
    chosen.store(found, std::memory_order_release);
    return 0;
}

P2P_API const char* experts_isa_name(void) { return table().name; }

P2P_API int experts_isa_available(const char* name) { return find(name) != nullptr; }

P2P_API const char* experts_numerics_class(int dtype) {
    return table().classes[dtype];
}

P2P_API void experts_linear(int dtype, const void* packed, uint32_t rows, uint32_t k, const void* x, uint64_t x_stride,
                            uint32_t m, float* out, uint64_t out_stride, uint32_t tile0, uint32_t tile1) {
    table().linear({dtype, packed, k, rows, x, x_stride, m, out, out_stride, tile0, tile1});
}

P2P_API void experts_ffn_gate_up(int dtype, const void* packed, uint32_t hidden, uint32_t inter,
                                 const void* x, uint64_t x_stride, uint32_t m, void* act,
                                 uint64_t act_stride, uint32_t tile0, uint32_t tile1) {
    experts_ffn_gate_up_formed(nullptr, dtype, packed, hidden, inter, x, x_stride, m, act, act_stride, tile0, tile1);
}

P2P_API void experts_ffn_gate_up_formed(const ExpertForm* form, int dtype, const void* packed, uint32_t hidden,
                                        uint32_t inter, const void* x, uint64_t x_stride, uint32_t m,
                                        void* act, uint64_t act_stride, uint32_t tile0, uint32_t tile1) {
    const void* behind = static_cast<const char*>(packed) + experts_gate_up_bytes(dtype, inter, hidden);
    const float* biases = form && form->biased ? static_cast<const float*>(behind) : nullptr;
    table().gate_up({dtype, packed, hidden, inter, x, x_stride, m, act, act_stride, tile0, tile1}, form, biases);
}

P2P_API void experts_add_down_biases(int dtype, const void* packed, uint32_t hidden, uint32_t inter, uint32_t m,
                                     float* out, uint64_t out_stride, uint32_t tile0, uint32_t tile1) {
    const void* behind = static_cast<const char*>(packed) + experts_pack_bytes(dtype, hidden, inter);
    const float* biases = static_cast<const float*>(behind);
    const uint32_t last = tile1 * EXPERTS_TILE_ROWS < hidden ? tile1 * EXPERTS_TILE_ROWS : hidden;
    for (uint32_t i = 0; i < m; ++i)
        for (uint32_t column = tile0 * EXPERTS_TILE_ROWS; column < last; ++column)
            out[i * out_stride + column] += biases[column];
}

P2P_API void experts_to_dtype(int dtype, const float* x, void* out, uint64_t n) {
    if (dtype == EAAS_F32) {
        memcpy(out, x, n * sizeof(float));
    } else {
        table().to_bf16(x, static_cast<uint16_t*>(out), n);
    }
}
