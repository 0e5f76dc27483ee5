// Moves parts of the channels to frames, rows and columns, to any dtype and strides.
#include "frames.cuh"

namespace fast_video_vae {

// The dtype of the result: an option of the compiler.
using U = FVV_RESULT;

// The channels of `x` are four nested indices. A pack is one number, unless the channels of the
// result are adjacent on both sides.
struct Spread {
  Video x;
  U* out;
  int64 batch, frame, row, column, channel;  // strides of `out`
  int64 c_step, t_step, h_step, w_step;      // of the four indices
  Items items;                               // frames are those of `out`
  Divisor packs, columns;                    // of a pixel of `out`, of a row of it
  Divisor times, high, wide;                 // frames, rows and columns per pixel of `x`
  uint32 count;                              // packs of a frame of `out`
  int before, width;                         // channels and columns of `x`
  float white;                               // the value of 1.0 in integers
};

namespace {

// Packs that a thread reads before it writes.
constexpr int kEach = 4;

__device__ __forceinline__ void convert(float v, float, float& to) { to = v; }
__device__ __forceinline__ void convert(float v, float, half& to) { narrow(v, to); }
__device__ __forceinline__ void convert(float v, float, bfloat16& to) { narrow(v, to); }
// Drops the fraction, like ComfyUI's saver; NaN is 0.
__device__ __forceinline__ void convert(float v, float white, uint8& to) {
  to = static_cast<uint8>(v == v ? static_cast<int>(v * white) : 0);
}
// To nearest even; NaN is 0. A product is never fused with a conversion.
__device__ __forceinline__ void convert(float v, float white, uint16& to) {
  to = static_cast<uint16>(v == v ? __float2int_rn(v * white) : 0);
}

#if FVV_IMAGES
// `clamp((x + 1) / 2, 0, 1)`; NaN stays NaN.
__device__ __forceinline__ float shaded(float v) {
  v = (v + 1.0f) * 0.5f;
  v = v < 0.0f ? 0.0f : v;
  return v > 1.0f ? 1.0f : v;
}
#endif

__device__ __forceinline__ PackOf<U, N> converted(const Pack& pack, float white) {
#if !FVV_IMAGES && FVV_SAME
  return pack;  // bit for bit
#else
  PackOf<U, N> result;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v = widen(pack.numbers[i]);
#if FVV_IMAGES
    v = shaded(v);
#endif
    convert(v, white, result.numbers[i]);
  }
  return result;
#endif
}

}  // namespace

FVV_KERNEL move_packs(const Spread op) {
  for (uint32 item = blockIdx.x; item < op.items.count; item += gridDim.x) {
    const Place at = place_of(op.items, item);
    const uint32 first = at.part * (kEach * kThreads) + threadIdx.x;
    const uint32 whole = divide(at.frame, op.times);
    const T* x = frame_of(op.x, at.video, whole) + (at.frame - whole * op.times.by) * op.t_step;
    U* out = op.out + at.video * op.batch + at.frame * op.frame;
    Pack held[kEach];
    int64 target[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32 pack = first + k * kThreads;
      if (pack >= op.count) break;
      const uint32 pixel = divide(pack, op.packs), row = divide(pixel, op.columns);
      const uint32 column = pixel - row * op.columns.by, y = divide(row, op.high);
      const uint32 left = divide(column, op.wide);
      const int64 channel = static_cast<int64>(pack - pixel * op.packs.by) * N;
      const int64 source = (static_cast<int64>(y) * op.width + left) * op.before +
                           (row - y * op.high.by) * op.h_step +
                           (column - left * op.wide.by) * op.w_step + channel * op.c_step;
      held[k] = load<Pack>(x + source);
      target[k] = row * op.row + column * op.column + channel * op.channel;
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + k * kThreads >= op.count) break;
      store(out + target[k], converted(held[k], op.white));
    }
  }
}

}  // namespace fast_video_vae
