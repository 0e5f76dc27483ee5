// The gate of SwiGLU: each thread computes a pack of some rows.
#include "launch.cuh"

namespace fast_video_vae_cuda {
namespace {

// Rows that a thread reads before it writes: two loads per row are in flight.
constexpr int kRows = 2;

template <class P>
__device__ __forceinline__ P gated(const P& x, const P& gate) {
  float v[P::kCount], g[P::kCount];
  widen(x, v);
  widen(gate, g);
#pragma unroll
  for (int i = 0; i < P::kCount; ++i) v[i] = silu(v[i]) * g[i];
  return narrow<typename P::Number>(v);
}

// Block: packs of a row by rows. Grid: blocks of rows, blocks of packs.
template <class P>
__global__ void __launch_bounds__(kThreads, kBlocks) gate_rows(const SiluMul op) {
  using T = typename P::Number;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y * kRows + threadIdx.y;
  const int64_t step = static_cast<int64_t>(gridDim.y) * blockDim.x * P::kCount;
  int64_t channel = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * P::kCount;
  for (; channel < op.x.channels; channel += step) {
    P x[kRows], gate[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t mine = row + k * blockDim.y;
      if (mine >= op.x.pixels) continue;
      x[k] = load<P>(static_cast<const T*>(op.x.data) + mine * op.x.row_stride + channel);
      gate[k] = load<P>(static_cast<const T*>(op.gate.data) + mine * op.gate.row_stride + channel);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int64_t mine = row + k * blockDim.y;
      if (mine >= op.x.pixels) continue;
      store(static_cast<T*>(op.out.data) + mine * op.out.row_stride + channel,
            gated(x[k], gate[k]));
    }
  }
}

}  // namespace

const char* silu_mul(const SiluMul& op, cudaStream_t stream) {
  const auto start = [&](auto pack) {
    using P = decltype(pack);
    const int64_t packs = op.x.channels / P::kCount;
    const unsigned wide = static_cast<unsigned>(packs < kThreads ? packs : kThreads);
    const int64_t parts = ceil_div(packs, wide);
    const dim3 block(wide, kThreads / wide);
    const dim3 grid(static_cast<unsigned>(ceil_div(op.x.pixels, block.y * kRows)),
                    static_cast<unsigned>(parts < kGridLimit ? parts : kGridLimit));
    return launch(gate_rows<P>, grid, block, stream, op);
  };
  return message_of(by_pack_of(op.dtype, start, op.x, op.gate, op.out));
}

}  // namespace fast_video_vae_cuda
