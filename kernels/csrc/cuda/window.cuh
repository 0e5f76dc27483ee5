// Where a new frame goes: behind the frames of the tail, which move on. Each thread does it for
// packs of its own, all by itself, so that nobody waits for anybody.
#pragma once

#include "numbers.cuh"

namespace fast_video_vae_cuda {

// The place of a pack in all frames of the result and of the tail.
template <class T>
struct Window {
  T* out;   // in the first frame
  T* tail;  // likewise
  int64_t out_frame, tail_frame;
  int frames, known;  // new ones, and those in front of them
  int last;           // which frame of the next tail this new one is; negative: none
};

template <class T>
__device__ __forceinline__ Window<T> window(const Video& x, const Video& tail, const Video& out,
                                            int64_t video, int frame) {
  const int known = static_cast<int>(tail.frames);
  const int last = tail.data ? frame + known - static_cast<int>(x.frames) : -1;
  return {static_cast<T*>(out.data) + video * out.batch_stride,
          static_cast<T*>(tail.data) + video * tail.batch_stride,
          out.frame_stride,
          tail.frame_stride,
          static_cast<int>(x.frames),
          known,
          last};
}

// Writes the old frames of the tail and moves them on, at a place in a picture.
//
// The thread of a new frame that becomes number `last` of the tail does every `frames`-th number up
// to it: then nobody else reads or writes these.
template <class P, class T>
__device__ __forceinline__ void roll(const Window<T>& at, int64_t place) {
#pragma unroll 1
  for (int k = at.last % at.frames; k <= at.last; k += at.frames) {
    const P old = load<P>(at.tail + k * at.tail_frame + place);
    store(at.out + k * at.out_frame + place, old);
    if (k >= at.frames) store(at.tail + (k - at.frames) * at.tail_frame + place, old);
  }
}

}  // namespace fast_video_vae_cuda
