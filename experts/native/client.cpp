// The client's life outside calls: servers come and go, routes are published and adopted, counters are read.
#include <algorithm>
#include <cstdlib>
#include <new>

#include "experts/native/client_state.h"
#include "p2p/native/doorbell.h"
#include "p2p/native/window.h"

namespace experts {

void Arena::Free::operator()(uint8_t* memory) const { std::free(memory); }

uint8_t* Arena::take(uint64_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    while (block_ < blocks_.size() && blocks_[block_].bytes - used_ < bytes) {
        block_++;
        used_ = 0;
    }
    if (block_ == blocks_.size()) {
        uint64_t size = bytes > (4u << 20) ? bytes : (4u << 20);
        auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, size));
        if (!memory) throw std::bad_alloc();
        blocks_.push_back({std::unique_ptr<uint8_t, Free>(memory), size});
    }
    uint8_t* taken = blocks_[block_].memory.get() + used_;
    used_ += bytes;
    return taken;
}

void Arena::reset() {
    block_ = 0;
    used_ = 0;
}

static void vacate(ExpertClient* client, uint32_t index) {
    Server& server = client->servers[index];
    client->used.fetch_and(~(1ull << index));
    for (Slot& slot : server.slots) slot = Slot{};
    server.units = 0;
    server.queue.clear();
    server.queue_head = 0;
    server.leaving.store(false);
    server.state.store(SERVER_LEFT, std::memory_order_release);
}

void adopt_locked(ExpertClient* client) {
    if (client->pending) {
        client->routes = std::move(*client->pending);
        client->pending.reset();
        client->routes_pending.store(0);
    }
    if (client->in_call) return;
    client->adopted_epoch.store(client->routes.epoch);
    for (uint32_t i = 0; i < EXPERTS_MAX_SERVERS; i++)
        if (client->servers[i].leaving.load()) vacate(client, i);
}

}  // namespace experts

using namespace experts;

P2P_API ExpertClient* expert_client_new(uint32_t layers, uint32_t experts, uint32_t hidden, uint32_t top_k,
                                        int32_t dtype, uint64_t model_hash, uint64_t incarnation,
                                        uint32_t lanes, void* own_page, uint32_t max_tokens_per_call) try {
    bool sizes = layers && experts && experts <= 65535 && hidden && top_k && top_k <= 1024 && lanes &&
                 max_tokens_per_call;
    if (!sizes || lanes > EXPERTS_MAX_LANES || max_tokens_per_call > MAX_ROWS || dtype < 0 || dtype > 2)
        return nullptr;
    auto client = std::make_unique<ExpertClient>();
    client->shape = {layers, experts, hidden, top_k, uint32_t(dtype), model_hash};
    client->incarnation = incarnation;
    client->lanes = lanes;
    client->max_tokens = max_tokens_per_call;
    client->page = own_page;
    client->routes.table.assign(uint64_t(layers) * experts * EXPERTS_MAX_REPLICAS, EXPERTS_NO_SERVER);
    uint64_t pairs = uint64_t(max_tokens_per_call) * top_k;
    client->call.filled = std::make_unique<std::atomic<uint64_t>[]>((pairs + 63) / 64);
    client->call.row.assign(pairs, nullptr);
    client->call.order.reserve(pairs);
    client->routed_rows.assign(uint64_t(layers) * experts, 0);
    client->routed_calls.assign(uint64_t(layers) * experts, 0);
    client->nothing.assign(hidden, 0);
    client->plan.count.assign(experts, 0);
    client->plan.server_of.assign(experts, EXPERTS_NO_SERVER);
    client->plan.want_of.assign(experts, 0);
    std::fill_n(client->speed, EXPERTS_MAX_SERVERS, 1.0);
    for (std::vector<uint64_t>& refused : client->plan.refused) refused.assign(experts, 0);
    client->plan.not_held.assign(experts, 0);
    // While rows travel nothing is allocated.
    uint64_t chunk_pairs = std::min(pairs, CHUNK_BYTES / client->shape.reply_row_bytes());
    for (uint32_t lane = 0; lane < lanes; lane++) {
        client->scratch[lane].keys.reserve(chunk_pairs);
        client->scratch[lane].pairs.reserve(chunk_pairs);
    }
    return client.release();
} P2P_CATCH(nullptr)

P2P_API void expert_client_free(ExpertClient* client) { delete client; }

P2P_API void expert_client_set_patience(ExpertClient* client, uint64_t patience_ns) {
    client->patience_ns = patience_ns;
}

