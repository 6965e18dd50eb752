// A stand-in for libcuda.so.1: device memory is a memfd, mapped where a real driver would map it.
//
// Strict where the real one is undefined or forgiving: every argument is checked, memory is used only while it is mapped
// and open, every call that needs a context has one, and the mode of capture has to be relaxed. What it counts, the
// tests read: fake_cuda_live. What it is told to refuse, it refuses: fake_cuda_fail. Two GPUs, which do not reach each
// other where fake_cuda_part says so.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum : int {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    ALREADY_MAPPED = 208,
    NOT_MAPPED = 211,
    PEER_ACCESS_UNSUPPORTED = 217,
    INVALID_HANDLE = 400,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    CAPTURE_UNSUPPORTED = 900,
};

constexpr size_t GRANULE = 2 << 20;
constexpr uint64_t TOTAL = 1ull << 32;
constexpr int DEVICES = 2;

struct Location {
    int type, id;
};
struct Properties {
    int type, handle_types;
    Location location;
    void* win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct Access {
    Location location;
    int flags;
};
static_assert(sizeof(Location) == 8 && sizeof(Properties) == 32 && sizeof(Access) == 12);

struct Allocation {
    int fd, device;
    size_t bytes;
    bool exportable;
};
struct Range {
    size_t bytes;
    bool mapped = false, open = false;
    int device = -1;
};

std::mutex lock;
bool started = false;
int devices = DEVICES, parted = 0, rdma_ordering = 100, rdma_flush = 1;
uint64_t flushes = 0;
std::map<uint64_t, Allocation> allocations;
std::map<uint64_t, Range> ranges;
std::map<uint64_t, size_t> pinned;
std::map<uint64_t, int> streams;
int retained[DEVICES] = {};
uint64_t next_handle = 0x1000;
std::string failing;
int failing_code = 0;
thread_local std::vector<uint64_t> contexts;
thread_local int mode = 0;
uint64_t rdma_allocations = 0;

uint64_t context_of(int device) { return 0xC0000 + uint64_t(device); }

// For an entry point: it fails where it was told to, and where its context is missing.
int enter(const char* name, bool needs_context = false) {
    if (!started && strcmp(name, "cuInit") != 0) return NOT_INITIALIZED;
    if (failing == name) {
        failing.clear();
        return failing_code;
    }
    if (needs_context) {
        if (contexts.empty() || !retained[contexts.back() - 0xC0000]) return INVALID_CONTEXT;
        if (mode != 2) return CAPTURE_UNSUPPORTED;
    }
    return OK;
}

#define ENTER(...)                                        \
    std::lock_guard guard(lock);                          \
    if (int code = enter(__func__ __VA_OPT__(, ) __VA_ARGS__)) return code

bool is_device(int device) { return device >= 0 && device < devices; }

bool plain(const Properties* p) {
    if (!p || p->type != 1 || p->handle_types != 1 || p->location.type != 1 || p->win32) return false;
    static const unsigned char zeros[4] = {};
    return !p->compression && p->rdma <= 1 && !p->usage && memcmp(p->reserved, zeros, 4) == 0;
}

Range* whole_range(uint64_t at, size_t bytes) {
    auto found = ranges.find(at);
    return found == ranges.end() || found->second.bytes != bytes ? nullptr : &found->second;
}

bool usable(uint64_t at, size_t bytes) {
    auto after = ranges.upper_bound(at);
    if (after == ranges.begin()) return false;
    auto& [start, range] = *--after;
    return range.open && bytes <= range.bytes && at - start <= range.bytes - bytes;
}

// As it travels: which GPU it lies on stands in the memfd's name.
int device_of_fd(int fd) {
    char link[64], name[128] = {};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int device = -1;
    if (readlink(link, name, sizeof name - 1) < 0 || sscanf(name, "/memfd:fake-cuda-%d", &device) != 1) return -1;
    return device;
}

}  // namespace

