// What the parts of the server share.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "experts/native/kernels.h"
#include "experts/native/server.h"
#include "experts/native/wire.h"

namespace experts {

constexpr uint32_t SERVER_MAX_SLOTS = 16;
constexpr uint32_t BATCH_JOBS = 16;
constexpr uint32_t BATCH_PAIRS = 512;  // so that a prefill delays decoding by little

struct FreeMemory {
    void operator()(uint8_t* memory) const { std::free(memory); }
};

// Grows, never shrinks; contents are lost when it grows. Throws std::bad_alloc.
class Buffer {
  public:
    uint8_t* need(uint64_t bytes) {
        if (bytes > bytes_) {
            uint64_t size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
            bytes_ = 0;
            memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(64, size)));
            if (!memory_) throw std::bad_alloc();
            bytes_ = size;
        }
        return memory_.get();
    }
    uint8_t* data() const { return memory_.get(); }

  private:
    std::unique_ptr<uint8_t, FreeMemory> memory_;
    uint64_t bytes_ = 0;
};

struct Client {
    bool attached = false;
    ClientLink link{};
    uint64_t done[SERVER_MAX_SLOTS] = {};      // last sequence answered in each slot
    uint64_t rejected[SERVER_MAX_SLOTS] = {};  // a signal whose frame did not validate, answered once
};

struct Expert {
    const void* gate_up = nullptr;
    const void* down = nullptr;
};

struct Job {
    uint32_t client;
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

// One pair of the batch; sorted, pairs of one layer and expert are neighbours.
struct Item {
    uint64_t key;  // layer << 32 | expert << 16 | job
    uint32_t pair;
};

struct Group {
    const Expert* expert;
    uint32_t first;  // of its items
    uint32_t count;
    float* out;  // count rows of hidden, in a reply where one request holds them all, else private
    bool direct;
};

}  // namespace experts

struct ExpertServer {
    experts::WireShape shape{};
    uint32_t intermediate = 0;
    ExpertForm form{};
    bool formed = false;  // experts are more than SwiGLU without biases
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
    std::vector<experts::Expert> experts;  // [layers][experts]
    std::vector<uint8_t> doubtful;         // of each: it gave a row that is not finite
    std::atomic<bool> any_doubtful{false};

    uint32_t next_client = 0;
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

namespace experts {

uint64_t monotonic_ns();
// Takes what is ready, validates it and groups it; false where there is nothing to compute or refuse. All of a batch's
// memory is had here: throws std::bad_alloc.
bool collect(ExpertServer* server, uint64_t now_ns);
// Computes and answers the batch; made by every lane.
void serve_batch(ExpertServer* server, uint32_t lane);

}  // namespace experts
