// Group norm of frames: the statistics of chunks of pixels, their combination, then the result.
//
// The variance is never the difference of two large numbers. A thread sums the distances of its
// values from its first value. The square of that value's own distance from their mean is part of
// the sum, so the subtraction cancels no more digits than the sum has. Threads, then chunks, are
// combined by their means and their centred sums of squares (Chan, Golub and LeVeque, "Updating
// Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979), in an order that
// depends on sizes only.
#include "launch.cuh"
#include "window.cuh"

namespace fast_video_vae_cuda {
namespace {

// Pixels that a writing thread reads before it writes.
constexpr int kPixels = 2;

template <class T>
__device__ __forceinline__ const T* frame_of(const Video& x, int64_t video, int64_t frame) {
  return static_cast<const T*>(x.data) + video * x.batch_stride + frame * x.frame_stride;
}

// Mean of each channel over a chunk of pixels, and the sum of squares about it. Block: packs of a
// pixel by pixels. Grid: chunks, frames, videos.
template <class P>
__global__ void __launch_bounds__(kThreads, kBlocks) sum_chunks(const GroupNormSilu op) {
  using T = typename P::Number;
  using Floats = Pack<float, P::kCount>;
  alignas(kPackBytes) __shared__ float means[kThreads * P::kCount];
  alignas(kPackBytes) __shared__ float squares[kThreads * P::kCount];
  const int channels = static_cast<int>(op.x.channels), wide = blockDim.x * P::kCount;
  const int64_t start = blockIdx.x * op.share, left = op.x.pixels - start;
  const int count = static_cast<int>(left < op.share ? left : op.share);
  const int rows = blockDim.y, each = count / rows, more = count % rows;
  // Pixels of the threads of a row of the block.
  const auto pixels_of = [&](int row) { return each + (row < more ? 1 : 0); };
  const int row = threadIdx.y, mine = pixels_of(row);
  const int place = threadIdx.y * blockDim.x + threadIdx.x;
  const T* x = frame_of<T>(op.x, blockIdx.z, blockIdx.y) + start * channels;
  const int64_t frame = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  float* partial = op.partial + (frame * op.chunks + blockIdx.x) * 2 * channels;

  for (int slice = 0; slice < channels; slice += wide) {
    const int channel = slice + threadIdx.x * P::kCount;
    if (mine && channel < channels) {
      float base[P::kCount], sum[P::kCount] = {}, square[P::kCount] = {};
      Floats mean, about;
      const T* from = x + static_cast<int64_t>(row) * channels + channel;
      widen(load<P>(from), base);
#pragma unroll 4
      for (int k = 1; k < mine; ++k) {
        float v[P::kCount];
        widen(load<P>(from + static_cast<int64_t>(k) * rows * channels), v);
#pragma unroll
        for (int i = 0; i < P::kCount; ++i) {
          v[i] -= base[i];
          sum[i] += v[i];
          square[i] += v[i] * v[i];
        }
      }
#pragma unroll
      for (int i = 0; i < P::kCount; ++i) {
        const float moved = sum[i] / mine;
        mean.numbers[i] = base[i] + moved;
        about.numbers[i] = square[i] - sum[i] * moved;
      }
      store(means + place * P::kCount, mean);
      store(squares + place * P::kCount, about);
    }
    __syncthreads();
    const int width = channels - slice < wide ? channels - slice : wide;
    for (int c = place; c < width; c += blockDim.x * blockDim.y) {
      const float *mean = means + c, *square = squares + c;
      const int used = count < rows ? count : rows;
      float moved = 0, total = 0;
      for (int r = 0; r < used; ++r) moved += pixels_of(r) * (mean[r * wide] - mean[0]);
      moved /= count;
      for (int r = 0; r < used; ++r) {
        const float apart = mean[r * wide] - mean[0] - moved;
        total += square[r * wide] + pixels_of(r) * apart * apart;
      }
      partial[slice + c] = mean[0] + moved;
      partial[channels + slice + c] = total;
    }
    __syncthreads();
  }
}

// Sum of a value over all threads of a block of whole warps, returned to all of them.
__device__ __forceinline__ float sum_of_block(float v) {
  __shared__ float sums[kThreads / kWarp];
  const int place = threadIdx.y * blockDim.x + threadIdx.x;
  for (int distance = kWarp / 2; distance; distance /= 2) {
    v += __shfl_xor_sync(kAllLanes, v, distance);
  }
  if (place % kWarp == 0) sums[place / kWarp] = v;
  __syncthreads();
  v = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) v += sums[warp];
  __syncthreads();
  return v;
}

// Factors and offsets of the channels of a group, by one block.
template <class T>
__device__ __forceinline__ void set_affine(const GroupNormSilu& op, int64_t frame, float mean,
                                           float inverse) {
  const int channels = static_cast<int>(op.x.channels), size = channels / op.groups;
  const int first = blockIdx.x * size;
  float* affine = op.affine + frame * 2 * channels + first;
  for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < size; c += kThreads) {
    float weight[1], bias[1];
    widen<T>(op.weight, first + c, weight);
    widen<T>(op.bias, first + c, bias);
    const float scale = weight[0] * inverse;
    affine[c] = scale;
    affine[channels + c] = bias[0] - mean * scale;
  }
}

