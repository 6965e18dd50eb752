// How long one server's replies take. Pure.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

namespace experts {

// By size of what was in flight, in classes of powers of two; by time in quarter octaves from 16 us to 1 s. Recent:
// counts of a class fade by half whenever it has seen 512 replies.
class Latency {
  public:
    void learn(uint32_t units, uint64_t ns) {
        Size& size = sizes_[class_of(units)];
        size.count[step_of(ns)]++;
        if (++size.total >= 512) {
            size.total = 0;
            for (uint16_t& count : size.count) size.total += count /= 2;
        }
        // One reply beside the hundredth: of few replies a single one that a stall held up says nothing.
        uint32_t above = 0, most = size.total < 8 ? 0 : 1 + size.total / 100, step = STEPS - 1;
        while (step && (above += size.count[step]) <= most) step--;
        size.q99_ns = edge_of(step);
        known_ = true;
    }

    bool known() const { return known_; }

    static constexpr uint32_t SIZES = 8;
    static uint32_t class_of(uint32_t units) {
        return std::min<uint32_t>(SIZES - 1, std::max(0, int(std::bit_width(units)) - 4));
    }
    // Of a class, where it is well known; else 0.
    uint64_t class_q99_ns(uint32_t size) const { return sizes_[size].total < 32 ? 0 : sizes_[size].q99_ns; }

    // 99 of 100 replies of that size came within this time; estimated from the nearest size where none of it was seen.
    // 0: nothing is known.
    uint64_t q99_ns(uint32_t units) const {
        uint32_t own = class_of(units);
        for (uint32_t off = 0; off < SIZES; off++) {
            // A larger one took no less; a smaller one, at worst, less by as much as it is smaller.
            if (own + off < SIZES && sizes_[own + off].total) return sizes_[own + off].q99_ns;
            if (own >= off && sizes_[own - off].total) return sizes_[own - off].q99_ns << off;
        }
        return 0;
    }

  private:
    static constexpr uint32_t STEPS = 64;

    struct Size {
        uint16_t count[STEPS] = {};
        uint32_t total = 0;
        uint64_t q99_ns = 0;
    };

    static uint32_t step_of(uint64_t ns) {
        uint64_t fine = ns >> 12;  // 4.096 us: two bits below the first octave
        if (fine < 4) return 0;
        uint32_t octave = uint32_t(std::bit_width(fine)) - 3;
        return std::min<uint32_t>(STEPS - 1, octave * 4 + uint32_t(fine >> octave & 3));
    }
    static uint64_t edge_of(uint32_t step) { return uint64_t(step % 4 + 5) << (step / 4 + 12); }

    Size sizes_[SIZES];
    bool known_ = false;
};

}  // namespace experts
