// A GPU on which windows lie, as the host reaches it: functions of its driver, handed in by whoever has loaded that.
// Everything takes a null GPU for host memory.
#pragma once
#include <cstddef>
#include <cstdint>

// Filled by p2p/nixl_native.py; stays for as long as anything uses it. The functions are the driver's own, named beside
// them; 0 is success.
struct P2pGpu {
    int (*push)(void* context);                                                       // cuCtxPushCurrent_v2
    int (*pop)(void** context);                                                       // cuCtxPopCurrent_v2
    int (*exchange_mode)(int* mode);                                                  // cuThreadExchangeStreamCaptureMode
    int (*to_device)(uint64_t to, const void* from, size_t bytes, void* stream);      // cuMemcpyHtoDAsync_v2
    int (*from_device)(void* to, uint64_t from, size_t bytes, void* stream);          // cuMemcpyDtoHAsync_v2
    int (*synchronize)(void* stream);                                                 // cuStreamSynchronize
    // cuFlushGPUDirectRDMAWrites; null where kernels see adapters' writes in order without it.
    int (*flush)(int target, int scope);
    void* context;
    void* stream;
    uint32_t kind;    // of the memory, as NIXL counts
    uint32_t device;  // as the driver counts
};

namespace p2p {

// While it lives, the GPU's context is this thread's; a CUDA graph that another thread captures is not spoilt.
class OnGpu {
  public:
    explicit OnGpu(const P2pGpu* gpu);
    ~OnGpu();
    OnGpu(const OnGpu&) = delete;
    OnGpu& operator=(const OnGpu&) = delete;

  private:
    const P2pGpu* gpu_;
    int mode_;
};

// Inside an OnGpu. Done when they return; false where the driver refuses, after which the context is lost.
bool copy_to(const P2pGpu* gpu, void* to, const void* from, size_t bytes);
bool copy_from(const P2pGpu* gpu, void* to, const void* from, size_t bytes);
// Store a signal word, a release: also of what adapters have written to the memory before.
bool store_signal(const P2pGpu* gpu, void* at, uint64_t value);

}  // namespace p2p