// What the tests ask.
EXPORT uint64_t fake_cuda_live(const char* what) {
    std::lock_guard guard(lock);
    std::string name = what;
    uint64_t mapped = 0, total = 0;
    for (auto& [at, range] : ranges) mapped += range.mapped;
    for (int count : retained) total += uint64_t(count);
    if (name == "handles") return allocations.size();
    if (name == "ranges") return ranges.size();
    if (name == "mappings") return mapped;
    if (name == "pinned") return pinned.size();
    if (name == "streams") return streams.size();
    if (name == "contexts") return total + contexts.size();
    if (name == "rdma") return rdma_allocations;
    if (name == "flushes") return flushes;
    return ~0ull;
}
EXPORT void fake_cuda_fail(const char* name, int code) {
    std::lock_guard guard(lock);
    failing = name;
    failing_code = code;
}
// As the end of the process would.
EXPORT void fake_cuda_forget() {
    std::lock_guard guard(lock);
    for (auto& [handle, one] : allocations) close(one.fd);
    allocations.clear();
}
EXPORT void fake_cuda_devices(int count) { devices = count; }
// Whether kernels see adapters' writes in order, and whether the host can help.
EXPORT void fake_cuda_rdma(int ordering, int flush) {
    rdma_ordering = ordering;
    rdma_flush = flush;
}
EXPORT void fake_cuda_part(int yes) { parted = yes; }

