// Instruction sets that this CPU and its kernel support, by CPUID: the compilers' own question for it,
// __builtin_cpu_supports, asks a runtime library that not every compiler brings in working order.
#pragma once
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace p2p {

struct Cpu {
    bool avx2 = false;       // and FMA, F16C
    bool avx512 = false;     // F, BW, VL, DQ; and AVX2
    bool avx512_dot = false; // BF16 and VNNI products, VBMI; and AVX512
};

inline Cpu cpu() {
    Cpu found;
#if defined(__x86_64__)
    // Intel SDM, volume 2, CPUID: leaf 1, and leaf 7 with subleaves 0 and 1.
    uint32_t eax, ebx, ecx, edx;
    auto all = [](uint32_t word, uint32_t bits) { return (word & bits) == bits; };
    constexpr uint32_t kFmaXsaveAvxF16c = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !all(ecx, kFmaXsaveAvxF16c)) return found;
    uint32_t kept, high;  // registers that the kernel saves for a thread
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if (!all(kept, 0x6) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return found;
    found.avx2 = all(ebx, 1u << 5);
    found.avx512 = found.avx2 && all(kept, 0xe6) && all(ebx, 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31);
    bool vnni_vbmi = all(ecx, 1u << 11 | 1u << 1);
    found.avx512_dot =
        found.avx512 && vnni_vbmi && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && all(eax, 1u << 5);
#endif
    return found;
}

}  // namespace p2p
