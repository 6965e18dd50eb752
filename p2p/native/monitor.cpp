#include "p2p/native/monitor.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <new>

namespace {

using Wide = unsigned __int128;

constexpr uint64_t BUCKET_NS = P2P_MONITOR_HISTORY_NS / 16;
constexpr uint64_t EVIDENCE_WRITES = 2 * P2P_MONITOR_WRITES;
constexpr uint64_t EVIDENCE_MOST = 8 * P2P_MONITOR_WRITES;
constexpr uint32_t BUCKETS = 32;  // 16 closed ones of BUCKET_NS cover the history; a power of two above that
static_assert(std::has_single_bit(BUCKETS) && std::has_single_bit(P2P_MONITOR_WRITES));

// Some completed writes: their bytes, the busy time they took, and the most bytes outstanding before one.
struct Writes {
    uint64_t bytes = 0;
    uint64_t ns = 0;
    uint64_t count = 0;
    uint64_t most = 0;

    void add(const Writes& other) {
        bytes += other.bytes, ns += other.ns, count += other.count;
        most = std::max(most, other.most);
    }
    void remove(const Writes& other) { bytes -= other.bytes, ns -= other.ns, count -= other.count; }
    uint64_t bandwidth() const {
        return ns ? static_cast<uint64_t>(static_cast<double>(bytes) * 1e9 / static_cast<double>(ns)) : 0;
    }
};

// What the last P2P_MONITOR_HISTORY_NS of busy time were like.
struct History {
    Writes usual;
    Writes closed[BUCKETS];
    uint32_t first = 0, end = 0;
    Writes open;

    bool known() const { return usual.ns >= P2P_MONITOR_HISTORY_NS; }
    Writes& bucket(uint32_t index) { return closed[index % BUCKETS]; }

    void close() {
        bucket(end++) = open;
        usual.add(open);
        open = {};
        while (usual.ns - bucket(first).ns >= P2P_MONITOR_HISTORY_NS) usual.remove(bucket(first++));
        usual.most = 0;
        for (uint32_t i = first; i != end; i++) usual.most = std::max(usual.most, bucket(i).most);
    }
};

// Writes that may show a change, and the one among them that was waited for longest.
struct Evidence {
    Writes all, longest;

    void add(const Writes& write) {
        all.add(write);
        if (write.ns > longest.ns) longest = write;
    }
    Writes rest() const {
        Writes rest = all;
        rest.remove(longest);
        return rest;
    }
};

// Written by the feeder alone, so a load and a store make an addition.
struct alignas(64) Published {
    std::atomic<uint64_t> bandwidth{0}, mean_bandwidth{0}, outstanding{0}, most_outstanding{0};
    std::atomic<uint64_t> writes{0}, bytes{0}, anomalies{0}, changed_ns{0}, state{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

uint64_t get(const std::atomic<uint64_t>& word) { return word.load(std::memory_order_relaxed); }
void set(std::atomic<uint64_t>& word, uint64_t value) { word.store(value, std::memory_order_relaxed); }
void add(std::atomic<uint64_t>& word, uint64_t value) { set(word, get(word) + value); }

}  // namespace

struct P2pMonitor {
    // The feeder's own.
    uint64_t outstanding = 0;
    uint64_t mark_ns = 0;  // the last completion, or the post that ended a pause
    bool slow = false;
    uint32_t next = 0;  // of `recent`
    Writes recent[P2P_MONITOR_WRITES];
    Writes window;  // their sum; its `most` means nothing
    Evidence evidence;  // for a change of state; without writes, there is none
    History history;
    Published published;

    void slide(const Writes& write) {
        Writes& place = recent[next++ % P2P_MONITOR_WRITES];
        if (place.count && !slow) history.open.add(place);
        window.remove(place);
        place = write;
        window.add(place);
    }

