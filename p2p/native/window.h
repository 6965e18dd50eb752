// Windows: one header page, then slots. One peer writes the slots; the owner writes the header.
//
//   page:   offset  size  field
//                0     4  magic "P2PW"
//                4     4  layout version (1)
//                8     8  incarnation of the owner
//               16     4  slots
//               20     4  zero
//               24     8  payload capacity of a slot in bytes
//               32     8  slot stride in bytes
//   slot i at 4096 + i * stride; stride = signal line + header + capacity, rounded up to 4096
#pragma once
#include "p2p/native/frame.h"

constexpr uint64_t P2P_PAGE = 4096;
constexpr uint32_t P2P_WINDOW_MAGIC = 0x57503250;
constexpr uint32_t P2P_WINDOW_VERSION = 1;
constexpr uint32_t P2P_SLOTS_LIMIT = 4096;

enum {
    P2P_E_WINDOW_SIZE = -20,         // slots or capacity out of range, or the memory is too small for them
    P2P_E_WINDOW_MAGIC = -21,
    P2P_E_WINDOW_VERSION = -22,
    P2P_E_WINDOW_INCARNATION = -23,
    P2P_E_WINDOW_LAYOUT = -24,       // slots, capacity or stride differ from what was agreed
};

struct P2pWindowHeader {
    uint32_t magic;
    uint32_t version;
    uint64_t incarnation;
    uint32_t slots;
    uint32_t zero;
    uint64_t payload_capacity;
    uint64_t slot_stride;
};
static_assert(sizeof(P2pWindowHeader) == 40);

inline uint64_t p2p_slot_stride(uint64_t payload_capacity) {
    return (P2P_FRAME_OFFSET + payload_capacity + P2P_PAGE - 1) / P2P_PAGE * P2P_PAGE;
}
inline uint64_t p2p_slot_offset(uint32_t index, uint64_t payload_capacity) {
    return P2P_PAGE + index * p2p_slot_stride(payload_capacity);
}
inline void* p2p_slot(void* window, uint32_t index, uint64_t payload_capacity) {
    return static_cast<uint8_t*>(window) + p2p_slot_offset(index, payload_capacity);
}
inline const void* p2p_slot(const void* window, uint32_t index, uint64_t payload_capacity) {
    return static_cast<const uint8_t*>(window) + p2p_slot_offset(index, payload_capacity);
}

// Bytes of a window; 0 where slots is not in 1..P2P_SLOTS_LIMIT or payload_capacity not in 1..P2P_PAYLOAD_LIMIT.
P2P_API uint64_t p2p_window_bytes(uint32_t slots, uint64_t payload_capacity);

// Write the header of zeroed memory. 0, or P2P_E_WINDOW_SIZE.
P2P_API int p2p_window_init(void* window, uint64_t bytes, uint64_t incarnation, uint32_t slots,
                            uint64_t payload_capacity);
// For the peer: is this the window that was agreed on? 0, or P2P_E_WINDOW_*.
P2P_API int p2p_window_check(const void* window, uint64_t bytes, uint64_t incarnation, uint32_t slots,
                             uint64_t payload_capacity);
