// Averages blocks of frames, pixels and channels to a smaller video.
#include "frames.cuh"

namespace fast_video_vae {

// Channel `c` of a pixel is the mean of `group` numbers of its block from number `c * group` on.
// They are nested: channel, frame, row, column. A pack is one channel, unless each result averages
// the whole block of its own channel.
struct AverageDown {
  Video x, out;
  Items items;
  Divisor packs, columns;  // of a pixel of `out`, of a row of it
  Divisor times, size;     // frames per block, rows and columns per block
  uint32 count;            // packs of a frame of `out`
  int before, group;
  int missing;  // frames of the first block that the video lacks
  float inverse;
};

FVV_KERNEL average_blocks(const AverageDown op) {
  const int64 row = static_cast<int64>(op.columns.by) * op.size.by * op.before;  // of `x`
  for (uint32 item = blockIdx.x; item < op.items.count; item += gridDim.x) {
    const Place at = place_of(op.items, item);
    const uint32 pack = at.part * kThreads + threadIdx.x;
    if (pack >= op.count) continue;
    const uint32 pixel = divide(pack, op.packs), y = divide(pixel, op.columns);
    const uint32 left = pixel - y * op.columns.by;
    const uint32 channel = (pack - pixel * op.packs.by) * N;
    const T* x = frame_of(op.x, at.video, 0) + y * op.size.by * row +
                 static_cast<int64>(left) * op.size.by * op.before;
    const int first = static_cast<int>(at.frame * op.times.by) - op.missing;
    float total[N] = {};
#pragma unroll 4
    for (int m = 0; m < op.group; ++m) {
      const uint32 index = channel * op.group + m, above = divide(index, op.size);
      const uint32 block = divide(above, op.size), before = divide(block, op.times);
      const int frame = first + static_cast<int>(block - before * op.times.by);
      if (frame < 0) continue;
      const int64 inside = (above - block * op.size.by) * row +
                           static_cast<int64>(index - above * op.size.by) * op.before + before;
      float v[N];
      widen(load<Pack>(x + frame * op.x.frame + inside), v);
      add(total, v);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) total[i] *= op.inverse;
    T* out = frame_of(op.out, at.video, at.frame);
    store(out + static_cast<int64>(pack) * N, narrow<T>(total));
  }
}

}  // namespace fast_video_vae
