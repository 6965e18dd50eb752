#include "p2p/native/note.h"

#include <cstring>

#include "p2p/native/frame.h"

P2P_API uint32_t p2p_note_seal(const P2pNote* fields, const void* blob, void* out) {
    if (fields->blob_bytes > P2P_BLOB_BYTES) return 0;
    auto* note = static_cast<uint8_t*>(out);
    P2pNote header = *fields;
    header.magic = P2P_NOTE_MAGIC;
    header.version = P2P_NOTE_VERSION;
    if (header.blob_bytes) std::memcpy(note + P2P_NOTE_HEADER, blob, header.blob_bytes);
    header.checksum = p2p_checksum(&header, note + P2P_NOTE_HEADER, header.blob_bytes);
    std::memcpy(note, &header, sizeof header);
    return P2P_NOTE_HEADER + header.blob_bytes;
}

P2P_API int p2p_note_open(const void* note, uint32_t bytes, uint64_t incarnation, P2pNote* out) {
    if (bytes < P2P_NOTE_HEADER || bytes > P2P_NOTE_BYTES) return -1;
    std::memcpy(out, note, sizeof *out);
    if (out->magic != P2P_NOTE_MAGIC || out->version != P2P_NOTE_VERSION) return -1;
    if (out->blob_bytes != bytes - P2P_NOTE_HEADER || out->incarnation != incarnation) return -1;
    const auto* blob = static_cast<const uint8_t*>(note) + P2P_NOTE_HEADER;
    return p2p_checksum(out, blob, out->blob_bytes) == out->checksum ? 0 : -1;
}
