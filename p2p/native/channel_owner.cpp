// The owner's end of a channel: knows which writes are there, stores signals, closes paths that are dead.
#include <algorithm>
#include <iterator>
#include <vector>

#include "p2p/native/channel_end.h"
#include "p2p/native/doorbell.h"
#include "p2p/native/gpu.h"

using namespace p2p;

namespace {

constexpr uint32_t REPORT_WRITES = 32;            // that the writer has not been told of, at most
constexpr uint64_t REPORT_NS = 250'000;           // nor for longer
constexpr uint64_t OFFER_NS = 200'000'000;        // between two of one offer
constexpr uint64_t OFFERED_NS = 3'000'000'000;    // then it is withdrawn; so long may a path take in the beginning
constexpr uint32_t TRIAL_STEPS = 8;               // in which what has come is also seen

struct OwnerPath : PathEnd {
    uint64_t heard_ns = 0;
    uint64_t opened_ns = 0;
    // A trial of a doubted path.
    bool on_trial = false;
    uint64_t trial_ns = 0;
    uint64_t trial_for_ns = 0;
    uint32_t trial_steps = 0;
    // Closed: said again until the writer has understood; then offered again.
    bool understood = false;
    uint64_t said_ns = 0;
    uint64_t repeat_ns = REPEAT_NS;
    uint64_t reopen_ns = 0;
    uint64_t wait_ns = 0;
    // Opening.
    std::vector<uint8_t> address;
    uint64_t offered_ns = 0;
    uint64_t first_offer_ns = 0;
};

struct Deferred {
    uint64_t first, number, offset, value;
};

}  // namespace

struct P2pOwner : P2pEnd {
    uint8_t* window = nullptr;
    const P2pGpu* gpu = nullptr;
    void* page = nullptr;
    uint32_t lanes = 0;
    OwnerPath paths[P2P_PATHS];
    uint64_t there = 0;                          // all writes up to this one
    uint64_t beyond[WINDOW_WRITES / 64] = {};    // bit n % WINDOW_WRITES: write n, of those above
    std::vector<Deferred> deferred;
    uint32_t unreported = 0;
    uint64_t unreported_ns = 0;
    uint64_t begun_ns = 0;                       // when the first path opened

    PathEnd& path(uint32_t index) override { return paths[index]; }
    void path_opened(uint32_t index, uint64_t now_ns) override;
    void path_closed(uint32_t index, uint64_t now_ns) override;
    bool step(uint64_t now_ns) override;
    uint64_t waiting() const override { return deferred.size(); }
};

namespace {

uint64_t& word_of(P2pOwner* o, uint64_t number) { return o->beyond[number % WINDOW_WRITES / 64]; }

bool is_there(P2pOwner* o, uint64_t number) {
    return number <= o->there || (word_of(o, number) >> (number % 64) & 1);
}

void close_path(P2pOwner* o, uint32_t index, uint64_t now_ns) {
    OwnerPath& path = o->paths[index];
    bool flaps = path.state == PathState::OPENING || now_ns - path.opened_ns < FLAPPING_NS;
    path.wait_ns = flaps && path.wait_ns ? std::min(2 * path.wait_ns, o->config.reopen_last_ns)
                                         : o->config.reopen_first_ns;
    path.state = PathState::CLOSING;
    path.on_trial = false;
    path.understood = false;
    o->counts.closed++;
    o->command(P2P_COMMAND_CLOSE, index, path.generation);
    if (o->live_paths() == 0) o->lose();
}

void say(P2pOwner* o, uint32_t over, P2pNote note, uint64_t now_ns) {
    uint8_t bits[WINDOW_WRITES / 8] = {};
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < WINDOW_WRITES; i++)
        if (uint64_t number = o->there + 1 + i; word_of(o, number) >> (number % 64) & 1) {
            bits[i / 8] |= uint8_t(1 << (i % 8));
            bytes = i / 8 + 1;
        }
    note.number = o->there;
    if (!tell(o->paths[over].ends, note, bits, bytes)) close_path(o, over, now_ns);
}

void say_on_all(P2pOwner* o, uint32_t path, uint64_t value, uint64_t now_ns) {
    P2pNote note = o->note(P2P_NOTE_STATE, path, o->paths[path].generation);
    note.value = value;
    for (uint32_t i = 0; i < P2P_PATHS; i++)
        if (o->paths[i].state == PathState::LIVE) say(o, i, note, now_ns);
}