    // As products, because quotients of integers lose; 128 bits hold them for any channel below 1 TB/s.
    bool below(const Writes& found, unsigned part, unsigned of) const {
        return Wide(found.bytes) * history.usual.ns * of < Wide(history.usual.bytes) * found.ns * part;
    }
    bool drains_longer(const Writes& found, unsigned times) const {
        const Writes& usual = history.usual;
        return Wide(found.most) * found.ns * usual.bytes > Wide(usual.most) * usual.ns * found.bytes * times;
    }
    bool low(const Writes& found) const {
        return below(found, 1, 2) && drains_longer(found, 2) &&
               Wide(found.ns) * history.usual.count * 2 > Wide(history.usual.ns) * found.count;
    }
    bool good(const Writes& found) const { return !below(found, 3, 4) || !drains_longer(found, 1); }

    void gather(const Writes& write) {
        if (evidence.all.count) {
            evidence.add(write);
        } else if (window.count == P2P_MONITOR_WRITES && window.ns && history.known()) {
            Writes found = window;
            found.most = 0;
            for (const Writes& recently : recent) found.most = std::max(found.most, recently.most);
            if (slow ? good(found) : low(found))
                for (const Writes& recently : recent) evidence.add(recently);
        }
    }

    void weigh(uint64_t now_ns) {
        const Writes& all = evidence.all;
        if (slow) {
            if (all.count < EVIDENCE_WRITES || all.ns < P2P_MONITOR_HISTORY_NS) return;
            if (good(all)) turn(false, now_ns);
            evidence = {};
            return;
        }
        const Writes rest = evidence.rest();
        bool enough = all.count >= EVIDENCE_WRITES && rest.ns >= P2P_MONITOR_EVIDENCE_NS &&
                      rest.ns >= 2 * evidence.longest.ns;
        if (enough && low(rest)) {
            history.open = {};
            turn(true, now_ns);
            add(published.anomalies, 1);
            evidence = {};
        } else if (enough && !below(rest, 3, 4)) {
            evidence = {};
        } else if (all.count >= EVIDENCE_MOST && all.ns >= P2P_MONITOR_HISTORY_NS) {
            evidence = {};
        }
    }

    void judge(const Writes& write, uint64_t now_ns) {
        gather(write);
        if (evidence.all.count) weigh(now_ns);
        if (evidence.all.count || history.open.ns < BUCKET_NS) return;
        history.close();
        set(published.mean_bandwidth, history.known() ? history.usual.bandwidth() : 0);
        set(published.most_outstanding, history.usual.most);
    }

    void turn(bool to_slow, uint64_t now_ns) {
        slow = to_slow;
        set(published.changed_ns, now_ns);
        set(published.state, slow ? P2P_MONITOR_SLOW : P2P_MONITOR_OK);
    }
};

P2P_API P2pMonitor* p2p_monitor_new(void) { return new (std::nothrow) P2pMonitor; }

P2P_API void p2p_monitor_free(P2pMonitor* monitor) { delete monitor; }

P2P_API void p2p_monitor_posted(P2pMonitor* monitor, uint64_t now_ns, uint64_t bytes) {
    if (!monitor || !bytes) return;
    if (!monitor->outstanding) monitor->mark_ns = now_ns;
    monitor->outstanding += bytes;
    set(monitor->published.outstanding, monitor->outstanding);
}

P2P_API void p2p_monitor_completed(P2pMonitor* monitor, uint64_t now_ns, uint64_t bytes) {
    if (!monitor || !bytes) return;
    P2pMonitor& m = *monitor;
    uint64_t before = m.outstanding;
    m.outstanding -= std::min(bytes, before);
    const Writes write{bytes, now_ns - std::min(now_ns, m.mark_ns), 1, before};
    m.slide(write);
    m.judge(write, now_ns);
    m.mark_ns = now_ns;
    uint64_t bandwidth = m.window.count == P2P_MONITOR_WRITES ? m.window.bandwidth() : 0;
    set(m.published.bandwidth, bandwidth);
    set(m.published.outstanding, m.outstanding);
    add(m.published.writes, 1);
    add(m.published.bytes, bytes);
}

P2P_API void p2p_monitor_read(const P2pMonitor* monitor, P2pMonitorState* out) {
    *out = {};
    if (!monitor) return;
    const Published& p = monitor->published;
    *out = {get(p.bandwidth), get(p.mean_bandwidth), get(p.outstanding), get(p.most_outstanding),
            get(p.writes),    get(p.bytes),          get(p.anomalies),   get(p.changed_ns),
            get(p.state)};
}
