// Faults that this process does to itself on command, at an exact place of the protocol.
//
// Nothing is armed unless a process that allows it was told to (p2p/faults.py). Until then each place below costs one
// relaxed load. What is random in a fault follows from its seed, the peer's name and how many frames went there since.
#pragma once
#include <atomic>
#include <cstdint>

#include "p2p/native/api.h"

// Where a kill or a freeze can strike.
#define P2P_FAULT_POINTS(X)                        \
    X(REQUEST_HALF_WRITTEN, "request-half-written") \
    X(REQUEST_BEFORE_SIGNAL, "request-before-signal") \
    X(REQUEST_AFTER_SIGNAL, "request-after-signal") \
    X(REPLY_TAKEN, "reply-taken")                  \
    X(COMBINED, "combined")                        \
    X(STEP_BEFORE_TOKENS, "step-before-tokens")    \
    X(STEP_AFTER_TOKENS, "step-after-tokens")      \
    X(REQUEST_TAKEN, "request-taken")              \
    X(COMPUTED, "computed")                        \
    X(REPLY_HALF_WRITTEN, "reply-half-written")    \
    X(REPLY_BEFORE_SIGNAL, "reply-before-signal")  \
    X(REPLY_AFTER_SIGNAL, "reply-after-signal")    \
    X(WEIGHTS_LOADED, "weights-loaded")            \
    X(CLIENT_ATTACHED, "client-attached")

enum P2pFaultPoint : uint32_t {
#define P2P_FAULT_POINT(name, text) P2P_POINT_##name,
    P2P_FAULT_POINTS(P2P_FAULT_POINT)
#undef P2P_FAULT_POINT
};

enum : int32_t {
    P2P_FAULT_KILL = 1,       // at a point
    P2P_FAULT_FREEZE = 2,     // at a point: a byte to `waker`, then SIGSTOP
    P2P_FAULT_SLOW = 3,       // work takes `times` as long
    P2P_FAULT_DELAY = 4,      // a frame's signal comes `by_ns` later
    P2P_FAULT_LOSS = 5,       // it never comes
    P2P_FAULT_PARTITION = 6,  // none goes there, and none is heard from there
    P2P_FAULT_RAIL_DOWN = 7,  // a device carries nothing
    P2P_FAULT_WIRE = 8,       // a bit of a frame's payload is flipped once it is sealed
    P2P_FAULT_ROWS = 9,       // a bit of its rows, before
    P2P_FAULT_NAN = 10,       // NaN in its rows, before
};

struct P2pFault {
    uint64_t id;
    uint64_t after;  // passes of the point that are let go first
    uint64_t by_ns;
    uint64_t seed;
    double share;  // of the frames, 0 to 1
    double times;
    int32_t kind;
    int32_t waker;
};

// `where`: the point or the rail. `peers`: names, a line each; empty: all. 0; -1: there is no such kind or
// point; P2P_E_MEMORY.
P2P_API int p2p_fault_arm(const P2pFault* fault, const char* where, const char* peers);
// What was delayed still comes at its time. 1 where it was armed.
P2P_API int p2p_fault_disarm(uint64_t id);
// Frames for that peer are written to the window at this address, from now until _unlink. 0 or P2P_E_MEMORY.
P2P_API int p2p_fault_link(const void* window, const char* peer);
// To be called before the memory goes: on return no delayed signal is stored there any more.
P2P_API void p2p_fault_unlink(const void* window);
// The same as p2p_fault_point, for the points that Python passes.
P2P_API void p2p_fault_pass(const char* point);

extern "C" __attribute__((visibility("default"))) std::atomic<uint32_t> p2p_faults_armed;

namespace p2p {

P2P_API void p2p_fault_strike(uint32_t point);
P2P_API int p2p_fault_send(const void* window, void* slot, uint64_t value, void* bells, uint32_t lane, uint32_t lanes);
P2P_API int p2p_fault_is_cut(const void* window);
P2P_API void p2p_fault_spoil(const void* window, float* rows, uint64_t count);
P2P_API void p2p_fault_linger(uint64_t began_ns, void* page);
P2P_API int p2p_fault_is_down(const char* rail);

inline bool faults_armed() {
    return __builtin_expect(p2p_faults_armed.load(std::memory_order_relaxed) != 0, 0);
}

}  // namespace p2p

inline void p2p_fault_point(P2pFaultPoint point) {
    if (p2p::faults_armed()) p2p::p2p_fault_strike(point);
}

// Just before a frame's signal would be stored: true where a fault has it now, signal and bells (`lanes` of them
// from `lane` on), to bring it later or never.
inline bool p2p_fault_takes(const void* window, void* slot, uint64_t value, void* bells, uint32_t lane,
                            uint32_t lanes) {
    return p2p::faults_armed() && p2p::p2p_fault_send(window, slot, value, bells, lane, lanes);
}

// Whether what comes from the peer that is written to at `window` is not heard.
inline bool p2p_fault_cut(const void* window) { return p2p::faults_armed() && p2p::p2p_fault_is_cut(window); }

// The rows of a frame that is not sealed yet.
inline void p2p_fault_rows(const void* window, float* rows, uint64_t count) {
    if (p2p::faults_armed()) p2p::p2p_fault_spoil(window, rows, count);
}

// Work that began then (CLOCK_MONOTONIC) is done. page: of the doorbells whose heartbeat goes on, slow as it is; or null.
inline void p2p_fault_stretch(uint64_t began_ns, void* page) {
    if (p2p::faults_armed()) p2p::p2p_fault_linger(began_ns, page);
}

inline bool p2p_fault_rail(const char* rail) { return p2p::faults_armed() && p2p::p2p_fault_is_down(rail); }
