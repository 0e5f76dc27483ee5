// Numbers in memory and in registers. A pack is what a thread reads and writes at once: 16 bytes,
// or a single number where memory is not aligned.
//
// Conversions are single instructions of NVIDIA's chips in inline PTX, because `cuda_fp16.h` and
// `cuda_bf16.h` are headers of the toolkit. Other compilers use the plain C++ below.
#pragma once

#include "platform.cuh"

namespace fast_video_vae {

struct half {
  uint16 bits;
};

struct bfloat16 {
  uint16 bits;
};

// The dtype of the activations, and the numbers of a pack: options of the compiler.
using T = FVV_DTYPE;
constexpr int N = FVV_PACK;

constexpr int kPackBytes = 16;

template <class Number, int Count>
struct alignas(Count * sizeof(Number) < kPackBytes ? Count * sizeof(Number) : kPackBytes) PackOf {
  Number numbers[Count];
};

using Pack = PackOf<T, N>;
using Floats = PackOf<float, N>;

template <class P, class Number>
__device__ __forceinline__ P load(const Number* from) {
  return *reinterpret_cast<const P*>(from);
}

// To global memory. NVIDIA's compiler would divide the store of a pack whose parts it knows.
template <class P, class Number>
__device__ __forceinline__ void store(Number* to, const P& pack) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(P) % kPackBytes == 0) {
    const uint4* words = reinterpret_cast<const uint4*>(&pack);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(P) / kPackBytes); ++i) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(__cvta_generic_to_global(reinterpret_cast<uint4*>(to) + i)),
                     "r"(words[i].x), "r"(words[i].y), "r"(words[i].z), "r"(words[i].w)
                   : "memory");
    }
    return;
  }
  if constexpr (sizeof(P) == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(&pack);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(words.x), "r"(words.y)
                 : "memory");
    return;
  }
  if constexpr (sizeof(P) == 4) {
    asm volatile("st.global.b32 [%0], %1;"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(*reinterpret_cast<const uint32*>(&pack))
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<P*>(to) = pack;
}

__device__ __forceinline__ float widen(float v) { return v; }

__device__ __forceinline__ float widen(bfloat16 v) {
  return __uint_as_float(static_cast<uint32>(v.bits) << 16);
}

__device__ __forceinline__ void narrow(float v, float& to) { to = v; }

#if defined(__CUDA_ARCH__)

__device__ __forceinline__ float widen(half v) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
  return wide;
}

__device__ __forceinline__ void narrow(float v, half& to) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(v));
}

#else

__device__ __forceinline__ float widen(half v) {
  _Float16 number;
  __builtin_memcpy(&number, &v, sizeof v);
  return static_cast<float>(number);
}

__device__ __forceinline__ void narrow(float v, half& to) {
  const _Float16 number = static_cast<_Float16>(v);
  __builtin_memcpy(&to, &number, sizeof to);
}

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

__device__ __forceinline__ void narrow(float v, bfloat16& to) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(v));
}

#else

// Chips without bfloat16 round the bits to nearest even.
__device__ __forceinline__ void narrow(float v, bfloat16& to) {
  const uint32 bits = __float_as_uint(v);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  to.bits = is_nan ? 0x7fff : static_cast<uint16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif

template <class Number>
__device__ __forceinline__ void narrow(float a, float b, Number* to) {
  narrow(a, to[0]);
  narrow(b, to[1]);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// Two conversions in one instruction. Halves of its result would be stored apart.
__device__ __forceinline__ void narrow(float a, float b, half* to) {
  uint32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  *reinterpret_cast<uint32*>(to) = both;
}

__device__ __forceinline__ void narrow(float a, float b, bfloat16* to) {
  uint32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  *reinterpret_cast<uint32*>(to) = both;
}

#endif

template <class Number>
__device__ __forceinline__ void widen(const PackOf<Number, N>& pack, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = widen(pack.numbers[i]);
}

template <class Number>
__device__ __forceinline__ PackOf<Number, N> narrow(const float (&from)[N]) {
  PackOf<Number, N> pack;
  if constexpr (N == 1) {
    narrow(from[0], pack.numbers[0]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) narrow(from[i], from[i + 1], pack.numbers + i);
  }
  return pack;
}

// One number per channel, in float32 or in the dtype of the activations.
struct Vector {
  const void* data;  // may be null
  int64 is_float;
};

__device__ __forceinline__ void widen(const Vector& vector, int channel, float (&to)[N]) {
  if (vector.is_float) {
    widen(load<Floats>(static_cast<const float*>(vector.data) + channel), to);
  } else {
    widen(load<Pack>(static_cast<const T*>(vector.data) + channel), to);
  }
}

__device__ __forceinline__ void add(float (&to)[N], const float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] += v[i];
}

// Adds the numbers of the channels from `channel` on, if there are any.
__device__ __forceinline__ void add(float (&to)[N], const Vector& vector, int channel) {
  if (!vector.data) return;
  float v[N];
  widen(vector, channel, v);
  add(to, v);
}

// `y * sigmoid(y)`; NaN for -inf, like the product. `__expf` rounds `y * log2(e)`, so its error
// grows with `y`, as does that of `exp` for an argument that was rounded. Its argument is negative,
// so that the divisor is at most 2: `__fdividef` returns 0 where it is beyond 2^126.
__device__ __forceinline__ float silu(float y) {
  const float power = __expf(-fabsf(y));
  return __fdividef(y < 0.0f ? y * power : y, 1.0f + power);
}

__device__ __forceinline__ void silu(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = silu(v[i]);
}

}  // namespace fast_video_vae
