// Which server computes which pair: experts split over their replicas (waterfill.h), then cut into chunks.
#include <algorithm>
#include <bit>
#include <cstring>

#include "experts/native/client_state.h"

namespace experts {
namespace {

constexpr uint8_t SPLIT = 254;  // in place of a server: several share the expert's rows
constexpr uint64_t WEIGH_CALLS = 16;
enum PairState : uint8_t { PAIR_OPEN, PAIR_PLACED, PAIR_FILLED };

struct Masks {
    uint64_t healthy = 0;     // takes rows
    uint64_t distrusted = 0;  // prompt, but its replies come corrupt: only where no other replica exists
    uint64_t late = 0;        // alive, but a reply of it is past its time: only where neither of those exists

    uint64_t live() const { return healthy | distrusted | late; }
    bool takes(uint32_t server) const {
        return server != EXPERTS_NO_SERVER && (healthy | distrusted) >> server & 1;
    }
};

Masks server_masks(ExpertClient* client, uint64_t now_ns) {
    Masks masks;
    for (uint32_t i : client->attached()) {
        Server& server = client->servers[i];
        if (!server.attached()) continue;
        bool distrusted = now_ns < server.stats.quarantined_until_ns;
        (server.is_late() ? masks.late : distrusted ? masks.distrusted : masks.healthy) |= 1ull << i;
    }
    return masks;
}

void compare_latencies(ExpertClient* client) {
    for (uint32_t size = 0; size < Latency::SIZES; size++) {
        uint64_t least_ns = UINT64_MAX;
        for (uint32_t i : client->attached())
            if (uint64_t q99_ns = client->servers[i].latency.class_q99_ns(size))
                least_ns = std::min(least_ns, q99_ns);
        client->least_q99_ns[size] = least_ns == UINT64_MAX ? 0 : least_ns;
    }
}

// A server that has not answered yet is expected to be as the one that is known best, or a freeze of it would not be
// told from a slow start.
void estimate_latencies(ExpertClient* client) {
    const Server* best = nullptr;
    bool unknown = false;
    for (uint32_t i : client->attached()) {
        const Server& server = client->servers[i];
        unknown |= !server.latency.known();
        if (server.latency.known() && (!best || server.stats.replies > best->stats.replies)) best = &server;
    }
    if (!unknown || !best) return;
    for (uint32_t i : client->attached())
        if (!client->servers[i].latency.known()) client->servers[i].latency = best->latency;
}

uint64_t replicas(const ExpertClient* client, uint32_t expert) {
    uint64_t row = uint64_t(client->call.layer) * client->shape.experts + expert;
    const uint8_t* table = client->routes.table.data() + row * EXPERTS_MAX_REPLICAS;
    uint64_t mask = 0;
    for (uint32_t i = 0; i < EXPERTS_MAX_REPLICAS; i++)
        if (table[i] < EXPERTS_MAX_SERVERS) mask |= 1ull << table[i];
    return mask;
}

// Whether one lives that is not attached yet.
bool awaits_replica(const ExpertClient* client, uint32_t expert) {
    uint64_t row = uint64_t(client->call.layer) * client->shape.experts + expert;
    return client->routes.table[(row + 1) * EXPERTS_MAX_REPLICAS - 1] == EXPERTS_AWAITED;
}

void forget_refusals(Plan& plan) {
    if (plan.any_refused) {
        for (std::vector<uint64_t>& refused : plan.refused) std::fill(refused.begin(), refused.end(), 0);
        std::fill(plan.not_held.begin(), plan.not_held.end(), 0);
    }
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

// Fills plan.server_of for every touched expert, and plan.want_of for those that are split.
void choose_servers(ExpertClient* client, const Masks& masks) {
    Plan& plan = client->plan;
    std::vector<Want>& wants = plan.wants;
    wants.clear();
    for (uint32_t expert : plan.touched) {
        uint64_t able = replicas(client, expert);
        uint64_t servers = 0;
        for (uint64_t mask : {masks.healthy, masks.distrusted, masks.late})
            if (!servers) servers = most_willing(plan, expert, able & mask);
        plan.want_of[expert] = uint32_t(wants.size());
        wants.push_back({expert, plan.count[expert], servers, {}});
    }
    if (client->call.id % WEIGH_CALLS == 0) {
        double ns[EXPERTS_MAX_SERVERS] = {};
        for (uint32_t i : client->attached()) ns[i] = client->servers[i].service.ns_per_unit();
        weigh(EXPERTS_MAX_SERVERS, ns, client->speed);
        compare_latencies(client);
    }
    // Clients draw differently, and anew in each call.
    uint64_t turn = (client->incarnation * 0x9e3779b97f4a7c15 >> 32) + client->call.id;
    plan.waterfill.split_rows(wants.data(), wants.size(), client->speed, EXPERT_COST, uint32_t(turn));
    for (const Want& want : wants) {
        uint32_t server = EXPERTS_NO_SERVER, slot = 0;
        for (uint32_t holder : Bits{want.servers})
            if (want.rows[slot++]) server = server == EXPERTS_NO_SERVER ? holder : SPLIT;
        plan.server_of[want.expert] = uint8_t(server);
    }
}

// One row of a split expert: where its token travels anyway, else where most rows are left.
uint32_t take_row(Want& want, uint64_t beside) {
    uint32_t best = EXPERTS_NO_SERVER, best_slot = 0, next_slot = 0;
    bool best_beside = false;
    for (uint32_t server : Bits{want.servers}) {
        uint32_t slot = next_slot++;
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
void assign_pairs(ExpertClient* client, Open open, Give give) {
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
    if (!server.has_queue()) server.queue_head = 0, server.queue.clear();
    // An expert that the server may not hold goes alone: who refuses a chunk does not say for which expert.
    auto part = [&](uint32_t pair) {
        uint32_t expert = call.ids[pair];
        return plan.any_refused && plan.not_held[expert] >> index & 1 ? expert + 1 : 0;
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
            bool fits = reply_bytes(shape, next - at) <= limit && request_bytes(shape, rows + 1, next - at) <= limit;
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
        for (size_t i = at; plan.any_refused && i < end; i++)
            chunk.refusals = std::max(chunk.refusals, refusals(plan, call.ids[list[i]], index));
        auto hedged = [&](uint32_t pair) { return plan.pair_late[pair] & ~plan.suspects; };
        if (call.attempt && std::any_of(list.begin() + at, list.begin() + end, hedged)) {
            client->hedge_credit.fetch_sub(HEDGE_COST, std::memory_order_relaxed);
            add(server.stats.extra, 1);
        }
        call.order.insert(call.order.end(), list.begin() + at, list.begin() + end);
        server.queue.push_back(uint32_t(call.chunks.size()));
        call.chunks.push_back(chunk);
        call.outstanding[server.link.lane].value++;
        at = end;
    }
    list.clear();
}

// Whether it is time to learn how a server does to which nothing is given: one that owes a reply, or a slow one.
bool wants_probe(const ExpertClient* client, uint32_t index, uint64_t now_ns) {
    const Server& server = client->servers[index];
    if (!server.attached() || !server.has_slot() || server.has_queue()) return false;
    if (server.in_state[SLOT_LATE]) return now_ns >= server.probe_at_ns;
    return client->speed[index] < 1 && server.drained() && now_ns >= server.asked_ns + PROBE_SLOW_NS;
}

// A copy of one pair that it holds as well; whoever was given the pair answers for it.
void plan_probe(ExpertClient* client, uint32_t index, uint64_t now_ns) {
    Call& call = client->call;
    Server& server = client->servers[index];
    for (uint32_t pair = 0; pair < call.n * client->shape.top_k; pair++) {
        if (call.ids[pair] == EXPERTS_NO_EXPERT || !(replicas(client, call.ids[pair]) >> index & 1)) continue;
        server.queue.assign(1, uint32_t(call.chunks.size()));
        server.queue_head = 0;
        call.chunks.push_back({.server = index, .first = uint32_t(call.order.size()), .pairs = 1, .rows = 1, .probe = true});
        call.order.push_back(pair);
        server.probe_at_ns = now_ns + server.probe_wait_ns;
        return;
    }
}

void cut_all(ExpertClient* client, uint64_t servers) {
    client->call.shared = 0;
    for (uint32_t index : Bits{servers}) {
        if (client->servers[index].link.lanes > 1) client->call.shared |= 1ull << index;
        cut_chunks(client, index);
    }
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

// A pair that nobody can compute, by routes that are in use, is left out of its token's sum where the caller allows it.
bool drop_pair(ExpertClient* client, const Masks& masks, uint32_t pair) {
    Call& call = client->call;
    if (!call.drop || !client->routes.epoch) return false;
    uint8_t& mark = call.drop[pair / client->shape.top_k];
    if (mark == EXPERTS_KEEP || awaits_replica(client, call.ids[pair])) return false;
    if (replicas(client, call.ids[pair]) & masks.live()) return false;
    mark = EXPERTS_DROPPED;
    call.filled_by_plan += fill_pair(call, pair, client->nothing.data());
    return true;
}

// Whether no server of a pair's expert lives, and the caller would rather hear of it than wait for another.
bool is_lost(const ExpertClient* client, const Masks& masks, uint32_t pair, uint32_t server) {
    if (server != EXPERTS_NO_SERVER || !client->patience_ns.load(std::memory_order_relaxed)) return false;
    return !(replicas(client, client->call.ids[pair]) & masks.live());
}

void bound_wait(ExpertClient* client, bool lost, uint64_t now_ns) {
    std::atomic<uint64_t>& end_ns = client->call.lost_ns;
    if (!lost)
        end_ns = UINT64_MAX;
    else if (end_ns == UINT64_MAX)
        end_ns = now_ns + client->patience_ns;
}

// Planned by routes that are no longer in use: its refusal says nothing about those that are.
bool outdated(const Call& call, const Chunk& chunk) { return chunk.attempt < call.routes_since; }

// Chunks that will not bring their pairs, or not soon, free them for another server.
void collect_missing(ExpertClient* client, const Masks& masks, uint64_t now_ns) {
    Call& call = client->call;
    Plan& plan = client->plan;
    for (LaneWord& word : call.outstanding) word.value = 0;
    plan.suspects = 0;
    for (uint32_t index : client->attached())
        if (client->servers[index].suspect(now_ns)) plan.suspects |= 1ull << index;
    for (Chunk& chunk : call.chunks) {
        Server& server = client->servers[chunk.server];
        uint64_t bit = 1ull << chunk.server;
        // Not sent yet, by old routes or to a server that became late: another replica may take it.
        if (chunk.probe) continue;
        if (chunk.state == CHUNK_PLANNED && (outdated(call, chunk) || !masks.takes(chunk.server)))
            chunk.state = CHUNK_FAILED;
        if (outdated(call, chunk)) chunk.refused = false;
        for (uint32_t i = 0; i < chunk.pairs; i++) {
            uint32_t pair = call.order[chunk.first + i];
            if (chunk.state == CHUNK_PLANNED || chunk.state == CHUNK_SENT)
                plan.pair_state[pair] = PAIR_PLACED;
            if (chunk.state == CHUNK_LATE) plan.pair_late[pair] |= bit;
            for (uint32_t count = 0; chunk.refused && count < chunk.refusals; count++)
                plan.refused[count][call.ids[pair]] |= bit;
            if (chunk.refused && chunk.not_held) plan.not_held[call.ids[pair]] |= bit;
        }
        plan.any_refused |= chunk.refused;
        chunk.refused = false;
        if (chunk.out()) call.outstanding[server.link.lane].value++;
    }
    for (uint32_t pair = 0; pair < plan.pair_state.size(); pair++)
        if (pair_filled(call, pair)) plan.pair_state[pair] = PAIR_FILLED;
    for (uint32_t index : client->attached()) {
        Server& server = client->servers[index];
        server.queue.erase(server.queue.begin(), server.queue.begin() + server.queue_head);
        server.queue_head = 0;
        std::erase_if(server.queue, [&](uint32_t chunk) { return call.chunks[chunk].state != CHUNK_PLANNED; });
    }
}

void collect_doubts(ExpertClient* client) {
    std::vector<Doubt>& doubts = client->plan.doubts;
    std::vector<uint32_t>& latest = client->plan.doubt_of;
    if (doubts.empty()) latest.assign(client->call.n * client->shape.top_k, NO_DOUBT);
    for (uint32_t lane = 0; lane < client->lanes; lane++) {
        std::vector<Doubt>& fresh = client->scratch[lane].doubts;
        for (Doubt& doubt : fresh) {
            doubt.before = latest[doubt.pair];
            doubts.push_back(doubt);
            latest[doubt.pair] = uint32_t(doubts.size() - 1);
        }
        fresh.clear();
    }
}

// Rows that are not finite: the model's own answer where two servers agree on them bit for bit, or, where nobody else
// can be asked, where the only one repeats them.
void settle_doubts(ExpertClient* client, uint64_t now_ns) {
    Call& call = client->call;
    collect_doubts(client);
    const std::vector<Doubt>& doubts = client->plan.doubts;
    for (const Doubt& doubt : doubts) {
        if (pair_filled(call, doubt.pair)) continue;
        uint64_t said = 0, others = 0;
        bool confirmed = false, repeated = false;
        // Only those of its own pair: of all together there may be as many as the call has pairs.
        for (uint32_t at = client->plan.doubt_of[doubt.pair]; at != NO_DOUBT; at = doubts[at].before) {
            const Doubt& other = doubts[at];
            said |= 1ull << other.server;
            if (&other == &doubt || std::memcmp(other.row, doubt.row, client->shape.reply_row_bytes())) continue;
            (other.server == doubt.server ? repeated : confirmed) = true;
        }
        for (uint32_t index : Bits{replicas(client, call.ids[doubt.pair])}) {
            const Server& server = client->servers[index];
            bool asked = server.state.load(std::memory_order_acquire) == SERVER_LIVE && !server.suspect(now_ns) &&
                         refusals(client->plan, call.ids[doubt.pair], index) < MAX_REFUSALS;
            if (asked && index != doubt.server) others |= 1ull << index;
        }
        bool alone = std::popcount(said) == 1 && !others;
        if (confirmed || (repeated && alone)) call.filled_by_plan += fill_pair(call, doubt.pair, doubt.row);
    }
}

// Where a pair goes that was meant for a server: whose row of it is in doubt is not asked while there is somebody else.
uint32_t avoid_doubted(const ExpertClient* client, const Masks& masks, uint32_t pair, uint32_t server) {
    const Plan& plan = client->plan;
    if (server == EXPERTS_NO_SERVER || !plan.doubts_by(pair, server)) return server;
    const uint32_t expert = client->call.ids[pair];
    uint64_t able = replicas(client, expert);
    for (uint32_t index : Bits{able})
        if (plan.doubts_by(pair, index)) able &= ~(1ull << index);
    uint64_t willing = most_willing(plan, expert, able & masks.healthy);
    if (!willing) willing = most_willing(plan, expert, able & masks.distrusted);
    return willing ? uint32_t(std::countr_zero(willing)) : server;
}

// Gives every open pair to a server, and cuts what each server got into chunks.
void place_pairs(ExpertClient* client, const Masks& masks, uint64_t now_ns) {
    Call& call = client->call;
    Plan& plan = client->plan;
    const uint32_t total = call.n * client->shape.top_k;
    auto open = [&](uint32_t pair) { return plan.pair_state[pair] == PAIR_OPEN; };
    bool unplaced = false, lost = false;
    for (uint32_t pair = 0; pair < total; pair++) {
        unplaced |= plan.pair_late[pair] != 0;
        if (open(pair) && plan.count[call.ids[pair]]++ == 0) plan.touched.push_back(call.ids[pair]);
    }
    if (!call.attempt) count_routed(client);
    choose_servers(client, masks);
    uint64_t servers = 0;
    assign_pairs(client, open, [&](uint32_t pair, uint32_t server) {
        server = avoid_doubted(client, masks, pair, server);
        if (server == EXPERTS_NO_SERVER && !plan.pair_late[pair] && drop_pair(client, masks, pair)) return;
        lost |= !plan.pair_late[pair] && is_lost(client, masks, pair, server);
        unplaced |= !masks.takes(server);
        if (server == EXPERTS_NO_SERVER) return;
        // A late server gets a row that it already holds again only after a while: what travelled may be lost.
        const Server& chosen = client->servers[server];
        bool again = masks.takes(server) || (now_ns >= chosen.probe_at_ns && chosen.has_slot());
        if (plan.pair_late[pair] && !again) return;
        for (uint32_t late : Bits{plan.pair_late[pair]}) add(client->servers[late].stats.hedges, 1);
        plan.list[server].push_back(pair);
        servers |= 1ull << server;
    });
    clear_counts(plan);
    call.unplaced.store(unplaced, std::memory_order_relaxed);
    bound_wait(client, lost, now_ns);
    cut_all(client, servers);
}

}  // namespace

void plan_first(ExpertClient* client, uint64_t now_ns) {
    Plan& plan = client->plan;
    const uint32_t total = client->call.n * client->shape.top_k;
    // A plan that ran out of memory left its scratch half used.
    clear_counts(plan);
    for (uint32_t server : client->attached()) plan.list[server].clear();
    forget_refusals(plan);
    plan.doubts.clear();
    plan.pair_state.assign(total, PAIR_OPEN);
    plan.pair_late.assign(total, 0);
    for (uint32_t pair = 0; pair < total; pair++) {
        if (client->call.ids[pair] != EXPERTS_NO_EXPERT) continue;
        plan.pair_state[pair] = PAIR_FILLED;
        client->call.filled_by_plan += fill_pair(client->call, pair, client->nothing.data());
    }
    estimate_latencies(client);
    place_pairs(client, server_masks(client, now_ns), now_ns);
    for (uint32_t index : client->attached())
        if (wants_probe(client, index, now_ns)) plan_probe(client, index, now_ns);
}

void plan_again(ExpertClient* client, uint64_t now_ns) {
    Call& call = client->call;
    Plan& plan = client->plan;
    call.attempt++;
    if (client->routes_pending.load()) {
        std::lock_guard lock(client->mutex);
        adopt_locked(client);
        call.routes_since = call.attempt;
        forget_refusals(plan);
    }
    for (uint32_t lane = 0; lane < client->lanes; lane++) check_liveness(client, lane, now_ns, true);
    Masks masks = server_masks(client, now_ns);
    settle_doubts(client, now_ns);
    std::fill(plan.pair_state.begin(), plan.pair_state.end(), PAIR_OPEN);
    std::fill(plan.pair_late.begin(), plan.pair_late.end(), 0);
    collect_missing(client, masks, now_ns);
    // Whoever hears of the epoch may take away what older routes still ask for.
    auto behind = [&](const Chunk& chunk) { return chunk.out() && outdated(call, chunk); };
    if (std::none_of(call.chunks.begin(), call.chunks.end(), behind))
        client->adopted_epoch.store(client->routes.epoch);
    call.replan.store(0);
    place_pairs(client, masks, now_ns);
}

void blame(ExpertClient* client) {
    const Call& call = client->call;
    uint64_t blamed = 0;
    auto judge = [&](const Doubt& doubt) {
        if (blamed >> doubt.server & 1) return;
        if (!std::memcmp(call.row[doubt.pair], doubt.row, client->shape.reply_row_bytes())) return;
        blamed |= 1ull << doubt.server;
        count_corrupt(client->servers[doubt.server], doubt.seen_ns);
    };
    std::for_each(client->plan.doubts.begin(), client->plan.doubts.end(), judge);
    for (uint32_t lane = 0; lane < client->lanes; lane++)
        std::for_each(client->scratch[lane].doubts.begin(), client->scratch[lane].doubts.end(), judge);
}

}  // namespace experts
