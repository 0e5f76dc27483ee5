// CUDA's bfloat16 on the CPU, rounded to nearest even.
#pragma once

#include <stdint.h>
#include <string.h>

struct __nv_bfloat16 {
  uint16_t bits;
};

struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
  return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}
