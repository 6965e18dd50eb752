// Both ends of the expert service, each with the fuzzer for its peer.
#include "experts/native/client.h"
#include "experts/native/kernels.h"
#include "experts/native/server.h"
#include "experts/native/wire.h"
#include "p2p/native/doorbell.h"
#include "tests/fuzz/native.h"

using namespace experts;
using namespace fuzz;

namespace {

constexpr uint32_t LAYERS = 2, EXPERTS = 6, HIDDEN = 40, INTERMEDIATE = 24, TOP_K = 2;
constexpr uint64_t HASH = 0x1234, SERVER = 77, CLIENT = 1000;
constexpr uint32_t SLOTS = 2, PEERS = 2;
constexpr uint64_t SLOT_BYTES = 1500;

// Of each model that a server has; the second is smaller where the first is larger, and larger where that is smaller.
constexpr uint32_t MODELS = 2, INNER[MODELS] = {INTERMEDIATE, 72};

WireShape shape_of(uint32_t dtype, uint32_t model = 0) {
    if (model) return {3, 4, 21, 3, dtype, HASH + 1};
    return {LAYERS, EXPERTS, HIDDEN, TOP_K, dtype, HASH};
}

struct Weights {
    Memory gate_up, down;
};

const Weights& weights_of(uint32_t dtype, uint32_t model) {
    static Weights all[3][MODELS];
    Weights& weights = all[dtype][model];
    if (weights.down) return weights;
    const uint32_t inner = INNER[model], hidden = shape_of(dtype, model).hidden;
    weights.gate_up = zeros(64, experts_gate_up_bytes(int(dtype), inner, hidden));
    weights.down = zeros(64, experts_pack_bytes(int(dtype), hidden, inner));
    std::vector<float> plain(inner * hidden);
    for (size_t i = 0; i < plain.size(); i++) plain[i] = float(int(i * 37 % 101) - 50) / 100;
    experts_pack_gate_up(int(dtype), plain.data(), plain.data(), EAAS_F32, inner, hidden, weights.gate_up.get());
    experts_pack_matrix(int(dtype), plain.data(), EAAS_F32, hidden, inner, weights.down.get());
    return weights;
}

// Writes a request that is right in every field; its bytes.
uint32_t write_request(Choices& choices, const WireShape& shape, uint8_t* payload) {
    WireHeader header{};
    header.magic = WIRE_MAGIC, header.version = WIRE_VERSION, header.kind = WIRE_REQUEST;
    header.model_hash = shape.model_hash, header.hidden = shape.hidden, header.dtype = uint16_t(shape.dtype);
    header.layer = choices.below(shape.layers), header.rows = 1 + choices.below(3);
    header.pairs = 1 + choices.below(header.rows * shape.top_k);
    std::vector<WirePair> pairs(header.pairs);
    for (WirePair& pair : pairs)
        pair = {uint16_t(choices.below(header.rows)), uint16_t(choices.below(shape.experts)),
                uint16_t(choices.below(shape.top_k)), 0};
    header.routing_hash = routing_hash(pairs.data(), header.pairs);
    uint32_t bytes = uint32_t(request_bytes(shape, header.rows, header.pairs));
    std::memset(payload, 0, bytes);
    std::memcpy(payload, &header, sizeof header);
    std::memcpy(payload + sizeof header, pairs.data(), header.pairs * sizeof(WirePair));
    choices.fill(payload + sizeof header + routing_bytes(header.pairs), choices.below(16));
    return bytes;
}

// So that the checks behind the hash are reached as well.
void hash_again(uint8_t* payload) {
    WireHeader header;
    std::memcpy(&header, payload, sizeof header);
    if (sizeof header + routing_bytes(header.pairs) > SLOT_BYTES) return;
    header.routing_hash = routing_hash(reinterpret_cast<WirePair*>(payload + sizeof header), header.pairs);
    std::memcpy(payload, &header, sizeof header);
}

struct Attached {
    Window request{SLOTS, SLOT_BYTES, SERVER}, reply;
    uint32_t model;  // that it asks for
    int32_t index = -1;
    uint64_t top[SLOTS] = {};  // of the signals ever stored
    bool whole[SLOTS] = {};    // the request there is right, and still waits
    bool held[SLOTS] = {};     // and the server has all of its experts

