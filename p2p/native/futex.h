// The two futex calls that doorbells (shared between processes) and lanes (private to one) need.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <ctime>

namespace p2p {

enum class Scope : int { SHARED = 0, PRIVATE = FUTEX_PRIVATE_FLAG };

// False on timeout; true where woken, where *word already differs from `seen`, and on a signal: the caller
// looks again.
bool futex_wait(const uint32_t* word, uint32_t seen, Scope scope, const timespec* timeout);
void futex_wake_all(uint32_t* word, Scope scope);

}  // namespace p2p
