// Loops that benchmarks/monitor.py times: writes that a monitor is told of, with or without the copies they stand for.
#include <cstring>

#include "p2p/native/monitor.h"
#include "p2p/native/wait.h"

// Nanoseconds of `writes` writes of `bytes` each, `depth` in flight, on a virtual clock: each takes 1 ns a byte.
// With `to`, each copies its bytes there from `from`, all over memory of `room` bytes.
P2P_API uint64_t monitor_loop(P2pMonitor* monitor, uint64_t writes, uint64_t bytes, uint64_t depth, uint8_t* to,
                              const uint8_t* from, uint64_t room) {
    static uint64_t clock = 0, at = 0;  // where the last call ended: what it touched is in the caches
    const uint64_t began = p2p::now_ns();
    for (uint64_t i = 0; i < writes + depth; i++, clock += bytes) {
        if (i < writes) {
            p2p_monitor_posted(monitor, clock, bytes);
            if (to) {
                if (at + bytes > room) at = 0;
                std::memcpy(to + at, from + at, bytes);
                at += bytes;
            }
        }
        if (i >= depth) p2p_monitor_completed(monitor, clock, bytes);
    }
    return p2p::now_ns() - began;
}
