// Group norm of frames: the statistics of chunks of pixels, their combination, then the result.
//
// The variance is never the difference of two large numbers, and a mean that is large against the
// deviation costs no digits. All means are distances from the first pixel of the frame. A thread
// updates the mean and the sum of squares about it with each value (Welford, "Note on a Method for
// Calculating Corrected Sums of Squares and Products", 1962). Threads, then chunks, are combined by
// both (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
// Variances", 1979), in an order that depends on sizes and alignment only.
#include "sums.cuh"
#include "window.cuh"

namespace fast_video_vae {

struct Chunks {
  Video x;
  float* partial;  // [B * T, chunks, 2, C]: mean less the first pixel, sum of squares about it
  Items items;     // parts are the chunks
  uint32 share, pixels;  // of a chunk, of a frame
  int channels;
};

struct Groups {
  Video x;
  const float* partial;  // of `Chunks`
  float* statistics;     // [B * T, 2, groups]: mean and 1 / sqrt(var + eps)
  Items items;           // parts are the groups
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

// Means and factors of the channels from `channel` on.
__device__ __forceinline__ void affine(const GroupNorm& op, int64 frame, int channel,
                                       float (&mean)[N], float (&scale)[N]) {
  const float* statistics = op.statistics + frame * 2 * op.groups;
  widen(op.weight, channel, scale);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32 group = divide(channel + i, op.size);
    mean[i] = statistics[group];
    scale[i] *= statistics[op.groups + group];
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
    const T* pixels = frame_of(op.x, at.video, at.frame);
    const T* x = pixels + static_cast<int64>(start) * channels;
    float* partial = op.partial + static_cast<int64>(item) * 2 * channels;

    for (int slice = 0; slice < channels; slice += wide) {
      const int channel = slice + threadIdx.x * N;
      if (mine && channel < channels) {
        float base[N];
        Floats mean{}, about{};
        const T* from = x + static_cast<int64>(row) * channels + channel;
        widen(load<Pack>(pixels + channel), base);
#pragma unroll 4
        for (int k = 0; k < mine; ++k) {
          float v[N];
          widen(load<Pack>(from + static_cast<int64>(k) * rows * channels), v);
          const float share = __fdividef(1.0f, k + 1);
#pragma unroll
          for (int i = 0; i < N; ++i) {
            v[i] -= base[i];
            const float apart = v[i] - mean.numbers[i];
            mean.numbers[i] += apart * share;
            about.numbers[i] += apart * (v[i] - mean.numbers[i]);
          }
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
    const int64 frame = at.video * op.items.frames.by + at.frame;
    const float* partial = op.partial + frame * op.chunks * 2 * op.channels + at.part * op.size;
    const T* first = frame_of(op.x, at.video, at.frame) + at.part * op.size;
    const float base = widen(first[0]), numbers = static_cast<float>(op.pixels) * op.size;
    float sum = 0, square = 0;
    for (uint32 chunk = threadIdx.y; chunk < op.chunks; chunk += blockDim.y) {
      const float* mean = partial + static_cast<int64>(chunk) * 2 * op.channels;
      for (int c = threadIdx.x; c < op.size; c += blockDim.x) {
        sum += pixels_of(op, chunk) * (widen(first[c]) - base + mean[c]);
      }
    }
    const float moved = sum_of_block(sum) / numbers;
    for (uint32 chunk = threadIdx.y; chunk < op.chunks; chunk += blockDim.y) {
      const float* mean = partial + static_cast<int64>(chunk) * 2 * op.channels;
      for (int c = threadIdx.x; c < op.size; c += blockDim.x) {
        const float apart = widen(first[c]) - base + mean[c] - moved;
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
  begin();
  for (uint32 item = blockIdx.x; item < w.items.count; item += gridDim.x) {
    const Place at = place_of(w.items, item);
    const Frame frame = frame_of(w, at);
    const int64 number = at.video * w.frames + frame.number;
    const uint32 first = at.part * (rows * kPixels * kRounds) + threadIdx.y;

    for (int channel = threadIdx.x * N; channel < w.channels; channel += blockDim.x * N) {
      float mean[N], scale[N];
      affine(op, number, channel, mean, scale);
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
          Result y = zeros();
          if (pixel.inside) {
            float v[N];
            widen(held[k], v);
#pragma unroll
            for (int i = 0; i < N; ++i) v[i] = (v[i] - mean[i]) * scale[i];
            add(v, op.bias, channel);
            if (w.silu) silu(v);
            y = result_of(w.codes, v, channel);
          }
          write(w, frame, pixel, channel, y);
        }
      }
    }
  }
  finish(w.codes);
}

}  // namespace fast_video_vae
