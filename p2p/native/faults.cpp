#include "p2p/native/faults.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "p2p/native/doorbell.h"
#include "p2p/native/frame.h"
#include "p2p/native/wait.h"

std::atomic<uint32_t> p2p_faults_armed{0};

namespace {

using p2p::now_ns;

constexpr uint64_t SLICE_NS = 5'000'000;  // a fault that is disarmed keeps nobody longer
constexpr const char* POINTS[] = {
#define P2P_FAULT_POINT(name, text) text,
    P2P_FAULT_POINTS(P2P_FAULT_POINT)
#undef P2P_FAULT_POINT
};
constexpr uint32_t POINT_COUNT = sizeof POINTS / sizeof *POINTS;

uint32_t point_of(const char* text) {
    for (uint32_t i = 0; i < POINT_COUNT; i++)
        if (!std::strcmp(POINTS[i], text)) return i;
    return POINT_COUNT;
}

uint64_t mix(uint64_t z) {  // splitmix64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

uint64_t hash(const std::string& text) {  // FNV-1a
    uint64_t sum = 0xCBF29CE484222325;
    for (char c : text) sum = (sum ^ uint8_t(c)) * 0x100000001B3;
    return sum;
}

struct Armed {
    P2pFault fault;
    std::string where, peers;              // peers: "\nname\nname\n", or empty
    uint32_t point;
    std::map<std::string, uint64_t> sent;  // frames, by peer

    bool meets(const std::string& peer) const {
        return peers.empty() || peers.find("\n" + peer + "\n") != std::string::npos;
    }

    // Numbers for the peer's next frame: what follows from them depends on nothing else.
    uint64_t draw(const std::string& peer) { return mix(fault.seed ^ mix(hash(peer) + sent[peer]++)); }

    bool hits(uint64_t drawn) const { return double(drawn >> 11) * 0x1p-53 < fault.share; }
};

struct Late {
    uint64_t due_ns, order;
    const void* window;
    void* slot;
    uint64_t value;
    void* bells;
    uint32_t lane, lanes;

    bool operator<(const Late& other) const {
        return due_ns != other.due_ns ? due_ns > other.due_ns : order > other.order;
    }
    void store() const {
        p2p_signal_store(slot, value);
        for (uint32_t i = lane; i < lane + lanes; i++) p2p_bell_ring(bells, i);
    }
};

struct Table {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<Armed> armed;
    std::map<const void*, std::string> peers;  // by window
    std::vector<Late> late;                    // a heap, the next on top
    uint64_t orders = 0;
    bool carrying = false;

    const std::string& peer_at(const void* window) const {
        static const std::string nobody;
        auto found = peers.find(window);
        return found == peers.end() ? nobody : found->second;
    }

    void delay(Late frame) {
        // Without a thread to carry it, it must not be taken.
        if (!carrying) std::thread([this] { carry(); }).detach();
        carrying = true;
        frame.order = orders++;
        late.push_back(frame);
        std::push_heap(late.begin(), late.end());
        changed.notify_one();
    }

    [[noreturn]] void carry() {
        std::unique_lock held(mutex);
        for (;;) {
            if (late.empty()) {
                changed.wait(held);
            } else if (uint64_t now = now_ns(); now < late.front().due_ns) {
                changed.wait_for(held, std::chrono::nanoseconds(late.front().due_ns - now));
            } else {
                late.front().store();
                std::pop_heap(late.begin(), late.end());
                late.pop_back();
            }
        }
    }
};

// Never destroyed: its thread outlives main.
Table& table() {
    static Table* only = new Table;
    return *only;
}

double slowness(const Table& faults) {
    double times = 1;
    for (const Armed& one : faults.armed)
        if (one.fault.kind == P2P_FAULT_SLOW) times *= one.fault.times;
    return times;
}

uint32_t payload_bytes(const void* slot) {
    P2pHeader header;
    std::memcpy(&header, static_cast<const uint8_t*>(slot) + P2P_SIGNAL, sizeof header);
    return header.length;
}

void flip(uint8_t* bytes, uint64_t count, uint64_t drawn) {
    if (!count) return;
    bytes[drawn % count] ^= uint8_t(1u << (drawn >> 61));
}

}  // namespace

P2P_API int p2p_fault_arm(const P2pFault* fault, const char* where, const char* peers) try {
    bool at_point = fault->kind == P2P_FAULT_KILL || fault->kind == P2P_FAULT_FREEZE;
    uint32_t point = at_point ? point_of(where) : POINT_COUNT;
    if (fault->kind < P2P_FAULT_KILL || fault->kind > P2P_FAULT_NAN || (at_point && point == POINT_COUNT)) return -1;
    std::lock_guard held(table().mutex);
    std::string lines;
    if (*peers) lines.append("\n").append(peers).append("\n");
    table().armed.push_back({*fault, where, lines, point, {}});
    p2p_faults_armed.store(uint32_t(table().armed.size()));
    return 0;
} P2P_CATCH(P2P_E_MEMORY)

P2P_API int p2p_fault_disarm(uint64_t id) {
    std::lock_guard held(table().mutex);
    auto gone = std::erase_if(table().armed, [id](const Armed& one) { return one.fault.id == id; });
    p2p_faults_armed.store(uint32_t(table().armed.size()));
    return gone != 0;
}

P2P_API int p2p_fault_link(const void* window, const char* peer) try {
    std::lock_guard held(table().mutex);
    table().peers[window] = peer;
    return 0;
} P2P_CATCH(P2P_E_MEMORY)

P2P_API void p2p_fault_unlink(const void* window) {
    std::lock_guard held(table().mutex);
    table().peers.erase(window);
    std::erase_if(table().late, [window](const Late& frame) { return frame.window == window; });
    std::make_heap(table().late.begin(), table().late.end());
}

P2P_API void p2p_fault_pass(const char* point) {
    if (p2p::faults_armed()) p2p::p2p_fault_strike(point_of(point));
}

namespace p2p {

P2P_API void p2p_fault_strike(uint32_t point) {
    // Held while this process is stopped: whoever disarms must not send the waker away before it has woken it.
    std::lock_guard held(table().mutex);
    auto& armed = table().armed;
    for (size_t i = 0; i < armed.size(); i++) {
        if (armed[i].point != point || armed[i].fault.after-- > 0) continue;
        P2pFault fault = armed[i].fault;
        armed.erase(armed.begin() + long(i));
        p2p_faults_armed.store(uint32_t(armed.size()));
        // To this very thread, which goes not one instruction further.
        if (fault.kind == P2P_FAULT_KILL) raise(SIGKILL);
        // With nobody to wake it, it had better not fall asleep.
        if (write(fault.waker, "!", 1) == 1) raise(SIGSTOP);
        return;
    }
}

P2P_API int p2p_fault_send(const void* window, void* slot, uint64_t value, void* bells, uint32_t lane,
                           uint32_t lanes) try {
    std::lock_guard held(table().mutex);
    const std::string& peer = table().peer_at(window);
    uint64_t by_ns = 0;
    bool lost = false;
    for (Armed& one : table().armed) {
        if (!one.meets(peer)) continue;
        uint64_t drawn;
        switch (one.fault.kind) {
            case P2P_FAULT_DELAY: by_ns += one.fault.by_ns; break;
            case P2P_FAULT_LOSS: lost |= one.hits(one.draw(peer)); break;
            case P2P_FAULT_PARTITION: lost = true; break;
            case P2P_FAULT_WIRE:
                drawn = one.draw(peer);
                if (one.hits(drawn))
                    flip(static_cast<uint8_t*>(p2p_payload(slot)), payload_bytes(slot), mix(drawn));
                break;
        }
    }
    if (lost) return 1;
    if (!by_ns) return 0;
    table().delay({now_ns() + by_ns, 0, window, slot, value, bells, lane, lanes});
    return 1;
} P2P_CATCH(0)  // sent as if no fault were armed

P2P_API int p2p_fault_is_cut(const void* window) {
    std::lock_guard held(table().mutex);
    const std::string& peer = table().peer_at(window);
    return std::any_of(table().armed.begin(), table().armed.end(), [&](const Armed& one) {
        return one.fault.kind == P2P_FAULT_PARTITION && one.meets(peer);
    });
}

P2P_API void p2p_fault_spoil(const void* window, float* rows, uint64_t count) try {
    std::lock_guard held(table().mutex);
    const std::string& peer = table().peer_at(window);
    for (Armed& one : table().armed) {
        if ((one.fault.kind != P2P_FAULT_ROWS && one.fault.kind != P2P_FAULT_NAN) || !one.meets(peer)) continue;
        uint64_t drawn = one.draw(peer);
        if (!count || !one.hits(drawn)) continue;
        if (one.fault.kind == P2P_FAULT_NAN)
            rows[mix(drawn) % count] = std::numeric_limits<float>::quiet_NaN();
        else
            flip(reinterpret_cast<uint8_t*>(rows), count * sizeof *rows, mix(drawn));
    }
} P2P_CATCH()

P2P_API void p2p_fault_linger(uint64_t began_ns, void* page) {
    double worked_ns = double(now_ns() - began_ns);
    for (;;) {
        double times;
        {
            std::lock_guard held(table().mutex);
            times = slowness(table());
        }
        double left_ns = double(began_ns) + worked_ns * times - double(now_ns());
        if (left_ns <= 0) return;
        p2p_bell_beat(page);
        std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(SLICE_NS, uint64_t(left_ns) + 1)));
    }
}

P2P_API int p2p_fault_is_down(const char* rail) {
    std::lock_guard held(table().mutex);
    return std::any_of(table().armed.begin(), table().armed.end(), [rail](const Armed& one) {
        return one.fault.kind == P2P_FAULT_RAIL_DOWN && one.where == rail;
    });
}

}  // namespace p2p