void report(P2pOwner* o, uint64_t now_ns) {
    if (!o->unreported || (o->unreported < REPORT_WRITES && now_ns - o->unreported_ns < REPORT_NS)) return;
    auto freshest = std::max_element(std::begin(o->paths), std::end(o->paths),
                                     [](const OwnerPath& a, const OwnerPath& b) {
                                         bool a_live = a.state == PathState::LIVE, b_live = b.state == PathState::LIVE;
                                         return a_live != b_live ? b_live : a.heard_ns < b.heard_ns;
                                     });
    if (freshest->state != PathState::LIVE) return;
    o->unreported = 0;
    say(o, uint32_t(freshest - o->paths), o->note(P2P_NOTE_STATE), now_ns);
}

bool complete(P2pOwner* o, const Deferred& signal) {
    if (signal.first == 0) return o->there >= signal.number;
    for (uint64_t number = std::max(signal.first, o->there + 1); number <= signal.number; number++)
        if (!is_there(o, number)) return false;
    return true;
}

void store(P2pOwner* o, const Deferred& signal) {
    if (!store_signal(o->gpu, o->window + signal.offset, signal.value)) return o->lose();
    for (uint32_t lane = 0; lane < o->lanes; lane++) p2p_bell_ring(o->page, lane);
}

void on_write(P2pOwner* o, const P2pNote& note, uint64_t now_ns) {
    if (note.number == 0 || note.number > o->there + WINDOW_WRITES) return;
    if (o->unreported++ == 0) o->unreported_ns = now_ns;
    if (is_there(o, note.number)) {
        o->counts.repeated++;
        return;
    }
    o->counts.writes++;
    word_of(o, note.number) |= 1ull << (note.number % 64);
    while (word_of(o, o->there + 1) >> ((o->there + 1) % 64) & 1) {
        o->there++;
        word_of(o, o->there) &= ~(1ull << (o->there % 64));
    }
    if (note.kind == P2P_NOTE_SIGNAL) {
        bool inside = note.offset % 8 == 0 && o->nbytes >= 8 && note.offset <= o->nbytes - 8;
        if (inside && note.first <= note.number) o->deferred.push_back({note.first, note.number, note.offset, note.value});
    }
    if (o->deferred.empty()) return;
    // In order of their numbers: of two signals in one word the later stays.
    std::sort(o->deferred.begin(), o->deferred.end(),
              [](const Deferred& a, const Deferred& b) { return a.number < b.number; });
    std::erase_if(o->deferred, [&](const Deferred& signal) {
        bool now = complete(o, signal);
        if (now) store(o, signal);
        // After a put's the next put to the same place may be waiting for this word.
        if (now && signal.first == 0) o->unreported = REPORT_WRITES;
        return now;
    });
}

void on_doubt(P2pOwner* o, uint32_t from, const P2pNote& note, uint64_t now_ns) {
    if (note.path >= P2P_PATHS) return;
    if (from == note.path) {
        o->unreported = REPORT_WRITES;
        return;
    }
    OwnerPath& path = o->paths[note.path];
    o->counts.doubts++;
    // Of an older generation, or closed already: that is said again anyway.
    if (path.generation != note.generation) return;
    if (note.value && (path.state == PathState::LIVE || path.state == PathState::OPENING))
        return close_path(o, note.path, now_ns);
    if (path.state != PathState::LIVE) return;
    if (path.on_trial) return;
    path.on_trial = true;
    path.trial_ns = now_ns;
    // The answer may have to queue behind what the writer has under way.
    path.trial_for_ns = std::max(o->config.grace_ns, std::min(note.offset, o->config.silence_ns));
    path.trial_steps = 0;
    if (!tell(path.ends, o->note(P2P_NOTE_PROBE, note.path, path.generation)))
        close_path(o, note.path, now_ns);
}

void receive(P2pOwner* o, uint32_t from, const void* bytes, uint32_t count, uint64_t now_ns) {
    P2pNote note;
    if (p2p_note_open(bytes, count, o->incarnation, &note)) return;
    switch (note.kind) {
        case P2P_NOTE_WROTE:
        case P2P_NOTE_SIGNAL: return on_write(o, note, now_ns);
        case P2P_NOTE_DOUBT: return on_doubt(o, from, note, now_ns);
        case P2P_NOTE_CLOSED:
            if (note.path < P2P_PATHS && o->paths[note.path].generation == note.generation)
                o->paths[note.path].understood = true;
            return;
        case P2P_NOTE_BYE: return o->lose();
    }
}

bool poll_path(P2pOwner* o, uint32_t index, uint64_t now_ns) {
    OwnerPath& path = o->paths[index];
    uint32_t events = 0;
    for (; events < EVENTS_A_STEP && path.state == PathState::LIVE; events++) {
        P2pPathEvent event;
        int found = path.ends.ops->poll(path.ends.self, &event);
        if (found < 0) close_path(o, index, now_ns);
        if (found <= 0) break;
        path.heard_ns = now_ns;
        if (path.on_trial) {
            path.on_trial = false;
            say_on_all(o, index, P2P_STATE_PATH_HEARD, now_ns);
        }
        if (event.kind == P2P_PATH_NOTE) receive(o, index, event.note, event.bytes, now_ns);
    }
    return events > 0;
}

