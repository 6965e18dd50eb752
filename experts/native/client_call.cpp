// One expert call: by all lanes at once, waiting on doorbells, or in steps that never wait.
#include <time.h>

#include <algorithm>
#include <bit>

#include "experts/native/client_state.h"
#include "p2p/native/doorbell.h"

using namespace experts;

namespace {

constexpr uint64_t LIVENESS_NS = 2'000'000;
constexpr uint64_t STALL_NS = 500'000'000;  // of waits that last 5 ms: the process did not run

uint64_t clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

// The call is over, well or not: what is still out comes back to slots that no call waits for.
void finish(ExpertClient* client) {
    Call& call = client->call;
    for (uint64_t left = client->used.load(); left; left &= left - 1) {
        Server& server = client->servers[std::countr_zero(left)];
        for (const Slot& slot : server.slots)
            if (call.missing.load() && slot.awaited_by(call.id) && !slot.probe)
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
    if (layer >= client->shape.layers || n == 0 || n > client->max_tokens || !rows || !ids || !weights ||
        !out)
        return EXPERTS_E_ARGUMENT;
    if (std::any_of(ids, ids + total, [&](uint16_t id) { return id >= client->shape.experts; }))
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
    call.settled = 0;
    call.chunks.clear();
    call.order.clear();
    for (uint32_t i = 0; i < (total + 63) / 64; i++) call.filled[i].store(0, std::memory_order_relaxed);
    for (LaneWord& word : call.outstanding) word.value = 0;
    for (uint32_t lane = 0; lane < client->lanes; lane++) {
        client->scratch[lane].doubts.clear();
        client->scratch[lane].doubts.reserve(total);
    }
    client->plan.doubts.clear();
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
    post_chunks(client, lane, clock_ns());
    return {seen, ring_shared(client, lane)};
}

void wait_lane(ExpertClient* client, uint32_t lane, const Dispatched& dispatched) {
    Call& call = client->call;
    // Once: whether the call is complete is for the lanes to say that receive the replies.
    uint64_t now_ns = clock_ns();
    if (dispatched.shared && call.outstanding[lane].value == 0 && call.missing.load() && client->page &&
        now_ns < call.end_ns())
        p2p_bell_wait(client->page, lane, dispatched.seen,
                      std::min(P2P_WAIT_NS, call.end_ns() - now_ns));
    uint64_t checked_ns = now_ns;
    for (;;) {
        uint32_t seen = p2p_bell_read(client->page, lane);
        uint64_t before_ns = now_ns;
        now_ns = clock_ns();
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
    if (call.replan.load() || call.in_doubt.load(std::memory_order_relaxed)) ring_lanes(client, lane);
}

void meet(ExpertClient* client, LanePool* pool, uint32_t lane) {
    if (client->lanes == 1) return;
    p2p_lanes_barrier(pool, lane);
    p2p_lanes_stamp(pool, lane, EXPERTS_PHASE_MEET);
}

}  // namespace

P2P_API int32_t expert_call(ExpertClient* client, LanePool* pool, uint32_t lane, uint32_t layer,
                            const void* rows, uint32_t n, const uint16_t* expert_ids, const float* weights,
                            float* out, uint8_t* drop, uint64_t deadline_ns,
                            void (*while_away)(void*, uint32_t), void* arg) {
    Call& call = client->call;
    const auto ended = [&](uint64_t phase) { p2p_lanes_stamp(pool, lane, phase); };
    if (lane == 0)
        call.status = begin(client, layer, rows, n, expert_ids, weights, out, drop, clock_ns(), deadline_ns);
    ended(EXPERTS_PHASE_PLAN);
    meet(client, pool, lane);
    if (lane == 0) count_settled(call);
    int32_t status = call.status;
    Dispatched dispatched{};
    if (status == EXPERTS_OK) {
        dispatched = dispatch(client, lane);
        ended(EXPERTS_PHASE_SEND);
        if (while_away) while_away(arg, lane);
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
            call.status = plan_or_fail(client, clock_ns());
            if (call.status != EXPERTS_OK) finish(client);
        }
        meet(client, pool, lane);
        if (lane == 0) count_settled(call);
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
    if (status == EXPERTS_OK) count_settled(client->call);
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
    bool stuck = call.replan.load() || (call.in_doubt.load() && client->routes_pending.load());
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
    count_settled(call);
    for (uint32_t lane = 0; lane < client->lanes; lane++) post_chunks(client, lane, now_ns);
    return EXPERTS_PENDING;
}

P2P_API int32_t expert_exchange(ExpertClient* client, uint32_t layer, const void* rows, uint32_t n,
                                const uint16_t* expert_ids, const float* weights, float* out,
                                uint8_t* drop, uint64_t deadline_ns) {
    if (client->lanes == 1)
        return expert_call(client, nullptr, 0, layer, rows, n, expert_ids, weights, out, drop, deadline_ns,
                           nullptr, nullptr);
    if (!client->own_pool) client->own_pool.reset(p2p_lanes_new(client->lanes, nullptr));
    if (!client->own_pool) return EXPERTS_E_MEMORY;
    int32_t status = EXPERTS_E_ARGUMENT;
    auto lane_call = [&](uint32_t lane) {
        int32_t mine = expert_call(client, client->own_pool.get(), lane, layer, rows, n, expert_ids, weights,
                                   out, drop, deadline_ns, nullptr, nullptr);
        if (lane == 0) status = mine;
    };
    auto run = [](void* arg, uint32_t lane) { (*static_cast<decltype(lane_call)*>(arg))(lane); };
    p2p_lanes_run(client->own_pool.get(), run, &lane_call);
    return status;
}
