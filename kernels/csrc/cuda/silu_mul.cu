// The gate of SwiGLU: `x * sigmoid(x) * gate`, for rows with one common stride.
#include "frames.cuh"

namespace fast_video_vae {

struct SiluMul {
  const T *x, *gate;
  T* out;
  int64 x_row, gate_row, out_row;
  uint32 items, packs;  // packs of all rows
  Divisor row;          // packs of a row
};

namespace {

// Packs that a thread reads of each tensor before it writes.
constexpr int kEach = 2;

}  // namespace

FVV_KERNEL gate_rows(const SiluMul op) {
  for (uint32 item = blockIdx.x; item < op.items; item += gridDim.x) {
    const uint32 first = item * (kEach * kThreads) + threadIdx.x;
    Pack x[kEach], gate[kEach];
    int64 row[kEach];
    int channel[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const uint32 pack = first + k * kThreads;
      if (pack >= op.packs) break;
      const uint32 number = divide(pack, op.row);
      row[k] = number;
      channel[k] = static_cast<int>(pack - number * op.row.by) * N;
      x[k] = load<Pack>(op.x + row[k] * op.x_row + channel[k]);
      gate[k] = load<Pack>(op.gate + row[k] * op.gate_row + channel[k]);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + k * kThreads >= op.packs) break;
      float v[N], g[N];
      widen(x[k], v);
      widen(gate[k], g);
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = silu(v[i]) * g[i];
      store(op.out + row[k] * op.out_row + channel[k], narrow<T>(v));
    }
  }
}

}  // namespace fast_video_vae
