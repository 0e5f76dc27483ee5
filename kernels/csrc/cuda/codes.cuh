// The results of a norm: numbers of the activations' dtype, or 8-bit codes of them (`codes.py`).
#pragma once

#include "numbers.cuh"

// 1: codes. An option of the compiler.
#ifndef FVV_CODES
#define FVV_CODES 0
#endif

namespace fast_video_vae {

// The code of 0 above the lowest one.
constexpr int kZeroCode = 17;

#if FVV_CODES
using Y = int8;
constexpr Y kZero = kZeroCode - 128;
#else
using Y = T;
constexpr Y kZero{};
#endif

using Result = PackOf<Y, N>;

// Codes per unit of each channel, and the numbers of values outside of the codes and of NaN.
struct Codes {
  const float* steps;
  uint64* saturated;
};

// What stands for 0.
__device__ __forceinline__ Result zeros() {
  Result result;
#pragma unroll
  for (int i = 0; i < N; ++i) result.numbers[i] = kZero;
  return result;
}

#if FVV_CODES

// `round(v) + kZeroCode`, for |v| < 2^22: 1.5 * 2^23 leaves the number in the low bits. Others and
// NaN are above 255. The sum is not fused with a product, and is faster than a conversion.
__device__ __forceinline__ uint32 code_of(float v) {
  return __float_as_uint(__fadd_rn(v, 12582912.0f)) - (0x4b400000 - kZeroCode);
}

// The numbers of values of a block outside of the codes, and of NaN. They are few, so registers are
// not spent on them.
__device__ __forceinline__ uint32* counts() {
  __shared__ uint32 counts[2];
  return counts;
}

// Codes in the bytes of words, in the order of memory.
constexpr int kWords = (N + 3) / 4;

// The code of a number that has none is the nearest one.
__device__ __forceinline__ void correct(const float (&v)[N], uint32 (&words)[kWords]) {
  uint32 both = 0;  // a count in each half
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (code_of(v[i]) <= 255) continue;
    const bool is_nan = v[i] != v[i];
    const uint32 code = is_nan ? kZeroCode : v[i] < 0.0f ? 0 : 255;
    words[i / 4] = (words[i / 4] & ~(255u << i % 4 * 8)) | code << i % 4 * 8;
    both += is_nan ? 1 << 16 : 1;
  }
  if (both & 0xffff) atomicAdd(counts(), both & 0xffff);
  if (both >> 16) atomicAdd(counts() + 1, both >> 16);
}

__device__ __forceinline__ Result result_of(const Codes& to, float (&v)[N], int channel) {
  float steps[N];
  widen(load<Floats>(to.steps + channel), steps);
  uint32 words[kWords] = {}, all = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[i] *= steps[i];
    const uint32 code = code_of(v[i]);
    all |= code;
    words[i / 4] |= (code & 255) << i % 4 * 8;
  }
  if (all > 255) correct(v, words);
  Result result;
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] ^= 0x80808080;
  if constexpr (N == 1) {
    result.numbers[0] = static_cast<Y>(words[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32*>(result.numbers)[i] = words[i];
  }
  return result;
}

// Before and after the results of a block. All of its threads take part.
__device__ __forceinline__ void begin() {
  if (threadIdx.x == 0 && threadIdx.y == 0) counts()[0] = counts()[1] = 0;
  __syncthreads();
}

__device__ __forceinline__ void finish(const Codes& to) {
  __syncthreads();
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  for (int i = 0; i < 2; ++i) {
    if (counts()[i]) atomicAdd(to.saturated + i, static_cast<uint64>(counts()[i]));
  }
}

#else

__device__ __forceinline__ Result result_of(const Codes&, const float (&v)[N], int) {
  return narrow<T>(v);
}

__device__ __forceinline__ void begin() {}

__device__ __forceinline__ void finish(const Codes&) {}

#endif

}  // namespace fast_video_vae
