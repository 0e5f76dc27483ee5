// Values in memory and in registers. A pack is the unit that a thread reads and writes: 16 bytes,
// or a single value where memory is not aligned.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "ops.h"

namespace fast_video_vae_cuda {

constexpr int kPackBytes = 16;

template <class T, int N>
struct alignas(N * sizeof(T) < kPackBytes ? N * sizeof(T) : kPackBytes) Pack {
  using Number = T;
  static constexpr int kCount = N;

  T numbers[N];
};

template <class P>
__device__ __forceinline__ P load(const typename P::Number* from) {
  return *reinterpret_cast<const P*>(from);
}

template <class P>
__device__ __forceinline__ void store(typename P::Number* to, const P& pack) {
  *reinterpret_cast<P*>(to) = pack;
}

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }

__device__ __forceinline__ void narrow(float v, float& to) { to = v; }
__device__ __forceinline__ void narrow(float v, __half& to) { to = __float2half_rn(v); }
__device__ __forceinline__ void narrow(float v, __nv_bfloat16& to) { to = __float2bfloat16_rn(v); }

// Two conversions in one instruction.
__device__ __forceinline__ void narrow(float a, float b, float* to) {
  to[0] = a;
  to[1] = b;
}

__device__ __forceinline__ void narrow(float a, float b, __half* to) {
  const __half2 both = __floats2half2_rn(a, b);
  to[0] = both.x;
  to[1] = both.y;
}

__device__ __forceinline__ void narrow(float a, float b, __nv_bfloat16* to) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  to[0] = both.x;
  to[1] = both.y;
}

template <class T, int N>
__device__ __forceinline__ void widen(const Pack<T, N>& pack, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = widen(pack.numbers[i]);
}

template <class T, int N>
__device__ __forceinline__ Pack<T, N> narrow(const float (&from)[N]) {
  Pack<T, N> pack;
  if constexpr (N == 1) {
    narrow(from[0], pack.numbers[0]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) narrow(from[i], from[i + 1], pack.numbers + i);
  }
  return pack;
}

// Parameters of the channels from `channel` on, for activations of type T.
template <class T, int N>
__device__ __forceinline__ void widen(const Vector& vector, int channel, float (&to)[N]) {
  if (vector.wide) {
    widen(load<Pack<float, N>>(static_cast<const float*>(vector.data) + channel), to);
  } else {
    widen(load<Pack<T, N>>(static_cast<const T*>(vector.data) + channel), to);
  }
}

// `y * sigmoid(y)`, within 4 ulp; NaN for -inf, like the product. Where the divisor is beyond
// 2^126, `__fdividef` returns 0, and the quotient is less than 1e-36.
__device__ __forceinline__ float silu(float y) { return __fdividef(y, 1.0f + expf(-y)); }

template <int N>
__device__ __forceinline__ void silu(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = silu(v[i]);
}

}  // namespace fast_video_vae_cuda
