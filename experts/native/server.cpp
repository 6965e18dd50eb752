// The expert server. From signals to replies: collect, group by model, layer and expert across clients, compute over
// the lanes, answer. Around batches: models, clients, experts, lease; the loop of each lane.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "experts/native/server.h"

#include "experts/native/kernels.h"
#include "experts/native/memory.h"
#include "experts/native/wire.h"
#include "p2p/native/doorbell.h"
#include "p2p/native/faults.h"
#include "p2p/native/frame.h"
#include "p2p/native/wait.h"
#include "p2p/native/window.h"

namespace experts {

constexpr uint32_t SERVER_MAX_SLOTS = 16;
constexpr uint32_t BATCH_JOBS = 16;
constexpr uint64_t PAIR_COST = 1 << 16;
// Of the cheapest model that asks, and as much work of others, so that a prefill delays decoding by little.
constexpr uint32_t BATCH_PAIRS = 512;
// Rows of one expert that weigh about as much as reading it: 2 bytes for the 2 operations of each, at 165 GFLOP/s over
// 30 GB/s.
constexpr uint32_t ACTIVATION_ROWS = 5;
constexpr uint32_t MOST_LAYERS = 1 << 24;  // an item's key has room for no more

struct Client {
    bool attached = false;
    ClientLink link{};
    uint64_t served = 0;  // pairs taken, each of its model's cost over the client's weight: who had least comes first
    uint64_t done[SERVER_MAX_SLOTS] = {};      // last sequence answered in each slot
    uint64_t rejected[SERVER_MAX_SLOTS] = {};  // a signal whose frame did not validate, answered once
    uint32_t slot = 0;  // of its oldest request that was not answered yet, and that one's sequence
    uint64_t sequence = 0;
    bool again = false;  // it has one in this batch already
};

struct Expert {
    const void* gate_up = nullptr;
    const void* down = nullptr;
};

// What a product of one expert is cut into: tiles, each of as many multiplications for every row as `depth`.
struct Tiles {
    uint32_t count, depth;
};

struct Model {
    bool open = false;
    WireShape shape{};
    uint32_t intermediate = 0;
    ExpertForm form{};
    bool formed = false;  // experts are more than SwiGLU without biases
    Tiles up{}, down{};
    uint64_t unit = 0;  // weights of one of an expert's matrices, in 64s: what a pair of this model costs
    uint64_t cost = 0;  // the same beside the first model's, whose pair costs PAIR_COST
    std::vector<Expert> experts;    // [layers][experts]
    std::vector<uint8_t> doubtful;  // of each: it gave a row that is not finite
    std::atomic<bool> any_doubtful{false};

    uint64_t element() const { return shape.dtype == EAAS_F32 ? 4 : 2; }
    uint64_t act_stride() const { return (uint64_t(intermediate) + 63) / 64 * 64; }
};

struct Job {
    const Client* client;
    Model* model;
    uint32_t slot;
    uint64_t sequence;
    uint32_t attempt;
    uint16_t status;
    uint64_t picked_ns;
    WireHeader header;
    uint64_t* folds;  // of each pair's row, summed over the columns computed so far (RowFold)
    Buffer payload;
    const WirePair* pairs() const {
        return reinterpret_cast<const WirePair*>(payload.data() + sizeof(WireHeader));
    }
    const uint8_t* rows() const { return payload.data() + sizeof(WireHeader) + routing_bytes(header.pairs); }
};

// One pair of the batch; sorted, pairs of one model, layer and expert are neighbours.
struct Item {
    uint64_t key;  // model << 56 | layer << 32 | expert << 16 | job
    uint32_t pair;
};

struct Group {
    Model* model;
    const Expert* expert;
    uint32_t first;  // of its items
    uint32_t count;
    const uint8_t* x;  // count rows
    uint8_t* act;      // count rows of act_stride
    float* out;  // count rows of hidden, in a reply where one request holds them all, else private
    bool direct;
    // What each of its tiles costs: its weights are read once.
    uint64_t rows() const { return ACTIVATION_ROWS + count; }
};

}  // namespace experts

