// A path: one way from a window's writer to its owner, over one rail. Transports implement it, channels use it.
//
// A path carries bytes one way and notes both ways. Nothing here waits. Its ends belong to the one thread that
// steps the channel.
#pragma once
#include <cstddef>
#include <cstdint>

#include "p2p/native/api.h"

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
    // Copy bytes to `offset` of the owner's window, then give the owner the note: it never comes before the bytes lie
    // there. The source stays as it is until DONE, or until the owner answers the note: of a write that was copied at
    // once the path knows no more, and says nothing. Writes may overtake each other. Zero bytes: the note alone.
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

// Notes: what the two ends of a channel tell each other. 64 bytes and a blob, little-endian.
//
//   offset  size  field
//        0     4  magic "P2PN"
//        4     1  version (1)
//        5     1  kind: P2P_NOTE_*
//        6     2  path that it speaks of: the index of its rail
//        8     4  generation of that path: how often it was opened
//       12     4  bytes of the blob, at most P2P_BLOB_BYTES
//       16     8  incarnation of the window's owner
//       24     8  number
//       32     8  first
//       40     8  offset
//       48     8  value
//       56     8  checksum (frame.h) over the 56 bytes before it and the blob
//       64     -  blob
constexpr uint32_t P2P_NOTE_MAGIC = 0x4E503250;
constexpr uint8_t P2P_NOTE_VERSION = 1;
constexpr uint32_t P2P_NOTE_HEADER = 64;
constexpr uint32_t P2P_BLOB_BYTES = P2P_NOTE_BYTES - P2P_NOTE_HEADER;

enum {
    // Writer to owner.
    P2P_NOTE_WROTE = 1,    // write `number` lies in the window
    P2P_NOTE_SIGNAL = 2,   // the same; with writes `first` to `number` there, the word at `offset` becomes `value`
    P2P_NOTE_DOUBT = 3,    // writes on `path` are overdue; value 1: its transport has failed
    P2P_NOTE_CLOSED = 4,   // has understood that `path` is closed
    P2P_NOTE_ECHO = 5,     // answers PROBE
    P2P_NOTE_HELLO = 6,    // first on a path; blob: token, writer's incarnation, transport's address
    // Owner to writer.
    P2P_NOTE_STATE = 16,   // writes to `number` are there, and those set in the blob's bits; value: P2P_STATE_PATH_*
    P2P_NOTE_PROBE = 17,   // answer on this path
    P2P_NOTE_OFFER = 18,   // `path` may be opened again; blob: transport's address
    P2P_NOTE_WELCOME = 19, // answers HELLO; blob: the window's first P2P_WELCOME_BYTES
    // Either.
    P2P_NOTE_BYE = 32,     // the other end has closed the channel
};
enum {
    P2P_STATE_PATH_UNSAID = 0,
    P2P_STATE_PATH_CLOSED = 1,  // nothing that was sent on it lands any more
    P2P_STATE_PATH_HEARD = 2,   // it was heard of since the doubt
};
constexpr uint32_t P2P_WELCOME_BYTES = 128;

struct P2pNote {
    uint32_t magic;
    uint8_t version;
    uint8_t kind;
    uint16_t path;
    uint32_t generation;
    uint32_t blob_bytes;
    uint64_t incarnation;
    uint64_t number;
    uint64_t first;
    uint64_t offset;
    uint64_t value;
    uint64_t checksum;
};
static_assert(sizeof(P2pNote) == P2P_NOTE_HEADER && offsetof(P2pNote, checksum) == 56);

// Fills magic, version and checksum; the blob is copied behind it. Returns the note's bytes, 0 where the blob is
// longer than P2P_BLOB_BYTES. `out` holds P2P_NOTE_BYTES.
P2P_API uint32_t p2p_note_seal(const P2pNote* fields, const void* blob, void* out);
// 0 and a copy of the header, or -1 where these bytes are no note for this incarnation's window.
P2P_API int p2p_note_open(const void* note, uint32_t bytes, uint64_t incarnation, P2pNote* out);
