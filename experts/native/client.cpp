// The client's calls, and its life outside them: servers come and go, routes are published and adopted, counters are
// read. One expert call is made by all lanes at once, waiting on doorbells, or in steps that never wait.
#include <sched.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "experts/native/client_state.h"
#include "experts/native/kernels.h"
#include "p2p/native/doorbell.h"
#include "p2p/native/wait.h"
#include "p2p/native/window.h"

namespace experts {

static void vacate(ExpertClient* client, uint32_t index) {
    Server& server = client->servers[index];
    client->used.fetch_and(~(1ull << index));
    std::fill_n(server.slots, MAX_SLOTS, Slot{});
    // A plan that ran out of memory has left pairs there, and whoever has this place next may come in mid-call.
    client->plan.list[index].clear();
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
    for (uint32_t i : client->attached())
        if (client->servers[i].leaving.load()) vacate(client, i);
}

}  // namespace experts

using namespace experts;

P2P_API ExpertClient* expert_client_new(uint32_t layers, uint32_t experts, uint32_t hidden, uint32_t top_k,
                                        int32_t dtype, uint64_t model_hash, uint64_t incarnation,
                                        uint32_t lanes, void* own_page, uint32_t max_tokens_per_call) try {
    bool sizes = layers && experts && experts <= 65535 && hidden && top_k && top_k <= 1024 && lanes &&
                 max_tokens_per_call;
    if (!sizes || lanes > EXPERTS_MAX_LANES || max_tokens_per_call > MAX_ROWS || dtype < 0 || dtype >= EAAS_DTYPES)
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

P2P_API void expert_client_set_team(ExpertClient* client, void* parallel_for, const int32_t* cores) {
    client->parallel_for = reinterpret_cast<ParallelFor*>(parallel_for);
    std::copy_n(cores, client->lanes, client->cores);
}

P2P_API int32_t expert_client_add_server(ExpertClient* client, const ServerLink* link) try {
    const WireShape& shape = client->shape;
    if (!link->tx || !link->rx || !link->slots || link->slots > MAX_SLOTS || link->lane >= client->lanes)
        return EXPERTS_E_ARGUMENT;
    if (link->rx_bytes < p2p_window_bytes(link->slots, link->slot_bytes) ||
        p2p_window_check(link->tx, link->tx_bytes, link->server_incarnation, link->slots, link->slot_bytes))
        return EXPERTS_E_ARGUMENT;
    // One token must fit, with all of its experts on this server.
    uint64_t limit = link->slot_bytes < CHUNK_BYTES ? link->slot_bytes : CHUNK_BYTES;
    if (request_bytes(shape, 1, shape.top_k) > limit || reply_bytes(shape, shape.top_k) > limit)
        return EXPERTS_E_ARGUMENT;
    std::lock_guard lock(client->mutex);
    for (uint32_t i = 0; i < EXPERTS_MAX_SERVERS; i++) {
        Server& server = client->servers[i];
        if (server.state.load() != SERVER_EMPTY) continue;
        static_cast<Link&>(server) = {};
        server.link = *link;
        server.stale = Block(link->slot_bytes);
        server.in_state[SLOT_FREE] = link->slots;
        for (uint32_t other = 0; other < EXPERTS_MAX_SERVERS; other++) {
            uint32_t state = client->servers[other].state.load();
            if ((state != SERVER_LIVE && state != SERVER_GONE) ||
                client->servers[other].link.server_incarnation != link->server_incarnation)
                continue;
            // The same server over another link: what it did counts.
            expert_client_stats(client, other, &server.stats);
            server.stats.held_slots = server.stats.lost_slots = 0;
        }
        server.state.store(SERVER_LIVE, std::memory_order_release);
        client->used.fetch_or(1ull << i, std::memory_order_release);
        return int32_t(i);
    }
    return EXPERTS_E_FULL;
} P2P_CATCH(EXPERTS_E_MEMORY)

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
    routes->table.assign(table, table + uint64_t(client->shape.layers) * client->shape.experts * EXPERTS_MAX_REPLICAS);
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
        if (!pair_filled(call, pair)) rows[pair / client->shape.top_k] = 1;
    return call.n;
}

