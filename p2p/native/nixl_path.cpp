#include "p2p/native/nixl_path.h"

#include <sys/random.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <deque>
#include <string>
#include <vector>

#include "p2p/native/faults.h"
#include "p2p/native/gpu.h"
#include "p2p/native/nixl_library.h"

namespace {

using p2p::nixl::Functions;
using p2p::nixl::Handle;

constexpr uint32_t ADDRESS_HEADER = 24;
constexpr size_t LOOKS = 4;  // requests asked after in one poll
constexpr char BEAT = 0;     // shorter than any note
constexpr uint64_t BEAT_NS = 20'000'000;
constexpr uint64_t SLOW_BEAT_NS = 320'000'000;  // a frozen process leaves these in the kernel's buffers

// A small write travels within its notification, in front of its note: a WRITE costs a round trip more.
constexpr uint64_t CARRIED_BYTES = 49152;
constexpr uint64_t CARRIED_MAGIC = 0x0144524143503250;  // no note begins so

struct Carried {
    uint64_t magic, offset, bytes;
};

// As it stands at the head of an address.
struct Place {
    uint64_t at, bytes;
    uint32_t kind, device;
};
static_assert(sizeof(Place) == ADDRESS_HEADER);

struct Request {
    uint64_t ticket;
    Handle handle;
};

struct Note {
    const void* data;
    size_t bytes;
};

// A write or a note that waits for its rail: as a network that retransmits, an outage delays and loses nothing.
struct Held {
    uint64_t ticket, offset;
    const void* source;
    uint64_t bytes;
    std::string note;
};

// Zero in every field, whatever the library's version calls them: no thread, no listener, no locks.
constexpr uint8_t PLAIN_CONFIG[128] = {};

std::string unique_name() {
    uint64_t words[2] = {};
    if (getrandom(words, sizeof words, 0) != ssize_t(sizeof words)) return {};
    char text[40];
    std::snprintf(text, sizeof text, "p2p-%016llx%016llx", (unsigned long long)words[0], (unsigned long long)words[1]);
    return text;
}

}  // namespace

struct P2pNixlPath {
    const Functions* nixl = nullptr;
    Handle agent = nullptr;
    Handle backend = nullptr;
    Handle local = nullptr, remote = nullptr;  // descriptor lists, filled anew for each write
    Handle options = nullptr;
    Handle map = nullptr;
    std::string address;
    const P2pGpu* gpu = nullptr;  // on which this end's memory lies
    uint8_t* window = nullptr;  // where carried bytes go; the writer's end has none
    uint64_t window_bytes = 0;
    std::string carried;
    std::string other;  // name of the other end's agent; empty until joined
    Place there{};
    bool broken = false;
    uint64_t heard = 1, heard_at_beat = 0;
    uint64_t beat_ns = BEAT_NS, next_beat_ns = 0;
    std::deque<Request> requests;
    std::vector<Note> notes;  // of the last fetch, from `next` on not yet told
    size_t next = 0;
    std::string rail;
    std::deque<Held> held;  // while a fault keeps the rail down

    ~P2pNixlPath() {
        if (!nixl) return;
        // A request that cannot be released now is cut off with its agent; its handle goes afterwards.
        for (Request& request : requests)
            if (request.handle) nixl->release_xfer_req(agent, request.handle);
        if (agent) nixl->destroy_agent(agent);
        for (Request& request : requests)
            if (request.handle) nixl->destroy_xfer_req(request.handle);
        if (backend) nixl->destroy_backend(backend);
        if (local) nixl->destroy_xfer_dlist(local);
        if (remote) nixl->destroy_xfer_dlist(remote);
        if (options) nixl->destroy_opt_args(options);
        if (map) nixl->destroy_notif_map(map);
    }

