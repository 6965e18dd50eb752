// The server's life around batches: clients, experts, lease; the loop of each lane.
#include <time.h>


#include "experts/native/server_state.h"
#include "p2p/native/doorbell.h"
#include "p2p/native/window.h"

using namespace experts;

namespace {

uint64_t boottime_ns() {
    timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

// The loop takes the mutex again at once after each batch; without this another thread might never get it.
class Turn {
  public:
    explicit Turn(ExpertServer* server) : server_(server) {
        server_->wanting.fetch_add(1);
        server_->mutex.lock();
        server_->wanting.fetch_sub(1);
    }
    ~Turn() { server_->mutex.unlock(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

  private:
    ExpertServer* server_;
};

void let_others_pass(ExpertServer* server) {
    timespec pause{0, 20'000};
    while (server->wanting.load()) nanosleep(&pause, nullptr);
}

bool may_answer(ExpertServer* server) {
    uint64_t lease_ns = server->lease_ns.load();
    return lease_ns == UINT64_MAX || (lease_ns && boottime_ns() < lease_ns);
}

// Computes the next batch, or finds none.
bool serve_next(ExpertServer* server, uint64_t now_ns) try {
    std::lock_guard lock(server->mutex);
    if (!may_answer(server) || !collect(server, now_ns)) return false;
    server->left.store(server->lanes - 1, std::memory_order_relaxed);
    server->batch.fetch_add(1, std::memory_order_release);
    for (uint32_t lane = 1; lane < server->lanes; lane++) p2p_bell_ring(server->page, lane);
    serve_batch(server, 0);
    return true;
} P2P_CATCH(server->starved = true)

void lead(ExpertServer* server) {
    void* page = server->page;
    for (;;) {
        uint32_t seen = p2p_bell_read(page, 0);
        uint64_t now_ns = monotonic_ns();
        if (page) p2p_bell_beat(page);
        if (server->stopped.load() || server->starved || now_ns >= server->run_until_ns) break;
        let_others_pass(server);
        if (!serve_next(server, now_ns)) p2p_bell_wait(page, 0, seen, P2P_WAIT_NS);
    }
    server->running.store(false);
    server->batch.fetch_add(1, std::memory_order_release);
    for (uint32_t lane = 1; lane < server->lanes; lane++) p2p_bell_ring(page, lane);
}

void follow(ExpertServer* server, uint32_t lane, uint32_t done) {
    for (;;) {
        uint32_t seen = p2p_bell_read(server->page, lane);
        uint32_t ready = server->batch.load(std::memory_order_acquire);
        if (ready == done) {
            // Rung by a client, from this core, while lane 0 still reads the request: it will not be long.
            bool rung = p2p_bell_wait(server->page, lane, seen, P2P_WAIT_NS);
            if (rung) p2p_lanes_spin(server->pool, lane, &server->batch, done);
            continue;
        }
        done = ready;
        if (!server->running.load()) return;
        serve_batch(server, lane);
    }
}

struct Run {
    ExpertServer* server;
    uint32_t batch;  // before the run: lane 0 may lead before another lane has looked
};

void run_lane(void* arg, uint32_t lane) {
    Run* run = static_cast<Run*>(arg);
    if (lane == 0)
        lead(run->server);
    else
        follow(run->server, lane, run->batch);
}

}  // namespace

P2P_API ExpertServer* expert_server_new(uint32_t layers, uint32_t experts, uint32_t hidden,
                                        uint32_t intermediate, uint32_t top_k, int32_t dtype,
                                        uint64_t model_hash, uint64_t incarnation, uint32_t lanes,
                                        const int32_t* cores, void* own_page, uint64_t max_slot_bytes) try {
    bool sizes = layers && experts && experts <= 65535 && hidden && intermediate && top_k && top_k <= 1024;
    if (!sizes || !lanes || lanes > P2P_BELL_LANES || dtype < 0 || dtype > 2 || !max_slot_bytes)
        return nullptr;
    auto server = std::make_unique<ExpertServer>();
    server->shape = {layers, experts, hidden, top_k, uint32_t(dtype), model_hash};
    server->intermediate = intermediate;
    server->incarnation = incarnation;
    server->lanes = lanes;
    server->page = own_page;
    server->max_slot_bytes = max_slot_bytes;
    server->experts.assign(uint64_t(layers) * experts, Expert{});
    server->doubtful.assign(server->experts.size(), 0);
    server->pool = p2p_lanes_new(lanes, cores);
    return server->pool ? server.release() : nullptr;
} P2P_CATCH(nullptr)

P2P_API void expert_server_free(ExpertServer* server) {
    if (!server) return;
    p2p_lanes_free(server->pool);
    delete server;
}

P2P_API int32_t expert_server_add_client(ExpertServer* server, const ClientLink* link) {
    if (!link->rx || !link->tx || !link->slots || link->slots > SERVER_MAX_SLOTS || !link->client_lanes ||
        link->client_lanes > P2P_BELL_LANES || !link->bell_lanes ||
        link->bell_lanes > link->client_lanes || link->slot_bytes < sizeof(WireHeader) ||
        link->slot_bytes > server->max_slot_bytes)
        return EXPERT_SERVER_E_ARGUMENT;
    uint64_t window = p2p_window_bytes(link->slots, link->slot_bytes);
    if (!window || link->rx_bytes < window || link->tx_bytes < window) return EXPERT_SERVER_E_ARGUMENT;
    if (p2p_window_check(link->tx, link->tx_bytes, link->client_incarnation, link->slots, link->slot_bytes))
        return EXPERT_SERVER_E_ARGUMENT;
    Turn turn(server);
    for (uint32_t i = 0; i < EXPERT_SERVER_MAX_CLIENTS; i++) {
        if (server->clients[i].attached) continue;
        server->clients[i] = Client{};
        server->clients[i].link = *link;
        server->clients[i].attached = true;
        return int32_t(i);
    }
    return EXPERT_SERVER_E_FULL;
}

P2P_API void expert_server_remove_client(ExpertServer* server, uint32_t index) {
    if (index >= EXPERT_SERVER_MAX_CLIENTS) return;
    Turn turn(server);
    server->clients[index].attached = false;
}

P2P_API void expert_server_set_form(ExpertServer* server, const ExpertForm* form) {
    Turn turn(server);
    server->form = *form;
    server->formed = true;
}

P2P_API int32_t expert_server_set_expert(ExpertServer* server, uint32_t layer, uint32_t expert,
                                         const void* gate_up, const void* down) {
    if (layer >= server->shape.layers || expert >= server->shape.experts || !gate_up != !down)
        return EXPERT_SERVER_E_ARGUMENT;
    Turn turn(server);
    server->experts[uint64_t(layer) * server->shape.experts + expert] = {gate_up, down};
    return EXPERT_SERVER_OK;
}

P2P_API void expert_server_clear_expert(ExpertServer* server, uint32_t layer, uint32_t expert) {
    expert_server_set_expert(server, layer, expert, nullptr, nullptr);
}

P2P_API void expert_server_set_lease(ExpertServer* server, uint64_t boottime_ns) {
    // A fence is for good: no later renewal undoes it.
    uint64_t lease_ns = server->lease_ns.load();
    while (lease_ns && !server->lease_ns.compare_exchange_weak(lease_ns, boottime_ns)) {
    }
}

P2P_API void expert_server_stop(ExpertServer* server) {
    server->stopped.store(true);
    if (server->page) p2p_bell_ring(server->page, 0);
}

P2P_API int32_t expert_server_run(ExpertServer* server, uint64_t max_ns) {
    Run run{server, server->batch.load()};
    server->run_until_ns = monotonic_ns() + max_ns;
    server->running.store(true);
    server->starved = false;
    p2p_lanes_run(server->pool, run_lane, &run);
    return server->starved ? int32_t(EXPERT_SERVER_E_MEMORY) : server->stopped.load();
}

P2P_API int32_t expert_server_step(ExpertServer* server, uint64_t now_ns) try {
    if (server->lanes != 1) return EXPERT_SERVER_E_ARGUMENT;
    std::lock_guard lock(server->mutex);
    if (!may_answer(server) || !collect(server, now_ns)) return 0;
    serve_batch(server, 0);
    return int32_t(server->job_count);
} P2P_CATCH(EXPERT_SERVER_E_MEMORY)

P2P_API int64_t expert_server_take_doubtful(ExpertServer* server) {
    if (!server->any_doubtful.exchange(false)) return -1;
    int64_t found = -1;
    for (size_t i = 0; i < server->doubtful.size(); i++) {
        std::atomic_ref mark(server->doubtful[i]);
        if (!mark.load()) continue;
        if (found >= 0) {
            server->any_doubtful.store(true);
            break;
        }
        mark.store(0);
        found = int64_t(i);
    }
    return found;
}

P2P_API void expert_server_counters(ExpertServer* server, ServerCounters* out) {
    auto read = [](uint64_t& field) { return std::atomic_ref(field).load(std::memory_order_relaxed); };
    ServerCounters& c = server->counters;
    *out = {read(c.batches), read(c.requests), read(c.rows),     read(c.pairs),
            read(c.experts), read(c.busy_ns),  read(c.not_held), read(c.invalid)};
}
