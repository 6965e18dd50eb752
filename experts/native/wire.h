// What travels in a p2p frame between a client and an expert server: sizes, hashes and checks of the fields that
// experts/wire.py describes.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

#include "experts/native/build/wire_format.h"
#include "p2p/native/cpu.h"

namespace experts {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

// What both ends agree on before the first request.
struct WireShape {
    uint32_t layers;
    uint32_t experts;
    uint32_t hidden;
    uint32_t top_k;
    uint32_t dtype;  // as kernels.h numbers it
    uint64_t model_hash;

    uint64_t source_bytes() const { return uint64_t(hidden) * (dtype == 0 ? 4 : 2); }
    uint64_t row_bytes() const { return (source_bytes() + 63) / 64 * 64; }
    uint64_t reply_row_bytes() const { return uint64_t(hidden) * 4; }
};

inline uint64_t routing_bytes(uint64_t pairs) { return (pairs * sizeof(WirePair) + 63) / 64 * 64; }
inline uint64_t request_bytes(const WireShape& shape, uint64_t rows, uint64_t pairs) {
    return sizeof(WireHeader) + routing_bytes(pairs) + rows * shape.row_bytes();
}
inline uint64_t reply_bytes(const WireShape& shape, uint64_t pairs) {
    return sizeof(WireHeader) + pairs * shape.reply_row_bytes();
}

// Order matters to the hash, each entry is mixed on its own so that numpy can compute it too.
inline uint64_t routing_hash(const WirePair* pairs, uint32_t count) {
    uint64_t sum = count;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t word;
        std::memcpy(&word, &pairs[i], sizeof word);
        uint64_t mixed = (word + (i + 1ull) * 0x9E3779B97F4A7C15ull) * 0xD6E8FEB86659FD93ull;
        mixed ^= mixed >> 32;
        sum += mixed * 0xD6E8FEB86659FD93ull;
    }
    return sum;
}

// What the digest is made of. It is taken of each row as the kernel leaves it, still in the cache, before the row is
// copied, sealed and sent; the client takes it again of the rows that it will sum. So it tells of whatever damages a
// row in between, in the memory of either host too, and the frame's checksum only of what came after it. It tells
// nothing of an arithmetic that is wrong, or of weights that are: those are for the self-test and SHA-256 at loading.
struct RowFold {
    uint64_t sum = 0;    // of each element's bits times a key that differs from column to column
    uint32_t over = 0;   // its top bit: some element is not finite
};

constexpr uint32_t COLUMN_KEY = 0x9E3779B1;

inline __attribute__((always_inline)) RowFold fold_columns(const float* row, uint32_t first, uint32_t last) {
    RowFold fold;
    for (uint32_t j = first; j < last; j++) {
        uint32_t bits;
        std::memcpy(&bits, row + j, sizeof bits);
        fold.sum += uint64_t(bits) * uint64_t((j * COLUMN_KEY) | 1);
        fold.over |= (bits & 0x7FFFFFFF) + 0x00800000;
    }
    return fold;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline RowFold fold_columns_avx2(const float* row, uint32_t first, uint32_t last) {
    return fold_columns(row, first, last);
}
inline const bool HAS_AVX2 = p2p::cpu().avx2;
inline RowFold fold_row(const float* row, uint32_t first, uint32_t last) {
    return HAS_AVX2 ? fold_columns_avx2(row, first, last) : fold_columns(row, first, last);
}
#else
inline RowFold fold_row(const float* row, uint32_t first, uint32_t last) { return fold_columns(row, first, last); }
#endif

inline bool finite_row(const float* row, uint32_t hidden) { return !(fold_row(row, 0, hidden).over >> 31); }

// Of all rows of a reply, in their order.
struct RowsDigest {
    uint64_t sum = 0;
    bool finite = true;

    void add(const RowFold& row) {
        sum = (sum ^ row.sum) * 0xD6E8FEB86659FD93ull;
        sum ^= sum >> 32;
        finite &= !(row.over >> 31);
    }
};

// Whether a request of `length` bytes, already in private memory at `payload`, may be served. Every later
// access is covered by what is checked here.
inline bool request_valid(const WireShape& shape, const uint8_t* payload, uint64_t length, uint64_t reply_capacity) {
    if (length < sizeof(WireHeader)) return false;
    WireHeader header;
    std::memcpy(&header, payload, sizeof header);
    if (header.magic != WIRE_MAGIC || header.version != WIRE_VERSION || header.kind != WIRE_REQUEST)
        return false;
    if (header.model_hash != shape.model_hash || header.layer >= shape.layers) return false;
    if (header.hidden != shape.hidden || header.dtype != shape.dtype) return false;
    if (header.status != STATUS_OK || header.zero0 || header.digest || header.service_ns) return false;
    if (header.rows == 0 || header.rows > MAX_ROWS) return false;
    if (header.pairs == 0 || header.pairs > uint64_t(header.rows) * shape.top_k) return false;
    if (length != request_bytes(shape, header.rows, header.pairs)) return false;
    if (reply_bytes(shape, header.pairs) > reply_capacity) return false;
    const WirePair* pairs = reinterpret_cast<const WirePair*>(payload + sizeof(WireHeader));
    for (uint32_t i = 0; i < header.pairs; i++) {
        const WirePair& pair = pairs[i];
        if (pair.row >= header.rows || pair.expert >= shape.experts || pair.k_slot >= shape.top_k ||
            pair.zero)
            return false;
    }
    return header.routing_hash == routing_hash(pairs, header.pairs);
}

// Whether what came whole speaks another version: no reason to think that its sender damages anything.
inline bool of_another_release(const uint8_t* payload, uint64_t length) {
    WireHeader header;
    if (length < sizeof header) return false;
    std::memcpy(&header, payload, sizeof header);
    return header.magic == WIRE_MAGIC && header.version != WIRE_VERSION;
}

// Whether a reply, already in private memory, answers that request; `status` receives its verdict.
inline bool reply_valid(const WireShape& shape, const uint8_t* payload, uint64_t length, uint32_t layer,
                        uint32_t rows, uint32_t pairs, uint64_t routing, uint16_t* status) {
    if (length < sizeof(WireHeader)) return false;
    WireHeader header;
    std::memcpy(&header, payload, sizeof header);
    if (header.magic != WIRE_MAGIC || header.version != WIRE_VERSION || header.kind != WIRE_REPLY)
        return false;
    if (header.zero0 || (header.digest && header.status != STATUS_OK)) return false;
    *status = header.status;
    // A request that the server could not read comes back without its particulars.
    if (header.status == STATUS_INVALID) return length == sizeof(WireHeader);
    if (header.model_hash != shape.model_hash || header.layer != layer || header.rows != rows) return false;
    if (header.pairs != pairs || header.hidden != shape.hidden || header.dtype != shape.dtype) return false;
    if (header.routing_hash != routing) return false;
    if (header.status == STATUS_NOT_HELD) return length == sizeof(WireHeader);
    return header.status == STATUS_OK && length == reply_bytes(shape, pairs);
}

}  // namespace experts