    // Null where all went well, else what did not.
    const char* open(const char* device, void* memory, uint64_t nbytes) {
        rail = device;
        if (p2p_fault_rail(device)) return "this rail is down, by a fault injected on purpose";
        std::string name = unique_name();
        if (name.empty()) return "the system has no random numbers";
        if (nixl->create_configured_agent(name.c_str(), PLAIN_CONFIG, &agent) != 0) {
            agent = nullptr;
            return "NIXL makes no agent";
        }
        if (!open_backend(device)) return "UCX opens nothing on this rail";
        if (!register_memory(memory, nbytes)) return "UCX cannot register the memory";
        bool made = nixl->create_xfer_dlist(kind(), &local) == 0 && nixl->create_opt_args(&options) == 0 &&
                    nixl->opt_args_set_has_notif(options, true) == 0 && nixl->create_notif_map(&map) == 0;
        if (!made) return "NIXL is out of memory";
        return describe(memory, nbytes) ? nullptr : "the agent's metadata is missing or too long";
    }

    bool open_backend(const char* device) {
        Handle params = nullptr;
        if (nixl->create_params(&params) != 0) return false;
        int made;
        {
            p2p::nixl::RailChoice choice(device);
            made = nixl->create_backend(agent, "UCX", params, &backend);
        }
        nixl->destroy_params(params);
        if (made != 0) backend = nullptr;
        return made == 0;
    }

    int kind() const { return gpu ? int(gpu->kind) : p2p::nixl::HOST_MEMORY; }
    uint32_t device() const { return gpu ? gpu->device : 0; }

    bool register_memory(void* memory, uint64_t nbytes) {
        Handle list = nullptr;
        if (nixl->create_reg_dlist(kind(), &list) != 0) return false;
        bool done = nixl->reg_dlist_add_desc(list, uintptr_t(memory), nbytes, device(), nullptr, 0) == 0 &&
                    nixl->register_mem(agent, list, nullptr) == 0;
        nixl->destroy_reg_dlist(list);
        return done;
    }

    bool describe(void* memory, uint64_t nbytes) {
        void* metadata = nullptr;
        size_t bytes = 0;
        if (nixl->get_local_md(agent, &metadata, &bytes) != 0) return false;
        bool fits = bytes > 0 && bytes <= P2P_NIXL_ADDRESS_BYTES - ADDRESS_HEADER;
        if (fits) {
            Place here{uint64_t(uintptr_t(memory)), nbytes, uint32_t(kind()), device()};
            address.assign(reinterpret_cast<const char*>(&here), sizeof here);
            address.append(static_cast<const char*>(metadata), bytes);
        }
        std::free(metadata);
        return fits;
    }

    int join(const void* theirs, uint32_t bytes) {
        if (!other.empty() || bytes <= ADDRESS_HEADER || bytes > P2P_NIXL_ADDRESS_BYTES) return -1;
        Place place;
        std::memcpy(&place, theirs, sizeof place);
        if (!place.at || !place.bytes || place.at + place.bytes < place.at) return -1;
        if (place.kind > uint32_t(p2p::nixl::GPU_MEMORY)) return -1;
        // Left by a try with metadata that made no sense.
        if (remote) nixl->destroy_xfer_dlist(remote);
        remote = nullptr;
        if (nixl->create_xfer_dlist(int(place.kind), &remote) != 0) return -1;
        char* name = nullptr;
        const char* metadata = static_cast<const char*>(theirs) + ADDRESS_HEADER;
        if (nixl->load_remote_md(agent, metadata, bytes - ADDRESS_HEADER, &name) != 0 || !name) return -1;
        other = name;
        std::free(name);
        there = place;
        // What the others said has been told by now, or does not matter.
        forget_notes();
        return other.empty() ? -1 : 0;
    }

    int fail() {
        broken = true;
        return -1;
    }

    // Whether the rail is down and has taken what was to be sent.
    bool holds(uint64_t ticket, uint64_t offset, const void* source, uint64_t bytes, const void* note,
               size_t note_bytes) {
        if (!p2p_fault_rail(rail.c_str())) return false;
        held.push_back({ticket, offset, source, bytes, {static_cast<const char*>(note), note_bytes}});
        return true;
    }

    void send_held() {
        // Not what comes back because the rail has just gone down again.
        for (size_t left = held.size(); left > 0; left--) {
            Held one = std::move(held.front());
            held.pop_front();
            write(one.ticket, one.offset, one.source, one.bytes, one.note.data(), uint32_t(one.note.size()));
        }
    }

