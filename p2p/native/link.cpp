#include "p2p/native/link.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace {

using p2p::Rail;
using p2p::Stage;

constexpr const char* NO_MEMORY = "no memory is left";
constexpr uint64_t DRAIN_NS = 200'000;
constexpr uint32_t BYE_STEPS = 4;
constexpr uint64_t STRAGGLER_NS = 400'000'000;  // for the other rails, once one is welcomed

// A window's address: for each rail u32 bytes and an agent's address (nixl_path.h), in the rails' order; 0
// bytes where that rail was down.
std::vector<std::string> split(const void* address, uint32_t bytes) {
    std::vector<std::string> parts;
    const char* at = static_cast<const char*>(address);
    uint32_t part;
    while (bytes > 0 && parts.size() < P2P_PATHS) {
        if (bytes < sizeof part) return {};
        std::memcpy(&part, at, sizeof part);
        at += sizeof part;
        bytes -= sizeof part;
        if (part > bytes || part > P2P_NIXL_ADDRESS_BYTES) return {};
        parts.emplace_back(at, part);
        at += part;
        bytes -= part;
    }
    return bytes ? std::vector<std::string>() : parts;
}

void wait(P2pCarrier* carrier, std::unique_lock<std::mutex>& held, uint64_t ns) {
    carrier->changed.wait_for(held, std::chrono::nanoseconds(ns));
}

// The link is in no list any more, or never was, and has no jobs.
void destroy(P2pLink* link) {
    for (Rail& rail : link->rails) p2p_nixl_path_free(rail.path);
    link->hang_up();
    if (link->fds[0] >= 0) close(link->fds[0]);
    p2p_end_free(link->end);
    p2p_monitor_free(link->monitor);
    delete link;
}

struct Destroy {
    void operator()(P2pLink* link) const { destroy(link); }
};
using NewLink = std::unique_ptr<P2pLink, Destroy>;
// Of one that is in the carrier's list.
struct Close {
    void operator()(P2pLink* link) const { p2p_link_close(link, 0); }
};

NewLink new_link(P2pCarrier* carrier, void* memory, uint64_t nbytes, uint64_t incarnation,
                                  const void* token, size_t rails) {
    NewLink link(new P2pLink);
    link->carrier = carrier;
    link->memory = static_cast<uint8_t*>(memory);
    link->nbytes = nbytes;
    link->incarnation = incarnation;
    std::memcpy(link->token, token, sizeof link->token);
    link->rails.resize(rails);
    return link;
}

// Makes the agents: one is enough, the other rails may come back. Null where that stands, else what does not.
const char* prepare(P2pLink& link, const std::vector<std::string>* addresses, char* scratch, uint64_t bytes) {
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, link.fds) < 0) return "no descriptors are left";
    std::snprintf(scratch, bytes, "the descriptor's address makes no sense");
    bool made = false;
    for (uint32_t i = 0; i < link.rails.size(); i++) {
        if (addresses && (*addresses)[i].empty()) continue;
        Rail& rail = link.rails[i];
        rail.path = link.carrier->make_path(link, i, addresses ? (*addresses)[i] : "", scratch, bytes);
        if (rail.path) rail.stage = Stage::GREETING;
        made |= rail.path != nullptr;
    }
    return made ? nullptr : scratch;
}

bool all_settled(const P2pLink& link) {
    for (const Rail& rail : link.rails)
        if (rail.stage == Stage::GREETING) return false;
    return true;
}

// What the other end has been heard of, on all rails: changes while it lives.
uint64_t heard(const P2pLink& link) {
    uint64_t sum = 0;
    for (const Rail& rail : link.rails)
        if (rail.stage == Stage::OPEN) sum += p2p_nixl_path_heard(rail.path);
    return sum;
}

