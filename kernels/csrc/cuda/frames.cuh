// Frames in memory, and the division of their work. A block does an item, some numbers or pixels of
// a frame, and then every `gridDim.x`-th item after it.
#pragma once

#include "numbers.cuh"

namespace fast_video_vae {

// `[B, C, T, H, W]`: the pixels of a frame are adjacent rows of C numbers. Strides are in numbers.
template <class Number>
struct VideoOf {
  Number* data;
  int64 batch, frame;
};

using Video = VideoOf<T>;

template <class Number>
__device__ __forceinline__ Number* frame_of(const VideoOf<Number>& x, int64 video, int64 frame) {
  return x.data + video * x.batch + frame * x.frame;
}

// A divisor and its reciprocal: a quotient of a number below 2^31 is a product and a shift
// (Granlund and Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct Divisor {
  uint32 by, magic, shift;
};

__device__ __forceinline__ uint32 divide(uint32 n, const Divisor& divisor) {
  return (__umulhi(n, divisor.magic) + n) >> divisor.shift;
}

// Items, the parts of a frame, and the frames of a video.
struct Items {
  uint32 count;
  Divisor parts, frames;
};

struct Place {
  uint32 part, frame;
  int64 video;
};

__device__ __forceinline__ Place place_of(const Items& items, uint32 item) {
  const uint32 whole = divide(item, items.parts), video = divide(whole, items.frames);
  return {item - whole * items.parts.by, whole - video * items.frames.by, video};
}

}  // namespace fast_video_vae
