// Two late writes, each at the worst instant: the page that the reader is about to touch is closed to it, and the
// fault lets the write land. Ends with 0 where neither is accepted, with 1 or 2 where that one is.
#include <signal.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "p2p/native/frame.h"

namespace {

constexpr uint64_t PAGE = 4096;
constexpr uint64_t LENGTH = 2 * PAGE - P2P_FRAME_OFFSET;
unsigned char *slot, *copy, *closed;
unsigned char byte_after;

void land(int, siginfo_t* fault, void*) {
    auto* at = static_cast<unsigned char*>(fault->si_addr);
    if (at < closed || at >= closed + PAGE) _Exit(3);
    mprotect(closed, PAGE, PROT_READ | PROT_WRITE);
    // The first page of the payload only: what the reader has copied of it by now, it has.
    std::memset(p2p_payload(slot), byte_after, PAGE - P2P_FRAME_OFFSET);
}

unsigned char* pages(uint64_t count) {
    void* memory = mmap(nullptr, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) _Exit(4);
    return static_cast<unsigned char*>(memory);
}

// Whether the reader accepts something that nobody sent.
bool accepts(unsigned char sealed, unsigned char before, unsigned char after, unsigned char* shut, int access) {
    std::memset(p2p_payload(slot), sealed, LENGTH);
    P2pHeader fields{};
    fields.receiver = 1;
    fields.sender = 2;
    fields.sequence = 3;
    fields.length = uint32_t(LENGTH);
    p2p_frame_seal(slot, &fields);
    std::memset(p2p_payload(slot), before, PAGE - P2P_FRAME_OFFSET);
    byte_after = after;
    closed = shut;
    if (mprotect(closed, PAGE, access)) _Exit(4);
    P2pHeader header;
    int length = p2p_frame_open(slot, LENGTH, 1, 2, 3, &header, copy);
    if (length < 0) return false;
    for (uint64_t i = 0; i < LENGTH; i++)
        if (copy[i] != sealed) return true;
    return false;
}

}  // namespace

int main() {
    struct sigaction action {};
    action.sa_sigaction = land;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    slot = pages(2);
    copy = pages(2);
    // A whole frame; another write lands at the instant in which the copy begins.
    if (accepts('a', 'a', 'b', copy, PROT_READ)) return 1;
    // A torn frame; the rest of it lands when its first half has been copied.
    if (accepts('a', 'b', 'a', slot + PAGE, PROT_NONE)) return 2;
    return 0;
}
