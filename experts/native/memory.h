// Memory of a client or a server: blocks that stay for the next call or batch, counters that one thread writes and
// others read, and masks of its peers.
#pragma once
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace experts {

struct FreeMemory {
    void operator()(uint8_t* memory) const { std::free(memory); }
};

// Aligned to 64 bytes, of which its size is a multiple. Throws std::bad_alloc.
class Block {
  public:
    Block() = default;
    explicit Block(uint64_t bytes) : bytes_((bytes + 63) / 64 * 64) {
        memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, bytes_)));
        if (!memory_) throw std::bad_alloc();
    }
    uint8_t* data() const { return memory_.get(); }
    uint64_t bytes() const { return bytes_; }

  private:
    std::unique_ptr<uint8_t, FreeMemory> memory_;
    uint64_t bytes_ = 0;
};

// Grows, never shrinks; contents are lost when it grows. Throws std::bad_alloc.
class Buffer {
  public:
    uint8_t* need(uint64_t bytes) {
        if (bytes > block_.bytes()) {
            block_ = Block();
            block_ = Block(bytes + bytes / 2);
        }
        return block_.data();
    }
    uint8_t* data() const { return block_.data(); }

  private:
    Block block_;
};

// Memory that is taken piece by piece, and is free all at once. Throws std::bad_alloc.
class Arena {
  public:
    uint8_t* take(uint64_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        for (; block_ < blocks_.size() && blocks_[block_].bytes() - used_ < bytes; block_++) used_ = 0;
        if (block_ == blocks_.size()) blocks_.emplace_back(std::max<uint64_t>(bytes, 4u << 20));
        used_ += bytes;
        return blocks_[block_].data() + used_ - bytes;
    }
    void reset() { block_ = used_ = 0; }

  private:
    std::vector<Block> blocks_;
    size_t block_ = 0;
    uint64_t used_ = 0;
};

inline void set(uint64_t& field, uint64_t value) { std::atomic_ref(field).store(value, std::memory_order_relaxed); }
inline void add(uint64_t& field, uint64_t amount) {
    set(field, std::atomic_ref(field).load(std::memory_order_relaxed) + amount);
}
// All of a structure of counters, each 8 bytes.
template <class Counters>
void read_counters(Counters& counters, Counters* out) {
    static_assert(sizeof(Counters) % sizeof(uint64_t) == 0);
    auto* from = reinterpret_cast<uint64_t*>(&counters);
    for (size_t i = 0; i < sizeof(Counters) / sizeof(uint64_t); i++) {
        const uint64_t value = std::atomic_ref(from[i]).load(std::memory_order_relaxed);
        std::memcpy(reinterpret_cast<char*>(out) + i * sizeof value, &value, sizeof value);
    }
}

// The numbers of a mask's bits, lowest first: for (uint32_t server : Bits{mask}).
struct Bits {
    uint64_t left;

    Bits begin() const { return *this; }
    static Bits end() { return {0}; }
    uint32_t operator*() const { return uint32_t(std::countr_zero(left)); }
    Bits& operator++() { return left &= left - 1, *this; }
    bool operator!=(const Bits& other) const { return left != other.left; }
};

}  // namespace experts