// Factors and offsets from given statistics. Block: any. Grid: groups, frames, videos.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) use_given(const GroupNormSilu op) {
  const int64_t frame = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const float* given = op.given + frame * 2 * op.groups + blockIdx.x;
  set_affine<T>(op, frame, given[0], given[op.groups]);
}

// Statistics of a group, and its factors and offsets. Block: channels by chunks. Grid: groups,
// frames, videos.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks) combine_chunks(const GroupNormSilu op) {
  const int channels = static_cast<int>(op.x.channels), size = channels / op.groups;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * size;
  const int64_t frame = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const float* partial = op.partial + frame * op.chunks * 2 * channels + first;
  const float base = partial[0];
  const float numbers = static_cast<float>(op.x.pixels) * size;
  const auto each = [&](auto add) {
    for (int64_t chunk = threadIdx.y; chunk < op.chunks; chunk += blockDim.y) {
      const int64_t left = op.x.pixels - chunk * op.share;
      const float count = static_cast<float>(left < op.share ? left : op.share);
      const float* mean = partial + chunk * 2 * channels;
      for (int c = threadIdx.x; c < size; c += blockDim.x) add(count, mean[c], mean[channels + c]);
    }
  };
  float sum = 0, square = 0;
  each([&](float count, float mean, float) { sum += count * (mean - base); });
  const float moved = sum_of_block(sum) / numbers;
  each([&](float count, float mean, float about) {
    const float apart = mean - base - moved;
    square += about + count * apart * apart;
  });
  const float inverse = 1.0f / sqrtf(sum_of_block(square) / numbers + op.eps);
  const float mean = base + moved;
  if (op.statistics && threadIdx.x == 0 && threadIdx.y == 0) {
    float* statistics = op.statistics + frame * 2 * op.groups + blockIdx.x;
    statistics[0] = mean;
    statistics[op.groups] = inverse;
  }
  if (op.affine) set_affine<T>(op, frame, mean, inverse);
}

template <class P>
__device__ __forceinline__ P normed(const P& pack, const float (&scale)[P::kCount],
                                    const float (&offset)[P::kCount], bool activate) {
  float v[P::kCount];
  widen(pack, v);
#pragma unroll
  for (int i = 0; i < P::kCount; ++i) v[i] = v[i] * scale[i] + offset[i];
  if (activate) silu(v);
  return narrow<typename P::Number>(v);
}

