#include "p2p/native/gpu.h"

#include <cstring>

#include "p2p/native/frame.h"

namespace p2p {

namespace {

constexpr int RELAXED = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr int CURRENT_CONTEXT = 0;   // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
constexpr int TO_OWNER = 100;        // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER

}  // namespace

// A context that cannot be entered shows in the first copy, which the driver then refuses.
OnGpu::OnGpu(const P2pGpu* gpu) : gpu_(gpu), mode_(RELAXED) {
    if (!gpu_) return;
    gpu_->push(gpu_->context);
    gpu_->exchange_mode(&mode_);
}

OnGpu::~OnGpu() {
    if (!gpu_) return;
    void* left = nullptr;
    gpu_->exchange_mode(&mode_);
    gpu_->pop(&left);
}

bool copy_to(const P2pGpu* gpu, void* to, const void* from, size_t bytes) {
    if (gpu)
        return gpu->to_device(uint64_t(uintptr_t(to)), from, bytes, gpu->stream) == 0 &&
               gpu->synchronize(gpu->stream) == 0;
    std::memcpy(to, from, bytes);
    return true;
}

bool copy_from(const P2pGpu* gpu, void* to, const void* from, size_t bytes) {
    if (gpu)
        return gpu->from_device(to, uint64_t(uintptr_t(from)), bytes, gpu->stream) == 0 &&
               gpu->synchronize(gpu->stream) == 0;
    std::memcpy(to, from, bytes);
    return true;
}

bool store_signal(const P2pGpu* gpu, void* at, uint64_t value) {
    if (gpu)
        return (!gpu->flush || gpu->flush(CURRENT_CONTEXT, TO_OWNER) == 0) &&
               copy_to(gpu, at, &value, sizeof value);
    p2p_signal_store(at, value);
    return true;
}

}  // namespace p2p