P2P_API int32_t expert_client_add_server(ExpertClient* client, const ServerLink* link) {
    const WireShape& shape = client->shape;
    if (!link->tx || !link->rx || !link->slots || link->slots > MAX_SLOTS || link->lane >= client->lanes)
        return EXPERTS_E_ARGUMENT;
    uint64_t window = p2p_window_bytes(link->slots, link->slot_bytes);
    if (!window || link->tx_bytes < window || link->rx_bytes < window) return EXPERTS_E_ARGUMENT;
    if (p2p_window_check(link->tx, link->tx_bytes, link->server_incarnation, link->slots, link->slot_bytes))
        return EXPERTS_E_ARGUMENT;
    // One token must fit, with all of its experts on this server.
    uint64_t limit = link->slot_bytes < CHUNK_BYTES ? link->slot_bytes : CHUNK_BYTES;
    if (request_bytes(shape, 1, shape.top_k) > limit || reply_bytes(shape, shape.top_k) > limit)
        return EXPERTS_E_ARGUMENT;
    std::lock_guard lock(client->mutex);
    for (uint32_t i = 0; i < EXPERTS_MAX_SERVERS; i++) {
        Server& server = client->servers[i];
        if (server.state.load() != SERVER_EMPTY) continue;
        server.stale.reset(new (std::nothrow) uint8_t[link->slot_bytes]);
        if (!server.stale) return EXPERTS_E_MEMORY;
        server.link = *link;
        std::fill_n(server.in_state, SLOT_STATES, 0);
        server.in_state[SLOT_FREE] = link->slots;
        server.sequence = 0;
        server.latency = {};
        std::fill_n(server.corrupt_ns, CORRUPT_MOST, 0);
        server.asked_ns = 0;
        server.service = {};
        server.probe_at_ns = 0;
        server.probe_wait_ns = PROBE_FIRST_NS;
        server.stats = ServerStats{};
        for (uint32_t other = 0; other < EXPERTS_MAX_SERVERS; other++) {
            uint32_t state = client->servers[other].state.load();
            if ((state != SERVER_LIVE && state != SERVER_GONE) ||
                client->servers[other].link.server_incarnation != link->server_incarnation)
                continue;
            // The same server over another link: what it did counts.
            expert_client_stats(client, other, &server.stats);
            server.stats.late_slots = server.stats.lost_slots = 0;
        }
        server.state.store(SERVER_LIVE, std::memory_order_release);
        client->used.fetch_or(1ull << i, std::memory_order_release);
        return int32_t(i);
    }
    return EXPERTS_E_FULL;
}

P2P_API void expert_client_remove_server(ExpertClient* client, uint32_t index) {
    if (index >= EXPERTS_MAX_SERVERS) return;
    std::lock_guard lock(client->mutex);
    uint32_t state = client->servers[index].state.load();
    if (state == SERVER_EMPTY || state == SERVER_LEFT) return;
    client->servers[index].leaving.store(true);
    if (!client->in_call) vacate(client, index);
}

P2P_API int32_t expert_client_server_idle(ExpertClient* client, uint32_t index) {
    if (index >= EXPERTS_MAX_SERVERS) return 0;
    std::lock_guard lock(client->mutex);
    std::atomic<uint32_t>& state = client->servers[index].state;
    // Only now may the place be given to another: until here its index still means the server that left.
    if (state.load() == SERVER_LEFT) state.store(SERVER_EMPTY);
    return state.load() == SERVER_EMPTY;
}

P2P_API int32_t expert_client_publish_routes(ExpertClient* client, uint64_t epoch, const uint8_t* table) try {
    auto routes = std::make_unique<Routes>();
    routes->epoch = epoch;
    routes->table.assign(
        table, table + uint64_t(client->shape.layers) * client->shape.experts * EXPERTS_MAX_REPLICAS);
    {
        std::lock_guard lock(client->mutex);
        client->pending = std::move(routes);
        client->routes_pending.store(1);
        if (!client->in_call) adopt_locked(client);
    }
    // A call may be waiting for exactly these routes.
    if (client->page)
        for (uint32_t lane = 0; lane < client->lanes; lane++) p2p_bell_ring(client->page, lane);
    return EXPERTS_OK;
} P2P_CATCH(EXPERTS_E_MEMORY)

P2P_API uint64_t expert_client_adopted_epoch(ExpertClient* client) { return client->adopted_epoch.load(); }

P2P_API void expert_client_take_routed(ExpertClient* client, uint32_t* rows, uint32_t* activated) {
    for (size_t i = 0; i < client->routed_rows.size(); i++) {
        rows[i] = std::atomic_ref(client->routed_rows[i]).exchange(0, std::memory_order_relaxed);
        activated[i] = std::atomic_ref(client->routed_calls[i]).exchange(0, std::memory_order_relaxed);
    }
}

P2P_API uint32_t expert_client_missing(ExpertClient* client, uint8_t* rows, uint32_t capacity) {
    const Call& call = client->call;
    if (call.n > capacity) return 0;
    std::fill_n(rows, call.n, 0);
    for (uint32_t pair = 0; pair < call.n * client->shape.top_k; pair++)
        if (!(call.filled[pair / 64].load(std::memory_order_relaxed) >> (pair % 64) & 1))
            rows[pair / client->shape.top_k] = 1;
    return call.n;
}

P2P_API int32_t expert_client_stats(ExpertClient* client, uint32_t index, ServerStats* out) {
    if (index >= EXPERTS_MAX_SERVERS) return EXPERTS_E_ARGUMENT;
    Server& server = client->servers[index];
    auto read = [](uint64_t& field) { return std::atomic_ref(field).load(std::memory_order_relaxed); };
    ServerStats& stats = server.stats;
    *out = {read(stats.rows),
            read(stats.pairs),
            read(stats.calls),
            read(stats.latency_ns),
            read(stats.latency_max_ns),
            read(stats.service_ns),
            read(stats.hedges),
            read(stats.redispatches),
            read(stats.lost),
            read(stats.corrupt),
            read(stats.replies),
            read(stats.in_flight),
            read(stats.latency_sum_ns),
            read(stats.service_sum_ns),
            read(stats.extra),
            read(stats.quarantined_until_ns),
            std::atomic_ref(stats.late_slots).load(std::memory_order_relaxed),
            std::atomic_ref(stats.lost_slots).load(std::memory_order_relaxed),
            server.state.load(),
            std::atomic_ref(client->speed[index]).load(std::memory_order_relaxed)};
    if (server.leaving.load()) out->state = SERVER_LEFT;
    return EXPERTS_OK;
}
