// Frames: how one message lies in a slot, how it is sealed, and how a reader takes it without trusting its writer.
//
//   slot:   offset  size  what
//                0    64  signal line: its first u64 is the signal word, the frame's sequence; rest zero
//               64    64  header
//              128     -  payload, up to the window's payload capacity
//
//   header: offset  size  field
//                0     4  magic "P2PF"
//                4     2  version (1)
//                6     2  flags (0)
//                8     8  receiver: incarnation of the window's owner, the reader
//               16     8  sequence, never used twice in one window
//               24     4  attempt, below P2P_ATTEMPT_LIMIT
//               28     4  length of the payload in bytes
//               32     8  remaining_ns until the sender's deadline: hosts share no clock
//               40     8  sender: the writer's incarnation
//               48     8  reserved (0)
//               56     8  checksum over the 56 bytes before it and the payload
//
// Checksum: w[i] are little-endian u32 words, the last padded with zeros; K[i] 256 odd 32-bit keys; P odd.
//   block(w) = sum of w[i] * K[i] mod 2^64, over at most 256 words
//   h = block(header);  for each 1,024-byte block of payload: h = h * P + block(payload block)
//   checksum = mix(h), a bijection
// A change within one word moves h by (less than 2^32) * K * P^n, which is never 0 mod 2^64: every flip of a byte is
// seen, always. Other tears pass with odds of about 2^-32 or less. It guards against accidents, not against forgers.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "p2p/native/api.h"

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

constexpr uint32_t P2P_FRAME_MAGIC = 0x46503250;
constexpr uint16_t P2P_FRAME_VERSION = 1;
constexpr uint64_t P2P_SIGNAL = 64;
constexpr uint64_t P2P_FRAME_HEADER = 64;
constexpr uint64_t P2P_FRAME_OFFSET = P2P_SIGNAL + P2P_FRAME_HEADER;  // of the payload in its slot
constexpr uint32_t P2P_ATTEMPT_LIMIT = 1u << 16;
constexpr uint64_t P2P_PAYLOAD_LIMIT = 1ull << 30;

// Why a frame is refused, in the order of the checks.
enum {
    P2P_E_MAGIC = -1,
    P2P_E_VERSION = -2,
    P2P_E_FLAGS = -3,
    P2P_E_RESERVED = -4,
    P2P_E_LENGTH = -5,       // more than the slot holds
    P2P_E_INCARNATION = -6,  // meant for another life of this reader
    P2P_E_SENDER = -7,       // not from the peer that this window was given to
    P2P_E_SEQUENCE = -8,     // a late or early frame, not the one awaited
    P2P_E_ATTEMPT = -9,
    P2P_E_CHECKSUM = -10,    // torn or corrupt
};

struct P2pHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t flags;
    uint64_t receiver;
    uint64_t sequence;
    uint32_t attempt;
    uint32_t length;
    uint64_t remaining_ns;
    uint64_t sender;
    uint64_t reserved;
    uint64_t checksum;
};
static_assert(sizeof(P2pHeader) == P2P_FRAME_HEADER && offsetof(P2pHeader, checksum) == 56);

inline void* p2p_payload(void* slot) { return static_cast<uint8_t*>(slot) + P2P_FRAME_OFFSET; }

P2P_API uint64_t p2p_checksum(const void* header56, const void* payload, uint64_t length);

// Write the header of the frame whose `fields->length` payload bytes already lie at p2p_payload(slot). The sealer fills
// magic, version, flags, reserved and checksum; the caller every other field. The signal is not touched.
P2P_API void p2p_frame_seal(void* slot, const P2pHeader* fields);

// Copy header and payload to private memory, then validate the copies: what passed cannot change any more.
//   capacity     bytes that payload_out and the slot's payload area both hold
//   receiver     incarnation of this window's owner; sender: of its peer; sequence of the frame awaited
// Returns the payload's length, or the first failed check as P2P_E_*; the outputs are then without meaning.
P2P_API int p2p_frame_open(const void* slot, uint64_t capacity, uint64_t receiver, uint64_t sender,
                           uint64_t sequence, P2pHeader* header_out, void* payload_out);

// The signal word. A store releases everything written before it; a load acquires what its value promises.
P2P_API void p2p_signal_store(void* slot, uint64_t value);
P2P_API uint64_t p2p_signal_load(const void* slot);
// out[i] = signal at first + i * stride_bytes, each an acquire.
P2P_API void p2p_signals_load(const void* first, uint64_t stride_bytes, uint64_t count, uint64_t* out);
