// The ops as PyTorch sees them, with the arguments of `SIGNATURES` (backends.py). native_ops/
// refuses unsupported layouts; the checks here protect direct calls through torch.ops.
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ops.h"

namespace fast_video_vae {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// The fastest instruction set of the machine, as PyTorch detects it, because the compilers' own
// detection needs a library on Windows. FAST_VIDEO_VAE_ISA lowers it, for tests.
const Kernels& kernels() {
  static const Kernels& chosen = [&]() -> const Kernels& {
    const std::string best = at::get_cpu_capability();
    const Kernels* avx512 = best == "AVX512" ? avx512_kernels() : nullptr;
    const Kernels* avx2 = best == "AVX512" || best == "AVX2" ? avx2_kernels() : nullptr;
    const char* wanted = std::getenv("FAST_VIDEO_VAE_ISA");
    for (const Kernels* some : {avx512, avx2}) {
      if (some && (!wanted || std::string(wanted) == some->name)) return *some;
    }
    return *generic_kernels();
  }();
  return chosen;
}

// Values below which a second thread costs more than it saves: the grain size of PyTorch's own ops.
constexpr int64_t kGrain = 32768;

// Distributes tasks over PyTorch's threads.
template <class Op>
void spread(void (*kernel)(const Op&, int64_t, int64_t), const Op& op, int64_t tasks,
            int64_t numbers) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, numbers));
#ifdef INTRA_OP_PARALLEL
  // Not at::parallel_for: its first call from this library in a thread would set the number of
  // threads to the default again, which a thread with a number of its own has changed.
  if (tasks <= 0) return;
  const int threads = at::get_num_threads();  // sets the default in a thread that has no number
  if (tasks <= grain || threads == 1 || at::in_parallel_region()) {
    return kernel(op, 0, tasks);
  }
  at::internal::invoke_parallel(0, tasks, grain, [&](int64_t begin, int64_t end) {
    c10::ParallelGuard guard(true);
    kernel(op, begin, end);
  });
#else
  // PyTorch's threads are those of OpenMP, which this compiler (on macOS or Windows) lacks.
  const int64_t count = std::min<int64_t>(at::get_num_threads(), ceil_div(tasks, grain));
  const int64_t share = count ? ceil_div(tasks, count) : 0;
  std::vector<std::thread> others;
  for (int64_t begin = share; begin < tasks; begin += share) {
    others.emplace_back([&, begin] { kernel(op, begin, std::min(tasks, begin + share)); });
  }
  kernel(op, 0, std::min(tasks, share));
  for (std::thread& other : others) other.join();
#endif
}

Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Dtype::float32;
    case at::kBFloat16: return Dtype::bfloat16;
    case at::kHalf: return Dtype::float16;
    default: TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", x.scalar_type());
  }
}

// Whether dimensions are contiguous, the last one fastest.
bool dense(at::IntArrayRef sizes, at::IntArrayRef strides, std::initializer_list<int> dims) {
  int64_t run = 1;
  for (auto dim = dims.end(); dim-- != dims.begin();) {
    if (sizes[*dim] > 1 && strides[*dim] != run) return false;
    run *= sizes[*dim];
  }
  return true;
}

Video video_of(const Tensor& x, const Tensor& like) {
  TORCH_CHECK(x.dim() == 5 && x.scalar_type() == like.scalar_type());
  TORCH_CHECK(x.numel() == 0 || dense(x.sizes(), x.strides(), {3, 4, 1}), "not channels-last");
  const int64_t item = x.element_size();
  return {static_cast<char*>(x.data_ptr()), x.size(0), x.size(1), x.size(2), x.size(3), x.size(4),
          x.stride(0) * item, x.stride(2) * item, item};
}

Video maybe_video_of(const MaybeTensor& x, const Tensor& like) {
  return x.has_value() ? video_of(*x, like) : Video();
}

void check_size(const Video& x, int64_t batch, int64_t channels, int64_t frames, int64_t height,
                int64_t width) {
  TORCH_CHECK(x.batch == batch && x.channels == channels && x.frames == frames &&
                  x.height == height && x.width == width,
              "sizes do not fit");
}

