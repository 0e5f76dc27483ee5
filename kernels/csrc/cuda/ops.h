// Interface between bindings and kernels: pointers and sizes, without the headers of torch and
// CUDA. All strides are in elements; those of dimensions of one are 0.
#pragma once

#include <stdint.h>

// CUDA's own name for a stream.
typedef struct CUstream_st* cudaStream_t;

namespace fast_video_vae_cuda {

enum class Dtype { float32, bfloat16, float16 };

// Most chunks of the statistics of a frame: enough blocks for the largest GPU, and few enough that
// combining them takes no time.
constexpr int64_t kChunks = 512;

// Most blocks of a grid along its second and third axis.
constexpr int64_t kGridLimit = 65535;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `[B, C, T, H, W]`: the pixels of a frame are dense rows of C values with one common stride.
struct Video {
  void* data = nullptr;
  int64_t batch = 0, channels = 0, frames = 0, height = 0, width = 0;
  int64_t pixels = 0;  // of a frame
  int64_t batch_stride = 0, frame_stride = 0, row_stride = 0;
};

// One value per channel, in float32 or in the dtype of the activations.
struct Vector {
  const void* data = nullptr;
  bool wide = true;
};

// `(x + bias) / max(norm2(x + bias), 1e-12) * (scale * factor)`, then SiLU. New frames are written
// after those of `tail`, which is updated.
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
  float* affine;          // [B * T, 2, C]: factor and offset of each channel; may be null
  float* statistics;      // [B * T, 2, groups]: mean and 1 / sqrt(var + eps); output, may be null
  const float* given;     // [B * T, 2, groups]: input instead of the statistics of `x`; may be null
};

// `x * sigmoid(x) * gate`, row by row.
struct SiluMul {
  Dtype dtype;
  Video x, gate, out;
};

// Launches the kernels of an op. Returns null, or CUDA's error message.
const char* rms_norm_silu(const RmsNormSilu& op, cudaStream_t stream);
const char* group_norm_silu(const GroupNormSilu& op, cudaStream_t stream);
// Writes `statistics` only.
const char* group_norm_statistics(const GroupNormSilu& op, cudaStream_t stream);
const char* silu_mul(const SiluMul& op, cudaStream_t stream);

}  // namespace fast_video_vae_cuda
