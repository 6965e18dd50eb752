#include "experts/native/waterfill.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

P2P_BUILT_FROM(experts_headers)

namespace experts {
namespace {

constexpr int SWEEPS = 12;
constexpr double EVEN = 1.0 / 512;  // of the mean: what the busiest server may be above it

struct Holder {
    double load;   // without the expert
    double speed;
    double level;  // time once it is activated, before it has rows
    uint32_t lot;
    uint32_t slot;  // of the expert's shares
};

// Which of two equal servers comes first: drawn anew for each turn, whatever their indexes.
uint32_t lot(uint32_t server, uint32_t turn) {
    uint32_t drawn = (turn * 0x9e3779b9 + server + 1) * 0x85ebca6b;
    drawn = (drawn ^ drawn >> 15) * 0xc2b2ae35;
    return drawn ^ drawn >> 13;
}

double squared(double load, double speed) { return load * load / speed; }

// The expert's servers, least loaded first. `load` holds nothing of the expert.
uint32_t holders_of(uint64_t servers, const double* load, const double* speed, double cost, uint32_t turn,
                    Holder* found) {
    uint32_t n = 0;
    for (uint32_t server : Bits{servers}) {
        Holder holder{load[server], speed[server], (load[server] + cost) / speed[server],
                      lot(server, turn), n};
        uint32_t at = n++;
        for (; at && (holder.level < found[at - 1].level ||
                      (holder.level == found[at - 1].level && holder.lot < found[at - 1].lot));
             at--)
            found[at] = found[at - 1];
        found[at] = holder;
    }
    return n;
}

// Splits rows over the holders; what that adds to the sum of squares.
double split(double rows, const Holder* holders, uint32_t n, double cost, double* share) {
    std::fill_n(share, EXPERTS_MAX_REPLICAS, 0.0);
    // One server alone: the one that it burdens least, which need not be the idlest where speeds differ.
    uint32_t alone = 0;
    double least = 0;
    for (uint32_t i = 0; i < n; i++) {
        const Holder& h = holders[i];
        double added = squared(h.load + cost + rows, h.speed) - squared(h.load, h.speed);
        if (i == 0 || added < least) least = added, alone = i;
    }
    double loads = 0, speeds = 0, before = 0, height = 0;
    uint32_t used = 1;
    for (uint32_t i = 0; i < n; i++) {
        const Holder& h = holders[i];
        if (i && (loads + rows) / speeds <= h.level) break;
        loads += h.load + cost, speeds += h.speed, before += squared(h.load, h.speed);
        double level = (loads + rows) / speeds;
        double added = level * level * speeds - before;
        if (i && added < least) least = added, used = i + 1, height = level;
    }
    if (used == 1)
        share[holders[alone].slot] = rows;
    else
        for (uint32_t i = 0; i < used; i++)
            share[holders[i].slot] = (height - holders[i].level) * holders[i].speed;
    return least;
}

void add_to(double* load, uint64_t servers, const double* share, double cost, double sign) {
    for (uint32_t server : Bits{servers}) {
        if (*share > 0) load[server] += sign * (*share + cost);
        share++;
    }
}

double squares(const double* load, const double* speed, uint64_t servers) {
    double sum = 0;
    for (uint32_t server : Bits{servers}) sum += squared(load[server], speed[server]);
    return sum;
}

// The server that ends last, and when.
uint32_t last_of(uint64_t all, const double* load, const double* speed, double* ends) {
    uint32_t last = 0;
    *ends = -1;
    for (uint32_t server : Bits{all}) {
        double time = load[server] / speed[server];
        if (time > *ends) *ends = time, last = server;
    }
    return last;
}

// Whole rows. rounded_off: by server, what rounding has taken from it so far.
void round_off(Want& want, const double* share, uint32_t turn, double* rounded_off) {
    uint32_t left = want.count, slot = 0;
    for (uint32_t server : Bits{want.servers}) {
        uint32_t rows = std::min(left, uint32_t(share[slot]));
        want.rows[slot] = rows;
        left -= rows;
        if (share[slot] > 0) rounded_off[server] += share[slot] - rows;
        slot++;
    }
    for (; left; left--) {
        uint32_t to = 0, to_slot = EXPERTS_MAX_REPLICAS;
        slot = 0;
        for (uint32_t server : Bits{want.servers}) {
            bool first = to_slot == EXPERTS_MAX_REPLICAS || rounded_off[server] > rounded_off[to] ||
                         (rounded_off[server] == rounded_off[to] && lot(server, turn) < lot(to, turn));
            if (share[slot] > 0 && first) to = server, to_slot = slot;
            slot++;
        }
        rounded_off[to] -= 1;
        want.rows[to_slot]++;
    }
}

}  // namespace

void Waterfill::split_rows(Want* wants, size_t n, const double* speed, double cost, uint32_t turn) {
    order.clear();
    share.resize(n * EXPERTS_MAX_REPLICAS);
    uint64_t all = 0;
    for (size_t i = 0; i < n; i++) {
        all |= wants[i].servers;
        // Rarest first, then largest, then by number.
        order.push_back(uint64_t(std::popcount(wants[i].servers)) << 56 |
                        uint64_t(~wants[i].count & 0xffffffff) << 24 | i);
    }
    std::sort(order.begin(), order.end());
    double speeds = 0;
    for (uint32_t server : Bits{all}) {
        load[server] = 0;
        speeds += speed[server];
    }
    Holder holders[EXPERTS_MAX_REPLICAS];
    size_t movable = n;  // from here on experts have a choice
    for (size_t at = 0; at < n; at++) {
        size_t i = order[at] & 0xffffff;
        uint32_t found = holders_of(wants[i].servers, load, speed, cost, turn, holders);
        if (found > 1 && movable == n) movable = at;
        if (!found) continue;
        split(wants[i].count, holders, found, cost, &share[i * EXPERTS_MAX_REPLICAS]);
        add_to(load, wants[i].servers, &share[i * EXPERTS_MAX_REPLICAS], cost, 1);
    }
    for (int sweep = 0; sweep < SWEEPS; sweep++) {
        double most = 0, loads = 0;
        for (uint32_t server : Bits{all}) {
            loads += load[server];
            most = std::max(most, load[server] / speed[server]);
        }
        if (most <= loads / speeds * (1 + EVEN)) break;
        double gained = 0;
        for (size_t at = movable; at < n; at++) {
            const Want& want = wants[order[at] & 0xffffff];
            double* old = &share[(order[at] & 0xffffff) * EXPERTS_MAX_REPLICAS];
            double fresh[EXPERTS_MAX_REPLICAS];
            double was = squares(load, speed, want.servers);
            add_to(load, want.servers, old, cost, -1);
            uint32_t found = holders_of(want.servers, load, speed, cost, turn, holders);
            double added = split(want.count, holders, found, cost, fresh);
            double gain = was - squares(load, speed, want.servers) - added;
            // Activations make hills: what is split again may lie no better.
            if (gain > 0) {
                gained += gain;
                std::copy_n(fresh, EXPERTS_MAX_REPLICAS, old);
            }
            add_to(load, want.servers, old, cost, 1);
        }
        if (gained <= most * most * speeds * 1e-6) break;
    }
    rebalance(wants, movable, all, speed, cost, turn);
    double rounded_off[EXPERTS_MAX_SERVERS] = {};
    for (size_t at = 0; at < n; at++) {
        size_t i = order[at] & 0xffffff;
        std::memset(wants[i].rows, 0, sizeof wants[i].rows);
        if (wants[i].servers) round_off(wants[i], &share[i * EXPERTS_MAX_REPLICAS], turn, rounded_off);
    }
}

void Waterfill::rebalance(const Want* wants, size_t movable, uint64_t all, const double* speed, double cost,
                          uint32_t turn) {
    if (!all) return;
    double ends, sooner, was[EXPERTS_MAX_SERVERS];
    for (uint32_t last = last_of(all, load, speed, &ends); speed[last] < 1; ends = sooner) {
        before = share;
        std::copy_n(load, EXPERTS_MAX_SERVERS, was);
        for (size_t at = movable; at < order.size(); at++) {
            const Want& want = wants[order[at] & 0xffffff];
            double* own = &share[(order[at] & 0xffffff) * EXPERTS_MAX_REPLICAS];
            if (!(want.servers >> last & 1)) continue;
            uint32_t slot = uint32_t(std::popcount(want.servers & ((uint64_t(1) << last) - 1)));
            if (!(own[slot] > 0)) continue;
            add_to(load, want.servers, own, cost, -1);
            Holder holders[EXPERTS_MAX_REPLICAS];
            uint32_t found = holders_of(want.servers, load, speed, cost, turn, holders);
            Holder* end = std::remove_if(holders, holders + found, [slot](const Holder& h) { return h.slot == slot; });
            split(want.count, holders, uint32_t(end - holders), cost, own);
            add_to(load, want.servers, own, cost, 1);
        }
        uint32_t next = last_of(all, load, speed, &sooner);
        if (!(sooner < ends)) {
            share.swap(before);
            std::copy_n(was, EXPERTS_MAX_SERVERS, load);
            return;
        }
        last = next;
    }
}

void ServiceTime::learn(double of_units, double of_ns, bool slow) {
    double usual = ns_per_unit(), share = 1.0 / 64;
    // A server that was put aside by its host for a while is not slower for it.
    if (usual) of_ns = std::min(of_ns, 4 * usual * of_units);
    if (slow && of_ns * 2 < usual * of_units) share = 1.0 / 4;
    units += share * (64 * of_units - units);
    ns += share * (64 * of_ns - ns);
    replies += replies < 32;
}

void weigh(uint32_t n, const double* ns_per_unit, double* speed) {
    double known[EXPERTS_MAX_SERVERS];
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i++)
        if (ns_per_unit[i] > 0) known[count++] = ns_per_unit[i];
    std::nth_element(known, known + count / 2, known + count);
    for (uint32_t i = 0; i < n; i++) {
        double found = ns_per_unit[i] > 0 ? std::clamp(known[count / 2] / ns_per_unit[i], 0.125, 8.0) : 1;
        double off = found / speed[i];
        if (off < 0.8 || off > 1.25)
            std::atomic_ref(speed[i]).store(std::abs(found - 1) < 0.1 ? 1 : found, std::memory_order_relaxed);
    }
}

}  // namespace experts

