// Notes at both ends of a channel, with the fuzzer for the other end; nothing where channels are not built.
#include "tests/fuzz/native.h"

#if __has_include("p2p/native/channel.h")
#include "p2p/native/channel.h"

using namespace fuzz;

namespace {

constexpr uint64_t OWNER = 77;

// A path whose other end is the fuzzer.
struct Rail {
    struct Event {
        P2pPathEvent event;
        std::unique_ptr<uint8_t[]> note;  // of exactly its size
    };
    const uint8_t* image = nullptr;
    uint64_t nbytes = 0;
    bool broken = false;
    std::vector<Event> events;
    Event current;

    static Rail& of(void* self) { return *static_cast<Rail*>(self); }
    static int write(void* self, uint64_t ticket, uint64_t offset, const void* source, uint64_t bytes, const void*,
                     uint32_t note_bytes) {
        Rail& rail = of(self);
        require(offset <= rail.nbytes && bytes <= rail.nbytes - offset && source == rail.image + offset &&
                    note_bytes <= P2P_NOTE_BYTES, "a write lies in the window");
        if (!rail.broken) rail.events.push_back({{P2P_PATH_DONE, 0, ticket, nullptr}, nullptr});
        return rail.broken ? -1 : 0;
    }
    static int tell(void* self, const void*, uint32_t bytes) {
        require(bytes <= P2P_NOTE_BYTES, "a note has its bounds");
        return of(self).broken ? -1 : 0;
    }
    static int poll(void* self, P2pPathEvent* event) {
        Rail& rail = of(self);
        if (rail.broken) return -1;
        if (rail.events.empty()) return 0;
        rail.current = std::move(rail.events.front());
        rail.events.erase(rail.events.begin());
        *event = rail.current.event;
        return 1;
    }
    static constexpr P2pPathOps OPS{write, tell, poll};
    P2pPath ends() { return {&OPS, this}; }

    void receive(Choices& choices, uint64_t incarnation, uint32_t generation) {
        constexpr uint8_t KINDS[] = {P2P_NOTE_WROTE, P2P_NOTE_SIGNAL, P2P_NOTE_STATE, P2P_NOTE_DOUBT, P2P_NOTE_CLOSED,
                                     P2P_NOTE_OFFER, P2P_NOTE_PROBE,  P2P_NOTE_ECHO,  P2P_NOTE_HELLO, P2P_NOTE_WELCOME};
        auto number = [&] { return choices.below(4) ? choices.below(40) : choices.value(); };
        P2pNote fields{};
        uint8_t note[P2P_NOTE_BYTES], blob[256];
        fields.kind = choices.below(12) ? KINDS[choices.below(std::size(KINDS))] : uint8_t(choices.bits(1));
        fields.path = uint16_t(choices.below(8) ? choices.below(2) : choices.value());
        fields.generation = choices.below(8) ? generation + choices.below(2) : uint32_t(choices.value());
        fields.incarnation = incarnation, fields.number = number(), fields.first = number();
        fields.offset = choices.below(2) ? 8 * choices.below(600) : choices.value(), fields.value = number();
        fields.blob_bytes = choices.below(4) ? choices.below(16) : choices.below(sizeof blob);
        choices.fill(blob, fields.blob_bytes);
        uint32_t bytes = p2p_note_seal(&fields, blob, note);
        if (choices.below(4) == 3 && damage(choices, note, bytes, 2) && choices.below(4)) {
            std::memcpy(&fields, note, sizeof fields);
            fields.checksum = p2p_checksum(&fields, note + P2P_NOTE_HEADER, bytes - P2P_NOTE_HEADER);
            std::memcpy(note, &fields, sizeof fields);
        }
        if (choices.below(16) == 15) bytes = choices.below(bytes + 1);
        events.push_back({{P2P_PATH_NOTE, bytes, 0, nullptr}, std::make_unique<uint8_t[]>(bytes)});
        std::memcpy(events.back().note.get(), note, bytes);
        events.back().event.note = events.back().note.get();
    }
};

constexpr P2pChannelConfig CHANNEL = [] {
    P2pChannelConfig config{};
    config.paths = 2, config.piece_bytes = 512, config.silence_ns = 1'000'000, config.grace_ns = 1'000'000;
    config.reopen_first_ns = 1'000'000, config.reopen_last_ns = 8'000'000;
    return config;
}();

}  // namespace