    explicit Attached(uint64_t incarnation, uint32_t model = 0)
        : reply(SLOTS, SLOT_BYTES, incarnation), model(model) {}
};

void judge_answers(Attached& client, uint64_t incarnation) {
    for (uint32_t i = 0; i < SLOTS; i++) {
        uint64_t signal = client.reply.signal(i);
        if (!signal) continue;
        P2pHeader frame;
        std::vector<uint8_t> payload(SLOT_BYTES);
        int length = p2p_frame_open(client.reply.slot(i), SLOT_BYTES, incarnation, SERVER, signal, &frame, payload.data());
        WireHeader header;
        std::memcpy(&header, payload.data(), sizeof header);
        require(length >= int(sizeof header) && header.magic == WIRE_MAGIC && header.kind == WIRE_REPLY &&
                    header.status <= STATUS_INVALID, "whatever was asked, a reply is a reply");
        if (!client.whole[i] || signal != client.top[i]) continue;
        client.whole[i] = false;
        require(header.status == (client.held[i] ? STATUS_OK : STATUS_NOT_HELD), "a whole request is served");
        const uint32_t row = shape_of(header.dtype, client.model).hidden * 4;
        require(length == int(client.held[i] ? sizeof header + header.pairs * row : sizeof header),
                "a reply has a row for each pair");
    }
}

}  // namespace

void fuzz::server(Choices& choices) {
    const uint32_t dtype = choices.below(3);
    const int32_t core = -1;
    ExpertServer* server = expert_server_new(LAYERS, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, int(dtype), HASH, SERVER, 1,
                                             &core, nullptr, SLOT_BYTES, nullptr);
    const WireShape second = shape_of(dtype, 1);
    auto open = [&] {
        require(expert_server_add_model(server, second.layers, second.experts, second.hidden, INNER[1], second.top_k,
                                        int(dtype), second.model_hash, nullptr) == 1, "a second model is added");
    };
    open();
    Memory page = zeros(P2P_PAGE, P2P_BELL_PAGE);
    std::vector<std::unique_ptr<Attached>> clients;
    auto attach = [&](uint32_t i) {
        clients[i] = std::make_unique<Attached>(CLIENT + i, choices.below(MODELS));
        Attached& client = *clients[i];
        ClientLink link{client.request.memory.get(), client.request.bytes, client.reply.memory.get(),
                        client.reply.bytes, page.get(), CLIENT + i, 1, 1, SLOTS, 1, SLOT_BYTES, client.model};
        client.index = expert_server_add_client(server, &link);
        require(client.index >= 0, "a client attaches");
    };
    clients.resize(PEERS);
    for (uint32_t i = 0; i < PEERS; i++) attach(i);
    auto step = [&] {
        int32_t answered = expert_server_step(server, 1);
        require(answered >= 0, "a step ends well");
        for (uint32_t i = 0; i < PEERS; i++) judge_answers(*clients[i], CLIENT + i);
        return answered;
    };
    bool lacks[MODELS][EXPERTS] = {};
    auto load = [&](uint32_t model, bool held) {
        const WireShape shape = shape_of(dtype, model);
        const Weights& weights = weights_of(dtype, model);
        for (uint32_t expert = 0; expert < shape.experts; expert++) {
            lacks[model][expert] = !held || (expert && choices.below(8) == 7);
            for (uint32_t layer = 0; layer < shape.layers; layer++) {
                const bool none = lacks[model][expert];
                require(!expert_server_set_expert(server, model, layer, expert, none ? nullptr : weights.gate_up.get(),
                                                  none ? nullptr : weights.down.get()), "an expert is taken or let go");
            }
        }
    };
    for (uint32_t model = 0; model < MODELS; model++) load(model, true);
    for (uint32_t turn = 0; choices.left() && turn < 40; turn++) {
        uint32_t number = choices.below(PEERS), slot = choices.below(SLOTS), kind = choices.below(16);
        if (kind == 15) {
            expert_server_remove_client(server, uint32_t(clients[number]->index));
            const bool asked = clients[1 - number]->model == 1;
            require(expert_server_remove_model(server, 1) == EXPERT_SERVER_E_BUSY, "a model that is held stays");
            if (choices.below(2) && !asked) {
                load(1, false);
                require(expert_server_remove_model(server, 1) == EXPERT_SERVER_OK, "what nobody has goes");
                open();
                load(1, true);
            }
            attach(number);
        }
        Attached& client = *clients[number];
        uint8_t* payload = client.request.payload(slot);
        client.whole[slot] = false;
        if (kind == 14) {
            choices.fill(client.request.slot(slot), P2P_FRAME_OFFSET + choices.below(64));
        } else {
            P2pHeader fields{};
            uint64_t top = client.top[slot];
            fields.receiver = SERVER, fields.sender = CLIENT + number;
            fields.sequence = top + 1 ? top + 1 : top, fields.attempt = choices.below(4);
            // Of the other model now and then: right in every field, and asked by somebody who may not.
            const bool strays = choices.below(8) == 7;
            fields.length = write_request(choices, shape_of(dtype, client.model ^ uint32_t(strays)), payload);
            WireHeader asked;
            std::memcpy(&asked, payload, sizeof asked);
            auto* pairs = reinterpret_cast<WirePair*>(payload + sizeof asked);
            const bool* lacked = lacks[client.model];
            bool held = std::none_of(pairs, pairs + asked.pairs, [&](WirePair p) { return lacked[p.expert]; });
            bool whole = top + 1 != 0 && !strays;
            if (kind < 10) {
                whole &= !damage(choices, payload, std::min<uint32_t>(fields.length, 128), 3);
                if (choices.below(2)) hash_again(payload);
            } else if (kind < 12) {
                fields.length = std::min<uint32_t>(uint32_t(choices.value()), SLOT_BYTES);
                whole = false;
            }
            whole &= seal(choices, client.request, slot, fields);
            uint64_t signal = choices.below(8) == 7 ? choices.value() : fields.sequence;
            client.whole[slot] = whole && signal == fields.sequence;
            client.held[slot] = held;
            p2p_signal_store(client.request.slot(slot), signal);
        }
        client.top[slot] = std::max(client.top[slot], client.request.signal(slot));
        if (choices.below(2)) step();
    }
    for (uint32_t i = 0; step(); i++) require(i < 2 * PEERS * SLOTS, "a server comes to rest");
    for (auto& client : clients)
        for (bool waits : client->whole) require(!waits, "a whole request is answered, whatever came before it");
    expert_server_free(server);
}

