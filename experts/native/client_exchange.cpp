// Requests out, replies in: what a lane does for its own servers. Nothing here waits.
#include <poll.h>

#include <algorithm>

#include "experts/native/client_state.h"
#include "p2p/native/doorbell.h"
#include "p2p/native/faults.h"
#include "p2p/native/frame.h"
#include "p2p/native/window.h"

namespace experts {
namespace {

template <class Visit>
void each_server(ExpertClient* client, uint32_t lane, Visit visit) {
    for (uint32_t index : client->attached()) {
        Server& server = client->servers[index];
        if (server.link.lane == lane && server.state.load(std::memory_order_acquire) == SERVER_LIVE)
            visit(server);
    }
}

// Copies the rows that the chunk needs and lists its pairs by expert; replies come back in that order.
uint64_t write_request(ExpertClient* client, LaneScratch& scratch, Chunk& chunk, uint8_t* payload) {
    Call& call = client->call;
    const WireShape& shape = client->shape;
    uint32_t* order = call.order.data() + chunk.first;
    uint64_t row_bytes = shape.row_bytes();
    uint64_t source_bytes = shape.source_bytes();
    uint8_t* rows = payload + sizeof(WireHeader) + routing_bytes(chunk.pairs);
    uint32_t row = 0, token = 0;
    scratch.keys.clear();
    for (uint32_t i = 0; i < chunk.pairs; i++) {
        uint32_t pair = order[i];
        if (i == 0 || pair / shape.top_k != token) {
            token = pair / shape.top_k;
            uint8_t* to = rows + row * row_bytes;
            std::memcpy(to, call.rows + token * source_bytes, source_bytes);
            std::memset(to + source_bytes, 0, row_bytes - source_bytes);
            row++;
        }
        scratch.keys.push_back(uint64_t(call.ids[pair]) << 48 | uint64_t(row - 1) << 32 | pair);
    }
    p2p_fault_point(P2P_POINT_REQUEST_HALF_WRITTEN);
    std::sort(scratch.keys.begin(), scratch.keys.end());
    scratch.pairs.resize(chunk.pairs);
    chunk.experts = 0;
    for (uint32_t i = 0; i < chunk.pairs; i++) {
        uint64_t key = scratch.keys[i];
        uint32_t pair = uint32_t(key);
        order[i] = pair;
        chunk.experts += i == 0 || key >> 48 != scratch.keys[i - 1] >> 48;
        scratch.pairs[i] = {uint16_t(key >> 32), uint16_t(key >> 48), uint16_t(pair % shape.top_k), 0};
    }
    uint64_t listed = chunk.pairs * sizeof(WirePair);
    std::memcpy(payload + sizeof(WireHeader), scratch.pairs.data(), listed);
    std::memset(payload + sizeof(WireHeader) + listed, 0, routing_bytes(chunk.pairs) - listed);
    chunk.routing = routing_hash(scratch.pairs.data(), chunk.pairs);
    WireHeader header{};
    header.magic = WIRE_MAGIC;
    header.version = WIRE_VERSION;
    header.kind = WIRE_REQUEST;
    header.model_hash = shape.model_hash;
    header.routing_hash = chunk.routing;
    header.layer = call.layer;
    header.rows = chunk.rows;
    header.pairs = chunk.pairs;
    header.hidden = shape.hidden;
    header.dtype = uint16_t(shape.dtype);
    header.reply_lane = uint16_t(client->servers[chunk.server].link.lane);
    std::memcpy(payload, &header, sizeof header);
    return request_bytes(shape, chunk.rows, chunk.pairs);
}

void change_state(ExpertClient* client, Server& server, Slot& slot, SlotState to) {
    SlotState from = slot.state;
    if (from == SLOT_BUSY) server.units -= slot.pairs;
    slot.state = to;
    server.in_state[from]--;
    server.in_state[to]++;
    uint32_t held = server.in_state[SLOT_LATE] + server.in_state[SLOT_LOST] + server.in_state[SLOT_COOLDOWN];
    set(server.stats.held_slots, held);
    set(server.stats.lost_slots, server.in_state[SLOT_LOST]);
    // A server that catches up may take what no other replica could.
    if (from == SLOT_LATE && !server.in_state[SLOT_LATE] &&
        client->call.unplaced.load(std::memory_order_relaxed))
        client->call.replan.store(1);
}

void send(ExpertClient* client, Server& server, uint32_t lane, uint32_t slot_index, uint32_t chunk_index,
          uint64_t now_ns) {
    Call& call = client->call;
    Chunk& chunk = call.chunks[chunk_index];
    Slot& slot = server.slots[slot_index];
    void* memory = p2p_slot(server.link.tx, slot_index, server.link.slot_bytes);
    P2pHeader fields{};
    fields.receiver = server.link.server_incarnation;
    fields.sequence = ++server.sequence;
    fields.attempt = chunk.attempt;
    fields.length = uint32_t(
        write_request(client, client->scratch[lane], chunk, static_cast<uint8_t*>(p2p_payload(memory))));
    fields.remaining_ns = call.deadline_ns > now_ns ? call.deadline_ns - now_ns : 0;
    fields.sender = client->incarnation;
    p2p_frame_seal(memory, &fields);
    p2p_fault_point(P2P_POINT_REQUEST_BEFORE_SIGNAL);
    if (!p2p_fault_takes(server.link.tx, memory, fields.sequence, server.link.bell_page, 0, 1)) {
        // Signal last: the server may read the payload as soon as it changes.
        p2p_signal_store(memory, fields.sequence);
        p2p_fault_point(P2P_POINT_REQUEST_AFTER_SIGNAL);
        p2p_bell_ring(server.link.bell_page, 0);
    }
    server.units += chunk.pairs;
    server.asked_ns = now_ns;
    // A deadline that passed is for lane_finished to see.
    uint64_t most_ns = std::max<uint64_t>(1, fields.remaining_ns / 4);
    uint64_t q99_ns = server.latency.q99_ns(server.units);
    if (uint64_t least_ns = client->least_q99_ns[Latency::class_of(server.units)])
        q99_ns = std::min(q99_ns, LONG_TIMES * least_ns);
    uint64_t hedge_ns = q99_ns ? std::max(HEDGE_FLOOR_NS, 2 * q99_ns) : UNKNOWN_NS;
    uint64_t suspect_ns = q99_ns ? std::max(SUSPECT_FLOOR_NS, 4 * q99_ns) : UNKNOWN_NS;
    change_state(client, server, slot, SLOT_BUSY);
    slot = {.state = SLOT_BUSY,
            .chunk = chunk_index,
            .pairs = chunk.pairs,
            .experts = chunk.experts,
            .units = server.units,
            .probe = chunk.probe,
            .call = call.id,
            .sequence = fields.sequence,
            .posted_ns = now_ns,
            .due_ns = now_ns + std::min(hedge_ns, most_ns),
            .suspect_ns = now_ns + std::min(suspect_ns, most_ns)};
    if (!chunk.probe && client->hedge_credit.load(std::memory_order_relaxed) < HEDGE_MOST)
        client->hedge_credit.fetch_add(HEDGE_EARNED, std::memory_order_relaxed);
    chunk.state = CHUNK_SENT;
    add(server.stats.rows, chunk.rows);
    add(server.stats.pairs, chunk.pairs);
    add(server.stats.calls, 1);
}

void post(ExpertClient* client, Server& server, uint32_t lane, uint64_t now_ns) {
    for (uint32_t i = 0; i < server.link.slots && server.has_queue(); i++)
        if (server.slots[i].state == SLOT_FREE)
            send(client, server, lane, i, server.queue[server.queue_head++], now_ns);
}

// The server answers: what was late before it was asked this is hardly under way any more.
void mark_slots_lost(ExpertClient* client, Server& server, const Slot& slot) {
    for (Slot& other : server.slots)
        if (other.state == SLOT_LATE && other.due_ns <= slot.posted_ns) change_state(client, server, other, SLOT_LOST);
}

// Nobody may be waiting for a probe when it is answered, so that it says nothing of latency.
void learn(ExpertClient* client, Server& server, const Slot& slot, uint64_t now_ns, uint64_t service_ns) {
    uint64_t latency = now_ns > slot.posted_ns ? now_ns - slot.posted_ns : 0;
    // No longer than until it was suspect: one freeze does not excuse the next.
    if (!slot.probe) server.latency.learn(slot.units, std::min(latency, slot.suspect_ns - slot.posted_ns));
    if (slot.state == SLOT_BUSY) server.probe_wait_ns = PROBE_FIRST_NS;
    ServerStats& stats = server.stats;
    add(stats.replies, 1);
    add(stats.in_flight, slot.units);
    add(stats.latency_sum_ns, latency);
    add(stats.service_sum_ns, service_ns);
    bool slow = client->speed[&server - client->servers] < 1;
    server.service.learn(slot.pairs + EXPERT_COST * slot.experts + UNIT_BASE, double(service_ns), slow);
}

// Its pairs go to another server, or to this one again.
void fail_chunk(Call& call, Server& server, Chunk& chunk, uint32_t refusals) {
    chunk.state = CHUNK_FAILED;
    chunk.refused = true;
    chunk.refusals = refusals;
    add(server.stats.redispatches, chunk.pairs);
    call.replan.store(1);
}

// Whether all of its pairs, sorted by expert when it was sent, are one expert's.
bool of_one_expert(const Call& call, const Chunk& chunk) {
    const uint32_t* pairs = call.order.data() + chunk.first;
    return call.ids[pairs[0]] == call.ids[pairs[chunk.pairs - 1]];
}

// A reply that its call did not wait for, or a probe's: it says how its server does, and nothing of it is used. False
// where it does not validate.
bool drain_stale_reply(ExpertClient* client, Server& server, const Slot& slot, const void* memory, uint64_t now_ns) {
    P2pHeader frame;
    WireHeader header{};
    int length = p2p_frame_open(memory, server.link.slot_bytes, client->incarnation,
                                server.link.server_incarnation, slot.sequence, &frame, server.stale.data());
    if (length >= int(sizeof header)) std::memcpy(&header, server.stale.data(), sizeof header);
    if (header.magic != WIRE_MAGIC || header.kind != WIRE_REPLY) {
        count_corrupt(server, now_ns);
        return false;
    }
    mark_slots_lost(client, server, slot);
    if (header.status == STATUS_OK) learn(client, server, slot, now_ns, header.service_ns);
    return true;
}

// Whether the row that the pair's expert was asked for is finite.
bool finite_input(const Call& call, const WireShape& shape, uint32_t pair) {
    return finite_source(shape, call.rows + pair / shape.top_k * shape.source_bytes());
}

// Reads and judges the reply. False where some of it was of no use, and may be the next time.
bool accept(ExpertClient* client, Server& server, Slot& slot, const void* memory, uint64_t now_ns) {
    Call& call = client->call;
    Chunk& chunk = call.chunks[slot.chunk];
    const WireShape& shape = client->shape;
    P2pHeader frame;
    int length = p2p_frame_open(memory, reply_bytes(shape, chunk.pairs), client->incarnation,
                                server.link.server_incarnation, slot.sequence, &frame, chunk.reply);
    uint16_t status = STATUS_INVALID;
    bool valid = length >= 0 && reply_valid(shape, chunk.reply, uint64_t(length), call.layer, chunk.rows,
                                            chunk.pairs, chunk.routing, &status);
    call.outstanding[server.link.lane].value--;
    p2p_fault_point(P2P_POINT_REPLY_TAKEN);
    // Only NOT_HELD of a single expert bars a server for this call; otherwise others are merely preferred.
    const uint32_t refusals = std::min(chunk.refusals + 1, MAX_REFUSALS - 1);
    if (!valid || (status != STATUS_INVALID && frame.attempt != chunk.attempt)) {
        if (length < 0 || !of_another_release(chunk.reply, uint64_t(length))) count_corrupt(server, now_ns);
        fail_chunk(call, server, chunk, refusals);
        return false;
    }
    mark_slots_lost(client, server, slot);
    WireHeader header;
    std::memcpy(&header, chunk.reply, sizeof header);
    if (status != STATUS_OK) {
        // A corrupt request may pass the next time; an expert that is not held stays so under these routes.
        chunk.not_held = status == STATUS_NOT_HELD;
        fail_chunk(call, server, chunk, chunk.not_held && of_one_expert(call, chunk) ? MAX_REFUSALS : refusals);
        return chunk.not_held;
    }
    const auto* row = reinterpret_cast<const float*>(chunk.reply + sizeof(WireHeader));
    const uint32_t hidden = shape.hidden;
    RowsDigest digest;
    for (uint32_t i = 0; i < chunk.pairs; i++) digest.add(fold_row(row + uint64_t(i) * hidden, 0, hidden));
    if (digest.sum != header.digest) {
        // The frame is whole: it was sealed like this.
        count_corrupt(server, now_ns);
        fail_chunk(call, server, chunk, refusals);
        return false;
    }
    learn(client, server, slot, now_ns, header.service_ns);
    chunk.state = CHUNK_DONE;
    uint32_t fresh = 0, doubted = 0;
    bool useful = true;
    for (uint32_t i = 0; i < chunk.pairs; i++, row += hidden) {
        uint32_t pair = call.order[chunk.first + i];
        // What came in so can only go out so, and is nobody's fault.
        if (!digest.finite && !finite_row(row, hidden) && finite_input(call, shape, pair)) {
            // Beyond what was reserved the row only stays missing.
            std::vector<Doubt>& doubts = client->scratch[server.link.lane].doubts;
            if (doubts.size() < doubts.capacity()) doubts.push_back({pair, chunk.server, now_ns, row});
            // A second answer is not delayed: where it equals the first it may be all the evidence that can be had.
            useful &= client->plan.doubts_by(pair, chunk.server) < 2;
            doubted++;
            continue;
        }
        fresh += fill_pair(call, pair, row);
    }
    call.missing.fetch_sub(fresh);
    if (!doubted) return true;
    // Of these rows alone: an expert that gives many of them by its nature is asked on.
    fail_chunk(call, server, chunk, 0);
    chunk.refused = false;
    return useful;
}

// Whether the rows of an overdue request may go elsewhere as well: at once from a suspect, else for credit.
bool may_hedge(ExpertClient* client, Server& server, Slot& slot, uint64_t now_ns) {
    if (now_ns >= slot.suspect_ns || server.suspect(now_ns)) return true;
    if (client->hedge_credit.load(std::memory_order_relaxed) >= HEDGE_COST) return true;
    slot.due_ns = slot.suspect_ns;
    return false;
}

void scan(ExpertClient* client, Server& server, uint64_t now_ns) {
    Call& call = client->call;
    const bool cut = p2p_fault_cut(server.link.tx);
    for (uint32_t i = 0; i < server.link.slots; i++) {
        Slot& slot = server.slots[i];
        if (slot.state == SLOT_FREE) continue;
        const void* memory = p2p_slot(server.link.rx, i, server.link.slot_bytes);
        bool current = slot.call == call.id;
        if (slot.state == SLOT_COOLDOWN) {
            if (!current || now_ns >= slot.due_ns) change_state(client, server, slot, SLOT_FREE);
            continue;
        }
        if (p2p_signal_load(memory) == slot.sequence && !cut) {
            bool awaited = current && !slot.probe;
            bool useful = awaited ? accept(client, server, slot, memory, now_ns)
                                  : drain_stale_reply(client, server, slot, memory, now_ns);
            change_state(client, server, slot, useful ? SLOT_FREE : SLOT_COOLDOWN);
            slot.due_ns = now_ns + COOLDOWN_NS;
        } else if (slot.state == SLOT_BUSY && now_ns >= slot.due_ns && may_hedge(client, server, slot, now_ns)) {
            change_state(client, server, slot, SLOT_LATE);
            if (slot.probe) server.probe_wait_ns = std::min(PROBE_LAST_NS, server.probe_wait_ns * 2);
            server.probe_at_ns = server.replan_at_ns = now_ns + server.probe_wait_ns;
            if (slot.probe) continue;
            if (current) call.chunks[slot.chunk].state = CHUNK_LATE;
            if (!current && !server.has_queue()) continue;
            call.unplaced.store(true, std::memory_order_relaxed);
            call.replan.store(1);
        } else if (current && !slot.probe && slot.state != SLOT_BUSY && now_ns >= server.replan_at_ns) {
            // What travelled may be lost for good: rows that nobody else has are asked for again, in another slot.
            server.replan_at_ns = now_ns + server.probe_wait_ns;
            call.replan.store(1);
        }
    }
}

// The peer has let go of the window: nothing more will come, its slots need no guard any longer.
void fail_link(ExpertClient* client, Server& server) {
    Call& call = client->call;
    auto fail = [&](uint32_t index) {
        Chunk& chunk = call.chunks[index];
        chunk.state = CHUNK_FAILED;
        if (chunk.probe) return;
        call.outstanding[server.link.lane].value--;
        add(server.stats.redispatches, chunk.pairs);
    };
    for (Slot& slot : server.slots) {
        if (slot.pending_in(call.id)) fail(slot.chunk);
        slot.state = SLOT_FREE;
    }
    std::fill_n(server.in_state, SLOT_STATES, 0);
    server.in_state[SLOT_FREE] = server.link.slots;
    for (; server.has_queue(); server.queue_head++)
        fail(server.queue[server.queue_head]);
    server.units = 0;
    set(server.stats.held_slots, 0);
    set(server.stats.lost_slots, 0);
    server.state.store(SERVER_GONE);
    call.replan.store(1);
}

}  // namespace

void post_chunks(ExpertClient* client, uint32_t lane, uint64_t now_ns) {
    each_server(client, lane, [&](Server& server) { post(client, server, lane, now_ns); });
}

bool ring_shared(ExpertClient* client, uint32_t lane) {
    bool rung = false;
    for (uint32_t index : Bits{client->call.shared}) {
        const ServerLink& link = client->servers[index].link;
        if (lane == link.lane || lane >= link.lanes) continue;
        p2p_bell_ring(link.bell_page, lane);
        rung = true;
    }
    return rung;
}

void progress(ExpertClient* client, uint32_t lane, uint64_t now_ns) {
    each_server(client, lane, [&](Server& server) {
        if (server.drained()) return;
        scan(client, server, now_ns);
        post(client, server, lane, now_ns);
    });
}

void check_liveness(ExpertClient* client, uint32_t lane, uint64_t now_ns, bool idle_too) {
    each_server(client, lane, [&](Server& server) {
        bool idle = server.drained() && !server.has_queue();
        if (server.link.liveness_fd < 0 || (idle && !idle_too)) return;
        pollfd probe{server.link.liveness_fd, POLLRDHUP, 0};
        if (poll(&probe, 1, 0) <= 0 || !(probe.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL))) return;
        // What it wrote before it died still counts.
        scan(client, server, now_ns);
        fail_link(client, server);
    });
}