P2P_API int32_t expert_client_stats(ExpertClient* client, uint32_t index, ServerStats* out) {
    if (index >= EXPERTS_MAX_SERVERS) return EXPERTS_E_ARGUMENT;
    Server& server = client->servers[index];
    read_counters(server.stats, out);
    out->state = server.leaving.load() ? SERVER_LEFT : server.state.load();
    out->speed = std::atomic_ref(client->speed[index]).load(std::memory_order_relaxed);
    return EXPERTS_OK;
}

// ---- calls

namespace {

constexpr uint64_t LIVENESS_NS = 2'000'000;
constexpr uint64_t STALL_NS = 500'000'000;  // of waits that last 5 ms: the process did not run

// The call is over, well or not: what is still out comes back to slots that no call waits for.
void finish(ExpertClient* client) {
    Call& call = client->call;
    for (uint32_t index : client->attached()) {
        Server& server = client->servers[index];
        for (const Slot& slot : server.slots)
            if (call.missing.load() && slot.pending_in(call.id) && !slot.probe)
                add(server.stats.lost, call.chunks[slot.chunk].pairs);
        server.queue.clear();
        server.queue_head = 0;
    }
    if (!call.missing.load()) blame(client);
    std::lock_guard lock(client->mutex);
    client->in_call = false;
    adopt_locked(client);
}

int32_t begin(ExpertClient* client, uint32_t layer, const void* rows, uint32_t n, const uint16_t* ids,
              const float* weights, float* out, uint8_t* drop, uint64_t now_ns, uint64_t deadline_ns) try {
    Call& call = client->call;
    uint32_t total = n * client->shape.top_k;
    const auto unknown = [&](uint16_t id) { return id >= client->shape.experts && id != EXPERTS_NO_EXPERT; };
    if (layer >= client->shape.layers || n == 0 || n > client->max_tokens || !rows || !ids || !weights || !out ||
        std::any_of(ids, ids + total, unknown))
        return EXPERTS_E_ARGUMENT;
    {
        std::lock_guard lock(client->mutex);
        if (client->in_call) return EXPERTS_E_ARGUMENT;
        adopt_locked(client);
        client->in_call = true;
    }
    call.id++;
    // Replies to earlier calls that came meanwhile free their slots, before the plan looks at them.
    for (uint32_t lane = 0; lane < client->lanes; lane++) progress(client, lane, now_ns);
    call.layer = layer;
    call.n = n;
    call.rows = static_cast<const uint8_t*>(rows);
    call.ids = ids;
    call.weights = weights;
    call.out = out;
    call.drop = drop;
    if (deadline_ns != call.said_deadline_ns) call.deadline_ns = call.said_deadline_ns = deadline_ns;
    call.lost_ns = UINT64_MAX;
    call.attempt = 0;
    call.routes_since = 0;
    call.replan.store(0);
    call.missing.store(total);
    call.filled_by_plan = 0;
    call.chunks.clear();
    call.order.clear();
    for (uint32_t i = 0; i < (total + 63) / 64; i++) call.filled[i].store(0, std::memory_order_relaxed);
    for (LaneWord& word : call.outstanding) word.value = 0;
    for (uint32_t lane = 0; lane < client->lanes; lane++) {
        client->scratch[lane].doubts.clear();
        client->scratch[lane].doubts.reserve(total);
    }
    client->arena.reset();
    plan_first(client, now_ns);
    return EXPERTS_OK;
} P2P_CATCH(client->in_call ? finish(client) : void(), EXPERTS_E_MEMORY)

int32_t plan_or_fail(ExpertClient* client, uint64_t now_ns) try {
    if (now_ns >= client->call.end_ns()) return EXPERTS_E_LOST;
    plan_again(client, now_ns);
    return EXPERTS_OK;
} P2P_CATCH(EXPERTS_E_MEMORY)

void ring_lanes(ExpertClient* client, uint32_t lane) {
    if (!client->page) return;
    for (uint32_t other = 0; other < client->lanes; other++)
        if (other != lane) p2p_bell_ring(client->page, other);
}

struct Dispatched {
    uint32_t seen;  // the lane's doorbell before
    bool shared;    // other lanes' servers compute on this core too, and ring when they leave it
};

// Sends what is planned for the lane's servers.
Dispatched dispatch(ExpertClient* client, uint32_t lane) {
    uint32_t seen = p2p_bell_read(client->page, lane);
    post_chunks(client, lane, p2p::now_ns());
    return {seen, ring_shared(client, lane)};
}

void wait_lane(ExpertClient* client, uint32_t lane, const Dispatched& dispatched) {
    Call& call = client->call;
    // Once: whether the call is complete is for the lanes to say that receive the replies.
    uint64_t now_ns = p2p::now_ns();
    if (dispatched.shared && call.outstanding[lane].value == 0 && call.missing.load() && client->page &&
        now_ns < call.end_ns())
        p2p_bell_wait(client->page, lane, dispatched.seen, std::min(P2P_WAIT_NS, call.end_ns() - now_ns));
    uint64_t checked_ns = now_ns;
    for (;;) {
        uint32_t seen = p2p_bell_read(client->page, lane);
        uint64_t before_ns = now_ns;
        now_ns = p2p::now_ns();
        // Time in which nobody here could have heard an answer is taken off the wait for it.
        if (lane == 0 && now_ns - before_ns > STALL_NS && call.deadline_ns < UINT64_MAX / 2)
            call.deadline_ns += now_ns - before_ns;
        // Waiting is work too: without this a step that waits for lost experts would look hung.
        if (lane == 0) p2p_bell_beat(client->page);
        progress(client, lane, now_ns);
        if (now_ns - checked_ns >= LIVENESS_NS) {
            check_liveness(client, lane, now_ns, false);
            checked_ns = now_ns;
        }
        if (lane_finished(client, lane, now_ns)) break;
        uint64_t wake_ns = std::min(call.end_ns(), next_due_ns(client, lane));
        p2p_bell_wait(client->page, lane, seen, wake_ns > now_ns ? std::min(P2P_WAIT_NS, wake_ns - now_ns) : 0);
    }
    // Another lane may wait for a reply that is no longer needed, or must come and plan again.
    if (call.replan.load() || call.unplaced.load(std::memory_order_relaxed)) ring_lanes(client, lane);
}

void meet(ExpertClient* client, LanePool* pool, uint32_t lane) {
    if (client->lanes == 1) return;
    p2p_lanes_barrier(pool, lane);
    p2p_lanes_stamp(pool, lane, EXPERTS_PHASE_MEET);
}

}  // namespace

