// Output of a new frame after the frames of the tail, and the update of the tail. Each thread does
// its own packs, so that no synchronisation is needed.
#pragma once

#include "numbers.cuh"

namespace fast_video_vae_cuda {

// The place of a pack in all frames of the result and of the tail.
template <class T>
struct Window {
  T* out;   // in the first frame
  T* tail;  // in the first frame
  int64_t out_frame, tail_frame;
  int frames, known;  // new frames, and frames of the tail
  int last;           // index of this frame in the next tail; negative: none
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

// Writes the old frames of the tail to the result and moves them within the tail.
//
// The thread of a new frame that becomes frame `last` of the tail does every `frames`-th frame up
// to it, so no other thread reads or writes these.
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
