// The writer's end of a channel: numbers writes, spreads them over the paths, sends again what a closed path lost.
#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "p2p/native/channel_end.h"
#include "p2p/native/monitor.h"
#include "p2p/native/window.h"

using namespace p2p;

namespace {

constexpr uint64_t FIRST_GUESS_BYTES_PER_S = 1'000'000'000;
constexpr uint64_t FIRST_PIECE_BYTES = 32 * 1024;  // while nothing is measured: 10 Mbit/s carry it in 26 ms
constexpr uint64_t LEAST_PIECE_BYTES = 16 * 1024;
constexpr uint64_t MEASURED_BYTES = 16384;     // in one step: less tells of latency, not of bandwidth
constexpr uint64_t LATELY_NS = 5'000'000;      // a channel on which nothing came for longer needs no hurry
constexpr uint64_t IN_FLIGHT_NS = 20'000'000;  // of a path's bandwidth: enough to keep it busy, little to lose
constexpr uint32_t IN_FLIGHT_WRITES = 256;

// LANDED: the transport says so; it counts only when the owner does.
enum class WriteState : uint8_t { READY, POSTED, LANDED, THERE };

struct Write {
    uint64_t number;
    uint64_t first;
    uint64_t offset;
    uint64_t bytes;
    uint64_t signal_offset;
    uint64_t value;
    uint64_t posted_ns;
    uint64_t under_way;  // bytes, when it was posted
    uint64_t after;      // sent only when all writes up to this one are there
    uint32_t path;
    WriteState state;
    bool signals;
    bool stale;     // its slot holds a newer frame: sent again it is only a number
    bool reported;  // to the monitor
};

struct WriterPath : PathEnd {
    uint64_t in_flight_bytes = 0;  // not landed yet
    uint32_t awaited = 0;          // writes that the owner has not spoken of
    uint64_t progress_ns = 0;      // when it last showed that it works, or began to have something to show
    uint64_t doubted_ns = 0;
    uint64_t repeat_ns = REPEAT_NS;
    bool measured = false;
    uint64_t bytes_per_s = FIRST_GUESS_BYTES_PER_S;
    uint64_t last_done_ns = 0;
    uint64_t done_bytes = 0;      // in this step, and when the first of them was posted
    uint64_t done_since_ns = 0;
    uint64_t sent_bytes = 0;
};

struct Frame {
    uint64_t signal = 0;
    uint64_t first = 0, last = 0;  // its writes
};

}  // namespace

struct P2pWriter : P2pEnd {
    uint8_t* image = nullptr;
    P2pMonitor* monitor = nullptr;
    WriterPath paths[P2P_PATHS];
    std::deque<Write> writes;     // by number, the first is the oldest that is not there
    std::deque<uint64_t> ready;   // numbers to send, lowest first
    uint64_t numbered = 0;
    uint32_t slots = 0;
    uint64_t capacity = 0;
    std::vector<Frame> frames;
    uint64_t stepped_ns = 0;
    uint64_t event_ns = 0;

    PathEnd& path(uint32_t index) override { return paths[index]; }
    void path_opened(uint32_t index, uint64_t now_ns) override;
    void path_closed(uint32_t index, uint64_t now_ns) override;
    bool step(uint64_t now_ns) override;
    uint64_t waiting() const override { return writes.size(); }
};

