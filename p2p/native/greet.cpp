// How the two ends of a path meet: HELLO and WELCOME.
//
// HELLO's blob, little-endian:
//   offset  size  field
//        0    32  token of the window
//       32     8  incarnation of the writer
//       40     8  the writer's number for this connection, not 0
//       48     -  address of its agent (nixl_path.h)
#include <algorithm>
#include <cstring>

#include "p2p/native/link.h"

namespace {

constexpr uint32_t HELLO_ADDRESS = P2P_TOKEN_BYTES + 16;

static_assert(HELLO_ADDRESS + P2P_NIXL_ADDRESS_BYTES <= P2P_BLOB_BYTES);

// How long it takes says nothing about where they differ.
bool equal_secrets(const uint8_t* a, const uint8_t* b) {
    uint8_t difference = 0;
    for (uint32_t i = 0; i < P2P_TOKEN_BYTES; i++) difference |= uint8_t(a[i] ^ b[i]);
    return difference == 0;
}

uint64_t load_u64(const std::string& bytes, size_t at) {
    uint64_t value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

}  // namespace

void P2pLink::give_up(uint32_t rail) {
    P2pNote failed = note(P2P_NOTE_DOUBT, rail);
    failed.value = 1;
    // Where it fails the path is broken, and polling it says so.
    for (uint32_t i = 0; !owns && i < rails.size(); i++)
        if (rails[i].stage == p2p::Stage::OPEN) p2p::tell(p2p_nixl_path_ends(rails[i].path), failed);
    carrier->close_rail(*this, rail);
    if (!owns || opened) return;
    // Nobody was welcomed after all.
    connection = peer_incarnation = 0;
    auto waits = [](const p2p::Rail& other) { return other.stage == p2p::Stage::GREETING; };
    if (std::none_of(rails.begin(), rails.end(), waits)) lose();
}

bool P2pLink::greet(uint32_t rail, uint64_t now) {
    p2p::Rail& at = rails[rail];
    if (at.deadline_ns && now >= at.deadline_ns) {
        give_up(rail);
        return true;
    }
    if (!owns && now >= at.hello_ns) {
        at.hello_ns = now + p2p::HELLO_NS;
        say_hello(rail);
    }
    P2pPath ends = p2p_nixl_path_ends(at.path);
    P2pPathEvent event;
    int result;
    bool happened = false;
    while (at.stage == p2p::Stage::GREETING && (result = ends.ops->poll(ends.self, &event)) != 0) {
        happened = true;
        if (result < 0) {
            give_up(rail);
            break;
        }
        if (event.kind == P2P_PATH_NOTE && !hear(rail, event, now)) carrier->refused++;
    }
    return happened || !owns;
}

bool P2pLink::hear(uint32_t rail, const P2pPathEvent& event, uint64_t now) {
    P2pNote header;
    if (p2p_note_open(event.note, event.bytes, incarnation, &header) < 0) return false;
    if (header.path != rail || header.generation != rails[rail].generation) return false;
    // A copy: the next call on the path forgets the note.
    std::string blob(static_cast<const char*>(event.note) + P2P_NOTE_HEADER, header.blob_bytes);
    if (owns && header.kind == P2P_NOTE_HELLO) return hear_hello(rail, blob, now);
    if (!owns && header.kind == P2P_NOTE_WELCOME) return hear_welcome(rail, blob, now);
    return false;
}

bool P2pLink::hear_hello(uint32_t rail, const std::string& blob, uint64_t now) {
    p2p::Rail& at = rails[rail];
    if (blob.size() <= HELLO_ADDRESS) return false;
    if (!equal_secrets(reinterpret_cast<const uint8_t*>(blob.data()), token)) return false;
    uint64_t theirs = load_u64(blob, P2P_TOKEN_BYTES), number = load_u64(blob, P2P_TOKEN_BYTES + 8);
    if (number == 0 || (connection && (number != connection || theirs != peer_incarnation))) return false;
    uint32_t address_bytes = uint32_t(blob.size()) - HELLO_ADDRESS;
    if (p2p_nixl_path_join(at.path, blob.data() + HELLO_ADDRESS, address_bytes) < 0) return false;
    if (!connection) {
        connection = number;
        peer_incarnation = theirs;
    }
    std::string page(std::min<uint64_t>(nbytes, P2P_WELCOME_BYTES), 0);
    P2pPath ends = p2p_nixl_path_ends(at.path);
    if (!p2p::copy_from(gpu(), page.data(), memory, page.size()) ||
        !p2p::tell(ends, note(P2P_NOTE_WELCOME, rail), page.data(), page.size()) ||
        p2p_end_path_open(end, rail, at.generation, ends, now) < 0) {
        give_up(rail);
        return true;
    }
    at.stage = p2p::Stage::OPEN;
    opened = true;
    return true;
}

bool P2pLink::hear_welcome(uint32_t rail, const std::string& blob, uint64_t now) {
    p2p::Rail& at = rails[rail];
    if (blob.size() != std::min<uint64_t>(nbytes, P2P_WELCOME_BYTES)) return false;
    if (!opened) {
        std::memcpy(memory, blob.data(), blob.size());
        // A window that is not laid out in slots has nothing to watch: its writer puts and signals.
        p2p_writer_watch_slots(end);
    }
    if (p2p_end_path_open(end, rail, at.generation, p2p_nixl_path_ends(at.path), now) < 0) {
        give_up(rail);
        return true;
    }
    at.stage = p2p::Stage::OPEN;
    opened = true;
    carrier->changed.notify_all();
    return true;
}

void P2pLink::say_hello(uint32_t rail) {
    uint8_t address[P2P_NIXL_ADDRESS_BYTES];
    uint32_t bytes = p2p_nixl_path_address(rails[rail].path, address);
    std::string blob(reinterpret_cast<const char*>(token), sizeof token);
    uint64_t numbers[2] = {carrier->incarnation, connection};
    blob.append(reinterpret_cast<const char*>(numbers), sizeof numbers);
    blob.append(reinterpret_cast<const char*>(address), bytes);
    // Where it fails the path is broken, and polling it says so.
    p2p::tell(p2p_nixl_path_ends(rails[rail].path), note(P2P_NOTE_HELLO, rail), blob.data(), blob.size());
}
