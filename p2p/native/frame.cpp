#include "p2p/native/frame.h"

#include <array>
#include <atomic>
#include <cstring>

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

uint64_t block_portable(const uint8_t* data) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < KEYS.size(); i++) {
        uint32_t word;
        std::memcpy(&word, data + 4 * i, 4);
        sum += uint64_t(word) * KEYS[i];
    }
    return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) uint64_t block_avx2(const uint8_t* data) {
    __m256i even[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i odd[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    const auto* keys = reinterpret_cast<const uint8_t*>(KEYS.data());
    for (uint64_t at = 0; at < BLOCK_BYTES; at += 64) {
        for (uint64_t half = 0; half < 2; half++) {
            __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + at + 32 * half));
            __m256i key = _mm256_load_si256(reinterpret_cast<const __m256i*>(keys + at + 32 * half));
            even[half] = _mm256_add_epi64(even[half], _mm256_mul_epu32(word, key));
            word = _mm256_srli_epi64(word, 32);
            key = _mm256_srli_epi64(key, 32);
            odd[half] = _mm256_add_epi64(odd[half], _mm256_mul_epu32(word, key));
        }
    }
    alignas(32) uint64_t lane[4];
    __m256i sum = _mm256_add_epi64(_mm256_add_epi64(even[0], even[1]), _mm256_add_epi64(odd[0], odd[1]));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lane), sum);
    return lane[0] + lane[1] + lane[2] + lane[3];
}
const auto block_sum = __builtin_cpu_supports("avx2") ? block_avx2 : block_portable;
#else
constexpr auto block_sum = block_portable;
#endif

// A block shorter than the full one: missing bytes are zeros.
uint64_t partial_sum(const uint8_t* data, uint64_t bytes) {
    uint64_t sum = 0;
    for (uint64_t at = 0; at < bytes; at += 4) {
        uint32_t word = 0;
        std::memcpy(&word, data + at, bytes - at < 4 ? bytes - at : 4);
        sum += uint64_t(word) * KEYS[at / 4];
    }
    return sum;
}

uint64_t mix(uint64_t h) {
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD;
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53;
    return h ^ (h >> 33);
}

}  // namespace

P2P_API uint64_t p2p_checksum(const void* header56, const void* payload, uint64_t length) {
    uint64_t h = partial_sum(static_cast<const uint8_t*>(header56), HEADER_SEALED);
    const auto* data = static_cast<const uint8_t*>(payload);
    for (; length >= BLOCK_BYTES; length -= BLOCK_BYTES, data += BLOCK_BYTES)
        h = h * BLOCK_FACTOR + block_sum(data);
    if (length) h = h * BLOCK_FACTOR + partial_sum(data, length);
    return mix(h);
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

P2P_API int p2p_frame_open(const void* slot, uint64_t capacity, uint64_t incarnation, uint64_t sender,
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
    if (header_out->incarnation != incarnation) return P2P_E_INCARNATION;
    if (header_out->sender != sender) return P2P_E_SENDER;
    if (header_out->sequence != sequence) return P2P_E_SEQUENCE;
    if (header_out->attempt >= P2P_ATTEMPT_LIMIT) return P2P_E_ATTEMPT;
    std::memcpy(payload_out, frame + P2P_FRAME_HEADER, header_out->length);
    // The checksum must read the copy, not what the compiler may still remember of the slot.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    bool whole = p2p_checksum(header_out, payload_out, header_out->length) == header_out->checksum;
    return whole ? int(header_out->length) : P2P_E_CHECKSUM;
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
