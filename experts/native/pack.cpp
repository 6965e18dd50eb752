// Writes the packed layout of kernels.h. Runs once per model and host, so it is plain code.
#include <stdint.h>
#include <string.h>

#include "experts/native/kernel_table.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the packed layouts are little-endian");

namespace {

uint16_t round_bf16(uint32_t bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits | 0x400000u) >> 16);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// From and To are the bits of an element: uint32_t for float32, uint16_t for bf16.
template <class To, class From>
To convert(From bits) {
    if constexpr (sizeof(To) == sizeof(From)) {
        return bits;
    } else if constexpr (sizeof(To) == 4) {
        return static_cast<uint32_t>(bits) << 16;
    } else {
        return round_bf16(bits);
    }
}

// One tile from 64 rows of k elements; a null row is padding. Returns the end of what was written.
template <class To, class From>
uint8_t* pack_tile(const uint8_t* const rows[EXPERTS_TILE_ROWS], uint32_t k, uint8_t* out) {
    constexpr uint32_t kPerStep = sizeof(To) == 2 ? 2 : 1;
    const uint32_t padded = (k + 1) / 2 * 2;
    for (uint32_t at = 0; at < padded; at += kPerStep) {
        for (uint32_t row = 0; row < EXPERTS_TILE_ROWS; ++row) {
            To step[kPerStep] = {};
            for (uint32_t i = 0; i < kPerStep && rows[row] != nullptr && at + i < k; ++i) {
                From bits;
                memcpy(&bits, rows[row] + static_cast<uint64_t>(at + i) * sizeof bits, sizeof bits);
                step[i] = convert<To>(bits);
            }
            memcpy(out, step, sizeof step);
            out += sizeof step;
        }
    }
    return out;
}

float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// The same for int8: group by group, 64 scales and then the steps of four k (kernel_table.h says how they come about).
template <class From>
uint8_t* pack_tile_int8(const uint8_t* const rows[EXPERTS_TILE_ROWS], uint32_t k, uint8_t* out) {
    constexpr uint32_t kGroup = EXPERTS_INT8_GROUP, kScaleBytes = EXPERTS_TILE_ROWS * sizeof(float);
    for (uint32_t first = 0; first < k; first += kGroup) {
        const uint32_t count = k - first < kGroup ? k - first : kGroup;
        for (uint32_t row = 0; row < EXPERTS_TILE_ROWS; ++row) {
            uint32_t bits[kGroup] = {}, top = 0;
            for (uint32_t i = 0; i < count && rows[row] != nullptr; ++i) {
                From stored;
                memcpy(&stored, rows[row] + static_cast<uint64_t>(first + i) * sizeof stored, sizeof stored);
                bits[i] = convert<uint32_t>(stored);
                top = (bits[i] & 0x7fffffffu) > top ? bits[i] & 0x7fffffffu : top;
            }
            const bool finite = top < 0x7f800000u;
            const float largest = as_float(top);
            const bool usable = finite && largest >= EXPERTS_INT8_LEAST;
            const float inverse = usable ? 127.0f / largest : 0.0f;
            const float scale = usable ? largest / 127.0f : finite ? 0.0f : __builtin_nanf("");
            memcpy(out + row * sizeof scale, &scale, sizeof scale);
            uint8_t* to = out + kScaleBytes + row * 4;
            for (uint32_t i = 0; i < kGroup; ++i) {
                // The low byte of the sum is the nearest integer.
                const float shifted = (usable ? as_float(bits[i]) * inverse : 0.0f) + 12582912.0f;
                memcpy(to + i / 4 * 4 * EXPERTS_TILE_ROWS + i % 4, &shifted, 1);
            }
        }
        out += kScaleBytes + kGroup * EXPERTS_TILE_ROWS;
    }
    return out;
}

typedef uint8_t* (*PackTile)(const uint8_t* const*, uint32_t, uint8_t*);

PackTile pack_tile_for(int dtype, int w_dtype) {
    const bool from_f32 = w_dtype == EAAS_F32;
    if (dtype == EAAS_INT8) return from_f32 ? pack_tile_int8<uint32_t> : pack_tile_int8<uint16_t>;
    if (dtype == EAAS_F32) return from_f32 ? pack_tile<uint32_t, uint32_t> : pack_tile<uint32_t, uint16_t>;
    return from_f32 ? pack_tile<uint16_t, uint32_t> : pack_tile<uint16_t, uint16_t>;
}

uint64_t element_bytes(int dtype) { return dtype == EAAS_F32 ? 4 : 2; }

// Of the types with groups: their k, and the bytes of each for one row.
constexpr struct {
    uint32_t k, bytes;
} kGroups[EAAS_DTYPES] = {{}, {}, {EXPERTS_INT8_GROUP, EXPERTS_INT8_GROUP + 4}, {128, 132}, {32, 17}, {128, 72}, {32, 24}};

uint64_t tiles_bytes(int dtype, uint64_t tiles, uint64_t k) {
    if (const auto [group, bytes] = kGroups[dtype]; group)
        return tiles * EXPERTS_TILE_ROWS * ((k + group - 1) / group) * bytes;
    return tiles * EXPERTS_TILE_ROWS * ((k + 1) / 2 * 2) * element_bytes(dtype);
}

}  // namespace

P2P_API uint64_t experts_pack_bytes(int dtype, uint32_t rows, uint32_t k) {
    return tiles_bytes(dtype, (uint64_t{rows} + EXPERTS_TILE_ROWS - 1) / EXPERTS_TILE_ROWS, k);
}

P2P_API uint64_t experts_gate_up_bytes(int dtype, uint32_t inter, uint32_t hidden) {
    const uint64_t tiles = (uint64_t{inter} + EXPERTS_GATE_UP_COLUMNS - 1) / EXPERTS_GATE_UP_COLUMNS;
    return tiles_bytes(dtype, tiles, hidden);
}

P2P_API void experts_pack_matrix(int dtype, const void* w, int w_dtype, uint32_t rows, uint32_t k, void* out) {
    const PackTile pack_tile = pack_tile_for(dtype, w_dtype);
    const uint64_t row_bytes = k * element_bytes(w_dtype);
    uint8_t* to = static_cast<uint8_t*>(out);
    for (uint64_t first = 0; first < rows; first += EXPERTS_TILE_ROWS) {
        const uint8_t* sources[EXPERTS_TILE_ROWS];
        for (uint64_t i = 0, row = first; i < EXPERTS_TILE_ROWS; ++i, ++row)
            sources[i] = row < rows ? static_cast<const uint8_t*>(w) + row * row_bytes : nullptr;
        to = pack_tile(sources, k, to);
    }
}

P2P_API void experts_pack_gate_up(int dtype, const void* gate, const void* up, int w_dtype, uint32_t inter,
                                  uint32_t hidden, void* out) {
    const PackTile pack_tile = pack_tile_for(dtype, w_dtype);
    const uint64_t row_bytes = hidden * element_bytes(w_dtype);
    uint8_t* to = static_cast<uint8_t*>(out);
    for (uint64_t first = 0; first < inter; first += EXPERTS_GATE_UP_COLUMNS) {
        const uint8_t* sources[EXPERTS_TILE_ROWS];
        for (uint32_t i = 0; i < EXPERTS_TILE_ROWS; ++i) {
            const uint64_t column = first + i / 32 * 16 + i % 16;
            const void* matrix = i / 16 % 2 == 0 ? gate : up;
            sources[i] = column < inter ? static_cast<const uint8_t*>(matrix) + column * row_bytes : nullptr;
        }
        to = pack_tile(sources, hidden, to);
    }
}
