// Sums and maxima of the threads of a block of whole warps.
#pragma once

#include "platform.cuh"

namespace fast_video_vae {

// Combines a number of each thread with `join`, and returns the result to all of them.
template <class Join>
__device__ __forceinline__ float joined(float v, Join join) {
  __shared__ float warps[kThreads / kWarp];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int distance = kWarp / 2; distance; distance /= 2) v = join(v, exchange(v, distance));
  __syncthreads();  // the numbers of the call before are read
  if (thread % kWarp == 0) warps[thread / kWarp] = v;
  __syncthreads();
  v = warps[0];
  for (int warp = 1; warp < kThreads / kWarp; ++warp) v = join(v, warps[warp]);
  return v;
}

__device__ __forceinline__ float sum_of_block(float v) {
  return joined(v, [](float a, float b) { return a + b; });
}

// The largest of numbers that are not NaN.
__device__ __forceinline__ float largest_of_block(float v) {
  return joined(v, [](float a, float b) { return a > b ? a : b; });
}

}  // namespace fast_video_vae