// Block: packs of a pixel by pixels. Grid: parts of a frame, new frames, videos.
template <class P>
__global__ void __launch_bounds__(kThreads, kBlocks) write_frames(const GroupNormSilu op) {
  using T = typename P::Number;
  using Floats = Pack<float, P::kCount>;
  const int channels = static_cast<int>(op.x.channels), rows = blockDim.y, frame = blockIdx.y;
  const int64_t video = blockIdx.z;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * rows * kPixels + threadIdx.y;
  const int64_t start = first * channels;
  const int step = rows * channels;
  const auto inside = [&](int k) { return first + k * rows < op.x.pixels; };
  const auto at = window<T>(op.x, op.tail, op.out, video, frame);
  const T* x = frame_of<T>(op.x, video, frame) + start;
  T* out = at.out + (at.known + frame) * at.out_frame + start;
  T* tail = at.tail + at.last * at.tail_frame + start;
  const float* affine = op.affine + (video * op.x.frames + frame) * 2 * channels;

  for (int channel = threadIdx.x * P::kCount; channel < channels;
       channel += blockDim.x * P::kCount) {
    if (at.last >= 0) {
#pragma unroll 1
      for (int k = 0; k < kPixels && inside(k); ++k) roll<P>(at, start + k * step + channel);
    }
    P held[kPixels];
#pragma unroll
    for (int k = 0; k < kPixels; ++k) {
      if (inside(k)) held[k] = load<P>(x + k * step + channel);
    }
    float scale[P::kCount], offset[P::kCount];
    widen(load<Floats>(affine + channel), scale);
    widen(load<Floats>(affine + channels + channel), offset);
#pragma unroll
    for (int k = 0; k < kPixels; ++k) {
      if (!inside(k)) break;
      const P y = normed(held[k], scale, offset, op.silu);
      store(out + k * step + channel, y);
      if (at.last >= 0) store(tail + k * step + channel, y);
    }
  }
}

// Packs of a pixel, by enough pixels for a block of about `kThreads`.
dim3 block_of(int64_t packs) {
  const unsigned wide = static_cast<unsigned>(packs < kThreads ? packs : kThreads);
  return dim3(wide, kThreads / wide);
}

dim3 grid_of(const GroupNormSilu& op, int64_t parts) {
  return dim3(static_cast<unsigned>(parts), static_cast<unsigned>(op.x.frames),
              static_cast<unsigned>(op.x.batch));
}

template <class P>
cudaError_t measure(const GroupNormSilu& op, cudaStream_t stream) {
  const dim3 block = block_of(op.x.channels / P::kCount);
  const cudaError_t error =
      launch(sum_chunks<P>, grid_of(op, op.chunks), block, stream, op);
  if (error != cudaSuccess) return error;
  unsigned wide = 1;
  while (wide < kWarp && wide < op.x.channels / op.groups) wide *= 2;
  return launch(combine_chunks<typename P::Number>, grid_of(op, op.groups),
                dim3(wide, kThreads / wide), stream, op);
}

template <class P>
cudaError_t write(const GroupNormSilu& op, cudaStream_t stream) {
  const dim3 block = block_of(op.x.channels / P::kCount);
  const int64_t parts = ceil_div(op.x.pixels, block.y * kPixels);
  return launch(write_frames<P>, grid_of(op, parts), block, stream, op);
}

}  // namespace

const char* group_norm_silu(const GroupNormSilu& op, cudaStream_t stream) {
  const auto start = [&](auto pack) {
    using P = decltype(pack);
    using T = typename P::Number;
    const cudaError_t error =
        op.given ? launch(use_given<T>, grid_of(op, op.groups), dim3(kThreads), stream, op)
                 : measure<P>(op, stream);
    return error == cudaSuccess ? write<P>(op, stream) : error;
  };
  return message_of(by_pack_of(op.dtype, start, op.x, op.tail, op.out));
}

const char* group_norm_statistics(const GroupNormSilu& op, cudaStream_t stream) {
  const auto start = [&](auto pack) { return measure<decltype(pack)>(op, stream); };
  return message_of(by_pack_of(op.dtype, start, op.x));
}

}  // namespace fast_video_vae_cuda
