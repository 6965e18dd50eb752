#include "p2p/native/window.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <numeric>

#include "p2p/native/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint64_t HEADER_SEALED = offsetof(P2pHeader, checksum);
constexpr uint64_t BLOCK_BYTES = 1024;
constexpr uint64_t BLOCK_FACTOR = 0x9E3779B97F4A7C15;  // odd, hence invertible mod 2^64

constexpr std::array<uint32_t, BLOCK_BYTES / 4> make_keys() {
    std::array<uint32_t, BLOCK_BYTES / 4> keys{};
    uint64_t state = 0x70327066;
    for (uint32_t& key : keys) {
        state += 0x9E3779B97F4A7C15;  // splitmix64
        uint64_t z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        key = uint32_t((z ^ (z >> 31)) >> 32) | 1;
    }
    return keys;
}

alignas(64) constexpr std::array<uint32_t, BLOCK_BYTES / 4> KEYS = make_keys();

// The last word may be short: missing bytes are zeros.
uint64_t sum_words(const uint8_t* data, uint64_t bytes, const uint32_t* keys) {
    uint64_t sum = 0;
    uint32_t word;
    for (; bytes >= 4; bytes -= 4, data += 4) {
        std::memcpy(&word, data, 4);
        sum += uint64_t(word) * *keys++;
    }
    if (!bytes) return sum;
    word = 0;
    std::memcpy(&word, data, bytes);
    return sum + uint64_t(word) * *keys;
}

// The sum must read the copy, not what the compiler may still remember of the slot.
inline __attribute__((always_inline)) void copied() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// One form for each instruction set: sums `bytes`, a multiple of STEP and at most a block. Where there is a `copy` it
// first copies all of them there, and sums the copy while the cache holds it.
constexpr uint64_t STEP = 64;
using Block = uint64_t(uint8_t* copy, const uint8_t* data, uint64_t bytes);

uint64_t block_portable(uint8_t* copy, const uint8_t* data, uint64_t bytes) {
    if (copy) {
        std::memcpy(copy, data, bytes);
        copied();
        data = copy;
    }
    return sum_words(data, bytes, KEYS.data());
}

#if defined(__x86_64__)
// Not memcpy: its call costs as much as copying half a block. Four sums: no addition waits for the one before it.
__attribute__((target("avx2"))) uint64_t block_avx2(uint8_t* copy, const uint8_t* data, uint64_t bytes) {
    if (copy) {
#pragma GCC unroll 4
        for (uint64_t at = 0; at < bytes; at += 64) {
            __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at));
            __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at + 32));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(copy + at), low);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(copy + at + 32), high);
        }
        copied();
        data = copy;
    }
    __m256i sum[4] = {};
    const auto* keys = reinterpret_cast<const uint8_t*>(KEYS.data());
#pragma GCC unroll 4
    for (uint64_t at = 0; at < bytes; at += 64)
        for (uint64_t half = 0; half < 2; half++) {
            __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at + 32 * half));
            __m256i key = _mm256_load_si256(reinterpret_cast<const __m256i*>(keys + at + 32 * half));
            __m256i even = _mm256_mul_epu32(word, key);
            __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(word, 32), _mm256_srli_epi64(key, 32));
            sum[half] = _mm256_add_epi64(sum[half], even);
            sum[2 + half] = _mm256_add_epi64(sum[2 + half], odd);
        }
    __m256i all = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
    __m128i two = _mm_add_epi64(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    return uint64_t(_mm_cvtsi128_si64(two)) + uint64_t(_mm_extract_epi64(two, 1));
}

__attribute__((target("avx512f"))) uint64_t block_avx512(uint8_t* copy, const uint8_t* data, uint64_t bytes) {
    if (copy) {
        for (uint64_t at = 0; at < bytes; at += 64)
            _mm512_storeu_si512(copy + at, _mm512_loadu_si512(data + at));
        copied();
        data = copy;
    }
    // The masked forms, with nothing masked: of the plain ones the compiler says that they read undefined registers.
    __m512i even = _mm512_setzero_si512(), odd = even;
    const auto* keys = reinterpret_cast<const uint8_t*>(KEYS.data());
    for (uint64_t at = 0; at < bytes; at += 64) {
        __m512i word = _mm512_loadu_si512(data + at);
        __m512i key = _mm512_load_si512(keys + at);
        even = _mm512_add_epi64(even, _mm512_maskz_mul_epu32(0xFF, word, key));
        word = _mm512_maskz_srli_epi64(0xFF, word, 32);
        key = _mm512_maskz_srli_epi64(0xFF, key, 32);
        odd = _mm512_add_epi64(odd, _mm512_maskz_mul_epu32(0xFF, word, key));
    }
    alignas(64) uint64_t lane[8];
    _mm512_store_si512(lane, _mm512_add_epi64(even, odd));
    return std::accumulate(lane, lane + 8, uint64_t{0});
}

