// What both ends of a channel share: notes, paths that open and close, commands that wait for the shell.
#include <cstring>

#include "p2p/native/channel_end.h"
#include "p2p/native/frame.h"

using namespace p2p;

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

namespace p2p {

bool tell(const P2pPath& path, P2pNote fields, const void* blob, size_t blob_bytes) {
    alignas(8) uint8_t note[P2P_NOTE_BYTES];
    fields.blob_bytes = uint32_t(blob_bytes);
    uint32_t bytes = p2p_note_seal(&fields, blob, note);
    return bytes && path.ops->tell(path.self, note, bytes) >= 0;
}

bool config_valid(const P2pChannelConfig& config) {
    return config.paths && config.paths <= P2P_PATHS && config.piece_bytes && config.piece_bytes <= 512 * 1024 &&
           config.silence_ns && config.grace_ns && config.reopen_first_ns &&
           config.reopen_last_ns >= config.reopen_first_ns;
}

}  // namespace p2p

void P2pEnd::command(uint32_t kind, uint32_t path, uint32_t generation, const void* blob, uint32_t blob_bytes) {
    auto made = std::make_unique<P2pCommand>();
    made->kind = kind;
    made->path = path;
    made->generation = generation;
    made->blob_bytes = blob_bytes;
    if (blob_bytes) std::memcpy(made->blob, blob, blob_bytes);
    commands.push_back(std::move(made));
}

void P2pEnd::lose() {
    if (!lost) command(P2P_COMMAND_LOST, 0, 0);
    lost = true;
}

uint32_t P2pEnd::live_paths() {
    uint32_t count = 0;
    for (uint32_t i = 0; i < P2P_PATHS; i++) count += path(i).state == PathState::LIVE;
    return count;
}

P2P_API void p2p_end_free(P2pEnd* end) { delete end; }

P2P_API int p2p_end_path_open(P2pEnd* end, uint32_t index, uint32_t generation, P2pPath ends, uint64_t now_ns) {
    if (index >= P2P_PATHS || end->lost) return -1;
    PathEnd& path = end->path(index);
    bool first = path.state == PathState::NONE && generation == 0;
    bool asked = path.state == PathState::OPENING && generation == path.generation;
    if (!first && !asked) return -1;
    path.state = PathState::LIVE;
    path.ends = ends;
    end->counts.opened++;
    end->path_opened(index, now_ns);
    return 0;
}

P2P_API void p2p_end_path_closed(P2pEnd* end, uint32_t index, uint32_t generation, uint64_t now_ns) {
    if (index < P2P_PATHS && end->path(index).generation == generation) end->path_closed(index, now_ns);
}

P2P_API int p2p_end_step(P2pEnd* end, uint64_t now_ns) try {
    return end->lost ? 0 : end->step(now_ns);
} P2P_CATCH(P2P_E_MEMORY)

P2P_API int p2p_end_command(P2pEnd* end, P2pCommand* out) {
    if (end->commands.empty()) return 0;
    const P2pCommand& next = *end->commands.front();
    std::memcpy(out, &next, offsetof(P2pCommand, blob) + next.blob_bytes);
    end->commands.pop_front();
    return 1;
}

P2P_API void p2p_end_bye(P2pEnd* end) try {
    end->lost = true;
    for (uint32_t i = 0; i < P2P_PATHS; i++)
        if (end->path(i).state == PathState::LIVE) tell(end->path(i).ends, end->note(P2P_NOTE_BYE));
} P2P_CATCH()

P2P_API void p2p_end_counts(const P2pEnd* end, P2pChannelCounts* out) {
    *out = end->counts;
    out->waiting = end->waiting();
}