// Until the writes have come, or nothing is heard any more: over a slow rail a single one may take seconds.
void drain(P2pLink& link, std::unique_lock<std::mutex>& held, uint64_t deadline) {
    P2pChannelCounts counts;
    const P2pChannelConfig& config = link.carrier->config;
    // Longer than giving up a rail takes, and than between two beats.
    uint64_t stalled_ns = std::max(2 * (config.silence_ns + config.grace_ns), P2P_NIXL_SILENCE_NS);
    uint64_t seen = 0, moved_ns = p2p::now_ns();
    while (!link.lost) {
        uint64_t now = p2p::now_ns();
        link.carrier->round(now);
        p2p_end_counts(link.end, &counts);
        if (uint64_t said = heard(link); said != seen) seen = said, moved_ns = now;
        if (counts.waiting == 0 || now >= deadline || now >= moved_ns + stalled_ns) return;
        wait(link.carrier, held, DRAIN_NS);
    }
}

// What was told goes out only while its path is polled, and no longer when the agent is gone. Without memory nothing is
// told: the other end notices.
void say_goodbye(P2pLink& link, std::unique_lock<std::mutex>& held) try {
    P2pPathEvent event;
    p2p_end_bye(link.end);
    for (uint32_t i = 0; i < BYE_STEPS; i++) {
        for (Rail& rail : link.rails) {
            if (rail.stage != Stage::OPEN) continue;
            P2pPath ends = p2p_nixl_path_ends(rail.path);
            ends.ops->poll(ends.self, &event);
        }
        wait(link.carrier, held, DRAIN_NS);
    }
} P2P_CATCH()

}  // namespace

const P2pGpu* P2pLink::gpu() const { return owns ? carrier->gpu : nullptr; }

void P2pLink::hang_up() {
    alive.store(false);
    if (fds[1] >= 0) close(fds[1]);
    fds[1] = -1;
}

P2P_API P2pLink* p2p_link_export(P2pCarrier* carrier, void* window, uint64_t nbytes, uint64_t incarnation,
                                 const void* token, char* error, uint64_t error_bytes) try {
    p2p::OnGpu on(carrier->gpu);
    auto link = new_link(carrier, window, nbytes, incarnation, token, carrier->rails.size());
    link->owns = true;
    link->end = p2p_owner_new(window, nbytes, incarnation, carrier->page, carrier->lanes, &carrier->config, carrier->gpu);
    char scratch[256];
    const char* wrong = link->end ? prepare(*link, nullptr, scratch, sizeof scratch) : NO_MEMORY;
    if (wrong) {
        std::snprintf(error, error_bytes, "%s", wrong);
        return nullptr;
    }
    p2p::Visit visit(carrier);
    carrier->links.push_back(link.get());
    return link.release();
} P2P_CATCH(std::snprintf(error, error_bytes, NO_MEMORY), nullptr)

P2P_API uint32_t p2p_link_address(P2pLink* link, void* out) {
    p2p::Visit visit(link->carrier);
    uint8_t* at = static_cast<uint8_t*>(out);
    uint8_t part[P2P_NIXL_ADDRESS_BYTES];
    for (Rail& rail : link->rails) {
        uint32_t bytes = rail.path ? p2p_nixl_path_address(rail.path, part) : 0;
        if (at + sizeof bytes + bytes > static_cast<uint8_t*>(out) + P2P_LINK_ADDRESS_BYTES) return 0;
        std::memcpy(at, &bytes, sizeof bytes);
        std::memcpy(at + sizeof bytes, part, bytes);
        at += sizeof bytes + bytes;
    }
    return uint32_t(at - static_cast<uint8_t*>(out));
}

