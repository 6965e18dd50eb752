#include "p2p/native/carrier.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <exception>

#include "p2p/native/link.h"

namespace p2p {

namespace {

constexpr uint64_t NAP_NS = 20'000;
constexpr uint64_t QUIET_NS = 2'000'000, QUIET_NAP_NS = 200'000;
constexpr uint64_t IDLE_NS = 1'000'000'000, IDLE_NAP_NS = 1'000'000;
constexpr uint64_t AWAY_NS = 1'000'000;

uint64_t nap_after(uint64_t quiet_ns) {
    if (quiet_ns < QUIET_NS) return NAP_NS;
    return quiet_ns < IDLE_NS ? QUIET_NAP_NS : IDLE_NAP_NS;
}

void sleep_ns(uint64_t ns) {
    timespec duration{0, long(ns)};
    nanosleep(&duration, nullptr);
}

// A thread that no signal meant for the application interrupts.
template <class Run>
std::thread quiet_thread(const char* name, Run run) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread;
    try {
        thread = std::thread(run);
        pthread_setname_np(thread.native_handle(), name);
    } catch (const std::exception&) {  // no thread, or no memory for one
        // The caller looks whether it is joinable.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
}

}  // namespace

}  // namespace p2p

bool P2pCarrier::round(uint64_t now) {
    bool busy = false;
    for (P2pLink* link : links) {
        try {
            if (!link->starved)
                busy |= link->step(now);
            else
                link->lose(), link->starved = false;
        } catch (...) {
            // What it had begun is half done: without memory the link ends, as soon as there is enough for that.
            link->starved = true;
        }
    }
    return busy;
}