namespace {

// The rows that an honest server of this world sends.
float row_value(uint32_t expert, const uint8_t* row) { return float(1 + expert) * float(1 + row[0]); }

struct Called {
    uint32_t n;
    std::vector<uint8_t> rows;
    std::vector<uint16_t> ids;
    std::vector<float> weights, before, out;

    Called(Choices& choices, uint64_t row_bytes)
        : n(1 + choices.below(6)), rows(n * row_bytes), ids(n * TOP_K), weights(n * TOP_K), before(n * HIDDEN, 0.5f) {
        for (uint32_t t = 0; t < n; t++) rows[t * row_bytes] = uint8_t(choices.bits(1));
        for (uint16_t& id : ids) id = uint16_t(choices.below(EXPERTS));
        for (float& weight : weights) weight = float(choices.bits(1)) / 4;
        out = before;
    }
    bool right(uint64_t row_bytes) const {
        for (uint32_t t = 0; t < n; t++) {
            float sum = 0;
            for (uint32_t k = 0; k < TOP_K; k++)
                sum += weights[t * TOP_K + k] * row_value(ids[t * TOP_K + k], &rows[t * row_bytes]);
            for (uint32_t j = 0; j < HIDDEN; j++)
                if (out[t * HIDDEN + j] != 0.5f + sum) return false;
        }
        return true;
    }
};

// Writes the honest reply to what the client asked in that slot; its bytes.
uint32_t write_reply(const WireShape& shape, const uint8_t* request, uint8_t* reply) {
    WireHeader header;
    std::memcpy(&header, request, sizeof header);
    const auto* pairs = reinterpret_cast<const WirePair*>(request + sizeof header);
    const uint8_t* rows = request + sizeof header + routing_bytes(header.pairs);
    auto* out = reinterpret_cast<float*>(reply + sizeof header);
    for (uint32_t i = 0; i < header.pairs; i++)
        std::fill_n(out + i * HIDDEN, HIDDEN, row_value(pairs[i].expert, rows + pairs[i].row * shape.row_bytes()));
    header.kind = WIRE_REPLY;
    std::memcpy(reply, &header, sizeof header);
    return uint32_t(reply_bytes(shape, header.pairs));
}

void publish(Choices& choices, ExpertClient* client, uint64_t epoch) {
    std::vector<uint8_t> table(LAYERS * EXPERTS * EXPERTS_MAX_REPLICAS, EXPERTS_NO_SERVER);
    for (size_t i = 0; i < table.size(); i += EXPERTS_MAX_REPLICAS)
        for (uint32_t peer = 0; peer < PEERS; peer++)
            if (choices.below(4) < 3) table[i + peer] = uint8_t(peer);
    expert_client_publish_routes(client, epoch, table.data());
}

}  // namespace