EXPORT int cuInit(unsigned flags) {
    ENTER();
    if (flags) return INVALID_VALUE;
    if (!devices) return NO_DEVICE;
    started = true;
    return OK;
}
EXPORT int cuGetErrorName(int code, const char** out) {
    static const std::map<int, const char*> names = {
        {1, "CUDA_ERROR_INVALID_VALUE"},   {2, "CUDA_ERROR_OUT_OF_MEMORY"},
        {3, "CUDA_ERROR_NOT_INITIALIZED"}, {100, "CUDA_ERROR_NO_DEVICE"},
        {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
        {208, "CUDA_ERROR_ALREADY_MAPPED"}, {217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
        {400, "CUDA_ERROR_INVALID_HANDLE"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"}};
    auto found = names.find(code);
    if (found == names.end()) return *out = nullptr, INVALID_VALUE;
    return *out = found->second, OK;
}
EXPORT int cuGetErrorString(int code, const char** out) {
    if (code > 900) return *out = nullptr, INVALID_VALUE;
    return *out = "as the stand-in was told, or found", OK;
}
EXPORT int cuDriverGetVersion(int* out) {
    ENTER();
    return *out = 13000, OK;
}
EXPORT int cuDeviceGetCount(int* out) {
    ENTER();
    return *out = devices, OK;
}
EXPORT int cuDeviceGet(int* out, int ordinal) {
    ENTER();
    if (!is_device(ordinal)) return INVALID_DEVICE;
    return *out = ordinal, OK;
}
EXPORT int cuDeviceGetName(char* out, int bytes, int device) {
    ENTER();
    if (!is_device(device) || bytes < 8) return INVALID_DEVICE;
    return snprintf(out, size_t(bytes), "Stand-in"), OK;
}
EXPORT int cuDeviceGetUuid_v2(unsigned char* out, int device) {
    ENTER();
    if (!is_device(device)) return INVALID_DEVICE;
    return memset(out, 0xA0 + device, 16), OK;
}
EXPORT int cuDeviceTotalMem_v2(size_t* out, int device) {
    ENTER();
    if (!is_device(device)) return INVALID_DEVICE;
    return *out = TOTAL, OK;
}
EXPORT int cuDeviceGetAttribute(int* out, int attribute, int device) {
    ENTER();
    const std::map<int, int> values = {{16, 132}, {20, 0}, {75, 9}, {76, 0}, {102, 1}, {103, 1}, {110, 1}, {116, 1}, {117, rdma_flush}, {118, rdma_ordering}, {133, 0}};
    auto found = values.find(attribute);
    if (!is_device(device) || found == values.end()) return INVALID_VALUE;
    return *out = found->second, OK;
}
EXPORT int cuDeviceGetP2PAttribute(int* out, int attribute, int source, int target) {
    ENTER();
    if (!is_device(source) || !is_device(target)) return INVALID_DEVICE;
    if (source == target || (attribute != 2 && attribute != 3)) return INVALID_VALUE;
    return *out = attribute == 2 && !parted, OK;
}
EXPORT int cuDevicePrimaryCtxRetain(uint64_t* out, int device) {
    ENTER();
    if (!is_device(device)) return INVALID_DEVICE;
    retained[device]++;
    return *out = context_of(device), OK;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER();
    if (!is_device(device) || !retained[device]) return INVALID_CONTEXT;
    return retained[device]--, OK;
}
EXPORT int cuCtxPushCurrent_v2(uint64_t context) {
    ENTER();
    if (context < 0xC0000 || !is_device(int(context - 0xC0000))) return INVALID_CONTEXT;
    return contexts.push_back(context), OK;
}
EXPORT int cuCtxPopCurrent_v2(uint64_t* out) {
    ENTER();
    if (contexts.empty()) return INVALID_CONTEXT;
    *out = contexts.back();
    return contexts.pop_back(), OK;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int* wanted) {
    ENTER();
    if (*wanted < 0 || *wanted > 2) return INVALID_VALUE;
    return std::swap(*wanted, mode), OK;
}
EXPORT int cuStreamCreate(uint64_t* out, unsigned flags) {
    ENTER(true);
    if (flags != 1) return INVALID_VALUE;
    *out = next_handle++;
    return streams[*out] = 0, OK;
}
EXPORT int cuStreamDestroy_v2(uint64_t stream) {
    ENTER(true);
    return streams.erase(stream) ? OK : INVALID_HANDLE;
}
EXPORT int cuStreamSynchronize(uint64_t stream) {
    ENTER(true);
    return streams.count(stream) ? OK : INVALID_HANDLE;
}
EXPORT int cuMemGetAllocationGranularity(size_t* out, const Properties* properties, int option) {
    ENTER();
    if (!plain(properties) || option < 0 || option > 1) return INVALID_VALUE;
    return *out = GRANULE, OK;
}
EXPORT int cuMemCreate(uint64_t* out, size_t bytes, const Properties* properties, unsigned long long flags) {
    ENTER(true);
    if (!plain(properties) || flags || !bytes || bytes % GRANULE) return INVALID_VALUE;
    int device = properties->location.id;
    if (!is_device(device)) return INVALID_DEVICE;
    if (bytes > TOTAL) return OUT_OF_MEMORY;
    char name[40];
    snprintf(name, sizeof name, "fake-cuda-%d", device);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, off_t(bytes)) != 0) return OUT_OF_MEMORY;
    // What another left behind: nobody may count on zeros.
    char rubbish = 0x5A;
    if (pwrite(fd, &rubbish, 1, 64) != 1) return OUT_OF_MEMORY;
    rdma_allocations += properties->rdma;
    allocations[*out = next_handle++] = {fd, device, bytes, true};
    return OK;
}
EXPORT int cuMemExportToShareableHandle(void* out, uint64_t handle, int type, unsigned long long flags) {
    ENTER(true);
    auto found = allocations.find(handle);
    if (found == allocations.end()) return INVALID_HANDLE;
    if (type != 1 || flags || !found->second.exportable) return INVALID_VALUE;
    int fd = fcntl(found->second.fd, F_DUPFD, 3);  // inherited by children, as nobody promises otherwise
    if (fd < 0) return OUT_OF_MEMORY;
    memcpy(out, &fd, sizeof fd);
    return OK;
}
EXPORT int cuMemImportFromShareableHandle(uint64_t* out, void* shared, int type) {
    ENTER(true);
    int fd = int(intptr_t(shared)), device = device_of_fd(fd);
    struct stat status{};
    if (type != 1 || device < 0 || fstat(fd, &status) != 0) return INVALID_VALUE;
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own < 0) return OUT_OF_MEMORY;
    allocations[*out = next_handle++] = {own, device, size_t(status.st_size), false};
    return OK;
}
EXPORT int cuMemRelease(uint64_t handle) {
    ENTER(true);
    auto found = allocations.find(handle);
    if (found == allocations.end()) return INVALID_HANDLE;
    close(found->second.fd);
    return allocations.erase(found), OK;
}
EXPORT int cuMemAddressReserve(uint64_t* out, size_t bytes, size_t alignment, uint64_t at, unsigned long long flags) {
    ENTER(true);
    if (!bytes || bytes % GRANULE || (alignment & (alignment - 1)) || at || flags) return INVALID_VALUE;
    void* whole = mmap(nullptr, bytes + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return OUT_OF_MEMORY;
    uint64_t start = uint64_t(whole), aligned = (start + GRANULE - 1) / GRANULE * GRANULE;
    if (aligned > start) munmap(whole, aligned - start);
    munmap(reinterpret_cast<void*>(aligned + bytes), start + GRANULE - aligned);
    ranges[aligned] = {bytes};
    return *out = aligned, OK;
}
EXPORT int cuMemAddressFree(uint64_t at, size_t bytes) {
    ENTER(true);
    Range* range = whole_range(at, bytes);
    if (!range || range->mapped) return INVALID_VALUE;
    munmap(reinterpret_cast<void*>(at), bytes);
    return ranges.erase(at), OK;
}
EXPORT int cuMemMap(uint64_t at, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    ENTER(true);
    auto found = allocations.find(handle);
    if (found == allocations.end()) return INVALID_HANDLE;
    Range* range = whole_range(at, bytes);
    if (!range || offset || flags || bytes % GRANULE || bytes > found->second.bytes) return INVALID_VALUE;
    if (range->mapped) return ALREADY_MAPPED;
    void* want = reinterpret_cast<void*>(at);
    if (mmap(want, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) != want) return OUT_OF_MEMORY;
    *range = {bytes, true, false, found->second.device};
    return OK;
}
EXPORT int cuMemUnmap(uint64_t at, size_t bytes) {
    ENTER(true);
    Range* range = whole_range(at, bytes);
    if (!range) return INVALID_VALUE;
    if (!range->mapped) return NOT_MAPPED;
    mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    *range = {bytes};
    return OK;
}
EXPORT int cuMemSetAccess(uint64_t at, size_t bytes, const Access* access, size_t count) {
    ENTER(true);
    Range* range = whole_range(at, bytes);
    if (!range || !range->mapped || !access || count != 1 || access->flags != 3) return INVALID_VALUE;
    if (access->location.type != 1 || !is_device(access->location.id)) return INVALID_DEVICE;
    if (parted && access->location.id != range->device) return PEER_ACCESS_UNSUPPORTED;
    if (mprotect(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE) != 0) return OUT_OF_MEMORY;
    return range->open = true, OK;
}
EXPORT int cuMemHostRegister_v2(void* at, size_t bytes, unsigned flags) {
    ENTER(true);
    if (!at || !bytes || flags != 3) return INVALID_VALUE;
    if (pinned.count(uint64_t(at))) return ALREADY_REGISTERED;
    return pinned[uint64_t(at)] = bytes, OK;
}
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t* out, void* at, unsigned flags) {
    ENTER(true);
    if (flags || !pinned.count(uint64_t(at))) return INVALID_VALUE;
    return *out = uint64_t(at), OK;
}
EXPORT int cuMemHostUnregister(void* at) {
    ENTER(true);
    return pinned.erase(uint64_t(at)) ? OK : NOT_REGISTERED;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, uint64_t stream) {
    ENTER(true);
    if (!streams.count(stream)) return INVALID_HANDLE;
    if (!from || !bytes) return INVALID_VALUE;
    if (!usable(to, bytes)) return ILLEGAL_ADDRESS;
    if (bytes == 8 && to % 8 == 0) {
        uint64_t word;
        memcpy(&word, from, 8);
        reinterpret_cast<std::atomic<uint64_t>*>(to)->store(word);
    } else {
        memcpy(reinterpret_cast<void*>(to), from, bytes);
    }
    return OK;
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, uint64_t stream) {
    ENTER(true);
    if (!streams.count(stream)) return INVALID_HANDLE;
    if (!to || !bytes) return INVALID_VALUE;
    if (!usable(from, bytes)) return ILLEGAL_ADDRESS;
    memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return OK;
}
EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, uint64_t stream) {
    ENTER(true);
    if (!streams.count(stream)) return INVALID_HANDLE;
    if (!bytes) return INVALID_VALUE;
    if (!usable(to, bytes)) return ILLEGAL_ADDRESS;
    return memset(reinterpret_cast<void*>(to), value, bytes), OK;
}
EXPORT int cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER(true);
    if (target != 0 || scope != 100) return INVALID_VALUE;
    return flushes++, OK;
}
