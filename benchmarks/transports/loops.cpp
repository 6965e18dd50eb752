// Both ends of the shm transport without a binding between them, and the copies they are judged by. Compiled by
// benchmarks/transports/native.py; no part of the product.
#include <ctime>

#include <cstdint>
#include <cstring>

#include "p2p/native/doorbell.h"
#include "p2p/native/frame.h"
#include "p2p/native/wait.h"

#define LOOP extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t SILENCE_NS = 10'000'000'000;
constexpr int SILENT = -100;

using p2p::now_ns;

}  // namespace

// One pair of windows as one of its two processes sees it; native.py has the same fields.
struct Link {
    uint8_t* out;        // slot 0 of the peer's window
    const uint8_t* in;   // slot 0 of the own window
    void* peer_page;
    void* own_page;
    uint64_t stride;
    uint64_t capacity;
    uint64_t slots;
    uint64_t own;        // incarnations
    uint64_t peer;
    uint64_t sent;       // sequences
    uint64_t taken;
};

namespace {

void send(Link& link, const uint8_t* source, uint64_t bytes, bool parked) {
    uint64_t sequence = ++link.sent;
    uint8_t* slot = link.out + sequence % link.slots * link.stride;
    std::memcpy(p2p_payload(slot), source, bytes);
    P2pHeader header{};
    header.receiver = link.peer;
    header.sender = link.own;
    header.sequence = sequence;
    header.length = uint32_t(bytes);
    p2p_frame_seal(slot, &header);
    p2p_signal_store(slot, sequence);
    if (parked) p2p_bell_ring(link.peer_page, 0);
}

const uint8_t* next_slot(const Link& link) { return link.in + (link.taken + 1) % link.slots * link.stride; }

bool ready(const Link& link) { return p2p_signal_load(next_slot(link)) == link.taken + 1; }

int take(Link& link, uint8_t* target) {
    P2pHeader header;
    int length = p2p_frame_open(next_slot(link), link.capacity, link.own, link.peer, link.taken + 1, &header, target);
    link.taken++;
    return length;
}

// Until `found()`; false where nothing came for a long time.
template <class Found>
bool wait_until(void* own_page, bool parked, Found found) {
    uint64_t began = now_ns();
    while (now_ns() - began < SILENCE_NS) {
        if (parked) {
            uint32_t seen = p2p_bell_read(own_page, 0);
            if (found()) return true;
            p2p_bell_wait(own_page, 0, seen, P2P_WAIT_NS);
        } else if (p2p::spin_until(found)) {
            return true;
        }
    }
    return false;
}

}  // namespace

// `count` rounds: a request of `request` bytes to every link, a reply from each, at most `depth` (no more than the
// slots) under way. ns[i] is from before request i was sent until its last reply was validated. 0, or why not.
LOOP int loops_drive(Link* links, uint64_t n, uint64_t request, uint64_t depth, uint64_t count, int parked,
                     const uint8_t* source, uint8_t* target, uint64_t* ns) {
    for (uint64_t round = 0; round < count + depth - 1; round++) {
        if (round < count) {
            ns[round] = now_ns();
            for (uint64_t i = 0; i < n; i++) send(links[i], source, request, parked);
        }
        if (round + 1 < depth) continue;
        for (uint64_t i = 0; i < n; i++) {
            if (!wait_until(links[i].own_page, parked, [&] { return ready(links[i]); })) return SILENT;
            int length = take(links[i], target);
            if (length < 0) return length;
        }
        uint64_t& began = ns[round + 1 - depth];
        began = now_ns() - began;
    }
    return 0;
}

// The other side: `count` requests from each link, each answered with `reply` bytes as soon as it is there.
LOOP int loops_serve(Link* links, uint64_t n, uint64_t reply, uint64_t count, int parked, const uint8_t* source,
                     uint8_t* target) {
    for (uint64_t left = n * count; left;) {
        uint64_t first = n;
        bool found = wait_until(links[0].own_page, parked, [&] {
            for (first = 0; first < n && !ready(links[first]); first++) {}
            return first < n;
        });
        if (!found) return SILENT;
        for (uint64_t i = first; i < n; i++) {
            if (!ready(links[i])) continue;
            int length = take(links[i], target);
            if (length < 0) return length;
            send(links[i], source, reply, parked);
            left--;
        }
    }
    return 0;
}

// ns of `calls` copies between `pieces` private buffers and as many slots, in turn, `bytes` each:
enum { COPY_OUT, PUT, PUT_SEALED, COPY_IN, OPEN, CHECKSUM };
LOOP uint64_t loops_copy(int what, uint8_t* slots, uint64_t stride, uint8_t* buffers, uint64_t pieces,
                         uint64_t bytes, uint64_t calls) {
    P2pHeader header{};
    header.length = uint32_t(bytes);
    uint64_t kept = 0, began = now_ns();
    for (uint64_t call = 0; call < calls; call++) {
        uint8_t* slot = slots + call % pieces * stride;
        uint8_t* buffer = buffers + call % pieces * stride;
        if (what <= PUT_SEALED) std::memcpy(p2p_payload(slot), buffer, bytes);
        if (what == PUT_SEALED) p2p_frame_seal(slot, &header);
        if (what == PUT || what == PUT_SEALED) p2p_signal_store(slot, call);
        if (what == COPY_IN) std::memcpy(buffer, p2p_payload(slot), bytes);
        if (what == OPEN && p2p_frame_open(slot, bytes, 0, 0, 0, &header, buffer) < 0) return 0;
        if (what == CHECKSUM) kept += p2p_checksum(&header, p2p_payload(slot), bytes);
    }
    uint64_t spent = now_ns() - began;
    return spent + (kept == 1);  // never taken away
}