void fuzz::client(Choices& choices) {
    const WireShape shape = shape_of(choices.below(3));
    const uint64_t row_bytes = HIDDEN * (shape.dtype == 0 ? 4 : 2);
    ExpertClient* client = expert_client_new(LAYERS, EXPERTS, HIDDEN, TOP_K, int32_t(shape.dtype), HASH, CLIENT, 1, nullptr, 6);
    Memory page = zeros(P2P_PAGE, P2P_BELL_PAGE);
    std::vector<std::unique_ptr<Attached>> servers;
    for (uint32_t i = 0; i < PEERS; i++) {
        Attached& server = *servers.emplace_back(std::make_unique<Attached>(CLIENT));
        ServerLink link{server.request.memory.get(), server.request.bytes, server.reply.memory.get(), server.reply.bytes,
                        page.get(), SERVER, -1, SLOTS, SLOT_BYTES, 0, 1};
        require(expert_client_add_server(client, &link) == int32_t(i), "a server attaches");
    }
    publish(choices, client, 1);
    bool forged = false;  // a false reply was sealed as a true one: what it says may be believed
    uint64_t now_ns = 1'000'000'000;
    for (uint32_t count = 0; count < 3 && (choices.left() || !count); count++) {
        Called call(choices, row_bytes);
        uint64_t deadline_ns = now_ns + 1 + choices.bits(5);
        int32_t status = expert_client_begin(client, choices.below(LAYERS), call.rows.data(), call.n, call.ids.data(),
                                             call.weights.data(), call.out.data(), nullptr, now_ns, deadline_ns);
        require(status == EXPERTS_OK, "a call begins");
        status = EXPERTS_PENDING;
        for (uint32_t turn = 0; choices.left() && turn < 30 && status == EXPERTS_PENDING; turn++) {
            Attached& server = *servers[choices.below(PEERS)];
            uint32_t slot = choices.below(SLOTS), kind = choices.below(16);
            P2pHeader asked = header_of(server.request.slot(slot));
            if (kind == 15) {
                publish(choices, client, 2 + turn);
            } else if (kind == 14) {
                choices.fill(server.reply.slot(slot), P2P_FRAME_OFFSET + choices.below(64));
            } else if (asked.magic) {
                uint8_t* payload = server.reply.payload(slot);
                P2pHeader fields{};
                fields.receiver = CLIENT, fields.sender = SERVER;
                fields.sequence = asked.sequence, fields.attempt = asked.attempt;
                fields.length = write_reply(shape, server.request.payload(slot), payload);
                bool whole = true;
                if (kind > 9) {
                    uint16_t refusal = uint16_t(choices.below(4));
                    std::memcpy(payload + 42, &refusal, sizeof refusal);
                    if (refusal && choices.below(2)) fields.length = sizeof(WireHeader);
                } else if (kind > 4) {
                    whole &= !damage(choices, payload, fields.length, 3);
                    if (choices.below(4) == 0) fields.length = std::min<uint32_t>(uint32_t(choices.value()), SLOT_BYTES);
                }
                whole &= seal(choices, server.reply, slot, fields);
                forged |= !whole;
                p2p_signal_store(server.reply.slot(slot), choices.below(8) == 7 ? choices.value() : asked.sequence);
            }
            now_ns += choices.below(4) == 3 ? 1 + choices.bits(4) : 1000;
            status = expert_client_step(client, now_ns);
        }
        now_ns = std::max(now_ns, deadline_ns);
        if (status == EXPERTS_PENDING) status = expert_client_step(client, now_ns);
        require(status == EXPERTS_OK || status == EXPERTS_E_LOST, "a call ends by its deadline");
        require(status == EXPERTS_OK || call.out == call.before, "a lost call leaves its output as it was");
        require(status != EXPERTS_OK || forged || call.right(row_bytes), "no wrong reply is accepted");
        for (uint32_t i = 0; i < PEERS; i++) {
            ServerStats stats;
            require(expert_client_stats(client, i, &stats) == EXPERTS_OK && stats.held_slots <= SLOTS, "counts hold");
        }
    }
    expert_client_free(client);
}
