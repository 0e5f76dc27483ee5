// Group norm of frames: the statistics of chunks of pixels, their combination, then the result.
//
// The variance is never the difference of two large numbers. A thread sums the distances of its
// values from its first value. The square of that value's own distance from their mean is part of
// the sum, so the subtraction cancels no more digits than the sum has. Threads, then chunks, are
// combined by their means and their centred sums of squares (Chan, Golub and LeVeque, "Updating
// Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979), in an order that
// depends on sizes only.
#include "sums.cuh"
#include "window.cuh"

namespace fast_video_vae {

struct Chunks {
  Video x;
  float* partial;  // [B * T, chunks, 2, C]: mean, and sum of squares about it
  Items items;     // parts are the chunks
  uint32 share, pixels;  // of a chunk, of a frame
  int channels;
};

struct Groups {
  const float* partial;  // of `Chunks`
  float* statistics;     // [B * T, 2, groups]: mean and 1 / sqrt(var + eps)
  Items items;           // parts are the groups; one video
  uint32 chunks, share, pixels;
  int channels, size;  // of a group
  float eps;
};

// `(x - mean) / sqrt(var + eps) * weight + bias`, then SiLU.
struct GroupNorm {
  Vector weight, bias;
  const float* statistics;  // of `Groups`
  Window window;
  Divisor size;  // channels of a group
  int groups;
};

namespace {

// Pixels that a writing thread reads before it writes, and how often it does.
constexpr int kPixels = 2;
constexpr int kRounds = 8;

// Pixels of a chunk; the last one is shorter.
__device__ __forceinline__ float pixels_of(const Groups& op, uint32 chunk) {
  const uint32 left = op.pixels - chunk * op.share;
  return static_cast<float>(left < op.share ? left : op.share);
}

// Factors and offsets of the channels from `channel` on.
__device__ __forceinline__ void affine(const GroupNorm& op, int64 frame, int channel,
                                       float (&scale)[N], float (&offset)[N]) {
  const float* mean = op.statistics + frame * 2 * op.groups;
  widen(op.weight, channel, scale);
  widen(op.bias, channel, offset);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32 group = divide(channel + i, op.size);
    scale[i] *= mean[op.groups + group];
    offset[i] -= mean[group] * scale[i];
  }
}

}  // namespace

