#include "p2p/native/window.h"

#include <atomic>
#include <cstring>

P2P_API uint64_t p2p_window_bytes(uint32_t slots, uint64_t payload_capacity) {
    if (slots < 1 || slots > P2P_SLOTS_LIMIT) return 0;
    if (payload_capacity < 1 || payload_capacity > P2P_PAYLOAD_LIMIT) return 0;
    return p2p_slot_offset(slots, payload_capacity);
}

P2P_API int p2p_window_init(void* window, uint64_t bytes, uint64_t incarnation, uint32_t slots,
                            uint64_t payload_capacity) {
    uint64_t needed = p2p_window_bytes(slots, payload_capacity);
    if (needed == 0 || bytes < needed) return P2P_E_WINDOW_SIZE;
    P2pWindowHeader header{};
    header.magic = P2P_WINDOW_MAGIC;
    header.version = P2P_WINDOW_VERSION;
    header.incarnation = incarnation;
    header.slots = slots;
    header.payload_capacity = payload_capacity;
    header.slot_stride = p2p_slot_stride(payload_capacity);
    std::memcpy(window, &header, sizeof header);
    return 0;
}

P2P_API int p2p_window_check(const void* window, uint64_t bytes, uint64_t incarnation, uint32_t slots,
                             uint64_t payload_capacity) {
    uint64_t needed = p2p_window_bytes(slots, payload_capacity);
    if (needed == 0 || bytes < needed) return P2P_E_WINDOW_SIZE;
    P2pWindowHeader header;
    std::memcpy(&header, window, sizeof header);
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (header.magic != P2P_WINDOW_MAGIC) return P2P_E_WINDOW_MAGIC;
    if (header.version != P2P_WINDOW_VERSION) return P2P_E_WINDOW_VERSION;
    if (header.incarnation != incarnation) return P2P_E_WINDOW_INCARNATION;
    bool agreed = header.slots == slots && header.payload_capacity == payload_capacity &&
                  header.slot_stride == p2p_slot_stride(payload_capacity);
    return agreed ? 0 : P2P_E_WINDOW_LAYOUT;
}
