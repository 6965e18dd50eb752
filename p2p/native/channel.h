// Channels: writes to one window over several paths, which may fail while they are under way.
//
// The writer numbers its writes. The owner knows which have come, whatever path they took. When the writer's writes
// on a path are overdue it says so over another (DOUBT); the owner probes the path, and where nothing is heard it
// closes its end, after which nothing that was sent there can land; only then it states what it has (STATE), and the
// writer sends the rest over the paths that are left. So nothing is lost, nothing counts twice and nothing lands
// late. A writer that has nothing under way, or is frozen, doubts nothing, and its paths stay. The last path is
// never closed for silence: whether a sole path or its peer is dead cannot be told from here.
//
// A closed path is offered again, under the next generation, after a while that doubles as long as it fails soon.
//
// Pure: no clock, no I/O beyond the paths, no waiting. What needs time or threads (closing and opening a transport)
// is asked for by commands and reported back. One thread at a time.
#pragma once
#include <cstdint>

#include "p2p/native/api.h"
#include "p2p/native/path.h"

struct P2pGpu;
struct P2pMonitor;
struct P2pEnd;  // of a channel: its writer's, or its owner's

constexpr uint32_t P2P_PATHS = 16;  // of one channel at most

struct P2pChannelConfig {
    uint64_t paths = 1;  // rails of this end; those that did not open in the beginning are offered later
    // A write is cut into pieces of so many: incast hurts only above.
    uint64_t piece_bytes = 512 * 1024;
    // A path that says nothing for so long, with writes under way, is doubted. TCP's own first retransmission comes after
    // 200 ms; a switch costs nothing but that path.
    uint64_t silence_ns = 100'000'000;
    uint64_t grace_ns = 20'000'000;            // for the probe's answer
    uint64_t reopen_first_ns = 500'000'000;    // from closing a path to offering it again
    uint64_t reopen_last_ns = 30'000'000'000;  // the same after many failures
};

enum {
    P2P_COMMAND_CLOSE = 1,  // close the transport of path `path`, generation `generation`; then say _path_closed
    P2P_COMMAND_OPEN = 2,   // owner: make one and say p2p_owner_offer; writer: join the one at `blob`, then _path_open
    P2P_COMMAND_LOST = 3,   // the last path has failed, or the other end said BYE: the peer is gone
};
struct P2pCommand {
    uint32_t kind;
    uint32_t path;
    uint32_t generation;
    uint32_t blob_bytes;
    uint8_t blob[P2P_BLOB_BYTES];
};

// What a channel has done. Read by the thread that steps it.
struct P2pChannelCounts {
    uint64_t writes;      // numbered so far
    uint64_t bytes;
    uint64_t sent_again;  // after their path was closed
    uint64_t repeated;    // that the owner had already
    uint64_t doubts;
    uint64_t closed;      // paths
    uint64_t opened;
    uint64_t waiting;     // writes not yet known to have come
};
struct P2pPathCounts {
    uint64_t live;
    uint64_t bytes_per_s;  // measured; what striping goes by
    uint64_t sent_bytes;
};

// Either end.
P2P_API void p2p_end_free(P2pEnd* end);
// The path has been welcomed. -1: the index is out of range, or this is no generation that was asked for.
P2P_API int p2p_end_path_open(P2pEnd* end, uint32_t path, uint32_t generation, P2pPath ends, uint64_t now_ns);
// The command is carried out; also: opening failed.
P2P_API void p2p_end_path_closed(P2pEnd* end, uint32_t path, uint32_t generation, uint64_t now_ns);
// Does what can be done now. 1 where anything happened or is under way, 0 where idle, P2P_E_MEMORY where what it did is
// half done: the channel must end.
P2P_API int p2p_end_step(P2pEnd* end, uint64_t now_ns);
P2P_API int p2p_end_command(P2pEnd* end, P2pCommand* out);  // 1: the next one; 0: none
P2P_API void p2p_end_bye(P2pEnd* end);
P2P_API void p2p_end_counts(const P2pEnd* end, P2pChannelCounts* out);

// The writer's end. `image` is the window as this side writes it, `nbytes` long. Each write and its completion are told
// to `monitor`; null: to nobody. Both outlive it. Null without memory, or where the configuration is out of range.
P2P_API P2pEnd* p2p_writer_new(void* image, uint64_t nbytes, uint64_t incarnation, const P2pChannelConfig* config,
                               P2pMonitor* monitor);
// The image's header page names slots (window.h): from now on a slot whose signal changes is sent by itself.
P2P_API int p2p_writer_watch_slots(P2pEnd* writer);
// Send a range of the image; after it, and all before it, a signal. -1 where it does not lie in the window;
// P2P_E_MEMORY: some of it may have been sent, and the channel must end.
P2P_API int p2p_writer_put(P2pEnd* writer, uint64_t offset, uint64_t bytes, uint64_t now_ns);
P2P_API int p2p_writer_signal(P2pEnd* writer, uint64_t offset, uint64_t value, uint64_t now_ns);
P2P_API void p2p_writer_path_counts(P2pEnd* writer, uint32_t path, P2pPathCounts* out);

// The owner's end. `page` is the doorbell page whose lanes are rung after each signal; may be null. Where the window
// lies on a GPU (gpu.h), null for host memory, it is stepped inside an OnGpu. Null as above.
P2P_API P2pEnd* p2p_owner_new(void* window, uint64_t nbytes, uint64_t incarnation, void* page, uint32_t lanes,
                              const P2pChannelConfig* config, const P2pGpu* gpu);
// The address of the transport that OPEN asked for.
P2P_API int p2p_owner_offer(P2pEnd* owner, uint32_t path, uint32_t generation, const void* address, uint32_t bytes,
                            uint64_t now_ns);