Block* const block_sum = p2p::cpu().avx512 ? block_avx512 : p2p::cpu().avx2 ? block_avx2 : block_portable;
#else
constexpr Block* block_sum = block_portable;
#endif

uint64_t mix(uint64_t h) {
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD;
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53;
    return h ^ (h >> 33);
}

// Of a payload; where there is a `copy`, of the copy of it that this makes there.
uint64_t checksum(const void* header56, const void* payload, uint64_t length, uint8_t* copy) {
    uint64_t h = sum_words(static_cast<const uint8_t*>(header56), HEADER_SEALED, KEYS.data());
    const auto* data = static_cast<const uint8_t*>(payload);
    for (uint64_t bytes; length; length -= bytes, data += bytes) {
        bytes = std::min(length, BLOCK_BYTES);
        uint64_t whole = bytes / STEP * STEP;
        uint64_t sum = block_sum(copy, data, whole);
        const uint8_t* rest = data + whole;
        if (copy) {
            std::memcpy(copy + whole, rest, bytes - whole);
            copied();
            rest = copy + whole;
            copy += bytes;
        }
        h = h * BLOCK_FACTOR + sum + sum_words(rest, bytes - whole, KEYS.data() + whole / 4);
    }
    return mix(h);
}

}  // namespace

P2P_API uint64_t p2p_checksum(const void* header56, const void* payload, uint64_t length) {
    return checksum(header56, payload, length, nullptr);
}

P2P_API void p2p_frame_seal(void* slot, const P2pHeader* fields) {
    P2pHeader header = *fields;
    header.magic = P2P_FRAME_MAGIC;
    header.version = P2P_FRAME_VERSION;
    header.flags = 0;
    header.reserved = 0;
    header.checksum = p2p_checksum(&header, p2p_payload(slot), header.length);
    std::memcpy(static_cast<uint8_t*>(slot) + P2P_SIGNAL, &header, sizeof header);
}

P2P_API int p2p_frame_open(const void* slot, uint64_t capacity, uint64_t receiver, uint64_t sender,
                           uint64_t sequence, P2pHeader* header_out, void* payload_out) {
    const auto* frame = static_cast<const uint8_t*>(slot) + P2P_SIGNAL;
    std::memcpy(header_out, frame, sizeof *header_out);
    // From here on the slot's header is not read again: its writer may be alive and wrong.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (header_out->magic != P2P_FRAME_MAGIC) return P2P_E_MAGIC;
    if (header_out->version != P2P_FRAME_VERSION) return P2P_E_VERSION;
    if (header_out->flags != 0) return P2P_E_FLAGS;
    if (header_out->reserved != 0) return P2P_E_RESERVED;
    if (header_out->length > capacity || header_out->length > P2P_PAYLOAD_LIMIT) return P2P_E_LENGTH;
    if (header_out->receiver != receiver) return P2P_E_INCARNATION;
    if (header_out->sender != sender) return P2P_E_SENDER;
    if (header_out->sequence != sequence) return P2P_E_SEQUENCE;
    if (header_out->attempt >= P2P_ATTEMPT_LIMIT) return P2P_E_ATTEMPT;
    auto* copy = static_cast<uint8_t*>(payload_out);
    uint64_t found = checksum(header_out, frame + P2P_FRAME_HEADER, header_out->length, copy);
    return found == header_out->checksum ? int(header_out->length) : P2P_E_CHECKSUM;
}

P2P_API void p2p_signal_store(void* slot, uint64_t value) {
    __atomic_store_n(static_cast<uint64_t*>(slot), value, __ATOMIC_RELEASE);
}

P2P_API uint64_t p2p_signal_load(const void* slot) {
    return __atomic_load_n(static_cast<const uint64_t*>(slot), __ATOMIC_ACQUIRE);
}

P2P_API void p2p_signals_load(const void* first, uint64_t stride_bytes, uint64_t count, uint64_t* out) {
    const auto* at = static_cast<const uint8_t*>(first);
    for (uint64_t i = 0; i < count; i++, at += stride_bytes) out[i] = p2p_signal_load(at);
}

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
