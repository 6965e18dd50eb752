// Fuzz targets of the native code: bytes decide what a hostile or broken peer writes, and when.
//
// With clang this is a libFuzzer program. With FUZZ_BLINDLY it brings a main that understands the same
// flags but tries random bytes only: native -max_total_time=10 -seed=1, or native FILE... to replay.
#include "tests/fuzz/native.h"

#include "p2p/native/doorbell.h"

namespace fuzz {

void frame(Choices& choices) {
    uint32_t capacity = choices.below(1400);
    Memory slot = zeros(64, P2P_FRAME_OFFSET + capacity), out = zeros(64, capacity);
    // A byte too many is seen: alignment's slack is not theirs.
    uint64_t end = P2P_FRAME_OFFSET + capacity, slack = (end + 63) / 64 * 64 - end;
    ASAN_POISON_MEMORY_REGION(slot.get() + end, slack);
    ASAN_POISON_MEMORY_REGION(out.get() + capacity, (capacity + 63) / 64 * 64 - capacity);
    P2pHeader fields{};
    fields.receiver = choices.bits(1), fields.sender = choices.bits(1), fields.sequence = choices.value();
    fields.attempt = choices.below(P2P_ATTEMPT_LIMIT), fields.length = choices.below(capacity + 1);
    choices.fill(slot.get() + P2P_FRAME_OFFSET, std::min(fields.length, 32u));
    p2p_frame_seal(slot.get(), &fields);
    bool changed = damage(choices, slot.get() + P2P_SIGNAL, uint32_t(end - P2P_SIGNAL), 3);
    P2pHeader now = header_of(slot.get());
    if (choices.below(2)) {
        now.checksum = p2p_checksum(&now, slot.get() + P2P_FRAME_OFFSET, std::min(now.length, capacity));
        std::memcpy(slot.get() + P2P_SIGNAL, &now, sizeof now);
    }
    P2pHeader got;
    int length = p2p_frame_open(slot.get(), capacity, fields.receiver, fields.sender, fields.sequence, &got, out.get());
    require(changed || length == int(fields.length), "a whole frame is accepted");
    if (length < 0) return;
    require(std::memcmp(&got, &now, sizeof now) == 0 && uint32_t(length) == now.length && now.length <= capacity &&
                now.receiver == fields.receiver && now.sender == fields.sender &&
                now.sequence == fields.sequence && now.attempt < P2P_ATTEMPT_LIMIT && !now.flags && !now.reserved,
            "an accepted frame is the one awaited");
    require(std::memcmp(out.get(), slot.get() + P2P_FRAME_OFFSET, now.length) == 0, "a payload arrives whole");
    require(p2p_checksum(&now, out.get(), now.length) == now.checksum, "an accepted payload has its checksum");
}

void pages(Choices& choices) {
    uint64_t incarnation = choices.bits(1);
    uint32_t slots = 1 + choices.below(3);
    uint64_t capacity = 1 + choices.below(5000);
    Window window(slots, capacity, incarnation);
    bool changed = damage(choices, window.memory.get(), sizeof(P2pWindowHeader), 3);
    uint64_t bytes = choices.below(2) ? choices.value() % (window.bytes + 1) : window.bytes;
    uint32_t want_slots = choices.below(2) ? uint32_t(choices.value()) : slots;
    uint64_t want_capacity = choices.below(2) ? choices.value() : capacity;
    int verdict = p2p_window_check(window.memory.get(), bytes, incarnation, want_slots, want_capacity);
    bool same = bytes == window.bytes && want_slots == slots && want_capacity == capacity;
    require(changed || !same || verdict == 0, "a window that was agreed on is accepted");
    require(verdict || p2p_window_bytes(want_slots, want_capacity) <= bytes, "an accepted window has all of its slots");

    Memory page = zeros(P2P_PAGE, P2P_BELL_PAGE);
    require(p2p_bell_init(page.get(), incarnation, 1 + choices.below(P2P_BELL_LANES)) == 0, "a page is made");
    damage(choices, page.get(), P2P_BELL_PAGE, 3);
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t lane = uint32_t(choices.value());
        p2p_bell_beat(page.get());
        p2p_bell_ring(page.get(), lane);
        p2p_bell_wait(page.get(), lane, uint32_t(choices.value()), choices.bits(1));
        p2p_bell_cancel(page.get(), lane);
    }
}

}  // namespace fuzz

namespace {

using fuzz::Choices;
using fuzz::require;

// In this order forever: the first byte of a recorded input is an index here.
constexpr void (*TARGETS[])(Choices&) = {fuzz::frame, fuzz::pages, fuzz::server, fuzz::client, fuzz::channel};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (!size) return 0;
    Choices choices(data + 1, size - 1);
    TARGETS[data[0] % std::size(TARGETS)](choices);
    return 0;
}

#ifdef FUZZ_BLINDLY
#include <chrono>
#include <csignal>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

namespace {

std::vector<uint8_t> input;

void keep_input() {
    std::ofstream("crash-input", std::ios::binary).write(reinterpret_cast<const char*>(input.data()), long(input.size()));
    std::fprintf(stderr, "the input is kept in ./crash-input\n");
}

void try_input() { LLVMFuzzerTestOneInput(input.data(), input.size()); }

}  // namespace

int main(int count, char** arguments) {
    __sanitizer_set_death_callback(keep_input);
    std::signal(SIGABRT, [](int) { keep_input(); });
    uint64_t seed = 1, runs = 0;
    double seconds = 0;
    for (int i = 1; i < count; i++) {
        std::string argument = arguments[i];
        if (argument.starts_with("-seed=")) {
            seed = std::stoull(argument.substr(6));
        } else if (argument.starts_with("-max_total_time=")) {
            seconds = std::stod(argument.substr(16));
        } else {
            std::ifstream file(argument, std::ios::binary);
            require(bool(file), "a file to replay can be read");
            input.assign(std::istreambuf_iterator<char>(file), {});
            try_input();
            runs++;
        }
    }
    auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (std::mt19937_64 random(seed); std::chrono::steady_clock::now() < end; runs++) {
        input.resize(1 + random() % 600);
        for (uint8_t& byte : input) byte = uint8_t(random());
        try_input();
    }
    std::fprintf(stderr, "stat::number_of_executed_units: %llu\n", (unsigned long long)runs);
}
#endif
