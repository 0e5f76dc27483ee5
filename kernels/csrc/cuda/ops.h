// What the bindings hand to the kernels: pointers and sizes, neither torch nor CUDA's headers. All
// distances are counts of numbers; those of dimensions of one are 0.
#pragma once

#include <stdint.h>

// CUDA's own name for a stream.
typedef struct CUstream_st* cudaStream_t;

namespace fast_video_vae_cuda {

enum class Dtype { float32, bfloat16, float16 };

// Chunks that the statistics of a frame are made of at most: enough blocks for the largest GPU, and
// few enough that to combine them costs nothing.
constexpr int64_t kChunks = 512;

// A grid has no more blocks than this along its second and third axis.
constexpr int64_t kGridLimit = 65535;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `[B, C, T, H, W]`: the pixels of a frame are rows of C dense numbers at one distance.
struct Video {
  void* data = nullptr;
  int64_t batch = 0, channels = 0, frames = 0, height = 0, width = 0;
  int64_t pixels = 0;  // of a frame
  int64_t batch_stride = 0, frame_stride = 0, row_stride = 0;
};

// A number for each channel, in float32 or in the dtype of the activations.
struct Vector {
  const void* data = nullptr;
  bool wide = true;
};

// `(x + bias) / max(norm2(x + bias), 1e-12) * (scale * factor)`, then SiLU. New frames go behind
// those of `tail`, which is moved on.
struct RmsNormSilu {
  Dtype dtype;
  bool silu;
  Video x, tail, out;  // `tail.data` may be null
  Vector scale, bias;  // `bias.data` may be null
  float factor;
};

// `(x - mean) / sqrt(var + eps) * weight + bias` per frame and group, then SiLU.
struct GroupNormSilu {
  Dtype dtype;
  bool silu;
  Video x, tail, out;  // `tail.data` may be null
  Vector weight, bias;
  int groups;
  float eps;
  int64_t share, chunks;  // pixels of a chunk, chunks of a frame
  float* partial;         // [B * T, chunks, 2, C]: mean, and sum of squares about it
  float* affine;          // [B * T, 2, C]: the factor of each channel, and its offset; may be null
  float* statistics;      // [B * T, 2, groups]: mean and 1 / sqrt(var + eps), to write; may be null
  const float* given;     // likewise, to be used instead of those of `x`; may be null
};

// `x * sigmoid(x) * gate`, row by row.
struct SiluMul {
  Dtype dtype;
  Video x, gate, out;
};

// Starts the kernels of an op. Null, or what CUDA says is wrong.
const char* rms_norm_silu(const RmsNormSilu& op, cudaStream_t stream);
const char* group_norm_silu(const GroupNormSilu& op, cudaStream_t stream);
// Writes `statistics` alone.
const char* group_norm_statistics(const GroupNormSilu& op, cudaStream_t stream);
const char* silu_mul(const SiluMul& op, cudaStream_t stream);

}  // namespace fast_video_vae_cuda
