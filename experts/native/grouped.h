// The loop over tiles of weights in groups of k that share a scale, for `*.isa.cpp` files.
//
// A panel of rows is staged once and stays in the nearest caches while every tile's weights pass over it as one stream.
// Between groups the float accumulators wait in memory, which keeps their bits.
#pragma once

#include "experts/native/kernel_table.h"
#include "experts/native/simd.h"

namespace EAAS_ISA_NS {

constexpr uint32_t kTile = EXPERTS_TILE_ROWS;

// Kind has
//     Staged                          one group of one row, as stage(x, count, to) makes it of `count` bf16
//     kGroup, kGroupBytes             k of a group, and bytes of one group of a tile
//     kPanelRows, kStagedGroups       most rows, and most groups of all of them, that are staged at once; rows of more
//                                     groups are staged in spans, tile by tile
//     add(w, count, staged, m, acc)   adds `count` groups of m rows to acc[m][64]
template <class Kind>
void grouped_tiles(const Product& p, Finish finish) {
    alignas(64) typename Kind::Staged staged[Kind::kStagedGroups];
    alignas(64) float acc[Kind::kPanelRows * kTile];
    const auto* const rows = static_cast<const uint16_t*>(p.x);
    const uint32_t k = p.k, m = p.m;
    const uint32_t groups = (k + Kind::kGroup - 1) / Kind::kGroup;
    const uint32_t span = groups < Kind::kStagedGroups ? groups : Kind::kStagedGroups;
    const uint32_t fitting = Kind::kStagedGroups / span;
    const uint32_t panel = fitting < Kind::kPanelRows ? fitting : Kind::kPanelRows;
    for (uint32_t row = 0; row < m; row += panel) {
        const uint32_t now = m - row < panel ? m - row : panel;
        uint32_t held = groups;  // the first group of the span that is staged
        for (uint32_t tile = p.tile0; tile < p.tile1; ++tile) {
            const uint8_t* w = static_cast<const uint8_t*>(p.packed) + uint64_t{tile} * groups * Kind::kGroupBytes;
            for (uint32_t i = 0; i < now * kTile; ++i) acc[i] = 0.0f;
            for (uint32_t first = 0; first < groups; first += span) {
                const uint32_t end = groups - first < span ? groups : first + span;
                for (uint32_t g = first; held != first && g < end; ++g) {
                    const uint32_t k0 = g * Kind::kGroup, count = k - k0 < Kind::kGroup ? k - k0 : Kind::kGroup;
                    for (uint32_t i = 0; i < now; ++i)
                        Kind::stage(rows + (row + i) * p.x_stride + k0, count, staged[(g - first) * now + i]);
                }
                held = first;
                Kind::add(w, end - first, staged, now, acc);
                w += (end - first) * Kind::kGroupBytes;
            }
            for (uint32_t i = 0; i < now; ++i) finish(tile, row + i, acc + i * kTile);
        }
    }
}

}  // namespace EAAS_ISA_NS
