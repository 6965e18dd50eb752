// Links and their carrier from within. Everything here is guarded by the carrier's lock.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "p2p/native/carrier.h"
#include "p2p/native/channel_end.h"
#include "p2p/native/doorbell.h"
#include "p2p/native/gpu.h"
#include "p2p/native/monitor.h"
#include "p2p/native/nixl_path.h"
#include "p2p/native/wait.h"

namespace p2p {

constexpr uint64_t HELLO_NS = 20'000'000;
constexpr uint64_t GREETING_NS = 2'000'000'000;  // a writer's, on a path that is opened again

enum class Stage {
    NONE,
    MAKING,    // the builder makes its agent
    GREETING,  // HELLO and WELCOME
    OPEN,      // the channel's
    CLOSING,   // the builder destroys its agent
};

struct Rail {
    Stage stage = Stage::NONE;
    uint32_t generation = 0;
    P2pNixlPath* path = nullptr;
    uint64_t deadline_ns = 0;  // of the greeting; 0: none
    uint64_t hello_ns = 0;     // the next one
};

// For the builder.
struct Job {
    P2pLink* link;
    uint32_t rail;
    uint32_t generation;
    P2pNixlPath* path;    // to destroy; null: to make
    std::string address;  // to join, where one is made
};

}  // namespace p2p

struct P2pLink {
    P2pCarrier* carrier = nullptr;
    bool owns = false;        // a window's link; else a peer's
    P2pEnd* end = nullptr;    // of its channel
    P2pMonitor* monitor = nullptr;  // of a peer's link: every write
    uint8_t* memory = nullptr;
    uint64_t nbytes = 0;
    uint64_t incarnation = 0;  // of the window's owner
    uint8_t token[P2P_TOKEN_BYTES] = {};
    uint64_t connection = 0;  // the writer's number for it; 0: nobody has connected
    uint64_t peer_incarnation = 0;
    std::vector<p2p::Rail> rails;
    uint32_t jobs = 0;    // under way
    bool opened = false;  // a path, ever
    bool lost = false;    // the channel's word
    bool closing = false;
    bool starved = false;  // a step, or the loss after one, had no memory
    int fds[2] = {-1, -1};  // the caller's end, ours
    std::atomic<bool> alive{true};

    P2pNote note(uint8_t kind, uint32_t rail) const { return end->note(kind, rail, rails[rail].generation); }
    // On which the memory lies: images lie in host memory.
    const P2pGpu* gpu() const;
    // HELLO and WELCOME on a path that is not open yet. True where anything happened.
    bool greet(uint32_t rail, uint64_t now);
    bool step(uint64_t now);
    void lose();
    void path_closed(uint32_t rail, uint32_t generation);
    void hang_up();
    // Ends a greeting. The other end may take the path for open, and where the rail is dead would never notice.
    void give_up(uint32_t rail);

  private:
    bool hear(uint32_t rail, const P2pPathEvent& event, uint64_t now);
    bool hear_hello(uint32_t rail, const std::string& blob, uint64_t now);
    bool hear_welcome(uint32_t rail, const std::string& blob, uint64_t now);
    void say_hello(uint32_t rail);
    void carry_out(const P2pCommand& command);
};

struct P2pCarrier {
    uint64_t incarnation = 0;
    std::vector<std::string> rails;
    void* page = nullptr;  // the endpoint's
    uint32_t lanes = 0;
    P2pChannelConfig config{};
    const P2pGpu* gpu = nullptr;

    std::mutex lock;
    std::condition_variable changed;  // for callers that wait
    std::condition_variable work;     // for the builder
    std::vector<P2pLink*> links;
    std::deque<p2p::Job> queue;
    bool stopping = false;
    bool leaving = false;  // nobody waits for a peer any more
    uint64_t refused = 0;
    std::atomic<uint32_t> visitors{0};
    std::atomic<uint64_t> inline_ns{0};  // when another thread last made progress itself
    P2pCommand command;                  // scratch, large
    alignas(P2P_BELL_PAGE) uint8_t bells[P2P_BELL_PAGE] = {};
    std::thread pump, builder;

    // Throws nothing: a link that finds no memory is lost.
    bool round(uint64_t now);
    void run_pump();
    void run_builder();
    void enqueue(p2p::Job job);
    // Destroys the rail's path, then tells the channel.
    void close_rail(P2pLink& link, uint32_t rail);
    void open_rail(P2pLink& link, uint32_t rail, uint32_t generation, std::string address);
    P2pNixlPath* make_path(const P2pLink& link, uint32_t rail, const std::string& address, char* error,
                           uint64_t error_bytes);

  private:
    bool wanted(const p2p::Job& job) const;
    void made(const p2p::Job& job, P2pNixlPath* path);
    void destroyed(const p2p::Job& job);
};

namespace p2p {

// The lock, for everyone but the pump, which goes out of the way.
class Visit {
  public:
    explicit Visit(P2pCarrier* carrier) : carrier_(carrier) {
        carrier_->visitors.fetch_add(1);
        held = std::unique_lock(carrier_->lock);
        carrier_->visitors.fetch_sub(1);
    }
    std::unique_lock<std::mutex> held;

  private:
    P2pCarrier* carrier_;
};

}  // namespace p2p