P2P_API int32_t expert_waterfill(uint32_t n, const uint32_t* counts, const uint64_t* servers,
                                 const double* speed, double expert_cost, uint32_t turn, uint32_t* rows) try {
    if (n > 65535 || !(expert_cost >= 0)) return EXPERTS_E_ARGUMENT;
    for (uint32_t i = 0; i < n; i++)
        if (std::popcount(servers[i]) > int(EXPERTS_MAX_REPLICAS)) return EXPERTS_E_ARGUMENT;
    for (uint32_t i = 0; i < EXPERTS_MAX_SERVERS; i++)
        if (!(speed[i] > 0)) return EXPERTS_E_ARGUMENT;
    static thread_local experts::Waterfill fill;
    std::vector<experts::Want> wants;
    for (uint32_t i = 0; i < n; i++)
        if (counts[i]) wants.push_back({i, counts[i], servers[i], {}});
    fill.split_rows(wants.data(), wants.size(), speed, expert_cost, turn);
    std::memset(rows, 0, sizeof(uint32_t) * EXPERTS_MAX_REPLICAS * n);
    for (const experts::Want& want : wants)
        std::memcpy(rows + want.expert * EXPERTS_MAX_REPLICAS, want.rows, sizeof want.rows);
    return EXPERTS_OK;
} P2P_CATCH(EXPERTS_E_MEMORY)

P2P_API int32_t expert_weigh(uint32_t n, const double* ns_per_unit, double* speed) {
    if (n > EXPERTS_MAX_SERVERS) return EXPERTS_E_ARGUMENT;
    experts::weigh(n, ns_per_unit, speed);
    return EXPERTS_OK;
}
