// What native fuzz targets are made of: decisions read from the fuzzer's bytes, damage, windows with guarded gaps.
// What is judged: no sanitizer speaks, every call ends, whole messages get their answer, and no wrong answer is taken.
#pragma once
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "p2p/native/window.h"

namespace fuzz {

inline void require(bool kept, const char* promise) {
    if (kept) return;
    std::fprintf(stderr, "broken: %s\n", promise);
    __sanitizer_print_stack_trace();
    std::abort();
}

// Decisions, one after another; once the bytes are used up every decision is zero.
class Choices {
  public:
    Choices(const uint8_t* data, size_t size) : data_(data), left_(size) {}
    bool left() const { return left_; }
    uint64_t bits(size_t bytes) {
        uint64_t value = 0;
        size_t taken = std::min(bytes, left_);
        std::memcpy(&value, data_, taken);
        data_ += taken;
        left_ -= taken;
        return value;
    }
    uint32_t below(uint32_t limit) { return limit > 1 ? uint32_t(bits(limit > 256 ? 4 : 1)) % limit : 0; }
    // What a field finds hard: an extreme, a neighbour of one, or any.
    uint64_t value() {
        const uint64_t hard[] = {0, 1, ~0ull, ~0ull >> 1, 1ull << 63, ~0ull - 1};
        uint32_t kind = below(10);
        return kind < 6 ? hard[kind] : bits(1u << (kind - 6));
    }
    void fill(void* to, size_t bytes) {
        auto* at = static_cast<uint8_t*>(to);
        for (size_t i = 0; i < bytes; i++) at[i] = uint8_t(bits(1));
    }

  private:
    const uint8_t* data_;
    size_t left_;
};

// Up to `most` changes; whether there was any.
inline bool damage(Choices& choices, uint8_t* bytes, uint32_t size, uint32_t most) {
    std::vector<uint8_t> before(bytes, bytes + size);
    for (uint32_t left = size ? choices.below(most + 1) : 0; left; left--) {
        // Half of them to what is read first.
        uint32_t at = choices.below(choices.below(2) ? std::min(size, 64u) : size), width = 2u << choices.below(3);
        uint64_t value;
        switch (choices.below(4)) {
            case 0: bytes[at] ^= uint8_t(1u << choices.below(8)); break;
            case 1:
            case 2:
                at = at / width * width;
                value = choices.value();
                std::memcpy(bytes + at, &value, std::min(width, size - at));
                break;
            case 3: {
                uint32_t from = choices.below(size);
                std::memmove(bytes + at, bytes + from, std::min({64u, size - at, size - from}));
            }
        }
    }
    return std::memcmp(before.data(), bytes, size) != 0;
}

struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<uint8_t, Free>;

inline Memory zeros(uint64_t alignment, uint64_t bytes) {
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment));
    std::memset(memory, 0, (bytes + alignment - 1) / alignment * alignment);
    return Memory(memory);
}

// A window whose gaps between slots may not be touched.
struct Window {
    uint32_t slots;
    uint64_t capacity, bytes;
    Memory memory;

    Window(uint32_t slots, uint64_t capacity, uint64_t incarnation)
        : slots(slots), capacity(capacity), bytes(p2p_window_bytes(slots, capacity)), memory(zeros(P2P_PAGE, bytes)) {
        require(p2p_window_init(memory.get(), bytes, incarnation, slots, capacity) == 0, "a window is made");
        for (uint32_t i = 0; i < slots; i++)
            ASAN_POISON_MEMORY_REGION(slot(i) + P2P_FRAME_OFFSET + capacity,
                                      p2p_slot_stride(capacity) - P2P_FRAME_OFFSET - capacity);
    }
    ~Window() { ASAN_UNPOISON_MEMORY_REGION(memory.get(), bytes); }
    uint8_t* slot(uint32_t index) const { return static_cast<uint8_t*>(p2p_slot(memory.get(), index, capacity)); }
    uint8_t* payload(uint32_t index) const { return slot(index) + P2P_FRAME_OFFSET; }
    uint64_t signal(uint32_t index) const { return p2p_signal_load(slot(index)); }
};

inline P2pHeader header_of(const void* slot) {
    P2pHeader header;
    std::memcpy(&header, static_cast<const uint8_t*>(slot) + P2P_SIGNAL, sizeof header);
    return header;
}

// Seals what lies in the slot, and perhaps damages the frame's header after it or before. True where the frame is
// still the one that `fields` describe.
inline bool seal(Choices& choices, Window& window, uint32_t slot, const P2pHeader& fields) {
    p2p_frame_seal(window.slot(slot), &fields);
    uint8_t* header = window.slot(slot) + P2P_SIGNAL;
    if (choices.below(3) < 2 || !damage(choices, header, P2P_FRAME_HEADER, 2)) return true;
    P2pHeader now = header_of(window.slot(slot));
    if (choices.below(4) == 0) return false;
    now.checksum = p2p_checksum(&now, window.payload(slot), std::min<uint64_t>(now.length, window.capacity));
    std::memcpy(header, &now, sizeof now);
    return false;
}

void frame(Choices& choices);
void pages(Choices& choices);
void server(Choices& choices);
void client(Choices& choices);
void channel(Choices& choices);

}  // namespace fuzz