namespace {

P2pWriter* writer_of(P2pEnd* end) { return static_cast<P2pWriter*>(end); }

Write* find(P2pWriter* w, uint64_t number) {
    if (w->writes.empty() || number < w->writes.front().number) return nullptr;
    uint64_t index = number - w->writes.front().number;
    return index < w->writes.size() ? &w->writes[index] : nullptr;
}

void submit(P2pWriter* w, uint64_t first, uint64_t offset, uint64_t bytes, bool signals, uint64_t signal_offset,
            uint64_t value, uint64_t now_ns, uint64_t after = 0) {
    uint64_t number = ++w->numbered;
    w->writes.push_back({number, first, offset, bytes, signal_offset, value, 0, 0, after, 0,
                         WriteState::READY, signals, false, false});
    w->ready.push_back(number);
    w->counts.writes++;
    w->counts.bytes += bytes;
    p2p_monitor_posted(w->monitor, now_ns, bytes);
    w->event_ns = now_ns;
}

// So small that the slowest path carries one in a quarter of the silence after which it is doubted.
uint64_t piece_bytes(const P2pWriter* w) {
    uint64_t bytes = w->config.piece_bytes;
    for (const WriterPath& path : w->paths) {
        if (path.state != PathState::LIVE) continue;
        double quarter = double(path.bytes_per_s) * double(w->config.silence_ns) / 4e9;
        bytes = std::min(bytes, path.measured ? uint64_t(quarter) : FIRST_PIECE_BYTES);
    }
    return std::max(bytes, std::min(LEAST_PIECE_BYTES, w->config.piece_bytes));
}

// Pieces of a range; the last of them carries the signal of a frame.
void submit_pieces(P2pWriter* w, uint64_t offset, uint64_t bytes, bool signals, uint64_t signal_offset,
                   uint64_t value, uint64_t now_ns, uint64_t after = 0) {
    uint64_t first = w->numbered + 1, most = piece_bytes(w);
    for (uint64_t at = 0; at < bytes; at += most) {
        uint64_t piece = std::min(most, bytes - at);
        submit(w, first, offset + at, piece, signals && at + piece == bytes, signal_offset, value, now_ns, after);
    }
}

// The last write to these bytes that may still land; 0: none. Of two puts to one place the later must stay, and writes
// overtake each other: also on one path, whose end copies small ones later than the transport lands large ones.
uint64_t last_over(const P2pWriter* w, uint64_t offset, uint64_t bytes) {
    for (auto write = w->writes.rbegin(); write != w->writes.rend(); write++)
        if (write->state != WriteState::THERE && write->offset < offset + bytes &&
            offset < write->offset + write->bytes)
            return write->number;
    return 0;
}

void scan_slots(P2pWriter* w, uint64_t now_ns) {
    for (uint32_t i = 0; i < w->slots; i++) {
        uint64_t at = p2p_slot_offset(i, w->capacity);
        Frame& frame = w->frames[i];
        uint64_t signal = p2p_signal_load(w->image + at);
        if (signal == frame.signal) continue;
        for (uint64_t number = frame.first; number && number <= frame.last; number++)
            if (Write* old = find(w, number)) old->stale = true;
        P2pHeader header;
        std::memcpy(&header, w->image + at + P2P_SIGNAL, sizeof header);
        uint64_t payload = std::min<uint64_t>(header.length, w->capacity);
        frame = {signal, w->numbered + 1, 0};
        submit_pieces(w, at + P2P_SIGNAL, P2P_FRAME_HEADER + payload, true, at, signal, now_ns);
        frame.last = w->numbered;
    }
}

void send_again(P2pWriter* w, uint32_t index) {
    for (Write& write : w->writes) {
        bool was_there = write.state == WriteState::POSTED || write.state == WriteState::LANDED;
        if (!was_there || write.path != index) continue;
        write.state = WriteState::READY;
        w->ready.push_back(write.number);
        w->counts.sent_again++;
    }
    std::sort(w->ready.begin(), w->ready.end());
    w->paths[index].in_flight_bytes = 0;
    w->paths[index].awaited = 0;
}

void fail(P2pWriter* w, uint32_t index) {
    WriterPath& path = w->paths[index];
    if (path.state != PathState::LIVE) return;
    path.state = PathState::FAILED;
    path.doubted_ns = 0;
    path.repeat_ns = REPEAT_NS;
    if (w->live_paths() == 0) w->lose();
}

void progressed(WriterPath& path, uint64_t now_ns) {
    path.progress_ns = now_ns;
    path.repeat_ns = REPEAT_NS;
}

void report(P2pWriter* w, Write& write, uint64_t now_ns) {
    if (!write.reported) p2p_monitor_completed(w->monitor, now_ns, write.bytes);
    write.reported = true;
}

// Its bytes are known to have got there: that is what a path's bandwidth is measured by.
void done(WriterPath& path, const Write& write) {
    path.in_flight_bytes -= std::min(path.in_flight_bytes, write.under_way);
    path.done_since_ns = path.done_bytes ? std::min(path.done_since_ns, write.posted_ns) : write.posted_ns;
    path.done_bytes += write.under_way;
}

// One sample a step: what was done since the step before came as one for all that can be told.
void measure(WriterPath& path, uint64_t now_ns) {
    if (path.done_bytes >= MEASURED_BYTES) {
        uint64_t since_ns = std::max(path.done_since_ns, path.last_done_ns);
        double sample = double(path.done_bytes) * 1e9 / double(now_ns > since_ns ? now_ns - since_ns : 1);
        double old = path.measured ? double(path.bytes_per_s) : sample;
        path.bytes_per_s = uint64_t(std::max(1.0, old * 0.75 + sample * 0.25));
        path.measured = true;
    }
    if (path.done_bytes) path.last_done_ns = now_ns;
    path.done_bytes = 0;
}

void landed(P2pWriter* w, WriterPath& path, uint32_t index, uint64_t number, uint64_t now_ns) {
    Write* write = find(w, number);
    if (!write || write->state != WriteState::POSTED || write->path != index) return;
    write->state = WriteState::LANDED;
    done(path, *write);
    progressed(path, now_ns);
    report(w, *write, now_ns);
}

void arrived(P2pWriter* w, Write& write, uint64_t now_ns) {
    if (write.state == WriteState::THERE) return;
    bool sent = write.state != WriteState::READY;
    WriterPath& path = w->paths[write.path];
    report(w, write, now_ns);
    if (sent) {
        if (write.state == WriteState::POSTED) done(path, write);
        path.awaited -= path.awaited > 0;
        progressed(path, now_ns);
    } else {
        std::erase(w->ready, write.number);
    }
    write.state = WriteState::THERE;
}

void on_state(P2pWriter* w, uint32_t from, const P2pNote& note, const uint8_t* blob, uint64_t now_ns) {
    for (Write& write : w->writes) {
        if (write.number > note.number) break;
        arrived(w, write, now_ns);
    }
    for (uint64_t bit = 0; bit < uint64_t(note.blob_bytes) * 8; bit++) {
        if (!(blob[bit / 8] >> (bit % 8) & 1)) continue;
        if (Write* write = find(w, note.number + 1 + bit)) arrived(w, *write, now_ns);
    }
    while (!w->writes.empty() && w->writes.front().state == WriteState::THERE) w->writes.pop_front();
    if (note.value == P2P_STATE_PATH_UNSAID || note.path >= P2P_PATHS) return;
    WriterPath& path = w->paths[note.path];
    bool meant = path.generation == note.generation;
    if (note.value == P2P_STATE_PATH_HEARD) {
        if (meant) progressed(path, now_ns);
        return;
    }
    if (meant && (path.state == PathState::LIVE || path.state == PathState::FAILED)) {
        path.state = PathState::CLOSED;
        // It may only have been slower than thought: the next time it is given less.
        path.bytes_per_s = std::max<uint64_t>(1, path.bytes_per_s / 2);
        w->counts.closed++;
        w->command(P2P_COMMAND_CLOSE, note.path, path.generation);
        send_again(w, note.path);
        if (w->live_paths() == 0) w->lose();
    } else if (meant && path.state == PathState::OPENING) {
        path.state = PathState::CLOSED;
        w->command(P2P_COMMAND_CLOSE, note.path, path.generation);
    }
    if (note.path != from) tell(w->paths[from].ends, w->note(P2P_NOTE_CLOSED, note.path, note.generation));
}

void on_offer(P2pWriter* w, const P2pNote& note, const uint8_t* blob) {
    if (note.path >= P2P_PATHS) return;
    WriterPath& path = w->paths[note.path];
    bool newer = path.state == PathState::NONE || note.generation > path.generation;
    bool waits = path.state == PathState::NONE || path.state == PathState::CLOSED || path.state == PathState::OPENING;
    if (!newer || !waits) return;
    if (path.state == PathState::OPENING) w->command(P2P_COMMAND_CLOSE, note.path, path.generation);
    path.state = PathState::OPENING;
    path.generation = note.generation;
    w->command(P2P_COMMAND_OPEN, note.path, note.generation, blob, note.blob_bytes);
}

void receive(P2pWriter* w, uint32_t index, const void* bytes, uint32_t count, uint64_t now_ns) {
    P2pNote note;
    if (p2p_note_open(bytes, count, w->incarnation, &note)) return;
    const auto* blob = static_cast<const uint8_t*>(bytes) + P2P_NOTE_HEADER;
    WriterPath& path = w->paths[index];
    switch (note.kind) {
        case P2P_NOTE_STATE: return on_state(w, index, note, blob, now_ns);
        case P2P_NOTE_OFFER: return on_offer(w, note, blob);
        case P2P_NOTE_PROBE:
            if (!tell(path.ends, w->note(P2P_NOTE_ECHO, index, path.generation))) fail(w, index);
            return;
        case P2P_NOTE_BYE: return w->lose();
    }
}

bool poll_path(P2pWriter* w, uint32_t index, uint64_t now_ns) {
    WriterPath& path = w->paths[index];
    uint32_t events = 0;
    for (; events < EVENTS_A_STEP && path.state == PathState::LIVE; events++) {
        P2pPathEvent event;
        int found = path.ends.ops->poll(path.ends.self, &event);
        if (found < 0) fail(w, index);
        if (found <= 0) break;
        if (event.kind == P2P_PATH_DONE)
            landed(w, path, index, event.ticket, now_ns);
        else
            receive(w, index, event.note, event.bytes, now_ns);
    }
    if (events) w->event_ns = now_ns;
    return events > 0;
}

uint64_t room_bytes(const P2pWriter* w, const WriterPath& path) {
    uint64_t busy_bytes = path.measured ? path.bytes_per_s / 1000 * (IN_FLIGHT_NS / 1'000'000) : 0;
    return std::max(2 * piece_bytes(w), busy_bytes);
}

// The path that will have sent it first; P2P_PATHS where none has room.
uint32_t choose(const P2pWriter* w, uint64_t bytes) {
    uint32_t best = P2P_PATHS;
    double best_s = 0;
    for (uint32_t i = 0; i < P2P_PATHS; i++) {
        const WriterPath& path = w->paths[i];
        if (path.state != PathState::LIVE || path.awaited >= IN_FLIGHT_WRITES) continue;
        if (path.in_flight_bytes && path.in_flight_bytes + bytes > room_bytes(w, path)) continue;
        double time_s = double(path.in_flight_bytes + bytes) / double(path.bytes_per_s);
        if (best == P2P_PATHS || time_s < best_s) best = i, best_s = time_s;
    }
    return best;
}

void post(P2pWriter* w, uint64_t now_ns) {
    while (!w->ready.empty()) {
        Write* write = find(w, w->ready.front());
        if (!write) {
            w->ready.pop_front();
            continue;
        }
        uint64_t oldest = w->writes.front().number;  // that is not there
        if (write->number >= oldest + WINDOW_WRITES || write->after >= oldest) return;
        uint64_t bytes = write->stale ? 0 : write->bytes;
        uint32_t index = choose(w, bytes);
        if (index == P2P_PATHS) return;
        WriterPath& path = w->paths[index];
        bool signals = write->signals && !write->stale;
        P2pNote fields = w->note(signals ? P2P_NOTE_SIGNAL : P2P_NOTE_WROTE, index, path.generation);
        fields.number = write->number;
        fields.first = write->first;
        fields.offset = write->signal_offset;
        fields.value = write->value;
        alignas(8) uint8_t note[P2P_NOTE_BYTES];
        uint32_t note_bytes = p2p_note_seal(&fields, nullptr, note);
        w->ready.pop_front();
        write->state = WriteState::POSTED;
        write->under_way = bytes;
        write->path = index;
        write->posted_ns = now_ns;
        // Only what is under way can be overdue.
        if (path.awaited++ == 0) path.progress_ns = now_ns;
        path.in_flight_bytes += bytes;
        path.sent_bytes += bytes;
        // Of one that is refused something may be under way all the same: it waits for the owner's word like others.
        if (path.ends.ops->write(path.ends.self, write->number, write->offset, w->image + write->offset, bytes, note,
                                 note_bytes) < 0)
            fail(w, index);
    }
}

// Until the next completion, at the measured rate; no more than the silence again, so that the bound on a switch
// does not rest on a measurement.
uint64_t expected_ns(const P2pWriter* w, const WriterPath& path) {
    uint64_t bytes = std::min(path.in_flight_bytes, 2 * piece_bytes(w));
    return std::min(w->config.silence_ns, uint64_t(double(bytes) * 1e9 / double(path.bytes_per_s)));
}

bool overdue(const P2pWriter* w, const WriterPath& path, uint64_t now_ns) {
    if (path.state == PathState::FAILED) return true;
    if (path.state != PathState::LIVE || path.awaited == 0) return false;
    uint64_t patience_ns = w->config.silence_ns + expected_ns(w, path);
    return now_ns - std::min(now_ns, path.progress_ns) > patience_ns;
}

void doubt(P2pWriter* w, uint64_t now_ns) {
    for (uint32_t i = 0; i < P2P_PATHS; i++) {
        WriterPath& path = w->paths[i];
        if (!overdue(w, path, now_ns) || (path.doubted_ns && now_ns - path.doubted_ns < path.repeat_ns)) continue;
        if (path.doubted_ns) path.repeat_ns = std::min(2 * path.repeat_ns, REPEAT_LAST_NS);
        path.doubted_ns = now_ns;
        P2pNote note = w->note(P2P_NOTE_DOUBT, i, path.generation);
        note.number = w->numbered;
        note.offset = expected_ns(w, path);
        note.value = path.state == PathState::FAILED;
        // Over itself too: there it only asks for what the owner has, whose last word may have been lost.
        for (uint32_t other = 0; other < P2P_PATHS; other++)
            if (w->paths[other].state == PathState::LIVE) {
                w->counts.doubts++;
                if (!tell(w->paths[other].ends, note)) fail(w, other);
            }
    }
}

}  // namespace