void P2pCarrier::run_pump() {
    // Naps of 20 microseconds are not rounded up to 70.
    prctl(PR_SET_TIMERSLACK, 1'000, 0, 0, 0);
    p2p::OnGpu on(gpu);
    uint64_t active_ns = p2p::now_ns();
    std::unique_lock held(lock);
    while (!stopping) {
        uint64_t now = p2p::now_ns();
        bool away = now < inline_ns.load() + p2p::AWAY_NS;
        if (away || visitors.load()) {
            held.unlock();
            p2p::sleep_ns(away ? p2p::AWAY_NS / 2 : p2p::NAP_NS);
            held.lock();
            continue;
        }
        uint32_t seen = p2p_bell_read(bells, 0);
        if (round(now)) active_ns = now;
        held.unlock();
        if (p2p_bell_wait(bells, 0, seen, p2p::nap_after(now - active_ns))) active_ns = p2p::now_ns();
        held.lock();
    }
}

void P2pCarrier::run_builder() {
    p2p::OnGpu on(gpu);
    std::unique_lock held(lock);
    while (true) {
        work.wait(held, [this] { return stopping || !queue.empty(); });
        if (queue.empty()) return;
        p2p::Job job = std::move(queue.front());
        queue.pop_front();
        held.unlock();
        P2pNixlPath* path = nullptr;
        char error[256];
        if (job.path)
            p2p_nixl_path_free(job.path);
        else
            path = make_path(*job.link, job.rail, job.address, error, sizeof error);
        held.lock();
        try {
            if (path && !wanted(job)) {
                held.unlock();
                p2p_nixl_path_free(path);
                held.lock();
                path = nullptr;
            }
            if (path)
                made(job, path);
            else
                destroyed(job);
        } catch (...) {
            job.link->starved = true;
        }
        job.link->jobs--;
        changed.notify_all();
    }
}

P2pNixlPath* P2pCarrier::make_path(const P2pLink& link, uint32_t rail, const std::string& address,
                                   char* error, uint64_t error_bytes) {
    // The owner's rails count. A writer with fewer uses some of its own twice.
    const char* name = rails[rail % rails.size()].c_str();
    P2pNixlPath* path = p2p_nixl_path_new(name, link.memory, link.nbytes, link.owns, link.gpu(), error, error_bytes);
    if (!path || address.empty()) return path;
    if (p2p_nixl_path_join(path, address.data(), uint32_t(address.size())) == 0) return path;
    std::snprintf(error, error_bytes, "NIXL refuses the other side's address");
    p2p_nixl_path_free(path);
    return nullptr;
}

void P2pCarrier::enqueue(p2p::Job job) {
    job.link->jobs++;
    // Who destroys goes first: a fence is waited for, and no path is made twice.
    auto at = queue.end();
    if (job.path) at = std::find_if(queue.begin(), at, [](const p2p::Job& other) { return !other.path; });
    queue.insert(at, std::move(job));
    work.notify_one();
}

void P2pCarrier::close_rail(P2pLink& link, uint32_t rail) {
    p2p::Rail& at = link.rails[rail];
    // One that is being made is destroyed as soon as it is there.
    if (at.path) enqueue({&link, rail, at.generation, at.path, {}});
    at.path = nullptr;
    at.stage = p2p::Stage::CLOSING;
}

void P2pCarrier::open_rail(P2pLink& link, uint32_t rail, uint32_t generation, std::string address) {
    p2p::Rail& at = link.rails[rail];
    if (at.path) close_rail(link, rail);
    at = {p2p::Stage::MAKING, generation, nullptr, 0, 0};
    enqueue({&link, rail, generation, nullptr, std::move(address)});
}

bool P2pCarrier::wanted(const p2p::Job& job) const {
    const p2p::Rail& at = job.link->rails[job.rail];
    return at.stage == p2p::Stage::MAKING && at.generation == job.generation && !job.link->closing && !job.link->lost;
}

void P2pCarrier::made(const p2p::Job& job, P2pNixlPath* path) {
    P2pLink& link = *job.link;
    p2p::Rail& at = link.rails[job.rail];
    uint64_t now = p2p::now_ns();
    at.path = path;
    at.stage = p2p::Stage::GREETING;
    if (!link.owns) {
        at.deadline_ns = now + p2p::GREETING_NS;
        return;
    }
    uint8_t address[P2P_NIXL_ADDRESS_BYTES];
    uint32_t bytes = p2p_nixl_path_address(path, address);
    if (p2p_owner_offer(link.end, job.rail, job.generation, address, bytes, now) < 0)
        close_rail(link, job.rail);
}

void P2pCarrier::destroyed(const p2p::Job& job) {
    P2pLink& link = *job.link;
    p2p::Rail& at = link.rails[job.rail];
    if (at.generation == job.generation && !at.path) at.stage = p2p::Stage::NONE;
    link.path_closed(job.rail, job.generation);
}

bool P2pLink::step(uint64_t now) {
    bool busy = false;
    for (uint32_t i = 0; i < rails.size(); i++) {
        if (rails[i].stage == p2p::Stage::GREETING) busy |= greet(i, now);
        if (rails[i].stage == p2p::Stage::OPEN) p2p_nixl_path_beat(rails[i].path, now);
    }
    if (!opened || lost) return busy;
    int did = p2p_end_step(end, now);
    if (did < 0) throw std::bad_alloc();
    busy |= did > 0;
    P2pCommand& command = carrier->command;
    while (!lost && p2p_end_command(end, &command)) {
        busy = true;
        carry_out(command);
    }
    return busy;
}

void P2pLink::carry_out(const P2pCommand& command) {
    if (command.kind == P2P_COMMAND_LOST) return lose();
    if (command.path >= rails.size()) return;
    p2p::Rail& at = rails[command.path];
    if (command.kind == P2P_COMMAND_OPEN) {
        std::string address(reinterpret_cast<const char*>(command.blob), command.blob_bytes);
        carrier->open_rail(*this, command.path, command.generation, std::move(address));
    } else if (at.generation == command.generation &&
               (at.path || at.stage == p2p::Stage::MAKING || at.stage == p2p::Stage::CLOSING)) {
        carrier->close_rail(*this, command.path);
    } else {
        path_closed(command.path, command.generation);
    }
}

void P2pLink::lose() {
    lost = true;
    for (uint32_t i = 0; i < rails.size(); i++)
        if (rails[i].path) carrier->close_rail(*this, i);
    // An owner says so when the last of its agents is destroyed: then nothing can land any more.
    if (!owns || jobs == 0) hang_up();
    carrier->changed.notify_all();
}

void P2pLink::path_closed(uint32_t rail, uint32_t generation) {
    p2p_end_path_closed(end, rail, generation, p2p::now_ns());
    // The job that calls is the last one.
    if (lost && jobs <= 1) hang_up();
}

P2P_API P2pCarrier* p2p_carrier_new(uint64_t incarnation, const char* const* rails, uint32_t rail_count,
                                    void* page, uint32_t lanes, const P2pGpu* gpu) try {
    if (rail_count < 1 || rail_count > P2P_PATHS) return nullptr;
    auto carrier = std::make_unique<P2pCarrier>();
    carrier->incarnation = incarnation;
    carrier->rails.assign(rails, rails + rail_count);
    carrier->page = page;
    carrier->lanes = lanes;
    carrier->config.paths = rail_count;
    carrier->gpu = gpu;
    p2p_bell_init(carrier->bells, incarnation, 1);
    P2pCarrier* running = carrier.get();
    running->pump = p2p::quiet_thread("p2p-pump", [running] { running->run_pump(); });
    running->builder = p2p::quiet_thread("p2p-builder", [running] { running->run_builder(); });
    if (running->pump.joinable() && running->builder.joinable()) return carrier.release();
    p2p_carrier_free(carrier.release());
    return nullptr;
} P2P_CATCH(nullptr)

P2P_API void p2p_carrier_leave(P2pCarrier* carrier) {
    p2p::Visit visit(carrier);
    carrier->leaving = true;
    carrier->changed.notify_all();
}

P2P_API void p2p_carrier_free(P2pCarrier* carrier) {
    if (!carrier) return;
    {
        p2p::Visit visit(carrier);
        carrier->stopping = true;
    }
    carrier->work.notify_all();
    p2p_bell_ring(carrier->bells, 0);
    if (carrier->pump.joinable()) carrier->pump.join();
    if (carrier->builder.joinable()) carrier->builder.join();
    delete carrier;
}

P2P_API void* p2p_carrier_page(P2pCarrier* carrier) { return carrier->bells; }

P2P_API int p2p_carrier_progress(P2pCarrier* carrier) {
    std::unique_lock held(carrier->lock, std::try_to_lock);
    if (!held) return 0;
    p2p::OnGpu on(carrier->gpu);
    uint64_t now = p2p::now_ns();
    carrier->inline_ns.store(now);
    return carrier->round(now);
}

P2P_API uint64_t p2p_carrier_refused(P2pCarrier* carrier) {
    p2p::Visit visit(carrier);
    return carrier->refused;
}
