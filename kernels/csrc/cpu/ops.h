// Interface between bindings and kernels: pointers and sizes, without torch. A kernel runs the
// tasks [begin, end) of an op; tasks are independent, and the bindings distribute them over
// threads.
#pragma once

#include <stdint.h>

#define FVV_QUOTE_(text) #text
#define FVV_QUOTE(text) FVV_QUOTE_(text)

namespace fast_video_vae {

enum class Dtype { float32, bfloat16, float16, uint8, uint16 };

// Vectors of parameters are padded to a multiple of this, so that whole vectors can be read.
constexpr int64_t kPadding = 16;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `[B, C, T, H, W]` with dense frames: pixels are adjacent rows of C. Strides of batch and frames
// are in bytes.
struct Video {
  char* data = nullptr;
  int64_t batch = 0, channels = 0, frames = 0, height = 0, width = 0;
  int64_t batch_stride = 0, frame_stride = 0;
  int64_t item = 0;  // bytes of a value

  int64_t pixels() const { return height * width; }
  // Address of value `index` of frame `t`.
  char* at(int64_t b, int64_t t, int64_t index) const {
    return data + b * batch_stride + t * frame_stride + index * item;
  }
};

// `[..., C]` as rows of C with one common stride, in bytes.
struct Rows {
  char* data = nullptr;
  int64_t count = 0, channels = 0, stride = 0;

  char* at(int64_t row) const { return data + row * stride; }
};

// The code of 0 in uint8.
constexpr int32_t kZeroCode = 17;

// The frames that a norm writes: those of the tail, then the new ones, each with a border.
struct Results {
  Video tail, out;               // `tail.data` may be null
  int64_t border = 0;            // pixels
  int zero = 0;                  // bytes of the border
  const float* codes = nullptr;  // null: values; otherwise codes per unit, padded
  bool is_signed = false;        // codes are int8
  int64_t* saturated = nullptr;  // the numbers of values outside of the codes, and of NaN

  int64_t known() const { return tail.data ? tail.frames : 0; }
  // Address of value `index` of new frame `t`.
  char* new_at(int64_t b, int64_t t, int64_t index) const {
    return out.at(b, known() + t, index);
  }
};

// Task: a block of `rows` pixels, in all frames.
struct RmsNormSilu {
  Dtype dtype;
  bool silu;
  Video x;
  Results results;
  const float* scale;   // gamma * sqrt(C), padded
  const float* bias;    // null or padded
  int64_t rows;
};

// Task: `rows` pixels of one frame.
struct GroupNormSums {
  Dtype dtype;
  Video x;
  int64_t padded;        // C, padded
  int64_t rows, chunks;  // per frame
  double* sums;          // [B * T, chunks, 2, C]: of x - shift and of its square
  float* shift;          // [B * T, padded]: about the mean, from a few pixels of each frame
};

// Task: one row of pixels, in all frames.
struct GroupNormSilu {
  Dtype dtype;
  bool silu;
  Video x;
  Results results;
  int64_t padded;       // C, padded
  const float* scale;   // [B * T, padded]
  const float* offset;  // [B * T, padded]
};

// Task: `block` values of a row.
struct SiluMul {
  Dtype dtype;
  Rows x, gate, out;
  int64_t block;
};

// Task: `block` values of a frame, a multiple of `period`.
struct BiasResidual {
  Dtype dtype;
  Video x, residual, out;      // `residual.data` may be null
  const float* bias;           // null, or `period` values: the C biases repeated
  const float* residual_bias;  // as `bias`
  int64_t period, block;
};

// Task: a row of pixels of `x`.
struct InterleaveTime {
  Video x, out;
  int64_t phases;
};

// Task: a row of pixels of the small picture, in one frame of `source` (of `grid` without one).
struct MergePhases {
  Dtype dtype;
  Video grid, source, out;  // `source.data` may be null
  const float* bias;        // null or padded
  int64_t times, first;     // frame `times * t + p - first` of `grid` is of frame t of `source`
};

// Strides of c, t, h and w in the channels of `x`, in elements.
struct Nest {
  int64_t c, t, h, w;
};

// Task: a row of pixels of `x`.
struct PixelShuffle3d {
  Video x, out;
  int64_t times, high, wide;
  Nest nest;
};

// Task: a row of pixels of `out`.
struct AverageDown {
  Dtype dtype;
  Video x, out;
  int64_t times, size, missing;
};

// Task: with patch > 1 a row of pixels of `frames`, otherwise `block` values of a frame.
struct FramesToImages {
  Dtype dtype, out_dtype;
  Video frames, out;
  int64_t patch, block;
  Nest nest;
  float white;  // the value of 1.0 in integers
};

// The ops, compiled for one instruction set.
struct Kernels {
  const char* name;
  void (*rms_norm_silu)(const RmsNormSilu&, int64_t begin, int64_t end);
  void (*group_norm_sums)(const GroupNormSums&, int64_t begin, int64_t end);
  void (*group_norm_silu)(const GroupNormSilu&, int64_t begin, int64_t end);
  void (*silu_mul)(const SiluMul&, int64_t begin, int64_t end);
  void (*bias_residual)(const BiasResidual&, int64_t begin, int64_t end);
  void (*interleave_time)(const InterleaveTime&, int64_t begin, int64_t end);
  void (*merge_phases)(const MergePhases&, int64_t begin, int64_t end);
  void (*pixel_shuffle_3d)(const PixelShuffle3d&, int64_t begin, int64_t end);
  void (*average_down)(const AverageDown&, int64_t begin, int64_t end);
  void (*frames_to_images)(const FramesToImages&, int64_t begin, int64_t end);
};

// Null if the sources are compiled for other processors.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace fast_video_vae
