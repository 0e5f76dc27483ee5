// Merges the four phases of a folded upsampling convolution into a picture of twice the size.
#include "frames.cuh"

namespace fast_video_vae {

// Pixel `(2 i + a, 2 j + b)` is phase `2 a + b` of the window at `(i + a, j + b)`.
struct MergePhases {
  Video grid, source, out;  // `source.data` may be null
  Vector bias;              // `data` may be null
  Items items;
  Divisor row, columns;    // packs of a pixel, pixels of a row of `out`
  Divisor times, repeats;  // frames per frame of `source`, results per channel of it
  uint32 packs;            // of a frame of `out`
  int channels, before;    // of `out`, of `source`
  int missing;             // frames of the video before the first of `out`
};

namespace {

// Packs that a thread reads of each tensor before it writes.
constexpr int kEach = 2;

// The numbers of `source` at `pixel` that are repeated from channel `channel` of a phase on.
__device__ __forceinline__ void repeated(const MergePhases& op, const T* pixel, int channel,
                                         uint32 time, uint32 phase, float (&to)[N]) {
  if (op.repeats.by == 4 * op.times.by) {  // all phases have the same
    widen(load<Pack>(pixel + channel), to);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32 place = ((channel + i) * op.times.by + time) * 4 + phase;
    to[i] = widen(pixel[divide(place, op.repeats)]);
  }
}

}  // namespace

FVV_KERNEL merge_windows(const MergePhases op) {
  const uint32 width = op.columns.by / 2;
  for (uint32 item = blockIdx.x; item < op.items.count; item += gridDim.x) {
    const Place at = place_of(op.items, item);
    const uint32 first = at.part * (kEach * kThreads) + threadIdx.x;
    const uint32 late = at.frame + op.missing, whole = divide(late, op.times);
    const uint32 time = late - whole * op.times.by;
    const T* grid = frame_of(op.grid, at.video, at.frame);
    const T* source = frame_of(op.source, at.video, whole);
    T* out = frame_of(op.out, at.video, at.frame);
    Pack held[kEach];
    float more[kEach][N];
    int channels[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32 pack = first + k * kThreads;
      if (pack >= op.packs) break;
      const uint32 pixel = divide(pack, op.row), y = divide(pixel, op.columns);
      const uint32 x = pixel - y * op.columns.by, phase = y % 2 * 2 + x % 2;
      const uint32 window = (y / 2 + y % 2) * (width + 1) + x / 2 + x % 2;
      const int channel = static_cast<int>(pack - pixel * op.row.by) * N;
      channels[k] = channel;
      held[k] = load<Pack>(grid + (static_cast<int64>(window) * 4 + phase) * op.channels + channel);
      if (op.source.data) {
        const int64 place = static_cast<int64>(y / 2 * width + x / 2) * op.before;
        repeated(op, source + place, channel, time, phase, more[k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32 pack = first + k * kThreads;
      if (pack >= op.packs) break;
      if (op.bias.data || op.source.data) {
        float v[N];
        widen(held[k], v);
        add(v, op.bias, channels[k]);
        if (op.source.data) add(v, more[k]);
        held[k] = narrow<T>(v);
      }
      store(out + static_cast<int64>(pack) * N, held[k]);
    }
  }
}

}  // namespace fast_video_vae