void check_like(const Video& x, const Video& like) {
  check_size(x, like.batch, like.channels, like.frames, like.height, like.width);
}

Rows rows_of(const Tensor& x, const Tensor& like) {
  TORCH_CHECK(x.sizes() == like.sizes() && x.scalar_type() == like.scalar_type());
  const int64_t last = x.dim() - 1, channels = x.size(last);
  Rows rows{static_cast<char*>(x.data_ptr()), channels ? x.numel() / channels : 0, channels, 0};
  if (x.numel() == 0) return rows;
  TORCH_CHECK(channels == 1 || x.stride(last) == 1, "the last dimension is not dense");
  int64_t run = 1;
  for (int64_t dim = last - 1; dim >= 0; --dim) {
    if (x.size(dim) == 1) continue;
    if (run == 1) rows.stride = x.stride(dim);
    TORCH_CHECK(x.stride(dim) == run * rows.stride, "the rows have no common stride");
    run *= x.size(dim);
  }
  rows.stride *= x.element_size();
  return rows;
}

// Replaces a NaN by the standard one, which rounding to bfloat16 keeps.
float usual(float value) {
  return std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value;
}

// Parameters times a factor, repeated `times` times, padded with zeros.
std::vector<float> padded(const Tensor& values, int64_t count, float factor = 1,
                          int64_t times = 1) {
  TORCH_CHECK(values.scalar_type() == at::kFloat && values.is_contiguous() &&
              values.numel() == count);
  std::vector<float> result(ceil_div(count * times, kPadding) * kPadding);
  const float* from = values.data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) result[i] = usual(from[i]) * factor;
  for (int64_t i = count; i < count * times; ++i) result[i] = result[i - count];
  return result;
}

// The result of a norm of `x`; `steps` is memory for the codes.
Results results_of(const Video& x, const Tensor& like, const MaybeTensor& tail, int64_t border,
                   const MaybeTensor& codes, const MaybeTensor& saturated, const Tensor& out,
                   std::vector<float>& steps) {
  Results results;
  results.tail = maybe_video_of(tail, out);
  results.out = video_of(out, out);
  results.border = border;
  const int64_t known = results.tail.frames;
  TORCH_CHECK(border >= 0);
  if (tail) check_size(results.tail, x.batch, x.channels, known, x.height, x.width);
  check_size(results.out, x.batch, x.channels, x.frames + known, x.height + 2 * border,
             x.width + 2 * border);
  TORCH_CHECK(codes.has_value() == saturated.has_value());
  if (!codes) {
    TORCH_CHECK(out.scalar_type() == like.scalar_type());
    return results;
  }
  results.is_signed = out.scalar_type() == at::kChar;
  TORCH_CHECK(results.is_signed || out.scalar_type() == at::kByte);
  TORCH_CHECK(saturated->scalar_type() == at::kLong && saturated->is_contiguous() &&
              saturated->numel() == 2);
  steps = padded(*codes, x.channels);
  results.codes = steps.data();
  results.saturated = saturated->data_ptr<int64_t>();
  results.zero = results.is_signed ? kZeroCode - 128 : kZeroCode;
  return results;
}

void rms_norm_silu(const Tensor& x, const Tensor& gamma, const MaybeTensor& bias,
                   const MaybeTensor& tail, const Tensor& out, const MaybeTensor& codes,
                   const MaybeTensor& saturated, bool silu, int64_t border) {
  std::vector<float> steps;
  RmsNormSilu op{};
  op.dtype = dtype_of(x);
  op.silu = silu;
  op.x = video_of(x, x);
  op.results = results_of(op.x, x, tail, border, codes, saturated, out, steps);
  const Video& v = op.x;
  const auto scale = padded(gamma, v.channels, std::sqrt(static_cast<float>(v.channels)));
  op.scale = scale.data();
  std::vector<float> offset;
  if (bias) offset = padded(*bias, v.channels);
  op.bias = bias ? offset.data() : nullptr;
  // A block of a frame is about 16 to 32 KB, so that it stays in the first caches.
  op.rows = std::max<int64_t>(1, 8192 / std::max<int64_t>(1, v.channels));
  const int64_t tasks = v.batch * ceil_div(v.pixels(), op.rows);
  spread(kernels().rms_norm_silu, op, tasks, op.rows * v.channels * op.results.out.frames);
}

