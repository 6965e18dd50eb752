// How a client splits the rows of one batch over replicas. Pure: the same input gives the same split.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "experts/native/client.h"
#include "experts/native/memory.h"

namespace experts {

// One expert of a batch: its rows, a mask of at most EXPERTS_MAX_REPLICAS servers that may compute it, and what
// `split_rows` found: rows for each of those servers, lowest index first.
struct Want {
    uint32_t expert;
    uint32_t count;
    uint64_t servers;
    uint32_t rows[EXPERTS_MAX_REPLICAS];
};

// What each server would do; kept from one batch to the next for its memory alone.
struct Waterfill {
    std::vector<uint64_t> order;
    std::vector<double> share;  // [wants][EXPERTS_MAX_REPLICAS], in parts of rows
    std::vector<double> before;  // the same, before a slow server was given less
    double load[EXPERTS_MAX_SERVERS];

    // Fills wants[i].rows so that the busiest server ends early: a server's time is
    // (its rows + expert_cost x its experts) / speed.
    //
    // Experts with the fewest servers go first, large before small; each is split over its servers to an even level.
    // Then experts are taken out and split again, while the sum over servers of time^2 x speed falls: at its least the
    // busiest server is as idle as the replicas allow, and an expert is split only where that is worth the further
    // activation. All that in parts of rows, for an odd row at each of many hands is a slope that no single move can
    // level; whole rows come last, each to the server from which rounding took most. A slow server may still end last
    // by a single expert: one that does gives up whatever others hold as well, where all then end sooner. Equal servers
    // are taken in an order drawn by `turn`, so that what is left over by many clients does not meet on one server.
    void split_rows(Want* wants, size_t n, const double* speed, double expert_cost, uint32_t turn);

  private:
    void rebalance(const Want* wants, size_t movable, uint64_t all, const double* speed, double cost, uint32_t turn);
};

// What a server's own service times say of its speed: sums over its replies that fade with a half-life of 44.
struct ServiceTime {
    double units = 0, ns = 0;
    uint32_t replies = 0;

    // units: rows, activations and the fixed cost of a request, in rows. A server that was found slow shows by few
    // replies that it is so no more: what may stretch one reply cannot shorten it.
    void learn(double of_units, double of_ns, bool slow);
    // 0 while too few replies were seen.
    double ns_per_unit() const { return replies < 32 || units <= 0 ? 0 : ns / units; }
};

// Relative speeds from times: 1 is the median server, or one whose time is unknown (0). A speed stays as it is until
// it is a quarter off, so that noise moves nobody's rows; within 1/8 and 8, for slow is not dead.
void weigh(uint32_t n, const double* ns_per_unit, double* speed);

}  // namespace experts

// The same for arrays, as tests and benchmarks call it.
//   counts   [n] rows of each expert
//   servers  [n] masks of those that may compute it, at most EXPERTS_MAX_REPLICAS each; 0: nobody, and no rows
//   speed    [EXPERTS_MAX_SERVERS] relative, above 0
//   rows     [n][EXPERTS_MAX_REPLICAS] out: for each expert's servers, lowest index first, padded with 0
// EXPERTS_OK, EXPERTS_E_ARGUMENT or EXPERTS_E_MEMORY.
P2P_API int32_t expert_waterfill(uint32_t n, const uint32_t* counts, const uint64_t* servers,
                                 const double* speed, double expert_cost, uint32_t turn, uint32_t* rows);
// `weigh` above; speed: [n] in and out. n up to EXPERTS_MAX_SERVERS.
P2P_API int32_t expert_weigh(uint32_t n, const double* ns_per_unit, double* speed);