    int tell(const void* note, size_t bytes) {
        if (broken || other.empty()) return -1;
        if (holds(0, 0, nullptr, 0, note, bytes)) return 0;
        return nixl->gen_notif(agent, other.c_str(), note, bytes, nullptr) == 0 ? 0 : fail();
    }

    int write(uint64_t ticket, uint64_t offset, const void* source, uint64_t bytes, const void* note,
              uint32_t note_bytes) {
        if (broken || other.empty() || offset > there.bytes || bytes > there.bytes - offset) return -1;
        if (bytes == 0) return tell(note, note_bytes);
        if (holds(ticket, offset, source, bytes, note, note_bytes)) return 0;
        Carried header{CARRIED_MAGIC, offset, bytes};
        if (bytes <= CARRIED_BYTES) return carry(header, source, note, note_bytes);
        Handle handle = nullptr;
        nixl->xfer_dlist_clear(local);
        nixl->xfer_dlist_clear(remote);
        bool made = nixl->xfer_dlist_add_desc(local, uintptr_t(source), bytes, device()) == 0 &&
                    nixl->xfer_dlist_add_desc(remote, there.at + offset, bytes, there.device) == 0 &&
                    nixl->opt_args_set_notif_msg(options, note, note_bytes) == 0 &&
                    nixl->create_xfer_req(agent, p2p::nixl::WRITE, local, remote, other.c_str(), &handle, options) == 0;
        if (!made) return fail();
        requests.push_back({ticket, handle});
        return nixl->post_xfer_req(agent, handle, nullptr) < 0 ? fail() : 0;
    }

    int carry(const Carried& header, const void* source, const void* note, uint32_t note_bytes) {
        carried.assign(reinterpret_cast<const char*>(&header), sizeof header);
        carried.append(static_cast<const char*>(source), header.bytes);
        carried.append(static_cast<const char*>(note), note_bytes);
        return tell(carried.data(), carried.size());
    }

    // Puts the bytes that a notification carries where they belong; what is left is its note. False: neither.
    bool unpack(Note* note) {
        Carried header;
        bool carries = note->bytes > sizeof header;
        if (carries) std::memcpy(&header, note->data, sizeof header);
        if (!carries || header.magic != CARRIED_MAGIC) return note->bytes <= P2P_NOTE_BYTES;
        uint64_t rest = note->bytes - sizeof header;
        bool inside = header.offset <= window_bytes && header.bytes <= window_bytes - header.offset;
        bool whole = header.bytes < rest && rest - header.bytes <= P2P_NOTE_BYTES;
        if (other.empty() || !inside || !whole) return false;
        const uint8_t* data = static_cast<const uint8_t*>(note->data) + sizeof header;
        if (!p2p::copy_to(gpu, window + header.offset, data, header.bytes)) {
            broken = true;
            return false;
        }
        *note = {data + header.bytes, rest - header.bytes};
        return true;
    }

    int poll(P2pPathEvent* event) {
        if (p2p_fault_rail(rail.c_str())) return 0;
        send_held();
        if (next < notes.size()) return tell_note(event);
        if (!broken && poll_requests(event) > 0) return 1;
        // What had come before it broke is told first.
        if (fetch_notes() < 0) broken = true;
        if (next < notes.size()) return tell_note(event);
        return broken ? -1 : 0;
    }

    int poll_requests(P2pPathEvent* event) {
        for (size_t i = 0; i < std::min(requests.size(), LOOKS); i++) {
            Request request = requests[i];
            int status = nixl->get_xfer_status(agent, request.handle);
            if (status < 0) return fail();
            if (status == p2p::nixl::UNDER_WAY) continue;
            nixl->release_xfer_req(agent, request.handle);
            nixl->destroy_xfer_req(request.handle);
            requests.erase(requests.begin() + long(i));
            heard++;
            *event = {P2P_PATH_DONE, 0, request.ticket, nullptr};
            return 1;
        }
        return 0;
    }

