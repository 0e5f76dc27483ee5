// What the kernels need from their compiler: NVRTC, hiprtc, or g++ in the emulator of the tests.
// None of them has headers, so the names of the standard library are defined here.
#pragma once

namespace fast_video_vae {

using int64 = long long;
using uint32 = unsigned int;
using uint16 = unsigned short;
using uint8 = unsigned char;
using int8 = signed char;
using uint64 = unsigned long long;

constexpr int kWarp = 32;

// Threads of a block, and fewest blocks per multiprocessor. Three are 80 registers per thread. Each
// block reads 32 to 64 bytes per thread at a time: 24 KB in flight hide the latency of an H200.
#if !defined(FVV_THREADS)
#define FVV_THREADS 256
#define FVV_BLOCKS 3
#endif
constexpr int kThreads = FVV_THREADS;

#if defined(__HIP__)

#define FVV_KERNEL extern "C" __global__ void __launch_bounds__(fast_video_vae::kThreads)

// Half of a wave of 64 lanes counts as a warp.
__device__ __forceinline__ float exchange(float v, int distance) {
  return __shfl_xor(v, distance, kWarp);
}

#else

#define FVV_KERNEL extern "C" __global__ void __launch_bounds__(FVV_THREADS, FVV_BLOCKS)

// The value of the lane whose number differs in the bit `distance`. All lanes take part.
__device__ __forceinline__ float exchange(float v, int distance) {
  return __shfl_xor_sync(0xffffffff, v, distance);
}

#endif

}  // namespace fast_video_vae
