// The frames that a norm writes: those of the tail, then the new ones, each with a border of zeros.
// The last of them become the next tail. Each thread does its own packs of all of them, so that no
// synchronisation is needed.
#pragma once

#include "codes.cuh"
#include "frames.cuh"

namespace fast_video_vae {

struct Window {
  Video x;
  VideoOf<Y> tail, out;  // `tail.data` may be null
  Codes codes;
  Items items;           // parts are those of a frame of `out`
  Divisor columns;       // of a frame of `out`
  uint32 pixels;       // of a frame of `out`
  uint32 height, width, border;
  int channels, frames, known;  // new frames, and frames of the tail
  int silu;                     // apply SiLU
};

// A new frame: the pixels of `x`, and those of the first frames of the tail and of the result.
struct Frame {
  const T* x;
  Y *tail, *out;
  int number, last;  // `last` is its number in the next tail; negative: it is not in it
};

__device__ __forceinline__ Frame frame_of(const Window& w, const Place& at) {
  const int number = static_cast<int>(at.frame);
  return {frame_of(w.x, at.video, number), frame_of(w.tail, at.video, 0),
          frame_of(w.out, at.video, 0), number, w.tail.data ? number + w.known - w.frames : -1};
}

// A pixel of the result: whether the frame has it, whether it is not in the border, and where it is
// in a frame of `x` or of the tail, and in one of the result.
struct Pixel {
  bool exists, inside;
  int64 source, target;
};

__device__ __forceinline__ Pixel pixel_of(const Window& w, uint32 index) {
  const bool exists = index < w.pixels;
  const int64 target = static_cast<int64>(index) * w.channels;
  if (!w.border) return {exists, exists, target, target};
  const uint32 y = divide(index, w.columns), row = y - w.border;
  const uint32 column = index - y * w.columns.by - w.border;
  // In the border above and on the left, the differences wrap to large numbers.
  const bool inside = exists && row < w.height && column < w.width;
  return {exists, inside, (static_cast<int64>(row) * w.width + column) * w.channels, target};
}

// Writes the old frames of the tail to the result and moves them within the tail.
//
// The thread of a new frame that becomes frame `last` of the tail does every `frames`-th frame up
// to it, so no other thread reads or writes these.
__device__ __forceinline__ void roll(const Window& w, const Frame& frame, const Pixel& pixel,
                                     int channel) {
  Y* const tail = frame.tail + pixel.source + channel;
  Y* const out = frame.out + pixel.target + channel;
#pragma unroll 1
  for (int k = frame.last % w.frames; k <= frame.last; k += w.frames) {
    Result old = zeros();
    if (pixel.inside) old = load<Result>(tail + k * w.tail.frame);
    store(out + k * w.out.frame, old);
    if (pixel.inside && k >= w.frames) store(tail + (k - w.frames) * w.tail.frame, old);
  }
}

// Writes a pack of a new frame to the result, and to the tail.
__device__ __forceinline__ void write(const Window& w, const Frame& frame, const Pixel& pixel,
                                      int channel, const Result& pack) {
  store(frame.out + (w.known + frame.number) * w.out.frame + pixel.target + channel, pack);
  if (frame.last >= 0 && pixel.inside) {
    store(frame.tail + frame.last * w.tail.frame + pixel.source + channel, pack);
  }
}

}  // namespace fast_video_vae
