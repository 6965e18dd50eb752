// The window monitor: is one channel slower than it was a moment ago? It has no clock, takes no lock and
// allocates only when it is made; one thread feeds it, any other may read it.
//
// The feeder says when a write was posted and when it completed. Posted means handed to the channel, whether on the
// wire yet or in the channel's own queue, so that what is outstanding shows what the channel owes. Each posted write
// ends in exactly one completion, in any order. Times are nanoseconds of one monotonic clock and never run backwards.
//
// Over the last W = 8 completed writes:
//   bandwidth = bytes / (last completion - first post), without the time in which nothing was outstanding. A
//       write that was posted behind others counts from the completion before its own: else a burst would look
//       slow for no reason but the queue it made. So idle gaps are no zeros, and a queue is no slowness.
//   outstanding = the most bytes outstanding just before one of the W completed.
// Usual is what the last 50 ms of busy time were like, W writes and more ago: mean bandwidth, mean time of W
// writes, most bytes outstanding. A write joins them when it leaves the window, in buckets of 1/16 (at least
// one write each). Busy time, because a pause says nothing; there is no verdict before 50 ms of it are known.
//
// Writes are low when all three hold of them:
//   bandwidth < 1/2 of the usual mean
//   outstanding > 2 x the usual maximum, each as the time that it takes to drain: outstanding / bandwidth.
//       In bytes, a sender that always keeps its cap full could never double anything, and its slow link would
//       never be seen; in time, any channel that was owed twice its maximum in bytes passes too. A sender that
//       merely goes from a full pipe to one write at a time halves the bandwidth, but waits less: not low.
//   they took over 1/2 of the time that as many writes usually take. A flood of small writes carries fewer bytes
//       a second over the same link, but is soon done.
// A low window raises suspicion. The evidence is its writes and all that follow, without the one that was
// waited for longest: a single stall, however long (the process was not run, say), is no slow link. It is
// enough from 2 W writes on, once the rest took 10 ms and twice as long as the longest wait: completions
// come in bursts, and schedulers stall.
// Anomaly: the evidence is enough, and low. The suspicion ends where its bandwidth is at least 3/4 of the
// mean, or after 8 W writes and 50 ms without a verdict. Writes that leave the window meanwhile join what
// is usual only if no anomaly comes of it, and none do during one: a slow link must not become the usual
// one.
// Recovered: a window, and from it on 2 W writes over at least 50 ms (after a stall, what it held up comes
// at once), have 3/4 of the mean again; or what is outstanding drains in the usual time (a sender that has
// turned to small writes would otherwise never be cleared).
//
// It judges at completions only: a channel on which nothing completes is its prober's business.
#pragma once
#include <cstdint>

#include "p2p/native/api.h"

constexpr uint32_t P2P_MONITOR_WRITES = 8;                   // W
constexpr uint64_t P2P_MONITOR_HISTORY_NS = 50'000'000;      // of busy time
constexpr uint64_t P2P_MONITOR_EVIDENCE_NS = 10'000'000;     // of busy time

enum {
    P2P_MONITOR_OK = 0,
    P2P_MONITOR_SLOW = 1,
};

struct P2pMonitor;

// Each field is whole; two of them may be a write apart.
struct P2pMonitorState {
    uint64_t bandwidth;        // bytes per second over the window; 0 while it is not full or took no time
    uint64_t mean_bandwidth;   // the usual one; 0 while unknown
    uint64_t outstanding;      // bytes, now
    uint64_t most_outstanding; // the usual maximum
    uint64_t writes;           // completed, ever
    uint64_t bytes;            // completed, ever
    uint64_t anomalies;
    uint64_t changed_ns;  // when the state last changed; 0: never
    uint64_t state;       // P2P_MONITOR_*
};

// Null without memory. The other functions take null for a monitor that is off.
P2P_API P2pMonitor* p2p_monitor_new(void);
P2P_API void p2p_monitor_free(P2pMonitor* monitor);

// For the feeder. A write of no bytes is ignored.
P2P_API void p2p_monitor_posted(P2pMonitor* monitor, uint64_t now_ns, uint64_t bytes);
P2P_API void p2p_monitor_completed(P2pMonitor* monitor, uint64_t now_ns, uint64_t bytes);

// From any thread; zeros for null.
P2P_API void p2p_monitor_read(const P2pMonitor* monitor, P2pMonitorState* out);