void P2pWriter::path_opened(uint32_t index, uint64_t now_ns) {
    paths[index].progress_ns = now_ns;
    paths[index].doubted_ns = 0;
}

void P2pWriter::path_closed(uint32_t index, uint64_t) {
    WriterPath& path = paths[index];
    // The owner may have opened its end: it is told until it has closed that.
    if (path.state != PathState::OPENING) return;
    path.state = PathState::FAILED;
    path.doubted_ns = 0;
    path.repeat_ns = REPEAT_NS;
}

bool P2pWriter::step(uint64_t now_ns) {
    // This side's own pauses are no silence of the paths.
    uint64_t pause_ns = stepped_ns ? now_ns - std::min(now_ns, stepped_ns) : 0;
    stepped_ns = now_ns;
    bool busy = false;
    for (uint32_t i = 0; i < P2P_PATHS; i++) {
        WriterPath& path = paths[i];
        if (path.state != PathState::LIVE) continue;
        if (pause_ns > config.grace_ns) path.progress_ns = std::min(now_ns, path.progress_ns + pause_ns);
        busy |= poll_path(this, i, now_ns);
    }
    for (WriterPath& path : paths) measure(path, now_ns);
    if (lost) return false;
    scan_slots(this, now_ns);
    post(this, now_ns);
    doubt(this, now_ns);
    // A peer that says nothing does not keep this side awake.
    return busy || (!writes.empty() && now_ns - std::min(now_ns, event_ns) < LATELY_NS);
}

