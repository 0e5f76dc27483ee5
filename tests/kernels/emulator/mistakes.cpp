// Kernels whose threads synchronise incorrectly; prints the emulator's error for each.
#include <stdio.h>

#include "gpu.h"

void half_a_barrier(float*) {
  if (threadIdx.x < 32) __syncthreads();
}

void half_a_shuffle(float* out) {
  if (threadIdx.x % 32 < 16) *out = __shfl_xor_sync(~0u, 1.0f, 1);
}

void a_short_warp(float* out) { *out = __shfl_xor_sync(~0u, 1.0f, 1); }

void another_distance(float* out) { *out = __shfl_xor_sync(~0u, 1.0f, threadIdx.x % 2 + 1); }

void no_barrier(float* out) {
  __shared__ float numbers[64];
  numbers[threadIdx.x] = blockIdx.x + 1;
  if (threadIdx.x == 0) out[blockIdx.x] = numbers[63];
}

void right(float* out) {
  __shared__ float numbers[64];
  const float lane = __shfl_xor_sync(~0u, threadIdx.x, 5);
  numbers[threadIdx.x] = lane;
  __syncthreads();
  if (threadIdx.x == 0) *out = numbers[33];
}

void report(const char* name, void (*kernel)(float*), unsigned threads) {
  float out[2] = {-1, -1};
  const char* error = emulator::run(2, threads, [&] { kernel(out); });
  printf("%s: %s, %g %g\n", name, *error ? error : "fine", out[0], out[1]);
}

int main() {
  report("half a barrier", half_a_barrier, 64);
  report("half a shuffle", half_a_shuffle, 64);
  report("a short warp", a_short_warp, 48);
  report("another distance", another_distance, 32);
  report("no barrier", no_barrier, 64);
  report("too many threads", right, 1025);
  report("right", right, 64);
}
