// `x + bias + residual + residual_bias`, added from left to right.
#include "frames.cuh"

namespace fast_video_vae {

struct BiasResidual {
  Video x, residual, out;      // `residual.data` may be null
  Vector bias, residual_bias;  // `data` may be null
  Items items;
  Divisor row;   // packs of a pixel
  uint32 packs;  // of a frame
};

namespace {

// Packs that a thread reads of each tensor before it writes.
constexpr int kEach = 2;

}  // namespace

FVV_KERNEL add_terms(const BiasResidual op) {
  for (uint32 item = blockIdx.x; item < op.items.count; item += gridDim.x) {
    const Place at = place_of(op.items, item);
    const uint32 first = at.part * (kEach * kThreads) + threadIdx.x;
    const T* x = frame_of(op.x, at.video, at.frame);
    const T* residual = frame_of(op.residual, at.video, at.frame);
    T* out = frame_of(op.out, at.video, at.frame);
    Pack held[kEach], more[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32 pack = first + k * kThreads;
      if (pack >= op.packs) break;
      held[k] = load<Pack>(x + static_cast<int64>(pack) * N);
      if (op.residual.data) more[k] = load<Pack>(residual + static_cast<int64>(pack) * N);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32 pack = first + k * kThreads;
      if (pack >= op.packs) break;
      const int channel = static_cast<int>(pack - divide(pack, op.row) * op.row.by) * N;
      float v[N];
      widen(held[k], v);
      add(v, op.bias, channel);
      if (op.residual.data) {
        float w[N];
        widen(more[k], w);
        add(v, w);
      }
      add(v, op.residual_bias, channel);
      store(out + static_cast<int64>(pack) * N, narrow<T>(v));
    }
  }
}

}  // namespace fast_video_vae