// Converts sums over the pixels of a frame to the mean and 1 / sqrt(var + eps) of each group.
void finish_statistics(const GroupNormSums& op, int64_t frame, int64_t groups, double eps,
                       float* means, float* inverses) {
  const int64_t channels = op.x.channels, each = channels / groups;
  const double pixels = static_cast<double>(op.x.pixels());
  std::vector<double> mean(channels), deviation(channels);
  for (int64_t c = 0; c < channels; ++c) {
    double total = 0, squares = 0;
    for (int64_t chunk = 0; chunk < op.chunks; ++chunk) {
      const double* sums = op.sums + (frame * op.chunks + chunk) * 2 * channels;
      total += sums[c];
      squares += sums[channels + c];
    }
    mean[c] = op.shift[frame * op.padded + c] + total / pixels;
    deviation[c] = squares - total * (total / pixels);
  }
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t first = group * each;
    double center = 0, variance = 0;
    for (int64_t c = first; c < first + each; ++c) center += mean[c] / each;
    for (int64_t c = first; c < first + each; ++c) {
      variance += deviation[c] / pixels + (mean[c] - center) * (mean[c] - center);
    }
    variance = variance / each;
    means[group] = static_cast<float>(center);
    inverses[group] = static_cast<float>(1 / std::sqrt((variance < 0 ? 0 : variance) + eps));
  }
}

