// Root mean square norms of pixels. A team of lanes, a power of two up to a warp, reads a pixel
// once, sums the squares by shuffles, and writes it.
#include "window.cuh"

namespace fast_video_vae {

// `(x + bias) * (root / max(norm2(x + bias), 1e-12)) * gamma`, then SiLU.
struct RmsNorm {
  Vector gamma, bias;  // `bias.data` may be null
  Window window;
  float root;  // of the number of channels
};

namespace {

// Packs of a pixel that each lane keeps in registers. The rest of a longer one is read twice, the
// second time from the cache.
constexpr int kHeld = 3;

// The eps of `torch.nn.functional.normalize`.
constexpr float kFloor = 1e-12f;

__device__ __forceinline__ void biased(const RmsNorm& op, const Pack& pack, int channel,
                                       float (&v)[N]) {
  widen(pack, v);
  add(v, op.bias, channel);
}

__device__ __forceinline__ float squares(const float (&v)[N]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += v[i] * v[i];
  return sum;
}

__device__ __forceinline__ Result scaled(const RmsNorm& op, float (&v)[N], int channel,
                                         float factor) {
  float gamma[N];
  widen(op.gamma, channel, gamma);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = v[i] * factor * gamma[i];
  if (op.window.silu) silu(v);
  return result_of(op.window.codes, v, channel);
}

}  // namespace

// Block: lanes of a team, teams. An item is a pixel for each team.
FVV_KERNEL norm_pixels(const RmsNorm op) {
  const Window& w = op.window;
  const int first = threadIdx.x * N, step = blockDim.x * N;
  begin();
  for (uint32 item = blockIdx.x; item < w.items.count; item += gridDim.x) {
    const Place at = place_of(w.items, item);
    const Frame frame = frame_of(w, at);
    const Pixel pixel = pixel_of(w, at.part * blockDim.y + threadIdx.y);
    // Teams without a pixel take part in the shuffles.
    const int end = pixel.exists ? w.channels : 0, read = pixel.inside ? w.channels : 0;
    const T* x = frame.x + pixel.source;

    if (frame.last >= 0) {
#pragma unroll 1
      for (int channel = first; channel < end; channel += step) roll(w, frame, pixel, channel);
    }
    Pack packs[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int channel = first + k * step;
      if (channel < read) packs[k] = load<Pack>(x + channel);
    }
    float held[kHeld][N], sum = 0;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int channel = first + k * step;
      if (channel >= read) break;
      biased(op, packs[k], channel, held[k]);
      sum += squares(held[k]);
    }
#pragma unroll 1
    for (int channel = first + kHeld * step; channel < read; channel += step) {
      float v[N];
      biased(op, load<Pack>(x + channel), channel, v);
      sum += squares(v);
    }
    for (int distance = blockDim.x / 2; distance; distance /= 2) sum += exchange(sum, distance);
    float norm = sqrtf(sum);
    norm = norm < kFloor ? kFloor : norm;  // not fmaxf, which drops NaN
    const float factor = op.root / norm;

#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int channel = first + k * step;
      if (channel >= end) continue;
      // Codes need the registers of the numbers that a pack becomes.
      if (FVV_CODES && pixel.inside) biased(op, packs[k], channel, held[k]);
      write(w, frame, pixel, channel,
            pixel.inside ? scaled(op, held[k], channel, factor) : zeros());
    }
#pragma unroll 1
    for (int channel = first + kHeld * step; channel < end; channel += step) {
      Result y = zeros();
      if (pixel.inside) {
        float v[N];
        biased(op, load<Pack>(x + channel), channel, v);
        y = scaled(op, v, channel, factor);
      }
      write(w, frame, pixel, channel, y);
    }
  }
  finish(w.codes);
}

}  // namespace fast_video_vae
