// What the two ends of a channel share: paths that live, notes that go out, commands that wait for the shell.
#pragma once
#include <cstring>
#include <deque>
#include <memory>

#include "p2p/native/channel.h"

namespace p2p {

constexpr uint32_t WINDOW_WRITES = 1024;             // that may be under way: as many as a STATE can list
constexpr uint64_t REPEAT_NS = 20'000'000;           // of a note whose path may have failed; doubled each time
constexpr uint64_t REPEAT_LAST_NS = 1'000'000'000;
constexpr uint32_t EVENTS_A_STEP = 64;               // of one path, so that none starves another
constexpr uint64_t FLAPPING_NS = 10'000'000'000;     // a path that fails sooner waits longer the next time

// FAILED: its transport broke, the owner has not yet said that it is closed. CLOSING: the shell closes it.
enum class PathState : uint8_t { NONE, OPENING, LIVE, FAILED, CLOSING, CLOSED };

struct End {
    uint64_t incarnation = 0;
    uint64_t nbytes = 0;
    P2pChannelConfig config{};
    P2pChannelCounts counts{};
    bool lost = false;
    std::deque<std::unique_ptr<P2pCommand>> commands;

    void command(uint32_t kind, uint32_t path, uint32_t generation, const void* blob = nullptr,
                 uint32_t blob_bytes = 0) {
        auto made = std::make_unique<P2pCommand>();
        made->kind = kind;
        made->path = path;
        made->generation = generation;
        made->blob_bytes = blob_bytes;
        if (blob_bytes) std::memcpy(made->blob, blob, blob_bytes);
        commands.push_back(std::move(made));
    }

    void lose() {
        if (!lost) command(P2P_COMMAND_LOST, 0, 0);
        lost = true;
    }

    int next_command(P2pCommand* out) {
        if (commands.empty()) return 0;
        std::memcpy(out, commands.front().get(), offsetof(P2pCommand, blob) + commands.front()->blob_bytes);
        commands.pop_front();
        return 1;
    }
};

// Whether the path took it.
inline bool tell(const End& end, const P2pPath& path, P2pNote fields, const void* blob = nullptr,
                 uint32_t blob_bytes = 0) {
    alignas(8) uint8_t note[P2P_NOTE_BYTES];
    fields.incarnation = end.incarnation;
    fields.blob_bytes = blob_bytes;
    uint32_t bytes = p2p_note_seal(&fields, blob, note);
    return bytes && path.ops->tell(path.self, note, bytes) >= 0;
}

inline P2pNote note_of(uint8_t kind, uint32_t path = 0, uint32_t generation = 0) {
    P2pNote note{};
    note.kind = kind;
    note.path = uint16_t(path);
    note.generation = generation;
    return note;
}

inline bool config_valid(const P2pChannelConfig& config) {
    return config.paths && config.paths <= P2P_PATHS && config.piece_bytes && config.piece_bytes <= 512 * 1024 && config.silence_ns && config.grace_ns &&
           config.reopen_first_ns && config.reopen_last_ns >= config.reopen_first_ns;
}

}  // namespace p2p
