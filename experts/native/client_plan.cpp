// Which server computes which pair: experts poured over their replicas (waterfill.h), then cut into chunks.
#include <algorithm>
#include <bit>

#include "experts/native/client_state.h"

namespace experts {
namespace {

constexpr uint8_t SPLIT = 254;  // in place of a server: several share the expert's rows
constexpr uint64_t WEIGH_CALLS = 64;
enum PairState : uint8_t { PAIR_OPEN, PAIR_PLACED, PAIR_FILLED };

struct Masks {
    uint64_t healthy = 0;  // takes rows
    uint64_t late = 0;     // alive, but owes a reply past its time: only where no other replica exists

    bool takes(uint32_t server) const { return server != EXPERTS_NO_SERVER && healthy >> server & 1; }
};

Masks server_masks(ExpertClient* client, uint64_t now_ns) {
    Masks masks;
    for (uint64_t left = client->used.load(std::memory_order_acquire); left; left &= left - 1) {
        uint32_t i = uint32_t(std::countr_zero(left));
        Server& server = client->servers[i];
        if (server.state.load(std::memory_order_acquire) != SERVER_LIVE || server.leaving.load()) continue;
        bool probe = now_ns >= server.probe_at_ns && server.busy + server.late < server.link.slots;
        (server.late == 0 || probe ? masks.healthy : masks.late) |= 1ull << i;
    }
    return masks;
}

uint64_t replicas(const ExpertClient* client, uint32_t expert) {
    uint64_t row = uint64_t(client->call.layer) * client->shape.experts + expert;
    const uint8_t* table = client->routes.table.data() + row * EXPERTS_MAX_REPLICAS;
    uint64_t mask = 0;
    for (uint32_t i = 0; i < EXPERTS_MAX_REPLICAS; i++)
        if (table[i] < EXPERTS_MAX_SERVERS) mask |= 1ull << table[i];
    return mask;
}

void forget_refusals(Plan& plan) {
    if (plan.any_refused)
        for (std::vector<uint64_t>& refused : plan.refused) std::fill(refused.begin(), refused.end(), 0);
    plan.any_refused = false;
}

uint32_t refusals(const Plan& plan, uint32_t expert, uint32_t server) {
    uint32_t count = 0;
    while (count < MAX_REFUSALS && plan.refused[count][expert] >> server & 1) count++;
    return count;
}

// Of these servers those that refused the expert least often; none that may not be asked again.
uint64_t most_willing(const Plan& plan, uint32_t expert, uint64_t servers) {
    for (const std::vector<uint64_t>& refused : plan.refused)
        if (uint64_t willing = servers & ~refused[expert]) return willing;
    return 0;
}

void weigh_servers(ExpertClient* client) {
    double ns[EXPERTS_MAX_SERVERS] = {};
    for (uint64_t left = client->used.load(std::memory_order_acquire); left; left &= left - 1) {
        uint32_t i = uint32_t(std::countr_zero(left));
        ns[i] = client->servers[i].service.ns_per_unit();
    }
    weigh(EXPERTS_MAX_SERVERS, ns, client->speed);
}

// Fills plan.server_of for every touched expert, and plan.want_of for those that are split.
void choose_servers(ExpertClient* client, const Masks& masks) {
    Plan& plan = client->plan;
    std::vector<Want>& wants = plan.wants;
    wants.clear();
    for (uint32_t expert : plan.touched) {
        uint64_t able = replicas(client, expert);
        uint64_t servers = most_willing(plan, expert, able & masks.healthy);
        if (!servers) servers = most_willing(plan, expert, able & masks.late);
        plan.want_of[expert] = uint32_t(wants.size());
        wants.push_back({expert, plan.count[expert], servers, {}});
    }
    if (client->call.id % WEIGH_CALLS == 0) weigh_servers(client);
    // Clients draw differently, and anew in each call.
    uint64_t turn = (client->incarnation * 0x9e3779b97f4a7c15 >> 32) + client->call.id;
    plan.fill.pour(wants.data(), wants.size(), client->speed, EXPERT_COST, uint32_t(turn));
    for (const Want& want : wants) {
        uint32_t server = EXPERTS_NO_SERVER, slot = 0;
        for (uint64_t left = want.servers; left; left &= left - 1, slot++)
            if (want.rows[slot]) server = server == EXPERTS_NO_SERVER ? uint32_t(std::countr_zero(left)) : SPLIT;
        plan.server_of[want.expert] = uint8_t(server);
    }
}

// One row of a split expert: where its token travels anyway, else where most rows are left.
uint32_t take_row(Want& want, uint64_t beside) {
    uint32_t best = EXPERTS_NO_SERVER, best_slot = 0, slot = 0;
    bool best_beside = false;
    for (uint64_t left = want.servers; left; left &= left - 1, slot++) {
        uint32_t server = uint32_t(std::countr_zero(left));
        bool travels = beside >> server & 1;
        if (!want.rows[slot] || (best_beside && !travels)) continue;
        if (best == EXPERTS_NO_SERVER || travels > best_beside || want.rows[slot] > want.rows[best_slot])
            best = server, best_slot = slot, best_beside = travels;
    }
    if (best != EXPERTS_NO_SERVER) want.rows[best_slot]--;
    return best;
}

// Calls give(pair, server) for every pair that open(pair) names, token after token.
template <class Open, class Give>
void deal(ExpertClient* client, Open open, Give give) {
    const Call& call = client->call;
    Plan& plan = client->plan;
    const uint32_t top_k = client->shape.top_k;
    for (uint32_t first = 0; first < call.n * top_k; first += top_k) {
        uint64_t beside = 0;
        bool split = false;
        for (uint32_t pair = first; pair < first + top_k; pair++) {
            if (!open(pair)) continue;
            uint32_t server = plan.server_of[call.ids[pair]];
            split |= server == SPLIT;
            if (server == SPLIT) continue;
            if (server != EXPERTS_NO_SERVER) beside |= 1ull << server;
            give(pair, server);
        }
        for (uint32_t pair = first; split && pair < first + top_k; pair++) {
            if (!open(pair) || plan.server_of[call.ids[pair]] != SPLIT) continue;
            uint32_t server = take_row(plan.wants[plan.want_of[call.ids[pair]]], beside);
            beside |= 1ull << server;
            give(pair, server);
        }
    }
}

void cut_chunks(ExpertClient* client, uint32_t index) {
    Call& call = client->call;
    Server& server = client->servers[index];
    const WireShape& shape = client->shape;
    const Plan& plan = client->plan;
    std::vector<uint32_t>& list = client->plan.list[index];
    uint64_t limit = std::min<uint64_t>(CHUNK_BYTES, server.link.slot_bytes);
    if (server.queue_head == server.queue.size()) {
        server.queue.clear();
        server.queue_head = 0;
    }
    // An expert that the server refused goes alone: who refuses a chunk does not say for which expert.
    auto part = [&](uint32_t pair) {
        uint32_t expert = call.ids[pair];
        return plan.any_refused && refusals(plan, expert, index) ? expert + 1 : 0;
    };
    if (plan.any_refused)
        std::sort(list.begin(), list.end(), [&](uint32_t a, uint32_t b) {
            return part(a) != part(b) ? part(a) < part(b) : a < b;
        });
    size_t at = 0;
    while (at < list.size()) {
        uint32_t rows = 0;
        size_t end = at;
        while (end < list.size() && part(list[end]) == part(list[at])) {
            // All pairs of a token go together: a row travels to a server once.
            auto beside = [&](uint32_t pair) {
                return pair / shape.top_k == list[end] / shape.top_k && part(pair) == part(list[end]);
            };
            size_t next = end + 1;
            while (next < list.size() && beside(list[next])) next++;
            bool fits =
                reply_bytes(shape, next - at) <= limit && request_bytes(shape, rows + 1, next - at) <= limit;
            if (!fits && end > at) break;
            rows++;
            end = next;
        }
        Chunk chunk{.server = index,
                    .first = uint32_t(call.order.size()),
                    .pairs = uint32_t(end - at),
                    .rows = rows,
                    .attempt = call.attempt,
                    .reply = client->arena.take(reply_bytes(shape, end - at))};
        if (part(list[at])) chunk.refusals = refusals(plan, call.ids[list[at]], index);
        call.order.insert(call.order.end(), list.begin() + at, list.begin() + end);
        server.queue.push_back(uint32_t(call.chunks.size()));
        call.chunks.push_back(chunk);
        call.outstanding[server.link.lane].value++;
        at = end;
    }
    list.clear();
}

void cut_all(ExpertClient* client, uint64_t servers) {
    client->call.shared = 0;
    for (; servers; servers &= servers - 1) {
        uint32_t index = uint32_t(std::countr_zero(servers));
        if (client->servers[index].link.lanes > 1) client->call.shared |= 1ull << index;
        cut_chunks(client, index);
    }
}

void count_pair(Plan& plan, uint32_t expert) {
    if (plan.count[expert] == 0) plan.touched.push_back(expert);
    plan.count[expert]++;
}

// What the router balances by: each row once, however often it is sent.
void count_routed(ExpertClient* client) {
    uint64_t first = uint64_t(client->call.layer) * client->shape.experts;
    for (uint32_t expert : client->plan.touched) {
        std::atomic_ref rows(client->routed_rows[first + expert]);
        rows.fetch_add(client->plan.count[expert], std::memory_order_relaxed);
        std::atomic_ref(client->routed_calls[first + expert]).fetch_add(1, std::memory_order_relaxed);
    }
}

void clear_counts(Plan& plan) {
    for (uint32_t expert : plan.touched) plan.count[expert] = 0;
    plan.touched.clear();
}

bool pair_filled(const Call& call, uint32_t pair) {
    return call.filled[pair / 64].load(std::memory_order_relaxed) >> (pair % 64) & 1;
}

// Planned by routes that are no longer in use: its refusal says nothing about those that are.
bool outdated(const Call& call, const Chunk& chunk) { return chunk.attempt < call.routes_since; }

// Chunks that will not bring their pairs, or not soon, free them for another server.
void survey(ExpertClient* client, const Masks& masks) {
    Call& call = client->call;
    Plan& plan = client->plan;
    uint32_t total = call.n * client->shape.top_k;
    plan.pair_state.assign(total, PAIR_OPEN);
    plan.pair_late.assign(total, 0);
    for (LaneWord& word : call.outstanding) word.value = 0;
    for (Chunk& chunk : call.chunks) {
        Server& server = client->servers[chunk.server];
        uint64_t bit = 1ull << chunk.server;
        // Not sent yet, by old routes or to a server that became late: another replica may take it.
        if (chunk.state == CHUNK_PLANNED && (outdated(call, chunk) || !(masks.healthy & bit)))
            chunk.state = CHUNK_FAILED;
        if (outdated(call, chunk)) chunk.refused = false;
        for (uint32_t i = 0; i < chunk.pairs; i++) {
            uint32_t pair = call.order[chunk.first + i];
            if (chunk.state == CHUNK_PLANNED || chunk.state == CHUNK_SENT)
                plan.pair_state[pair] = PAIR_PLACED;
            if (chunk.state == CHUNK_LATE) plan.pair_late[pair] |= bit;
            for (uint32_t count = 0; chunk.refused && count < chunk.refusals; count++)
                plan.refused[count][call.ids[pair]] |= bit;
        }
        plan.any_refused |= chunk.refused;
        chunk.refused = false;
        if (chunk.out()) call.outstanding[server.link.lane].value++;
    }
    for (uint32_t pair = 0; pair < total; pair++)
        if (pair_filled(call, pair)) plan.pair_state[pair] = PAIR_FILLED;
    for (Server& server : client->servers) {
        auto kept = [&](uint32_t chunk) { return call.chunks[chunk].state == CHUNK_PLANNED; };
        std::vector<uint32_t> queue;
        std::copy_if(server.queue.begin() + server.queue_head, server.queue.end(), std::back_inserter(queue),
                     kept);
        server.queue = std::move(queue);
        server.queue_head = 0;
    }
}

}  // namespace

void plan_first(ExpertClient* client, uint64_t now_ns) {
    Call& call = client->call;
    Plan& plan = client->plan;
    uint32_t total = call.n * client->shape.top_k;
    // A plan that ran out of memory left its scratch half used.
    clear_counts(plan);
    for (std::vector<uint32_t>& list : plan.list) list.clear();
    forget_refusals(plan);
    for (uint32_t pair = 0; pair < total; pair++) count_pair(plan, call.ids[pair]);
    count_routed(client);
    Masks masks = server_masks(client, now_ns);
    choose_servers(client, masks);
    uint64_t servers = 0;
    bool in_doubt = false;
    auto give = [&](uint32_t pair, uint32_t server) {
        in_doubt |= !masks.takes(server);
        if (server == EXPERTS_NO_SERVER) return;
        plan.list[server].push_back(pair);
        servers |= 1ull << server;
    };
    deal(client, [](uint32_t) { return true; }, give);
    clear_counts(plan);
    call.in_doubt.store(in_doubt, std::memory_order_relaxed);
    cut_all(client, servers);
}

void plan_again(ExpertClient* client, uint64_t now_ns) {
    Call& call = client->call;
    Plan& plan = client->plan;
    uint32_t total = call.n * client->shape.top_k;
    call.attempt++;
    if (client->routes_pending.load()) {
        std::lock_guard lock(client->mutex);
        adopt_locked(client);
        call.routes_since = call.attempt;
        forget_refusals(plan);
    }
    for (uint32_t lane = 0; lane < client->lanes; lane++) check_liveness(client, lane, now_ns, true);
    Masks masks = server_masks(client, now_ns);
    survey(client, masks);
    // Whoever hears of the epoch may take away what older routes still ask for.
    auto behind = [&](const Chunk& chunk) { return chunk.out() && outdated(call, chunk); };
    if (std::none_of(call.chunks.begin(), call.chunks.end(), behind))
        client->adopted_epoch.store(client->routes.epoch);
    call.replan.store(0);
    for (uint32_t pair = 0; pair < total; pair++)
        if (plan.pair_state[pair] == PAIR_OPEN) count_pair(plan, call.ids[pair]);
    choose_servers(client, masks);
    uint64_t servers = 0;
    bool in_doubt = false;
    auto give = [&](uint32_t pair, uint32_t server) {
        // A late server gets a row again only where it does not already hold it.
        in_doubt |= !masks.takes(server);
        if (server == EXPERTS_NO_SERVER || (!masks.takes(server) && plan.pair_late[pair])) return;
        for (uint64_t left = plan.pair_late[pair]; left; left &= left - 1)
            add(client->servers[std::countr_zero(left)].stats.hedges, 1);
        plan.list[server].push_back(pair);
        servers |= 1ull << server;
    };
    for (uint32_t pair = 0; pair < total; pair++) in_doubt |= plan.pair_late[pair] != 0;
    deal(client, [&](uint32_t pair) { return plan.pair_state[pair] == PAIR_OPEN; }, give);
    clear_counts(plan);
    call.in_doubt.store(in_doubt, std::memory_order_relaxed);
    cut_all(client, servers);
}

}  // namespace experts