P2P_API int32_t expert_call(ExpertClient* client, LanePool* pool, uint32_t lane, uint32_t layer, const void* rows,
                            uint32_t n, const uint16_t* expert_ids, const float* weights, float* out, uint8_t* drop,
                            uint64_t deadline_ns, void (*overlap)(void*, uint32_t), void* arg) {
    Call& call = client->call;
    const auto ended = [&](uint64_t phase) { p2p_lanes_stamp(pool, lane, phase); };
    if (lane == 0)
        call.status = begin(client, layer, rows, n, expert_ids, weights, out, drop, p2p::now_ns(), deadline_ns);
    ended(EXPERTS_PHASE_PLAN);
    meet(client, pool, lane);
    if (lane == 0) count_filled_by_plan(call);
    int32_t status = call.status;
    Dispatched dispatched{};
    if (status == EXPERTS_OK) {
        dispatched = dispatch(client, lane);
        ended(EXPERTS_PHASE_SEND);
        if (overlap) overlap(arg, lane);
        ended(EXPERTS_PHASE_AWAY);
    }
    while (status == EXPERTS_OK) {
        wait_lane(client, lane, dispatched);
        ended(EXPERTS_PHASE_REPLY);
        meet(client, pool, lane);
        if (call.missing.load() == 0) {
            combine(client, lane, client->lanes);
            if (lane == 0) finish(client);
            ended(EXPERTS_PHASE_COMBINE);
            break;
        }
        if (lane == 0) {
            call.status = plan_or_fail(client, p2p::now_ns());
            if (call.status != EXPERTS_OK) finish(client);
        }
        meet(client, pool, lane);
        if (lane == 0) count_filled_by_plan(call);
        status = call.status;
        if (status == EXPERTS_OK) dispatched = dispatch(client, lane);
    }
    meet(client, pool, lane);
    return status;
}

