// Waiting without the kernel, for about as long as the kernel needs to wake an idle core.
#pragma once
#include <cstdint>

namespace p2p {

constexpr uint32_t SPIN_PAUSES = 2048;  // 40 to 50 microseconds

inline void pause_once() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `ready()` became true in that time.
template <class Ready>
bool spin_until(Ready ready) {
    for (uint32_t i = 0; i < SPIN_PAUSES; i++) {
        if (ready()) return true;
        pause_once();
    }
    return false;
}

}  // namespace p2p