void keep(P2pOwner* o, uint32_t index, uint64_t now_ns) {
    OwnerPath& path = o->paths[index];
    switch (path.state) {
        case PathState::NONE:
            if (index < o->config.paths && o->begun_ns && now_ns - o->begun_ns >= OFFERED_NS)
                close_path(o, index, now_ns);
            return;
        case PathState::LIVE:
            path.trial_steps++;
            if (path.on_trial && path.trial_steps >= TRIAL_STEPS && now_ns - path.trial_ns >= path.trial_for_ns &&
                o->live_paths() > 1)
                close_path(o, index, now_ns);
            return;
        case PathState::CLOSED:
            if (!path.understood && now_ns - path.said_ns >= path.repeat_ns) {
                if (path.said_ns) path.repeat_ns = std::min(2 * path.repeat_ns, REPEAT_LAST_NS);
                path.said_ns = now_ns;
                say_on_all(o, index, P2P_STATE_PATH_CLOSED, now_ns);
            }
            if (!path.understood || now_ns < path.reopen_ns) return;
            path.state = PathState::OPENING;
            path.generation++;
            path.address.clear();
            path.first_offer_ns = now_ns;
            o->command(P2P_COMMAND_OPEN, index, path.generation);
            return;
        case PathState::OPENING: {
            if (now_ns - path.first_offer_ns >= OFFERED_NS) return close_path(o, index, now_ns);
            if (path.address.empty() || now_ns - path.offered_ns < OFFER_NS) return;
            path.offered_ns = now_ns;
            P2pNote note = o->note(P2P_NOTE_OFFER, index, path.generation);
            for (uint32_t i = 0; i < P2P_PATHS; i++)
                if (o->paths[i].state == PathState::LIVE &&
                    !tell(o->paths[i].ends, note, path.address.data(), uint32_t(path.address.size())))
                    close_path(o, i, now_ns);
            return;
        }
        default: return;
    }
}

}  // namespace

void P2pOwner::path_opened(uint32_t index, uint64_t now_ns) {
    OwnerPath& path = paths[index];
    path.opened_ns = path.heard_ns = now_ns;
    path.on_trial = false;
    if (!begun_ns) begun_ns = now_ns;
}

void P2pOwner::path_closed(uint32_t index, uint64_t now_ns) {
    OwnerPath& path = paths[index];
    if (path.state != PathState::CLOSING && path.state != PathState::OPENING) return;
    if (path.state == PathState::OPENING)
        path.wait_ns = std::min(std::max(2 * path.wait_ns, config.reopen_first_ns), config.reopen_last_ns);
    path.state = PathState::CLOSED;
    path.said_ns = 0;
    path.repeat_ns = REPEAT_NS;
    path.reopen_ns = now_ns + path.wait_ns;
}

bool P2pOwner::step(uint64_t now_ns) {
    bool busy = false;
    for (uint32_t i = 0; i < P2P_PATHS && !lost; i++) busy |= poll_path(this, i, now_ns);
    for (uint32_t i = 0; i < P2P_PATHS && !lost; i++) {
        keep(this, i, now_ns);
        busy |= paths[i].on_trial;
    }
    if (lost) return false;
    report(this, now_ns);
    return busy || unreported;
}

P2P_API P2pEnd* p2p_owner_new(void* window, uint64_t nbytes, uint64_t incarnation, void* page, uint32_t lanes,
                              const P2pChannelConfig* config, const P2pGpu* gpu) try {
    if (!window || !nbytes || lanes > P2P_BELL_LANES || !config_valid(*config)) return nullptr;
    auto owner = std::make_unique<P2pOwner>();
    owner->window = static_cast<uint8_t*>(window);
    owner->nbytes = nbytes;
    owner->incarnation = incarnation;
    owner->page = page;
    owner->lanes = lanes;
    owner->config = *config;
    owner->gpu = gpu;
    return owner.release();
} P2P_CATCH(nullptr)

P2P_API int p2p_owner_offer(P2pEnd* end, uint32_t index, uint32_t generation, const void* address, uint32_t bytes,
                            uint64_t now_ns) try {
    if (index >= P2P_PATHS || !bytes || bytes > P2P_BLOB_BYTES) return -1;
    OwnerPath& path = static_cast<P2pOwner*>(end)->paths[index];
    if (path.state != PathState::OPENING || path.generation != generation) return -1;
    const auto* from = static_cast<const uint8_t*>(address);
    path.address.assign(from, from + bytes);
    path.offered_ns = 0;
    path.first_offer_ns = now_ns;
    return 0;
} P2P_CATCH(-1)
