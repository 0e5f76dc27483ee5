// CUDA's half precision numbers on the CPU, rounded to nearest even.
#pragma once

#include <stdint.h>
#include <string.h>

struct __half {
  uint16_t bits;
};

struct __half2 {
  __half x, y;
};

inline float __half2float(__half v) {
  const uint32_t sign = (v.bits & 0x8000u) << 16, magnitude = v.bits & 0x7fffu;
  const uint32_t shifted = magnitude << 13;
  float finite;
  memcpy(&finite, &shifted, 4);
  finite *= 0x1p112f;  // the exponent's other bias; denormal numbers become normal
  uint32_t bits;
  memcpy(&bits, &finite, 4);
  bits = sign | (magnitude >= 0x7c00 ? shifted | 0x7f800000 : bits);
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

inline __half __float2half_rn(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {0x7fff};
  if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and more
  uint32_t result;
  if (magnitude < 113u << 23) {
    // 0.5 has the ulp that denormal half precision numbers have: the sum is rounded to it.
    float small;
    memcpy(&small, &magnitude, 4);
    small += 0.5f;
    memcpy(&result, &small, 4);
    result -= 0x3f000000;
  } else {
    result = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  }
  return {static_cast<uint16_t>(sign | result)};
}

inline __half2 __floats2half2_rn(float a, float b) {
  return {__float2half_rn(a), __float2half_rn(b)};
}