struct ExpertServer {
    uint64_t incarnation = 0;
    uint32_t lanes = 1;
    LanePool* pool = nullptr;
    void* page = nullptr;
    uint64_t max_slot_bytes = 0;

    std::mutex mutex;  // held by the loop from scan to reply, by others to change what it reads
    std::atomic<uint32_t> wanting{0};  // threads that wait for the mutex: the loop lets them pass
    std::atomic<uint64_t> lease_ns{UINT64_MAX};
    std::atomic<bool> stopped{false};
    experts::Client clients[EXPERT_SERVER_MAX_CLIENTS];
    uint32_t places = 0;  // of clients, up to the last that was ever taken: weights push the others out of the caches
    experts::Model models[EXPERT_SERVER_MAX_MODELS];

    uint32_t next_client = 0;
    uint64_t served = 0;  // of the client that had the last request, before it
    experts::Job jobs[experts::BATCH_JOBS];
    uint32_t job_count = 0;
    std::vector<experts::Item> items;
    std::vector<experts::Group> groups;
    experts::Buffer x, act, out, folds;
    ServerCounters counters{};

    std::atomic<uint32_t> batch{0};  // rises when a batch is ready for the other lanes
    std::atomic<uint32_t> left{0};   // other lanes that have not left the batch yet
    std::atomic<bool> running{false};
    bool starved = false;  // the run ended for want of memory: a server without is best replaced
    uint64_t run_until_ns = 0;
};