// `[B * T, 2, groups]`.
void measure(const Tensor& x, int64_t groups, double eps, float* statistics) {
  GroupNormSums op{};
  op.dtype = dtype_of(x);
  op.x = video_of(x, x);
  const Video& v = op.x;
  const int64_t frames = v.batch * v.frames;
  if (x.numel() == 0) {
    std::fill_n(statistics, frames * 2 * groups, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  op.padded = ceil_div(v.channels, kPadding) * kPadding;
  // The split depends on the size only, so the result is the same for any number of threads.
  op.rows = std::max<int64_t>(256, ceil_div(v.pixels(), 32));
  op.chunks = ceil_div(v.pixels(), op.rows);
  std::vector<double> sums(frames * op.chunks * 2 * v.channels);
  std::vector<float> shift(frames * op.padded);
  op.sums = sums.data();
  op.shift = shift.data();
  spread(kernels().group_norm_sums, op, frames * op.chunks, op.rows * v.channels);
  for (int64_t frame = 0; frame < frames; ++frame) {
    float* means = statistics + frame * 2 * groups;
    finish_statistics(op, frame, groups, eps, means, means + groups);
  }
}

// Checks and reads `[B, T, 2, groups]`.
float* statistics_of(const Tensor& statistics, const Tensor& x, int64_t groups) {
  TORCH_CHECK(groups > 0 && x.size(1) % groups == 0);
  TORCH_CHECK(statistics.scalar_type() == at::kFloat && statistics.is_contiguous() &&
              statistics.dim() == 4 && statistics.size(0) == x.size(0) &&
              statistics.size(1) == x.size(2) && statistics.size(2) == 2 &&
              statistics.size(3) == groups);
  return statistics.data_ptr<float>();
}

void group_norm_statistics(const Tensor& x, const Tensor& out, int64_t groups, double eps) {
  TORCH_CHECK(x.dim() == 5);
  measure(x, groups, eps, statistics_of(out, x, groups));
}

void group_norm_silu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                     const MaybeTensor& statistics, const MaybeTensor& tail, const Tensor& out,
                     const MaybeTensor& codes, const MaybeTensor& saturated, int64_t groups,
                     double eps, bool silu, int64_t border) {
  std::vector<float> steps;
  GroupNormSilu op{};
  op.dtype = dtype_of(x);
  op.silu = silu;
  op.x = video_of(x, x);
  op.results = results_of(op.x, x, tail, border, codes, saturated, out, steps);
  const Video& v = op.x;
  TORCH_CHECK(groups > 0 && v.channels % groups == 0);
  const int64_t frames = v.batch * v.frames, each = v.channels / groups;
  std::vector<float> own;
  const float* numbers = nullptr;
  if (statistics) {
    numbers = statistics_of(*statistics, x, groups);
  } else {
    own.resize(frames * 2 * groups);
    measure(x, groups, eps, own.data());
    numbers = own.data();
  }
  op.padded = ceil_div(v.channels, kPadding) * kPadding;
  std::vector<float> scale(frames * op.padded), offset(frames * op.padded);
  const auto weights = padded(weight, v.channels), biases = padded(bias, v.channels);
  for (int64_t frame = 0; frame < frames; ++frame) {
    for (int64_t c = 0; c < v.channels; ++c) {
      const float* mean = numbers + frame * 2 * groups + c / each;
      // The offset uses the rounded factor, so that a large mean does not magnify its error.
      const float factor = usual(weights[c] * mean[groups]);
      const double moved = static_cast<double>(*mean) * factor;
      scale[frame * op.padded + c] = factor;
      offset[frame * op.padded + c] = usual(static_cast<float>(biases[c] - moved));
    }
  }
  op.scale = scale.data();
  op.offset = offset.data();
  spread(kernels().group_norm_silu, op, v.batch * v.height,
         v.width * v.channels * op.results.out.frames);
}

void silu_mul(const Tensor& x, const Tensor& gate, const Tensor& out) {
  SiluMul op{dtype_of(x), rows_of(x, x), rows_of(gate, x), rows_of(out, x), 8192};
  if (x.is_contiguous() && gate.is_contiguous() && out.is_contiguous()) {
    for (Rows* rows : {&op.x, &op.gate, &op.out}) {
      rows->channels *= rows->count;
      rows->count = 1;
    }
  }
  op.block = std::min(op.block, std::max<int64_t>(1, op.x.channels));
  spread(kernels().silu_mul, op, op.x.count * ceil_div(op.x.channels, op.block), op.block);
}

void bias_residual(const Tensor& x, const MaybeTensor& bias, const MaybeTensor& residual,
                   const MaybeTensor& residual_bias, const Tensor& out) {
  BiasResidual op{dtype_of(x), video_of(x, x), maybe_video_of(residual, x), video_of(out, x)};
  const Video& v = op.x;
  check_like(op.out, v);
  if (residual) check_like(op.residual, v);
  if (v.channels == 0) return;
  // Few channels: enough pixels at a time for whole vectors, with the biases repeated for each.
  const int64_t times = kPadding / std::gcd(v.channels, kPadding);
  op.period = v.channels * times;
  op.block = ceil_div(8192, op.period) * op.period;
  std::vector<float> biases, more;
  if (bias) op.bias = (biases = padded(*bias, v.channels, 1, times)).data();
  if (residual_bias) {
    op.residual_bias = (more = padded(*residual_bias, v.channels, 1, times)).data();
  }
  const int64_t blocks = ceil_div(v.pixels() * v.channels, op.block);
  spread(kernels().bias_residual, op, v.batch * v.frames * blocks, op.block);
}

void interleave_time(const Tensor& x, const Tensor& out, int64_t phases) {
  const InterleaveTime op{video_of(x, x), video_of(out, x), phases};
  const Video& v = op.x;
  TORCH_CHECK(phases > 0 && v.channels % phases == 0);
  check_size(op.out, v.batch, v.channels / phases, v.frames * phases, v.height, v.width);
  spread(kernels().interleave_time, op, v.batch * v.frames * v.height, v.width * v.channels);
}

void merge_phases(const Tensor& grid, const MaybeTensor& source, const MaybeTensor& bias,
                  const Tensor& out, int64_t times) {
  MergePhases op{dtype_of(grid), video_of(grid, grid), maybe_video_of(source, grid),
                 video_of(out, grid), nullptr, times, 0};
  const Video& v = op.grid;
  TORCH_CHECK(v.channels % 4 == 0 && v.height > 0 && v.width > 0 && times > 0);
  check_size(op.out, v.batch, v.channels / 4, v.frames, 2 * v.height - 2, 2 * v.width - 2);
  std::vector<float> offset;
  if (bias) {
    offset = padded(*bias, v.channels / 4);
    op.bias = offset.data();
  }
  int64_t frames = v.frames;
  if (source) {
    const int64_t channels = op.source.channels;
    frames = v.frames == 1 ? 1 : v.frames / times;
    check_size(op.source, v.batch, channels, frames, v.height - 1, v.width - 1);
    TORCH_CHECK(v.frames == 1 || v.frames == frames * times);
    if (channels == 0) return;
    TORCH_CHECK(v.channels * times % channels == 0);
    if (v.frames == 1) op.first = times - 1;
  }
  spread(kernels().merge_phases, op, v.batch * frames * (v.height - 1),
         (v.width - 1) * v.channels * (source ? times : 1));
}

Nest nest_of(const std::string& order, int64_t c, int64_t t, int64_t h, int64_t w) {
  Nest nest{};
  int64_t distance = 1;
  for (auto letter = order.rbegin(); letter != order.rend(); ++letter) {
    switch (*letter) {
      case 'c': nest.c = distance; distance *= c; break;
      case 't': nest.t = distance; distance *= t; break;
      case 'h': nest.h = distance; distance *= h; break;
      case 'w': nest.w = distance; distance *= w; break;
      default: TORCH_CHECK(false, "order is ", order);
    }
  }
  TORCH_CHECK(nest.c && nest.t && nest.h && nest.w && order.size() == 4, "order is ", order);
  return nest;
}

void pixel_shuffle_3d(const Tensor& x, const Tensor& out, at::IntArrayRef size,
                      const std::string& order) {
  TORCH_CHECK(size.size() == 3);
  PixelShuffle3d op{video_of(x, x), video_of(out, x), size[0], size[1], size[2], {}};
  const Video& v = op.x;
  const int64_t parts = op.times * op.high * op.wide;
  TORCH_CHECK(op.times > 0 && op.high > 0 && op.wide > 0 && v.channels % parts == 0);
  TORCH_CHECK(v.item == 2 || v.item == 4);
  check_size(op.out, v.batch, v.channels / parts, op.times * v.frames, op.high * v.height,
             op.wide * v.width);
  if (v.channels == 0) return;
  op.nest = nest_of(order, op.out.channels, op.times, op.high, op.wide);
  spread(kernels().pixel_shuffle_3d, op, v.batch * v.frames * v.height, v.width * v.channels);
}

void average_down(const Tensor& x, const Tensor& out, int64_t times, int64_t size) {
  AverageDown op{dtype_of(x), video_of(x, x), video_of(out, x), times, size, 0};
  const Video& v = op.x;
  TORCH_CHECK(times > 0 && size > 0 && v.height % size == 0 && v.width % size == 0);
  const int64_t channels = op.out.channels;
  check_size(op.out, v.batch, channels, ceil_div(v.frames, times), v.height / size,
             v.width / size);
  if (out.numel() == 0) return;
  TORCH_CHECK(v.channels > 0 && v.channels * times * size * size % channels == 0);
  op.missing = op.out.frames * times - v.frames;
  spread(kernels().average_down, op, v.batch * op.out.frames * op.out.height,
         op.out.width * v.channels * times * size * size);
}

// `[B * T, H, W, C]` or `[B, T, H, W, C]` with dense pixels.
Video images_of(const Tensor& x, int64_t frames) {
  TORCH_CHECK(x.dim() == 4 || x.dim() == 5);
  const int64_t item = x.element_size();
  const int d = static_cast<int>(x.dim()) - 3;
  TORCH_CHECK(x.numel() == 0 || dense(x.sizes(), x.strides(), {d, d + 1, d + 2}),
              "pixels are not dense");
  Video v;
  v.data = static_cast<char*>(x.data_ptr());
  v.height = x.size(d);
  v.width = x.size(d + 1);
  v.channels = x.size(d + 2);
  v.item = item;
  v.frames = d == 2 ? x.size(1) : frames;
  v.batch = d == 2 || frames == 0 ? x.size(0) : x.size(0) / frames;
  v.frame_stride = x.stride(d - 1) * item;
  v.batch_stride = d == 2 ? x.stride(0) * item : frames * v.frame_stride;
  return v;
}

void frames_to_images(const Tensor& frames, const Tensor& out, int64_t patch,
                      const std::string& order) {
  FramesToImages op{};
  op.dtype = dtype_of(frames);
  op.white = 1;
  switch (out.scalar_type()) {
    case at::ScalarType::Byte: op.out_dtype = Dtype::uint8, op.white = 255; break;
    case at::ScalarType::UInt16: op.out_dtype = Dtype::uint16, op.white = 65535; break;
    default: op.out_dtype = dtype_of(out);
  }
  op.frames = video_of(frames, frames);
  op.out = images_of(out, frames.size(2));
  op.patch = patch;
  op.block = 8192;
  const Video& v = op.frames;
  TORCH_CHECK(op.out_dtype == Dtype::float32 || op.out_dtype == Dtype::uint8 ||
              op.out_dtype == Dtype::uint16);
  TORCH_CHECK(patch > 0 && v.channels % (patch * patch) == 0);
  if (out.numel() == 0) return;
  check_size(op.out, v.batch, v.channels / (patch * patch), v.frames, v.height * patch,
             v.width * patch);
  op.nest = nest_of(order, op.out.channels, 1, patch, patch);
  const int64_t numbers = v.pixels() * v.channels;
  const int64_t blocks = patch > 1 ? v.height : ceil_div(numbers, op.block);
  spread(kernels().frames_to_images, op, v.batch * v.frames * blocks, numbers / blocks);
}

// For meta tensors; the caller has set the shapes.
template <class... Args>
auto nothing(void (*)(Args...)) {
  return [](Args...) {};
}

#define FVV_EACH(DO)                                                                     \
  DO(rms_norm_silu, "(Tensor x, Tensor gamma, Tensor? bias, Tensor(a!)? tail, "          \
                    "Tensor(c!) out, Tensor? codes, Tensor(b!)? saturated, bool silu, "  \
                    "int border) -> ()")                                                 \
  DO(group_norm_silu, "(Tensor x, Tensor weight, Tensor bias, Tensor? statistics, "      \
                      "Tensor(a!)? tail, Tensor(c!) out, Tensor? codes, "                \
                      "Tensor(b!)? saturated, int groups, float eps, bool silu, "        \
                      "int border) -> ()")                                               \
  DO(group_norm_statistics, "(Tensor x, Tensor(a!) out, int groups, float eps) -> ()")   \
  DO(silu_mul, "(Tensor x, Tensor gate, Tensor(a!) out) -> ()")                          \
  DO(bias_residual, "(Tensor x, Tensor? bias, Tensor? residual, Tensor? residual_bias, " \
                    "Tensor(a!) out) -> ()")                                             \
  DO(interleave_time, "(Tensor x, Tensor(a!) out, int phases) -> ()")                    \
  DO(merge_phases, "(Tensor grid, Tensor? source, Tensor? bias, Tensor(a!) out, "        \
                   "int times) -> ()")                                                   \
  DO(pixel_shuffle_3d, "(Tensor x, Tensor(a!) out, int[3] size, str order) -> ()")       \
  DO(average_down, "(Tensor x, Tensor(a!) out, int times, int size) -> ()")              \
  DO(frames_to_images, "(Tensor frames, Tensor(a!) out, int patch, str order) -> ()")

#define FVV_DEFINE(op, schema) m.def(#op schema);
#define FVV_CPU(op, schema) m.impl(#op, op);
#define FVV_META(op, schema) m.impl(#op, nothing(op));

TORCH_LIBRARY_FRAGMENT(fast_video_vae, m) {
  FVV_EACH(FVV_DEFINE)
  m.def("isa() -> str", [] { return std::string(kernels().name); });
  // The hash of these sources; see build.py.
  m.def("key() -> str", [] { return std::string(FVV_QUOTE(FVV_KEY)); });
}

TORCH_LIBRARY_IMPL(fast_video_vae, CPU, m) { FVV_EACH(FVV_CPU) }

TORCH_LIBRARY_IMPL(fast_video_vae, Meta, m) { FVV_EACH(FVV_META) }

}  // namespace
}  // namespace fast_video_vae