P2P_API int32_t expert_client_begin(ExpertClient* client, uint32_t layer, const void* rows, uint32_t n,
                                    const uint16_t* expert_ids, const float* weights, float* out,
                                    uint8_t* drop, uint64_t now_ns, uint64_t deadline_ns) {
    int32_t status = begin(client, layer, rows, n, expert_ids, weights, out, drop, now_ns, deadline_ns);
    if (status == EXPERTS_OK) count_filled_by_plan(client->call);
    for (uint32_t lane = 0; status == EXPERTS_OK && lane < client->lanes; lane++)
        post_chunks(client, lane, now_ns);
    client->checked_ns = now_ns;
    return status;
}

P2P_API int32_t expert_client_step(ExpertClient* client, uint64_t now_ns) {
    Call& call = client->call;
    if (!client->in_call) return EXPERTS_E_ARGUMENT;
    bool check = now_ns - client->checked_ns >= LIVENESS_NS;
    for (uint32_t lane = 0; lane < client->lanes; lane++) {
        progress(client, lane, now_ns);
        if (check) check_liveness(client, lane, now_ns, false);
    }
    if (check) client->checked_ns = now_ns;
    bool stuck = call.replan.load() || (call.unplaced.load() && client->routes_pending.load());
    if (call.missing.load() == 0) {
        for (uint32_t lane = 0; lane < client->lanes; lane++) combine(client, lane, client->lanes);
        finish(client);
        return EXPERTS_OK;
    }
    if (!stuck && now_ns < call.end_ns()) return EXPERTS_PENDING;
    int32_t status = plan_or_fail(client, now_ns);
    if (status != EXPERTS_OK) {
        finish(client);
        return status;
    }
    count_filled_by_plan(call);
    for (uint32_t lane = 0; lane < client->lanes; lane++) post_chunks(client, lane, now_ns);
    return EXPERTS_PENDING;
}

namespace {

// Each lane on a thread of the caller's. False, and nothing has run, where it gives fewer threads than there are lanes.
bool run_on_team(ExpertClient* client, void (*run)(void*, uint32_t), void* arg) {
    struct Region {
        ExpertClient* client;
        void (*run)(void*, uint32_t);
        void* arg;
        std::atomic<bool> fits{true};
    } region{client, run, arg};
    // So much that no part of an uneven division is as large as a lane's.
    constexpr int64_t SHARE = 4096;
    const auto on_thread = [](int64_t begin, int64_t end, void* argument) {
        Region& region = *static_cast<Region*>(argument);
        if (end - begin != SHARE) return region.fits.store(false);
        const uint32_t lane = uint32_t(begin / SHARE);
        static thread_local bool pinned = false;
        const int32_t core = region.client->cores[lane];
        if (core >= 0 && !std::exchange(pinned, true)) {
            cpu_set_t cores;
            CPU_ZERO(&cores);
            CPU_SET(core, &cores);
            // Where it may not be used, that only costs speed.
            sched_setaffinity(0, sizeof cores, &cores);
        }
        region.run(region.arg, lane);
    };
    return !client->parallel_for(0, client->lanes * SHARE, SHARE, on_thread, &region) && region.fits.load();
}

// By one thread, for all lanes.
int32_t call_alone(ExpertClient* client, uint32_t layer, const void* rows, uint32_t n, const uint16_t* ids,
                   const float* weights, float* out, uint64_t deadline_ns) {
    int32_t status = EXPERTS_E_ARGUMENT;  // another call of this client runs
    auto call = [&](uint32_t lane) {
        int32_t mine = expert_call(client, client->own_pool, lane, layer, rows, n, ids, weights, out, nullptr,
                                   deadline_ns, nullptr, nullptr);
        if (lane == 0) status = mine;
    };
    auto run = [](void* arg, uint32_t lane) { (*static_cast<decltype(call)*>(arg))(lane); };
    if (client->lanes == 1) {
        call(0);
        return status;
    }
    // Its barriers serve the caller's threads as well.
    if (!client->own_pool) client->own_pool = p2p_lanes_new(client->lanes, nullptr);
    if (!client->own_pool) return EXPERTS_E_MEMORY;
    if (!client->parallel_for || !run_on_team(client, run, &call)) p2p_lanes_run(client->own_pool, run, &call);
    return status;
}

// `count` elements from `at` on, in the client's type: where they lie, or a copy.
const uint8_t* stage_rows(ExpertClient* client, const void* rows, uint32_t type, uint64_t at, uint64_t count) {
    const bool wide = client->shape.dtype == 0;
    if (wide == (type == 0)) return static_cast<const uint8_t*>(rows) + at * (wide ? 4 : 2);
    std::vector<uint8_t>& staged = client->staging.rows;
    staged.resize(count * (wide ? 4 : 2));
    if (wide)
        std::transform(static_cast<const uint16_t*>(rows) + at, static_cast<const uint16_t*>(rows) + at + count,
                       reinterpret_cast<uint32_t*>(staged.data()), [](uint16_t bits) { return uint32_t(bits) << 16; });
    else
        experts_to_dtype(EAAS_BF16, static_cast<const float*>(rows) + at, staged.data(), count);
    return staged.data();
}

// False where one names no expert and is not -1 either, which becomes EXPERTS_NO_EXPERT.
template <class Id>
bool stage_ids(ExpertClient* client, const void* ids, uint64_t at, uint64_t count) {
    const Id* from = static_cast<const Id*>(ids) + at;
    const auto unknown = [&](Id id) { return id >= client->shape.experts && id != Id(-1); };
    client->staging.ids.assign(from, from + count);
    return std::none_of(from, from + count, unknown);
}

}  // namespace

