// One private mapping for many arrays, in huge pages where the host has them: a decode step is a walk over
// weights.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace eaas {

class Arena {
  public:
    Arena() = default;
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        if (base_) munmap(base_, mapped_);
    }

    // Runs `layout(*this)` twice: once to count, once to hand out zeroed memory. False: the host has too
    // little.
    template <class Layout>
    bool build(Layout layout) {
        layout(*this);
        mapped_ = (used_ + kHuge - 1) / kHuge * kHuge + kHuge;
        void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return false;
        base_ = static_cast<uint8_t*>(memory);
        madvise(base_, mapped_, MADV_HUGEPAGE);
        used_ = (kHuge - reinterpret_cast<uintptr_t>(base_) % kHuge) % kHuge;
        layout(*this);
        return true;
    }

    template <class T = uint8_t>
    T* take(uint64_t count) {
        T* taken = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
        used_ += (count * sizeof(T) + kAlign - 1) / kAlign * kAlign;
        return taken;
    }

  private:
    static constexpr uint64_t kHuge = 2u << 20;
    static constexpr uint64_t kAlign = 128;
    uint8_t* base_ = nullptr;
    uint64_t mapped_ = 0;
    uint64_t used_ = 0;
};

inline uint64_t span_begin(uint64_t count, uint32_t lane, uint32_t lanes) { return count * lane / lanes; }

// The part of `count` items that one lane takes: static and contiguous, so that a lane meets the same weights
// each step.
struct Span {
    uint32_t begin, end;
    Span(uint64_t count, uint32_t lane, uint32_t lanes)
        : begin(static_cast<uint32_t>(span_begin(count, lane, lanes))),
          end(static_cast<uint32_t>(span_begin(count, lane + 1, lanes))) {}
};

}  // namespace eaas
