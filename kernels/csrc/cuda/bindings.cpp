// The ops as PyTorch sees them. Results are arguments, so that a dispatch mode sees one op per
// call; the stream is an argument, so that this compiles with any build of PyTorch. cuda_ops/
// refuses unsupported layouts; the checks here protect direct calls through torch.ops.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>

#include "ops.h"

namespace fast_video_vae_cuda {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Pixels of a frame are counted in 31 bits; channels have one bit less for sums with an offset.
constexpr int64_t kCountLimit = std::numeric_limits<int32_t>::max();
constexpr int64_t kChannelLimit = int64_t(1) << 30;

// Fewest pixels of a chunk: with fewer, its two values per channel would be a relevant cost.
constexpr int64_t kShare = 256;

Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return Dtype::float32;
    case at::kBFloat16: return Dtype::bfloat16;
    case at::kHalf: return Dtype::float16;
    default: TORCH_CHECK(false, "expected float32, bfloat16 or float16, got ", x.scalar_type());
  }
}

void check_alike(const Tensor& x, const Tensor& like) {
  TORCH_CHECK(x.scalar_type() == like.scalar_type() && x.device() == like.device(),
              "dtypes or devices do not fit");
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
  check_alike(x, like);
  TORCH_CHECK(x.dim() == 5 && (x.numel() == 0 || dense(x.sizes(), x.strides(), {3, 4, 1})),
              "not channels-last");
  Video v;
  v.data = x.data_ptr();
  v.batch = x.size(0);
  v.channels = x.size(1);
  v.frames = x.size(2);
  v.height = x.size(3);
  v.width = x.size(4);
  v.pixels = v.height * v.width;
  v.batch_stride = v.batch > 1 ? x.stride(0) : 0;
  v.frame_stride = v.frames > 1 ? x.stride(2) : 0;
  v.row_stride = v.channels;
  TORCH_CHECK(v.batch <= kGridLimit && v.frames <= kGridLimit && v.pixels <= kCountLimit,
              "more than a grid counts");
  return v;
}

Video maybe_video_of(const MaybeTensor& x, const Tensor& like) {
  return x.has_value() ? video_of(*x, like) : Video();
}

// Rows of `[..., C]` with one common stride, treated as the pixels of a frame.
Video rows_of(const Tensor& x, const Tensor& like) {
  check_alike(x, like);
  TORCH_CHECK(x.sizes() == like.sizes() && x.numel() > 0, "sizes do not fit");
  const int64_t last = x.dim() - 1;
  TORCH_CHECK(x.size(last) == 1 || x.stride(last) == 1, "the last dimension is not dense");
  Video v;
  v.data = x.data_ptr();
  v.batch = v.frames = v.height = 1;
  v.channels = x.size(last);
  v.width = v.pixels = x.numel() / v.channels;
  int64_t run = 1;
  for (int64_t dim = last - 1; dim >= 0; --dim) {
    if (x.size(dim) == 1) continue;
    if (run == 1) v.row_stride = x.stride(dim);
    TORCH_CHECK(x.stride(dim) == run * v.row_stride, "the rows have no common stride");
    run *= x.size(dim);
  }
  TORCH_CHECK(v.pixels <= kCountLimit, "more rows than a grid counts");
  return v;
}

void check_size(const Video& x, int64_t batch, int64_t channels, int64_t frames, int64_t height,
                int64_t width) {
  TORCH_CHECK(x.batch == batch && x.channels == channels && x.frames == frames &&
                  x.height == height && x.width == width,
              "sizes do not fit");
}

Vector vector_of(const Tensor& values, const Tensor& like, int64_t count) {
  const bool wide = values.scalar_type() == at::kFloat;
  TORCH_CHECK((wide || values.scalar_type() == like.scalar_type()) && values.is_contiguous() &&
                  values.numel() == count && values.device() == like.device(),
              "parameters do not fit");
  return {values.const_data_ptr(), wide};
}

// Launches the kernels of an op.
template <class Op>
void start(const char* (*kernels)(const Op&, cudaStream_t), const Op& op, int64_t stream) {
  const char* error = kernels(op, reinterpret_cast<cudaStream_t>(stream));
  TORCH_CHECK(!error, "a kernel did not start: ", error);
}

void rms_norm_silu(const Tensor& x, const Tensor& gamma, bool silu, const MaybeTensor& bias,
                   const MaybeTensor& tail, const Tensor& out, int64_t stream) {
  RmsNormSilu op{};
  op.dtype = dtype_of(x);
  op.silu = silu;
  op.x = video_of(x, x);
  op.tail = maybe_video_of(tail, x);
  op.out = video_of(out, x);
  const Video& v = op.x;
  TORCH_CHECK(x.numel() > 0 && v.channels < kChannelLimit, "sizes do not fit");
  if (tail) check_size(op.tail, v.batch, v.channels, op.tail.frames, v.height, v.width);
  check_size(op.out, v.batch, v.channels, v.frames + op.tail.frames, v.height, v.width);
  op.scale = vector_of(gamma, x, v.channels);
  if (bias) op.bias = vector_of(*bias, x, v.channels);
  op.factor = std::sqrt(static_cast<float>(v.channels));
  start(fast_video_vae_cuda::rms_norm_silu, op, stream);
}