P2P_API P2pLink* p2p_link_connect(P2pCarrier* carrier, void* image, uint64_t nbytes, uint64_t incarnation,
                                  const void* token, const void* address, uint32_t address_bytes,
                                  uint64_t timeout_ns, char* error, uint64_t error_bytes) try {
    p2p::OnGpu on(carrier->gpu);
    uint64_t deadline = p2p::now_ns() + timeout_ns;
    std::vector<std::string> addresses = split(address, address_bytes);
    auto link = new_link(carrier, image, nbytes, incarnation, token, addresses.size());
    while (link->connection == 0)
        if (getrandom(&link->connection, sizeof link->connection, 0) < 0) break;
    P2pChannelConfig config = carrier->config;
    config.paths = std::max<uint64_t>(1, addresses.size());
    link->monitor = p2p_monitor_new();
    link->end = p2p_writer_new(image, nbytes, incarnation, &config, link->monitor);
    char scratch[256];
    const char* wrong = link->end ? prepare(*link, &addresses, scratch, sizeof scratch) : NO_MEMORY;
    if (wrong) {
        std::snprintf(error, error_bytes, "%s", wrong);
        return nullptr;
    }
    {
        p2p::Visit visit(carrier);
        carrier->links.push_back(link.get());
    }
    std::unique_ptr<P2pLink, Close> joined(link.release());
    bool welcomed, broken;
    {
        p2p::Visit visit(carrier);
        p2p_bell_ring(carrier->bells, 0);
        bool first = true;
        while (!all_settled(*joined) && !joined->lost && !carrier->leaving) {
            uint64_t now = p2p::now_ns();
            if (joined->opened && first) deadline = std::min(deadline, now + STRAGGLER_NS), first = false;
            if (now >= deadline) break;
            wait(carrier, visit.held, std::min(deadline - now, p2p::HELLO_NS));
        }
        broken = joined->lost || all_settled(*joined);
        welcomed = joined->opened && !joined->lost;
        for (uint32_t i = 0; welcomed && i < joined->rails.size(); i++)
            if (joined->rails[i].stage == Stage::GREETING) joined->give_up(i);
    }
    if (welcomed) return joined.release();
    if (broken)
        std::snprintf(error, error_bytes, "the connection was refused or broke");
    else
        std::snprintf(error, error_bytes, "no answer in %llu ms", (unsigned long long)(timeout_ns / 1'000'000));
    return nullptr;
} P2P_CATCH(std::snprintf(error, error_bytes, NO_MEMORY), nullptr)

P2P_API void p2p_link_close(P2pLink* link, uint64_t bound_ns) {
    P2pCarrier* carrier = link->carrier;
    p2p::OnGpu on(carrier->gpu);
    {
        p2p::Visit visit(carrier);
        if (link->opened && !link->lost) {
            if (!link->owns) drain(*link, visit.held, p2p::now_ns() + bound_ns);
            say_goodbye(*link, visit.held);
        }
        link->closing = true;
        std::erase(carrier->links, link);
        carrier->changed.wait(visit.held, [link] { return link->jobs == 0; });
    }
    destroy(link);
}

P2P_API int p2p_link_put(P2pLink* link, uint64_t offset, uint64_t bytes) {
    p2p::Visit visit(link->carrier);
    int result = p2p_writer_put(link->end, offset, bytes, p2p::now_ns());
    // Some of it may be under way.
    link->starved |= result == P2P_E_MEMORY;
    p2p_bell_ring(link->carrier->bells, 0);
    return result;
}

P2P_API int p2p_link_signal(P2pLink* link, uint64_t offset, uint64_t value) {
    p2p::Visit visit(link->carrier);
    int result = p2p_writer_signal(link->end, offset, value, p2p::now_ns());
    link->starved |= result == P2P_E_MEMORY;
    p2p_bell_ring(link->carrier->bells, 0);
    return result;
}

P2P_API int p2p_link_alive(P2pLink* link) { return link->alive.load(); }

P2P_API int p2p_link_fd(P2pLink* link) { return link->fds[0]; }

P2P_API uint64_t p2p_link_peer_incarnation(P2pLink* link) {
    p2p::Visit visit(link->carrier);
    return link->owns ? link->peer_incarnation : link->incarnation;
}

P2P_API P2pMonitor* p2p_link_monitor(P2pLink* link) { return link->monitor; }

P2P_API void p2p_link_counts(P2pLink* link, P2pChannelCounts* out) {
    p2p::Visit visit(link->carrier);
    p2p_end_counts(link->end, out);
}

P2P_API int p2p_link_rail_counts(P2pLink* link, uint32_t rail, P2pPathCounts* out) {
    p2p::Visit visit(link->carrier);
    if (link->owns || rail >= link->rails.size()) return -1;
    p2p_writer_path_counts(link->end, rail, out);
    return 0;
}