namespace {

using namespace experts;

// ---- one batch

uint32_t tiles(uint32_t rows, uint32_t tile) { return (rows + tile - 1) / tile; }

// Looks for the client's oldest request that was not answered yet.
bool find_request(Client& client) {
    if (p2p_fault_cut(client.link.tx)) return false;
    client.slot = client.link.slots;
    for (uint32_t i = 0; i < client.link.slots; i++) {
        uint64_t seen = p2p_signal_load(p2p_slot(client.link.rx, i, client.link.slot_bytes));
        // A signal from before the last answer came late or twice: nobody waits for another, which would only
        // overwrite the last.
        if (seen <= client.done[i] || seen == client.rejected[i]) continue;
        if (client.slot == client.link.slots || seen < client.sequence) client.slot = i, client.sequence = seen;
    }
    return client.slot < client.link.slots;
}

Model& model_of(ExpertServer* server, const Client& client) { return server->models[client.link.model]; }

void take_request(ExpertServer* server, Client& client, uint64_t now_ns) {
    Job& job = server->jobs[server->job_count];
    job.model = &model_of(server, client);
    uint8_t* payload = job.payload.need(client.link.slot_bytes);
    P2pHeader frame;
    int length =
        p2p_frame_open(p2p_slot(client.link.rx, client.slot, client.link.slot_bytes), client.link.slot_bytes,
                       server->incarnation, client.link.client_incarnation, client.sequence, &frame, payload);
    p2p_fault_point(P2P_POINT_REQUEST_TAKEN);
    bool opened = length >= 0;
    bool valid = opened && request_valid(job.model->shape, payload, uint64_t(length), client.link.slot_bytes);
    if (valid) std::memcpy(&job.header, payload, sizeof job.header);
    valid = valid && job.header.reply_lane < client.link.client_lanes;
    if (!valid) job.header = WireHeader{};
    job.client = &client;
    job.slot = client.slot;
    job.sequence = client.sequence;
    job.attempt = opened ? frame.attempt : 0;
    job.picked_ns = now_ns;
    job.status = valid ? STATUS_OK : STATUS_INVALID;
    // A frame that cannot be read has no trusted sequence: only that very signal is put aside.
    (opened ? client.done : client.rejected)[client.slot] = client.sequence;
    server->job_count++;
}

void add_items(ExpertServer* server, uint32_t job_index) {
    Job& job = server->jobs[job_index];
    const WirePair* pairs = job.pairs();
    const Model& model = *job.model;
    const Expert* held = model.experts.data() + uint64_t(job.header.layer) * model.shape.experts;
    const uint64_t place = uint64_t(&model - server->models) << 56 | uint64_t(job.header.layer) << 32;
    for (uint32_t i = 0; i < job.header.pairs; i++) {
        if (held[pairs[i].expert].gate_up) continue;
        job.status = STATUS_NOT_HELD;
        return;
    }
    for (uint32_t i = 0; i < job.header.pairs; i++)
        server->items.push_back({place | uint64_t(pairs[i].expert) << 16 | job_index, i});
}

float* reply_rows(const Job& job) {
    const ClientLink& link = job.client->link;
    uint8_t* payload = static_cast<uint8_t*>(p2p_payload(p2p_slot(link.tx, job.slot, link.slot_bytes)));
    return reinterpret_cast<float*>(payload + sizeof(WireHeader));
}

void group(ExpertServer* server) {
    std::vector<Item>& items = server->items;
    auto before = [](const Item& a, const Item& b) {
        return a.key != b.key ? a.key < b.key : a.pair < b.pair;
    };
    // One client lists its pairs by expert already.
    if (!std::is_sorted(items.begin(), items.end(), before)) std::sort(items.begin(), items.end(), before);
    auto* folds = reinterpret_cast<uint64_t*>(server->folds.need(items.size() * sizeof(uint64_t)));
    std::fill_n(folds, items.size(), 0);
    uint64_t x_bytes = 0, act_bytes = 0, out_bytes = 0;
    for (uint32_t i = 0; i < server->job_count; i++) {
        Job& job = server->jobs[i];
        job.folds = folds;
        if (job.status != STATUS_OK) continue;
        folds += job.header.pairs;
        x_bytes += job.header.pairs * job.model->shape.row_bytes();
        act_bytes += job.header.pairs * job.model->act_stride() * job.model->element();
        out_bytes += job.header.pairs * job.model->shape.reply_row_bytes();
    }
    uint8_t* x = server->x.need(x_bytes);
    uint8_t* act = server->act.need(act_bytes);
    float* out = reinterpret_cast<float*>(server->out.need(out_bytes));
    for (size_t first = 0; first < items.size();) {
        const Job& job = server->jobs[items[first].key & 0xFFFF];
        Model& model = *job.model;
        const uint64_t row_bytes = model.shape.row_bytes();
        size_t end = first;
        bool direct = true;
        const uint8_t* const rows = x;
        for (; end < items.size() && items[end].key >> 16 == items[first].key >> 16; end++, x += row_bytes) {
            direct &= items[end].key == items[first].key && items[end].pair == items[first].pair + (end - first);
            const Job& from = server->jobs[items[end].key & 0xFFFF];
            std::memcpy(x, from.rows() + from.pairs()[items[end].pair].row * row_bytes, row_bytes);
        }
        const uint64_t count = end - first, hidden = model.shape.hidden;
        uint64_t place = uint64_t(job.header.layer) * model.shape.experts + (items[first].key >> 16 & 0xFFFF);
        float* to = direct ? reply_rows(job) + items[first].pair * hidden : out;
        server->groups.push_back(
            {&model, &model.experts[place], uint32_t(first), uint32_t(count), rows, act, to, direct});
        act += count * model.act_stride() * model.element();
        out += count * hidden;
        first = end;
    }
}

void answer(ExpertServer* server, uint32_t job_index) {
    Job& job = server->jobs[job_index];
    const WireShape& shape = job.model->shape;
    const ClientLink& link = job.client->link;
    void* memory = p2p_slot(link.tx, job.slot, link.slot_bytes);
    bool ok = job.status == STATUS_OK;
    if (ok) {
        float* rows = reply_rows(job);
        for (const Group& from : server->groups) {
            if (from.direct) continue;
            for (uint32_t i = 0; i < from.count; i++) {
                const Item& item = server->items[from.first + i];
                if ((item.key & 0xFFFF) != job_index) continue;
                std::memcpy(rows + uint64_t(item.pair) * shape.hidden, from.out + uint64_t(i) * shape.hidden,
                            shape.reply_row_bytes());
            }
        }
        p2p_fault_rows(link.tx, rows, uint64_t(job.header.pairs) * shape.hidden);
    }
    p2p_fault_point(P2P_POINT_REPLY_HALF_WRITTEN);
    WireHeader header = job.header;
    header.magic = WIRE_MAGIC;
    header.version = WIRE_VERSION;
    header.kind = WIRE_REPLY;
    header.status = job.status;
    header.service_ns = p2p::now_ns() - job.picked_ns;
    RowsDigest digest;
    for (uint32_t i = 0; ok && i < header.pairs; i++) digest.add({job.folds[i], 0});
    header.digest = digest.sum;
    std::memcpy(p2p_payload(memory), &header, sizeof header);
    P2pHeader fields{};
    fields.receiver = link.client_incarnation;
    fields.sequence = job.sequence;
    fields.attempt = job.attempt;
    fields.length = uint32_t(ok ? reply_bytes(shape, header.pairs) : sizeof(WireHeader));
    fields.sender = server->incarnation;
    p2p_frame_seal(memory, &fields);
    // A request that could not be read does not say which lane waits: all are rung.
    bool read = job.header.magic;
    uint32_t first = read ? std::min<uint32_t>(job.header.reply_lane, link.bell_lanes - 1) : 0;
    uint32_t count = read ? 1 : link.bell_lanes;
    p2p_fault_point(P2P_POINT_REPLY_BEFORE_SIGNAL);
    if (p2p_fault_takes(link.tx, memory, job.sequence, link.bell_page, first, count)) return;
    // Signal last: the client may read the reply as soon as it changes.
    p2p_signal_store(memory, job.sequence);
    p2p_fault_point(P2P_POINT_REPLY_AFTER_SIGNAL);
    for (uint32_t lane = first; lane < first + count; lane++) p2p_bell_ring(link.bell_page, lane);
}

void count_batch(ExpertServer* server) {
    ServerCounters& counters = server->counters;
    add(counters.batches, 1);
    add(counters.pairs, server->items.size());
    add(counters.experts, server->groups.size());
    add(counters.busy_ns, p2p::now_ns() - server->jobs[0].picked_ns);
    for (const Group& group : server->groups) add(counters.work, group.model->unit * group.rows());
    for (uint32_t i = 0; i < server->job_count; i++) {
        const Job& job = server->jobs[i];
        add(job.status == STATUS_OK         ? counters.requests
            : job.status == STATUS_NOT_HELD ? counters.not_held
                                            : counters.invalid,
            1);
        if (job.status != STATUS_OK) continue;
        add(counters.rows, job.header.rows);
        add(counters.received_bytes, job.header.rows * job.model->shape.source_bytes());
        add(counters.sent_bytes, job.header.pairs * job.model->shape.reply_row_bytes());
    }
}

// Takes what is ready, validates it and groups it; false where there is nothing to compute or refuse. All of a batch's
// memory is had here: throws std::bad_alloc.
bool collect(ExpertServer* server, uint64_t now_ns) {
    server->job_count = 0;
    server->items.clear();
    server->groups.clear();
    Client* waiting[EXPERT_SERVER_MAX_CLIENTS];
    uint32_t count = 0;
    uint64_t taken = 0, cheapest = UINT64_MAX;
    for (uint32_t i = 0; i < server->places; i++) {
        Client& client = server->clients[(server->next_client + i) % server->places];
        if (!client.attached || !find_request(client)) continue;
        waiting[count++] = &client;
        client.again = false;
        // What it left to others before is not made up for.
        client.served = std::max(client.served, server->served);
        cheapest = std::min(cheapest, model_of(server, client).cost);
    }
    // One request of each client, who had least for its weight first; then more of those that have had less than the
    // one that has had most, which weigh more. So no client's chunks delay another's by more than its part; one alone
    // fills the batch.
    const bool alone = count == 1;
    uint32_t unserved = count;
    uint64_t most = 0;
    auto had_less = [](const Client* a, const Client* b) { return a->served < b->served; };
    while (count && server->job_count < BATCH_JOBS && taken < BATCH_PAIRS * cheapest) {
        Client** next = std::min_element(waiting, waiting + count, had_less);
        Client& client = **next;
        if (!alone && !unserved && client.served >= most) break;
        take_request(server, client, now_ns);
        const uint64_t pairs = server->jobs[server->job_count - 1].header.pairs;
        const uint64_t cost = model_of(server, client).cost;
        taken += pairs * cost;
        server->served = client.served;
        client.served += std::max<uint64_t>(std::max<uint64_t>(pairs, 1) * cost / client.link.weight, 1);
        if (!client.again) unserved--, most = std::max(most, client.served);
        client.again = true;
        server->next_client = uint32_t(&client - server->clients) + 1;
        if (!find_request(client)) std::copy(next + 1, waiting + count--, next);
    }
    if (server->job_count == 0) return false;
    for (uint32_t i = 0; i < server->job_count; i++)
        if (server->jobs[i].status == STATUS_OK) add_items(server, i);
    group(server);
    return true;
}

// Groups lie by model.
bool of_several_models(const ExpertServer* server) {
    return !server->groups.empty() && server->groups.front().model != server->groups.back().model;
}

// Calls work(group, tile0, tile1) for the lane's part of all tiles of all groups: contiguous, so that whole groups
// stay with one lane where they can.
template <class Work>
void over_tiles(const ExpertServer* server, uint32_t lane, Tiles Model::*part, Work work) {
    const bool several = of_several_models(server);
    // All tiles of one model are as deep.
    auto cost_of = [&](const Group& group) { return group.rows() * (several ? (group.model->*part).depth : 1); };
    uint64_t total = 0, before = 0;
    for (const Group& group : server->groups) total += cost_of(group) * (group.model->*part).count;
    uint64_t first = total * lane / server->lanes, last = total * (lane + 1) / server->lanes;
    for (const Group& group : server->groups) {
        const uint64_t cost = cost_of(group), tiles = (group.model->*part).count;
        auto tile = [&](uint64_t at) {
            return at <= before ? 0 : uint32_t(std::min<uint64_t>(tiles, (at - before + cost - 1) / cost));
        };
        if (tile(first) < tile(last)) work(group, tile(first), tile(last));
        before += cost * tiles;
    }
}

// Whether every lane computes whole groups, so that none reads what another wrote. Of several models the two products
// are divided among lanes at different places.
bool whole_groups(const ExpertServer* server) {
    if (of_several_models(server)) return false;
    uint64_t total = 0, before = 0;
    for (const Group& group : server->groups) total += group.rows();
    uint32_t found = 1;
    for (const Group& group : server->groups) {
        if (before * server->lanes == total * found) found++;
        before += group.rows();
    }
    return found == server->lanes;
}

void computed(const ExpertServer* server) {
    p2p_fault_point(P2P_POINT_COMPUTED);
    p2p_fault_stretch(server->jobs[0].picked_ns, server->page);
}

// Computes and answers the batch; made by every lane.
void serve_batch(ExpertServer* server, uint32_t lane) {
    const uint32_t lanes = server->lanes;
    auto up = [&](const Group& g, uint32_t tile0, uint32_t tile1) {
        const Model& m = *g.model;
        experts_ffn_gate_up_formed(m.formed ? &m.form : nullptr, int(m.shape.dtype), g.expert->gate_up, m.shape.hidden,
                                   m.intermediate, g.x, m.shape.row_bytes() / m.element(), g.count, g.act,
                                   m.act_stride(), tile0, tile1);
    };
    auto down = [&](const Group& g, uint32_t tile0, uint32_t tile1) {
        Model& m = *g.model;
        const uint32_t hidden = m.shape.hidden;
        experts_linear(int(m.shape.dtype), g.expert->down, hidden, m.intermediate, g.act, m.act_stride(), g.count,
                       g.out, hidden, tile0, tile1);
        if (m.form.biased)
            experts_add_down_biases(int(m.shape.dtype), g.expert->down, hidden, m.intermediate, g.count, g.out, hidden,
                                    tile0, tile1);
        const uint32_t column0 = tile0 * EXPERTS_TILE_ROWS;
        const uint32_t column1 = std::min<uint32_t>(tile1 * EXPERTS_TILE_ROWS, hidden);
        uint32_t over = 0;
        for (uint32_t i = 0; i < g.count; i++) {
            const Item& item = server->items[g.first + i];
            const RowFold part = fold_row(g.out + uint64_t(i) * hidden, column0, column1);
            over |= part.over;
            std::atomic_ref fold(server->jobs[item.key & 0xFFFF].folds[item.pair]);
            fold.fetch_add(part.sum, std::memory_order_relaxed);
        }
        if (over >> 31) {
            std::atomic_ref(m.doubtful[size_t(g.expert - m.experts.data())]).store(1);
            m.any_doubtful.store(true);
        }
    };
    if (lanes == 1) {
        for (const Group& g : server->groups) {
            p2p_bell_beat(server->page);
            up(g, 0, g.model->up.count), down(g, 0, g.model->down.count);
        }
        computed(server);
        for (uint32_t i = 0; i < server->job_count; i++) answer(server, i);
        count_batch(server);
        return;
    }
    over_tiles(server, lane, &Model::up, up);
    if (!whole_groups(server)) p2p_lanes_barrier(server->pool, lane);
    over_tiles(server, lane, &Model::down, down);
    p2p_lanes_barrier(server->pool, lane);
    computed(server);
    for (uint32_t i = lane; i < server->job_count; i += lanes) answer(server, i);
    if (lane == 0) {
        count_batch(server);
        // The next batch reuses all of this, and clients may go once the mutex is free.
        for (;;) {
            uint32_t seen = p2p_bell_read(server->page, 0), left = server->left.load(std::memory_order_acquire);
            if (!left) return;
            if (!p2p_lanes_spin(server->pool, 0, &server->left, left))
                p2p_bell_wait(server->page, 0, seen, P2P_WAIT_NS);
        }
    }
    // A client's lane on this core is best woken from here, before this lane parks.
    for (uint32_t i = 0; i < server->job_count; i++) {
        const ClientLink& link = server->jobs[i].client->link;
        if (lane < link.bell_lanes) p2p_bell_ring(link.bell_page, lane);
    }
    if (server->left.fetch_sub(1, std::memory_order_release) == 1) p2p_bell_ring(server->page, 0);
}

// ---- around batches

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

bool is_open(const ExpertServer* server, uint32_t index) {
    return index < EXPERT_SERVER_MAX_MODELS && server->models[index].open;
}

void let_others_pass(ExpertServer* server) {
    timespec pause{0, 20'000};
    while (server->wanting.load()) nanosleep(&pause, nullptr);
}

bool may_take(ExpertServer* server) {
    uint64_t lease_ns = server->lease_ns.load();
    return lease_ns == UINT64_MAX || (lease_ns && p2p::now_ns(CLOCK_BOOTTIME) < lease_ns);
}

// Computes the next batch, or finds none.
bool serve_next(ExpertServer* server, uint64_t now_ns) try {
    std::lock_guard lock(server->mutex);
    if (!may_take(server) || !collect(server, now_ns)) return false;
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
        uint64_t now_ns = p2p::now_ns();
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

}  // namespace

P2P_API ExpertServer* expert_server_new(uint32_t layers, uint32_t experts, uint32_t hidden, uint32_t intermediate,
                                        uint32_t top_k, int32_t dtype, uint64_t model_hash, uint64_t incarnation,
                                        uint32_t lanes, const int32_t* cores, void* own_page, uint64_t max_slot_bytes,
                                        const ExpertForm* form) try {
    if (!lanes || lanes > P2P_BELL_LANES || !max_slot_bytes) return nullptr;
    auto server = std::make_unique<ExpertServer>();
    server->incarnation = incarnation;
    server->lanes = lanes;
    server->page = own_page;
    server->max_slot_bytes = max_slot_bytes;
    if (expert_server_add_model(server.get(), layers, experts, hidden, intermediate, top_k, dtype, model_hash, form))
        return nullptr;
    server->pool = p2p_lanes_new(lanes, cores);
    return server->pool ? server.release() : nullptr;
} P2P_CATCH(nullptr)

P2P_API int32_t expert_server_add_model(ExpertServer* server, uint32_t layers, uint32_t experts, uint32_t hidden,
                                        uint32_t intermediate, uint32_t top_k, int32_t dtype, uint64_t model_hash,
                                        const ExpertForm* form) try {
    bool sizes = layers && layers <= MOST_LAYERS && experts && experts <= 65535 && hidden && intermediate;
    if (!sizes || !top_k || top_k > 1024 || dtype < 0 || dtype >= EAAS_DTYPES) return EXPERT_SERVER_E_ARGUMENT;
    std::vector<Expert> none(uint64_t(layers) * experts);
    std::vector<uint8_t> sound(none.size());
    Turn turn(server);
    Model* const models = server->models;
    Model* const model = std::find_if_not(models, models + EXPERT_SERVER_MAX_MODELS, [](auto& m) { return m.open; });
    if (model == models + EXPERT_SERVER_MAX_MODELS) return EXPERT_SERVER_E_FULL;
    model->shape = {layers, experts, hidden, top_k, uint32_t(dtype), model_hash};
    model->intermediate = intermediate;
    model->formed = form;
    model->form = form ? *form : ExpertForm{};
    model->up = {tiles(intermediate, EXPERTS_GATE_UP_COLUMNS), hidden};
    model->down = {tiles(hidden, EXPERTS_TILE_ROWS), intermediate};
    model->unit = (uint64_t(hidden) * intermediate + 63) / 64;
    // One so large or small beside the first that this rounds or saturates is served with the rest all the same.
    model->cost = uint64_t(std::clamp(double(PAIR_COST) * double(model->unit) / double(models->unit), 1.0, 0x1p40));
    model->experts.swap(none);
    model->doubtful.swap(sound);
    model->any_doubtful.store(false);
    model->open = true;
    return int32_t(model - models);
} P2P_CATCH(EXPERT_SERVER_E_MEMORY)

P2P_API int32_t expert_server_remove_model(ExpertServer* server, uint32_t index) {
    Turn turn(server);
    if (!index || !is_open(server, index)) return EXPERT_SERVER_E_ARGUMENT;
    Model& model = server->models[index];
    auto asks = [&](const Client& client) { return client.attached && client.link.model == index; };
    auto held = [](const Expert& expert) { return expert.gate_up; };
    if (std::any_of(server->clients, server->clients + server->places, asks) ||
        std::any_of(model.experts.begin(), model.experts.end(), held))
        return EXPERT_SERVER_E_BUSY;
    model.open = false;
    model.experts = {};
    model.doubtful = {};
    return EXPERT_SERVER_OK;
}

P2P_API void expert_server_free(ExpertServer* server) {
    if (!server) return;
    p2p_lanes_free(server->pool);
    delete server;
}

P2P_API int32_t expert_server_add_client(ExpertServer* server, const ClientLink* link) {
    if (!link->rx || !link->tx || !link->slots || link->slots > SERVER_MAX_SLOTS || !link->client_lanes ||
        link->client_lanes > P2P_BELL_LANES || !link->bell_lanes ||
        link->bell_lanes > link->client_lanes || link->slot_bytes < sizeof(WireHeader) ||
        !link->weight || link->weight > EXPERT_SERVER_MAX_WEIGHT ||
        link->slot_bytes > server->max_slot_bytes)
        return EXPERT_SERVER_E_ARGUMENT;
    if (link->rx_bytes < p2p_window_bytes(link->slots, link->slot_bytes) ||
        p2p_window_check(link->tx, link->tx_bytes, link->client_incarnation, link->slots, link->slot_bytes))
        return EXPERT_SERVER_E_ARGUMENT;
    Turn turn(server);
    if (!is_open(server, link->model)) return EXPERT_SERVER_E_ARGUMENT;
    for (uint32_t i = 0; i < EXPERT_SERVER_MAX_CLIENTS; i++) {
        if (server->clients[i].attached) continue;
        server->clients[i] = {.attached = true, .link = *link};
        server->places = std::max(server->places, i + 1);
        return int32_t(i);
    }
    return EXPERT_SERVER_E_FULL;
}

P2P_API void expert_server_remove_client(ExpertServer* server, uint32_t index) {
    if (index >= EXPERT_SERVER_MAX_CLIENTS) return;
    Turn turn(server);
    server->clients[index].attached = false;
}

P2P_API int32_t expert_server_set_expert(ExpertServer* server, uint32_t index, uint32_t layer, uint32_t expert,
                                         const void* gate_up, const void* down) {
    Turn turn(server);
    if (!is_open(server, index) || !gate_up != !down) return EXPERT_SERVER_E_ARGUMENT;
    Model& model = server->models[index];
    if (layer >= model.shape.layers || expert >= model.shape.experts) return EXPERT_SERVER_E_ARGUMENT;
    model.experts[uint64_t(layer) * model.shape.experts + expert] = {gate_up, down};
    return EXPERT_SERVER_OK;
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
    // Before the run: lane 0 may lead before another lane has looked.
    const uint32_t before = server->batch.load();
    server->run_until_ns = p2p::now_ns() + max_ns;
    server->running.store(true);
    server->starved = false;
    auto serve = [&](uint32_t lane) { lane ? follow(server, lane, before) : lead(server); };
    auto run = [](void* arg, uint32_t lane) { (*static_cast<decltype(serve)*>(arg))(lane); };
    p2p_lanes_run(server->pool, run, &serve);
    return server->starved ? int32_t(EXPERT_SERVER_E_MEMORY) : server->stopped.load();
}

P2P_API int32_t expert_server_step(ExpertServer* server, uint64_t now_ns) try {
    if (server->lanes != 1) return EXPERT_SERVER_E_ARGUMENT;
    std::lock_guard lock(server->mutex);
    if (!may_take(server) || !collect(server, now_ns)) return 0;
    serve_batch(server, 0);
    return int32_t(server->job_count);
} P2P_CATCH(EXPERT_SERVER_E_MEMORY)

P2P_API int64_t expert_server_take_doubtful(ExpertServer* server, uint32_t index) {
    if (index >= EXPERT_SERVER_MAX_MODELS || !server->models[index].any_doubtful.load()) return -1;
    Turn turn(server);
    Model& model = server->models[index];
    const auto found = std::find(model.doubtful.begin(), model.doubtful.end(), 1);
    if (found == model.doubtful.end()) return model.any_doubtful.store(false), -1;
    *found = 0;
    return found - model.doubtful.begin();
}

P2P_API void expert_server_counters(ExpertServer* server, ServerCounters* out) {
    read_counters(server->counters, out);
}
