// Root mean square norms of rows. A team of lanes, a power of two up to a warp, reads a row once,
// sums the squares by shuffles, and writes it.
#include "launch.cuh"
#include "window.cuh"

namespace fast_video_vae_cuda {
namespace {

// Packs of a row that each lane keeps in registers. The rest of a longer row is read twice, the
// second time from the cache.
constexpr int kHeld = 4;

// The eps of `torch.nn.functional.normalize`.
constexpr float kFloor = 1e-12f;

template <class P>
__device__ __forceinline__ void biased(const RmsNormSilu& op, const P& pack, int channel,
                                       float (&v)[P::kCount]) {
  widen(pack, v);
  if (!op.bias.data) return;
  float bias[P::kCount];
  widen<typename P::Number>(op.bias, channel, bias);
#pragma unroll
  for (int i = 0; i < P::kCount; ++i) v[i] += bias[i];
}

template <class P>
__device__ __forceinline__ float squares(const RmsNormSilu& op, const P& pack, int channel) {
  float v[P::kCount], sum = 0;
  biased(op, pack, channel, v);
#pragma unroll
  for (int i = 0; i < P::kCount; ++i) sum += v[i] * v[i];
  return sum;
}

template <class P>
__device__ __forceinline__ P scaled(const RmsNormSilu& op, const P& pack, int channel, float inverse) {
  float v[P::kCount], scale[P::kCount];
  biased(op, pack, channel, v);
  widen<typename P::Number>(op.scale, channel, scale);
#pragma unroll
  for (int i = 0; i < P::kCount; ++i) v[i] = v[i] * inverse * (scale[i] * op.factor);
  if (op.silu) silu(v);
  return narrow<typename P::Number>(v);
}

// Block: a column of teams. Grid: blocks of pixels, frames, videos.
template <class P>
__global__ void __launch_bounds__(kThreads, kBlocks) norm_rows(const RmsNormSilu op) {
  using T = typename P::Number;
  const int channels = static_cast<int>(op.x.channels), step = blockDim.x * P::kCount;
  const int first = threadIdx.x * P::kCount;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int frame = blockIdx.y;
  const int64_t video = blockIdx.z;
  // Rows after the last have no channels, but their lanes take part in the shuffles.
  const int end = row < op.x.pixels ? channels : 0;
  const T* x = static_cast<const T*>(op.x.data) + video * op.x.batch_stride +
               frame * op.x.frame_stride + row * op.x.row_stride;

  auto at = window<T>(op.x, op.tail, op.out, video, frame);
  at.out += row * op.out.row_stride;
  at.tail += row * op.tail.row_stride;
  if (at.last >= 0) {
#pragma unroll 1
    for (int channel = first; channel < end; channel += step) roll<P>(at, channel);
  }
  P held[kHeld];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int channel = first + k * step;
    if (channel < end) held[k] = load<P>(x + channel);
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int channel = first + k * step;
    if (channel < end) sum += squares(op, held[k], channel);
  }
#pragma unroll 1
  for (int channel = first + kHeld * step; channel < end; channel += step) {
    sum += squares(op, load<P>(x + channel), channel);
  }
  for (int distance = blockDim.x / 2; distance; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  float norm = sqrtf(sum);
  norm = norm < kFloor ? kFloor : norm;  // not fmaxf, which drops NaN
  const float inverse = 1.0f / norm;

  T* out = at.out + (at.known + frame) * at.out_frame;
  T* tail = at.tail + at.last * at.tail_frame;
  const auto write = [&](const P& pack, int channel) {
    const P y = scaled(op, pack, channel, inverse);
    store(out + channel, y);
    if (at.last >= 0) store(tail + channel, y);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int channel = first + k * step;
    if (channel < end) write(held[k], channel);
  }
#pragma unroll 1
  for (int channel = first + kHeld * step; channel < end; channel += step) {
    write(load<P>(x + channel), channel);
  }
}

}  // namespace

const char* rms_norm_silu(const RmsNormSilu& op, cudaStream_t stream) {
  const auto start = [&](auto pack) {
    using P = decltype(pack);
    unsigned team = 1;
    while (team < kWarp && team * kHeld * P::kCount < op.x.channels) team *= 2;
    const dim3 block(team, kThreads / team);
    const dim3 grid(static_cast<unsigned>(ceil_div(op.x.pixels, block.y)),
                    static_cast<unsigned>(op.x.frames), static_cast<unsigned>(op.x.batch));
    return launch(norm_rows<P>, grid, block, stream, op);
  };
  return message_of(by_pack_of(op.dtype, start, op.x, op.tail, op.out, op.scale, op.bias));
}

}  // namespace fast_video_vae_cuda