P2P_API P2pEnd* p2p_writer_new(void* image, uint64_t nbytes, uint64_t incarnation, const P2pChannelConfig* config,
                               P2pMonitor* monitor) try {
    if (!image || !nbytes || !config_valid(*config)) return nullptr;
    auto writer = std::make_unique<P2pWriter>();
    writer->image = static_cast<uint8_t*>(image);
    writer->nbytes = nbytes;
    writer->incarnation = incarnation;
    writer->config = *config;
    writer->monitor = monitor;
    return writer.release();
} P2P_CATCH(nullptr)

P2P_API int p2p_writer_watch_slots(P2pEnd* end) try {
    P2pWriter* writer = writer_of(end);
    P2pWindowHeader header;
    if (writer->nbytes < sizeof header) return -1;
    std::memcpy(&header, writer->image, sizeof header);
    if (p2p_window_check(writer->image, writer->nbytes, writer->incarnation, header.slots, header.payload_capacity))
        return -1;
    writer->frames.assign(header.slots, Frame{});
    writer->slots = header.slots;
    writer->capacity = header.payload_capacity;
    return 0;
} P2P_CATCH(-1)

P2P_API int p2p_writer_put(P2pEnd* end, uint64_t offset, uint64_t bytes, uint64_t now_ns) try {
    P2pWriter* writer = writer_of(end);
    if (offset > writer->nbytes || bytes > writer->nbytes - offset) return -1;
    submit_pieces(writer, offset, bytes, false, 0, 0, now_ns, last_over(writer, offset, bytes));
    return 0;
} P2P_CATCH(P2P_E_MEMORY)

P2P_API int p2p_writer_signal(P2pEnd* end, uint64_t offset, uint64_t value, uint64_t now_ns) try {
    if (offset % 8 || end->nbytes < 8 || offset > end->nbytes - 8) return -1;
    // First 0: everything before it, whatever path that takes.
    submit(writer_of(end), 0, 0, 0, true, offset, value, now_ns);
    return 0;
} P2P_CATCH(P2P_E_MEMORY)

P2P_API void p2p_writer_path_counts(P2pEnd* end, uint32_t index, P2pPathCounts* out) {
    *out = {};
    if (index >= P2P_PATHS) return;
    const WriterPath& path = writer_of(end)->paths[index];
    *out = {path.state == PathState::LIVE, path.bytes_per_s, path.sent_bytes};
}