P2P_API int32_t expert_apply(ExpertClient* client, uint32_t layer, const void* rows, uint32_t rows_type, uint32_t n,
                             const void* ids, uint32_t id_bytes, const float* weights, void* out, uint32_t out_type,
                             uint64_t wait_ns) try {
    const WireShape& shape = client->shape;
    const uint64_t hidden = shape.hidden, top_k = shape.top_k;
    const auto stage = id_bytes == 2   ? stage_ids<uint16_t>
                       : id_bytes == 4 ? stage_ids<uint32_t>
                       : id_bytes == 8 ? stage_ids<uint64_t>
                                       : nullptr;
    if (layer >= shape.layers || !stage || rows_type > 1 || out_type > 1) return EXPERTS_E_ARGUMENT;
    Staging& staging = client->staging;
    staging.sums.assign(n * hidden, 0);
    for (uint64_t at = 0; at < n; at += client->max_tokens) {
        const uint32_t count = uint32_t(std::min<uint64_t>(client->max_tokens, n - at));
        if (!stage(client, ids, at * top_k, count * top_k)) return EXPERTS_E_ARGUMENT;
        staging.weights.assign(weights + at * top_k, weights + (at + count) * top_k);
        const uint8_t* chunk = stage_rows(client, rows, rows_type, at * hidden, count * hidden);
        float* sums = staging.sums.data() + at * hidden;
        for (uint64_t row = 0; row < count; row++) {
            uint16_t* chosen = staging.ids.data() + row * top_k;
            if (!finite_source(shape, chunk + row * shape.source_bytes())) {
                std::fill_n(chosen, top_k, EXPERTS_NO_EXPERT);
                std::fill_n(sums + row * hidden, hidden, std::numeric_limits<float>::quiet_NaN());
            }
            for (uint64_t k = 0; k < top_k; k++)
                if (chosen[k] == EXPERTS_NO_EXPERT) staging.weights[row * top_k + k] = 0;
        }
        if (int32_t status = call_alone(client, layer, chunk, count, staging.ids.data(), staging.weights.data(), sums,
                                        p2p::now_ns() + wait_ns))
            return status;
    }
    experts_to_dtype(int(out_type), staging.sums.data(), out, staging.sums.size());
    return EXPERTS_OK;
} P2P_CATCH(EXPERTS_E_MEMORY)