void fuzz::channel(Choices& choices) {
    const uint64_t nbytes = choices.below(2) ? 8 + choices.below(4000) : p2p_window_bytes(1, 600);
    Memory memory = zeros(8, nbytes);
    if (nbytes % 8) ASAN_POISON_MEMORY_REGION(memory.get() + nbytes, 8 - nbytes % 8);
    if (nbytes == p2p_window_bytes(1, 600)) p2p_window_init(memory.get(), nbytes, OWNER, 1, 600);
    Rail rails[2];
    uint32_t generations[2] = {};
    for (Rail& rail : rails) rail.image = memory.get(), rail.nbytes = nbytes;
    bool owns = choices.below(2);
    P2pEnd* end = owns ? p2p_owner_new(memory.get(), nbytes, OWNER, nullptr, 0, &CHANNEL, nullptr)
                       : p2p_writer_new(memory.get(), nbytes, OWNER, &CHANNEL, nullptr);
    require(end, "an end is made");
    auto open = [&](uint32_t path, uint64_t now_ns) {
        rails[path].broken = false;
        p2p_end_path_open(end, path, generations[path], rails[path].ends(), now_ns);
    };
    uint64_t now_ns = 1'000'000'000;
    for (uint32_t path = 0; path < 2; path++) open(path, now_ns);
    if (!owns) p2p_writer_watch_slots(end);
    for (uint32_t turn = 0; choices.left() && turn < 60; turn++) {
        uint32_t path = choices.below(2), kind = choices.below(16);
        if (kind < 10) {
            rails[path].receive(choices, OWNER, generations[path]);
        } else if (kind == 10) {
            rails[path].broken = true;
        } else if (!owns && kind < 13) {
            p2p_writer_put(end, choices.value() % (nbytes + 8), choices.value() % (nbytes + 8), now_ns);
        } else if (!owns && kind < 15) {
            p2p_writer_signal(end, choices.below(2) ? 8 * choices.below(600) : choices.value(), turn, now_ns);
        } else if (!owns && nbytes >= P2P_PAGE + P2P_FRAME_OFFSET) {
            choices.fill(memory.get() + P2P_PAGE, P2P_FRAME_OFFSET);  // its own program's frame
        }
        now_ns += choices.below(4) == 3 ? choices.bits(5) : 1000;
        p2p_end_step(end, now_ns);
        P2pCommand command;
        for (uint32_t count = 0; p2p_end_command(end, &command); count++) {
            require(count < 4 * P2P_PATHS * (turn + 1), "commands do not breed");
            if (command.kind == P2P_COMMAND_LOST) continue;
            if (command.path >= 2) {
                require(command.path < P2P_PATHS, "a command names a path");
                if (owns) p2p_end_path_closed(end, command.path, command.generation, now_ns);
                continue;
            }
            generations[command.path] = command.generation;
            if (command.kind == P2P_COMMAND_CLOSE) {
                rails[command.path].events.clear();
                if (owns) p2p_end_path_closed(end, command.path, command.generation, now_ns);
            } else if (choices.below(4)) {
                if (owns) p2p_owner_offer(end, command.path, command.generation, "address", 7, now_ns);
                open(command.path, now_ns);
            } else if (!owns) {
                p2p_end_path_closed(end, command.path, command.generation, now_ns);
            }
        }
    }
    p2p_end_free(end);
}
#else
void fuzz::channel(Choices&) {}
#endif