// Mean of each channel over a chunk of pixels, and the sum of squares about it. Block: packs of a
// pixel, pixels.
FVV_KERNEL sum_chunks(const Chunks op) {
  alignas(kPackBytes) __shared__ float means[kThreads * N];
  alignas(kPackBytes) __shared__ float squares[kThreads * N];
  const int channels = op.channels, wide = blockDim.x * N;
  const int rows = blockDim.y, row = threadIdx.y, place = row * blockDim.x + threadIdx.x;
  for (uint32 item = blockIdx.x; item < op.items.count; item += gridDim.x) {
    const Place at = place_of(op.items, item);
    const uint32 start = at.part * op.share, left = op.pixels - start;
    const int count = static_cast<int>(left < op.share ? left : op.share);
    const int each = count / rows, more = count % rows;
    // Pixels of the threads of a row of the block.
    const auto pixels_of = [&](int row) { return each + (row < more ? 1 : 0); };
    const int mine = pixels_of(row);
    const T* x = frame_of(op.x, at.video, at.frame) + static_cast<int64>(start) * channels;
    float* partial = op.partial + static_cast<int64>(item) * 2 * channels;

    for (int slice = 0; slice < channels; slice += wide) {
      const int channel = slice + threadIdx.x * N;
      if (mine && channel < channels) {
        float base[N], sum[N] = {}, square[N] = {};
        Floats mean, about;
        const T* from = x + static_cast<int64>(row) * channels + channel;
        widen(load<Pack>(from), base);
#pragma unroll 4
        for (int k = 1; k < mine; ++k) {
          float v[N];
          widen(load<Pack>(from + static_cast<int64>(k) * rows * channels), v);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            v[i] -= base[i];
            sum[i] += v[i];
            square[i] += v[i] * v[i];
          }
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float moved = sum[i] / mine;
          mean.numbers[i] = base[i] + moved;
          about.numbers[i] = square[i] - sum[i] * moved;
        }
        *reinterpret_cast<Floats*>(means + place * N) = mean;
        *reinterpret_cast<Floats*>(squares + place * N) = about;
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
}

// Statistics of a group of a frame. Block: channels, chunks.
FVV_KERNEL combine_chunks(const Groups op) {
  for (uint32 item = blockIdx.x; item < op.items.count; item += gridDim.x) {
    const Place at = place_of(op.items, item);
    const int64 frame = at.frame;
    const float* partial = op.partial + frame * op.chunks * 2 * op.channels + at.part * op.size;
    const float base = partial[0], numbers = static_cast<float>(op.pixels) * op.size;
    float sum = 0, square = 0;
    for (uint32 chunk = threadIdx.y; chunk < op.chunks; chunk += blockDim.y) {
      const float* mean = partial + static_cast<int64>(chunk) * 2 * op.channels;
      for (int c = threadIdx.x; c < op.size; c += blockDim.x) {
        sum += pixels_of(op, chunk) * (mean[c] - base);
      }
    }
    const float moved = sum_of_block(sum) / numbers;
    for (uint32 chunk = threadIdx.y; chunk < op.chunks; chunk += blockDim.y) {
      const float* mean = partial + static_cast<int64>(chunk) * 2 * op.channels;
      for (int c = threadIdx.x; c < op.size; c += blockDim.x) {
        const float apart = mean[c] - base - moved;
        square += mean[op.channels + c] + pixels_of(op, chunk) * apart * apart;
      }
    }
    const float inverse = 1.0f / sqrtf(sum_of_block(square) / numbers + op.eps);
    if (threadIdx.x == 0 && threadIdx.y == 0) {
      const int groups = static_cast<int>(op.items.parts.by);
      float* statistics = op.statistics + frame * 2 * groups + at.part;
      statistics[0] = base + moved;
      statistics[groups] = inverse;
    }
  }
}

// Block: packs of a pixel, pixels. An item is `kRounds * kPixels` pixels for each thread.
FVV_KERNEL write_pixels(const GroupNorm op) {
  const Window& w = op.window;
  const int rows = blockDim.y;
  for (uint32 item = blockIdx.x; item < w.items.count; item += gridDim.x) {
    const Place at = place_of(w.items, item);
    const Frame frame = frame_of(w, at);
    const int64 number = at.video * w.frames + frame.number;
    const uint32 first = at.part * (rows * kPixels * kRounds) + threadIdx.y;

    for (int channel = threadIdx.x * N; channel < w.channels; channel += blockDim.x * N) {
      float scale[N], offset[N];
      affine(op, number, channel, scale, offset);
#pragma unroll 1
      for (int round = 0; round < kRounds; ++round) {
        const uint32 start = first + round * (rows * kPixels);
        if (start >= w.pixels) break;
        Pack held[kPixels];
#pragma unroll
        for (int k = 0; k < kPixels; ++k) {
          const Pixel pixel = pixel_of(w, start + k * rows);
          if (pixel.inside) held[k] = load<Pack>(frame.x + pixel.source + channel);
        }
#pragma unroll
        for (int k = 0; k < kPixels; ++k) {
          const Pixel pixel = pixel_of(w, start + k * rows);
          if (!pixel.exists) break;
          if (frame.last >= 0) roll(w, frame, pixel, channel);
          Pack y{};
          if (pixel.inside) {
            float v[N];
            widen(held[k], v);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = v[i] * scale[i] + offset[i];
            if (w.silu) silu(v);
            y = narrow<T>(v);
          }
          write(w, frame, pixel, channel, y);
        }
      }
    }
  }
}

}  // namespace fast_video_vae
