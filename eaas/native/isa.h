// Choice among the tables that `*.isa.cpp` files define once per instruction set.
#pragma once
#include <cstring>

#include "experts/native/kernels.h"

#if defined(EAAS_HAVE_AVX2)
#define EAAS_IF_AVX2(x) x
#else
#define EAAS_IF_AVX2(x)
#endif
#if defined(EAAS_HAVE_AVX512)
#define EAAS_IF_AVX512(x) x
#else
#define EAAS_IF_AVX512(x)
#endif

// Declares the same thing in the namespace of every instruction set of this build.
#define EAAS_EACH_ISA(declaration)                    \
    namespace isa_portable {                          \
    declaration;                                      \
    }                                                 \
    EAAS_IF_AVX2(namespace isa_avx2 { declaration; }) \
    EAAS_IF_AVX512(namespace isa_avx512 { declaration; })

// That of the instruction set which experts_isa_name() names now.
#define EAAS_CURRENT_ISA(name)                                                           \
    (EAAS_IF_AVX512(std::strcmp(experts_isa_name(), "avx512") == 0 ? isa_avx512::name :) \
         EAAS_IF_AVX2(std::strcmp(experts_isa_name(), "avx2") == 0 ? isa_avx2::name :) isa_portable::name)
