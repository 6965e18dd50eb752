// A path: one way from a window's writer to its owner, over one rail. Transports implement it, channels use it.
//
// A path carries bytes one way and notes both ways. Nothing here waits. Its ends belong to the one thread that
// steps the channel.
#pragma once
#include <cstdint>

constexpr uint32_t P2P_NOTE_BYTES = 8192;  // longest note

enum {
    P2P_PATH_DONE = 1,  // the write with that ticket has landed
    P2P_PATH_NOTE = 2,  // a note has come
};

struct P2pPathEvent {
    uint32_t kind;
    uint32_t bytes;     // of the note
    uint64_t ticket;
    const void* note;   // lives until the next call on this path
};

// Every function returns a negative number once the path is broken, and may be called again all the same.
struct P2pPathOps {
    // Copy bytes to `offset` of the owner's window, then give the owner the note: it never comes before the bytes
    // lie there. The source stays as it is until DONE, or until the owner answers the note: of a write that was
    // copied at once the path knows no more, and says nothing. Writes may overtake each other. Zero bytes: the
    // note alone.
    int (*write)(void* path, uint64_t ticket, uint64_t offset, const void* source, uint64_t bytes,
                 const void* note, uint32_t note_bytes);
    // A note alone, to the other end.
    int (*tell)(void* path, const void* note, uint32_t note_bytes);
    // The next event: 1; none: 0.
    int (*poll)(void* path, P2pPathEvent* event);
};

struct P2pPath {
    const P2pPathOps* ops;
    void* self;
};
