// Waiting: without the kernel for about as long as it needs to wake an idle core, and by the two futex calls that
// doorbells (shared between processes) and lanes (private to one) need.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

namespace p2p {

// About what waking an idle core takes. By the clock: a pause takes 13 to 60 ns on x86-64, from processor to processor.
constexpr uint64_t SPIN_NS = 50'000;

inline void pause_once() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline uint64_t now_ns(clockid_t clock = CLOCK_MONOTONIC) {
    timespec now;
    clock_gettime(clock, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

// Whether `ready()` became true in that time.
template <class Ready>
bool spin_until(Ready ready) {
    const uint64_t end_ns = now_ns() + SPIN_NS;
    do {
        for (uint32_t i = 0; i < 16; i++) {  // between two looks at the clock
            if (ready()) return true;
            pause_once();
        }
    } while (now_ns() < end_ns);
    // It may have been away from its core since it looked.
    return ready();
}

enum class Scope : int { SHARED = 0, PRIVATE = FUTEX_PRIVATE_FLAG };

// False on timeout; true where woken, where *word already differs from `seen`, and on a signal: the caller looks again.
inline bool futex_wait(const uint32_t* word, uint32_t seen, Scope scope, const timespec* timeout) {
    long result = syscall(SYS_futex, word, FUTEX_WAIT | int(scope), seen, timeout, nullptr, 0);
    return result == 0 || errno != ETIMEDOUT;
}

inline void futex_wake_all(uint32_t* word, Scope scope) {
    syscall(SYS_futex, word, FUTEX_WAKE | int(scope), INT_MAX, nullptr, nullptr, 0);
}

}  // namespace p2p
