// Selection and launch of a kernel.
#pragma once

#include "numbers.cuh"

namespace fast_video_vae_cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;

// Approximate threads of a block: eight warps.
constexpr int kThreads = 8 * kWarp;

// Fewest blocks per multiprocessor: 80 registers per thread. Each block reads 32 to 64 bytes per
// thread at a time, so that 24 KB are in flight, which hides the latency of an H200.
constexpr int kBlocks = 3;

template <class... Expected, class... Given>
cudaError_t launch(void (*kernel)(Expected...), dim3 grid, dim3 block, cudaStream_t stream,
                   Given... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  // The caller reports the error, so it is cleared here.
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

inline const char* message_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

inline bool aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kPackBytes == 0;
}

inline bool in_packs(const Vector& vector, int) { return aligned(vector.data); }

inline bool in_packs(const Video& x, int count) {
  return aligned(x.data) && x.channels % count == 0 && x.batch_stride % count == 0 &&
         x.frame_stride % count == 0 && x.row_stride % count == 0;
}

// Calls `start` with the widest pack that suits the alignment of all tensors.
template <class T, class Start, class... Tensors>
cudaError_t by_pack(Start start, const Tensors&... tensors) {
  constexpr int kCount = kPackBytes / sizeof(T);
  if ((in_packs(tensors, kCount) && ...)) return start(Pack<T, kCount>());
  return start(Pack<T, 1>());
}

template <class Start, class... Tensors>
cudaError_t by_pack_of(Dtype dtype, Start start, const Tensors&... tensors) {
  switch (dtype) {
    case Dtype::float32: return by_pack<float>(start, tensors...);
    case Dtype::bfloat16: return by_pack<__nv_bfloat16>(start, tensors...);
    case Dtype::float16: return by_pack<__half>(start, tensors...);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fast_video_vae_cuda