// The split depends on the size only, so two calls are bit-identical.
void split(GroupNormSilu& op) {
  op.share = std::max(kShare, ceil_div(op.x.pixels, kChunks));
  op.chunks = ceil_div(op.x.pixels, op.share);
}

float* statistics_of(const Tensor& statistics, const Tensor& x, int64_t frames, int64_t groups) {
  TORCH_CHECK(statistics.scalar_type() == at::kFloat && statistics.is_contiguous() &&
                  statistics.device() == x.device() && statistics.numel() == frames * 2 * groups,
              "statistics do not fit");
  return statistics.data_ptr<float>();
}

void group_norm_silu(const Tensor& x, const Tensor& weight, const Tensor& bias, int64_t groups,
                     double eps, bool silu, const MaybeTensor& statistics,
                     const MaybeTensor& tail, const Tensor& out, int64_t stream) {
  GroupNormSilu op{};
  op.dtype = dtype_of(x);
  op.silu = silu;
  op.x = video_of(x, x);
  op.tail = maybe_video_of(tail, x);
  op.out = video_of(out, x);
  const Video& v = op.x;
  TORCH_CHECK(x.numel() > 0 && v.channels < kChannelLimit, "sizes do not fit");
  TORCH_CHECK(groups > 0 && v.channels % groups == 0, "groups do not fit");
  if (tail) check_size(op.tail, v.batch, v.channels, op.tail.frames, v.height, v.width);
  check_size(op.out, v.batch, v.channels, v.frames + op.tail.frames, v.height, v.width);
  op.weight = vector_of(weight, x, v.channels);
  op.bias = vector_of(bias, x, v.channels);
  op.groups = static_cast<int>(groups);
  op.eps = static_cast<float>(eps);
  const int64_t frames = v.batch * v.frames, affine = frames * 2 * v.channels;
  if (statistics) op.given = statistics_of(*statistics, x, frames, groups);
  split(op);
  const int64_t partial = statistics ? 0 : affine * op.chunks;
  const Tensor memory = at::empty({affine + partial}, x.options().dtype(at::kFloat));
  op.affine = memory.data_ptr<float>();
  op.partial = op.affine + affine;
  start(fast_video_vae_cuda::group_norm_silu, op, stream);
}

void group_norm_statistics(const Tensor& x, int64_t groups, double eps, const Tensor& out,
                           int64_t stream) {
  GroupNormSilu op{};
  op.dtype = dtype_of(x);
  op.x = video_of(x, x);
  const Video& v = op.x;
  TORCH_CHECK(x.numel() > 0 && v.channels < kChannelLimit, "sizes do not fit");
  TORCH_CHECK(groups > 0 && v.channels % groups == 0, "groups do not fit");
  op.groups = static_cast<int>(groups);
  op.eps = static_cast<float>(eps);
  const int64_t frames = v.batch * v.frames;
  op.statistics = statistics_of(out, x, frames, groups);
  split(op);
  const Tensor memory =
      at::empty({frames * 2 * v.channels * op.chunks}, x.options().dtype(at::kFloat));
  op.partial = memory.data_ptr<float>();
  start(fast_video_vae_cuda::group_norm_statistics, op, stream);
}

void silu_mul(const Tensor& x, const Tensor& gate, const Tensor& out, int64_t stream) {
  const SiluMul op{dtype_of(x), rows_of(x, x), rows_of(gate, x), rows_of(out, x)};
  start(fast_video_vae_cuda::silu_mul, op, stream);
}

#define FVV_QUOTE_(text) #text
#define FVV_QUOTE(text) FVV_QUOTE_(text)

// Device of the kernels: the CPU in the tests, which emulate a GPU.
#ifndef FVV_DISPATCH_KEY
#define FVV_DISPATCH_KEY CUDA
#endif

TORCH_LIBRARY(fast_video_vae_cuda, m) {
  m.def("rms_norm_silu(Tensor x, Tensor gamma, bool silu, Tensor? bias, Tensor(a!)? tail, "
        "Tensor(b!) out, int stream) -> ()");
  m.def("group_norm_silu(Tensor x, Tensor weight, Tensor bias, int groups, float eps, bool silu, "
        "Tensor? statistics, Tensor(a!)? tail, Tensor(b!) out, int stream) -> ()");
  m.def("group_norm_statistics(Tensor x, int groups, float eps, Tensor(a!) out, int stream) -> ()");
  m.def("silu_mul(Tensor x, Tensor gate, Tensor(a!) out, int stream) -> ()");
  // The hash of these sources; see build.py.
  m.def("key() -> str", [] { return std::string(FVV_QUOTE(FVV_KEY)); });
}

TORCH_LIBRARY_IMPL(fast_video_vae_cuda, FVV_DISPATCH_KEY, m) {
  m.impl("rms_norm_silu", rms_norm_silu);
  m.impl("group_norm_silu", group_norm_silu);
  m.impl("group_norm_statistics", group_norm_statistics);
  m.impl("silu_mul", silu_mul);
}

}  // namespace
}  // namespace fast_video_vae_cuda