uint64_t next_due_ns(ExpertClient* client, uint32_t lane) {
    uint64_t due_ns = UINT64_MAX;
    each_server(client, lane, [&](Server& server) {
        for (uint32_t i = 0; server.in_state[SLOT_BUSY] && i < server.link.slots; i++)
            if (server.slots[i].state == SLOT_BUSY) due_ns = std::min(due_ns, server.slots[i].due_ns);
    });
    return due_ns;
}

bool lane_finished(ExpertClient* client, uint32_t lane, uint64_t now_ns) {
    Call& call = client->call;
    if (call.missing.load() == 0 || call.replan.load() || now_ns >= call.end_ns()) return true;
    bool unplaced = call.unplaced.load(std::memory_order_relaxed);
    if (unplaced && client->routes_pending.load()) return true;
    // With pairs unplaced, lane 0 stays awake for new routes.
    return call.outstanding[lane].value == 0 && !(lane == 0 && unplaced);
}

void combine(ExpertClient* client, uint32_t lane, uint32_t lanes) {
    constexpr uint32_t BLOCK = 256;
    Call& call = client->call;
    const uint32_t hidden = client->shape.hidden, top_k = client->shape.top_k;
    // Few rows are split by columns, many by rows; a sum's order never depends on it.
    bool by_rows = call.n >= 2 * lanes;
    uint32_t blocks = (hidden + 15) / 16;
    uint32_t t0 = by_rows ? uint64_t(call.n) * lane / lanes : 0;
    uint32_t t1 = by_rows ? uint64_t(call.n) * (lane + 1) / lanes : call.n;
    uint32_t j0 = by_rows ? 0 : uint64_t(blocks) * lane / lanes * 16;
    uint32_t j1 = by_rows ? hidden : std::min<uint32_t>(hidden, uint64_t(blocks) * (lane + 1) / lanes * 16);
    float sum[BLOCK];
    for (uint32_t t = t0; t < t1; t++) {
        const float* const* row = call.row.data() + uint64_t(t) * top_k;
        const float* weight = call.weights + uint64_t(t) * top_k;
        float* out = call.out + uint64_t(t) * hidden;
        for (uint32_t j = j0; j < j1; j += BLOCK) {
            uint32_t width = std::min(BLOCK, j1 - j);
            for (uint32_t i = 0; i < width; i++) sum[i] = weight[0] * row[0][j + i];
            for (uint32_t k = 1; k < top_k; k++)
                for (uint32_t i = 0; i < width; i++) sum[i] += weight[k] * row[k][j + i];
            for (uint32_t i = 0; i < width; i++) out[j + i] += sum[i];
        }
    }
    p2p_fault_point(P2P_POINT_COMBINED);
}

}  // namespace experts
