// Checks the generic kernels against plain loops, without PyTorch: a program for a processor whose
// PyTorch is not installed. It prints the first wrong value and returns 1.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ops.h"

using namespace fast_video_vae;

// 3 vectors of 4 values and a part of one.
constexpr int64_t kCount = 15;

// Upper halves of float32 as bfloat16, so that all values are exact.
float value(Dtype dtype, const char* from, int64_t i) {
  float number;
  if (dtype == Dtype::float32) {
    memcpy(&number, from + 4 * i, 4);
  } else {
    uint16_t half;
    memcpy(&half, from + 2 * i, 2);
    const uint32_t bits = (uint32_t)half << 16;
    memcpy(&number, &bits, 4);
  }
  return number;
}

void set(Dtype dtype, char* to, int64_t i, float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  const uint16_t half = (uint16_t)(bits >> 16);
  if (dtype == Dtype::float32) {
    memcpy(to + 4 * i, &number, 4);
  } else {
    memcpy(to + 2 * i, &half, 2);
  }
}

bool close(const char* op, int64_t i, double got, double wanted, double tolerance) {
  if (fabs(got - wanted) <= tolerance * fmax(1, fabs(wanted))) return true;
  printf("%s: value %d is %g, not %g\n", op, (int)i, got, wanted);
  return false;
}

bool check(Dtype dtype) {
  const int64_t item = dtype == Dtype::float32 ? 4 : 2;
  // One rounding to the dtype, and those of float32 before it.
  const double tolerance = dtype == Dtype::float32 ? 1e-6 : 1.0 / 256;
  char x[4 * kCount], gate[4 * kCount], out[4 * kCount];
  float scale[16] = {}, squares = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    set(dtype, x, i, (float)(i * i - 60) / 16);
    set(dtype, gate, i, (float)(3 - i) / 2);
    scale[i] = 1 + (float)i / 8;
    squares += value(dtype, x, i) * value(dtype, x, i);
  }
  bool right = true;
  const Rows rows{x, 1, kCount, 0}, gates{gate, 1, kCount, 0}, outs{out, 1, kCount, 0};
  generic_kernels()->silu_mul(SiluMul{dtype, rows, gates, outs, kCount}, 0, 1);
  for (int64_t i = 0; i < kCount; ++i) {
    const double v = value(dtype, x, i), wanted = v / (1 + exp(-v)) * value(dtype, gate, i);
    right = close("silu_mul", i, value(dtype, out, i), wanted, tolerance) && right;
  }
  const int64_t bytes = kCount * item;
  const Video video{x, 1, kCount, 1, 1, 1, bytes, bytes, item}, none{};
  const Video result{out, 1, kCount, 1, 1, 1, bytes, bytes, item};
  generic_kernels()->rms_norm_silu(
      RmsNormSilu{dtype, false, video, none, result, scale, nullptr, 1}, 0, 1);
  for (int64_t i = 0; i < kCount; ++i) {
    const double wanted = value(dtype, x, i) / sqrt((double)squares) * scale[i];
    right = close("rms_norm", i, value(dtype, out, i), wanted, tolerance) && right;
  }
  uint8_t pixels[kCount];
  const Video image{(char*)pixels, 1, kCount, 1, 1, 1, kCount, kCount, 1};
  generic_kernels()->frames_to_images(
      FramesToImages{dtype, Dtype::uint8, video, image, 1, kCount, {}, 255}, 0, 1);
  for (int64_t i = 0; i < kCount; ++i) {
    const double share = fmin(fmax((value(dtype, x, i) + 1) / 2, 0), 1);
    right = close("frames_to_images", i, pixels[i], floor(share * 255), 0) && right;
  }
  return right;
}

// Images of 10, 12 and 16 bits, of float32 numbers around the middles between integers.
bool check_words() {
  bool right = true;
  float x[kCount];
  uint16_t pixels[kCount];
  const int64_t bytes = sizeof x;
  const Video video{(char*)x, 1, kCount, 1, 1, 1, bytes, bytes, 4};
  const Video image{(char*)pixels, 1, kCount, 1, 1, 1, bytes / 2, bytes / 2, 2};
  const float whites[] = {1023, 4095, 65535};
  for (const float white : whites) {
    for (int64_t step = 0; step < (int64_t)white; ++step) {
      const double middle = (step + 0.5) / white * 2 - 1;
      for (int64_t i = 0; i < kCount; ++i) x[i] = (float)(middle + (i - 7) * 0x1p-25);
      generic_kernels()->frames_to_images(
          FramesToImages{Dtype::float32, Dtype::uint16, video, image, 1, kCount, {}, white}, 0, 1);
      for (int64_t i = 0; i < kCount; ++i) {
        const volatile float product = (x[i] + 1) * 0.5f * white;  // one rounding of its own
        right = close("16-bit images", i, pixels[i], nearbyint(product), 0) && right;
      }
      if (!right) return false;
    }
  }
  return right;
}

int main() {
  return check(Dtype::float32) && check(Dtype::bfloat16) && check_words() ? 0 : 1;
}