    void beat(uint64_t now_ns) {
        if (now_ns < next_beat_ns || p2p_fault_rail(rail.c_str())) return;
        beat_ns = heard != heard_at_beat ? BEAT_NS : std::min(beat_ns * 5 / 4, SLOW_BEAT_NS);
        next_beat_ns = now_ns + beat_ns;
        heard_at_beat = heard;
        tell(&BEAT, sizeof BEAT);
    }

    int tell_note(P2pPathEvent* event) {
        Note note = notes[next++];
        *event = {P2P_PATH_NOTE, uint32_t(note.bytes), 0, note.data};
        return 1;
    }

    void forget_notes() {
        if (notes.empty()) return;
        notes.clear();
        next = 0;
        nixl->notif_map_clear(map);
    }

    int fetch_notes() {
        forget_notes();
        size_t agents = 0;
        if (nixl->get_notifs(agent, map, nullptr) != 0 || nixl->notif_map_size(map, &agents) != 0) return -1;
        if (agents == 0) return 0;
        for (size_t i = 0; i < agents; i++) {
            const char* name = nullptr;
            size_t count = 0;
            if (nixl->notif_map_get_agent_at(map, i, &name) != 0) return -1;
            if (!other.empty() && other != name) continue;
            if (nixl->notif_map_get_notifs_size(map, name, &count) != 0) return -1;
            heard++;
            for (size_t j = 0; j < count; j++) {
                Note note{};
                if (nixl->notif_map_get_notif(map, name, j, &note.data, &note.bytes) != 0) return -1;
                if (note.bytes > sizeof BEAT && unpack(&note)) notes.push_back(note);
            }
        }
        if (notes.empty()) nixl->notif_map_clear(map);
        return 0;
    }
};

namespace {

P2pNixlPath* self_of(void* path) { return static_cast<P2pNixlPath*>(path); }

constexpr P2pPathOps OPS = {
    [](void* path, uint64_t ticket, uint64_t offset, const void* source, uint64_t bytes, const void* note,
       uint32_t note_bytes) {
        return self_of(path)->write(ticket, offset, source, bytes, note, note_bytes);
    },
    [](void* path, const void* note, uint32_t note_bytes) { return self_of(path)->tell(note, note_bytes); },
    [](void* path, P2pPathEvent* event) { return self_of(path)->poll(event); },
};

}  // namespace

P2P_API P2pNixlPath* p2p_nixl_path_new(const char* rail, void* memory, uint64_t nbytes, int owns,
                                       const P2pGpu* gpu, char* error, uint64_t error_bytes) try {
    const Functions* nixl = p2p::nixl::functions();
    const char* wrong = "NIXL is not loaded";
    if (nixl) {
        auto path = std::make_unique<P2pNixlPath>();
        path->nixl = nixl;
        path->gpu = gpu;
        if (owns) path->window = static_cast<uint8_t*>(memory), path->window_bytes = nbytes;
        wrong = path->open(rail, memory, nbytes);
        if (!wrong) return path.release();
    }
    std::snprintf(error, error_bytes, "%s", wrong);
    return nullptr;
} P2P_CATCH(std::snprintf(error, error_bytes, "no memory is left"), nullptr)

P2P_API void p2p_nixl_path_free(P2pNixlPath* path) { delete path; }

P2P_API uint32_t p2p_nixl_path_address(const P2pNixlPath* path, void* out) {
    std::memcpy(out, path->address.data(), path->address.size());
    return uint32_t(path->address.size());
}

P2P_API int p2p_nixl_path_join(P2pNixlPath* path, const void* address, uint32_t bytes) try {
    return path->join(address, bytes);
} P2P_CATCH(P2P_E_MEMORY)

P2P_API void p2p_nixl_path_beat(P2pNixlPath* path, uint64_t now_ns) { path->beat(now_ns); }

P2P_API uint64_t p2p_nixl_path_heard(const P2pNixlPath* path) { return path->heard; }

P2P_API P2pPath p2p_nixl_path_ends(P2pNixlPath* path) { return {&OPS, path}; }
