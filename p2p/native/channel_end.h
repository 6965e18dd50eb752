// The two ends of a channel from within: what channel.cpp does for both, and what each does by itself.
#pragma once
#include <cstddef>
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

struct PathEnd {
    PathState state = PathState::NONE;
    uint32_t generation = 0;
    P2pPath ends{};
};

// Whether the path took it.
bool tell(const P2pPath& path, P2pNote fields, const void* blob = nullptr, size_t blob_bytes = 0);
bool config_valid(const P2pChannelConfig& config);

}  // namespace p2p

struct P2pEnd {
    uint64_t incarnation = 0;
    uint64_t nbytes = 0;
    P2pChannelConfig config{};
    P2pChannelCounts counts{};
    bool lost = false;
    std::deque<std::unique_ptr<P2pCommand>> commands;

    virtual ~P2pEnd() = default;
    virtual p2p::PathEnd& path(uint32_t index) = 0;
    virtual void path_opened(uint32_t index, uint64_t now_ns) = 0;
    virtual void path_closed(uint32_t index, uint64_t now_ns) = 0;  // of the generation that this end knows
    virtual bool step(uint64_t now_ns) = 0;
    virtual uint64_t waiting() const = 0;

    void command(uint32_t kind, uint32_t path, uint32_t generation, const void* blob = nullptr,
                 uint32_t blob_bytes = 0);
    void lose();
    uint32_t live_paths();

    P2pNote note(uint8_t kind, uint32_t path = 0, uint32_t generation = 0) const {
        P2pNote made{};
        made.kind = kind;
        made.path = uint16_t(path);
        made.generation = generation;
        made.incarnation = incarnation;
        return made;
    }
};
