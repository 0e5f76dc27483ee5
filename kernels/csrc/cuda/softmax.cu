// Softmax of rows of scores in float32, rounded to the dtype that the next product reads.
#include "numbers.cuh"
#include "sums.cuh"

namespace fast_video_vae {

// `exp(scores - max) / sum(exp(scores - max)) * factor`.
struct Softmax {
  const float* scores;
  T* weights;
  uint32 rows;
  int columns;
  float factor;
};

namespace {

// Packs of a row that each thread keeps in registers. The rest of a longer row is read again, from
// the cache.
constexpr int kHeld = 4;

}  // namespace

// An item is a row.
FVV_KERNEL weigh_rows(const Softmax op) {
  constexpr int kStep = kThreads * N;
  const int first = threadIdx.x * N, rest = first + kHeld * kStep;
  for (uint32 item = blockIdx.x; item < op.rows; item += gridDim.x) {
    const float* scores = op.scores + static_cast<int64>(item) * op.columns;
    T* weights = op.weights + static_cast<int64>(item) * op.columns;
    Floats held[kHeld];
    float largest = -__int_as_float(0x7f800000);
    const auto raise = [&](const Floats& pack) {
#pragma unroll
      for (int i = 0; i < N; ++i) largest = pack.numbers[i] > largest ? pack.numbers[i] : largest;
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (first + k * kStep < op.columns) held[k] = load<Floats>(scores + first + k * kStep);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (first + k * kStep < op.columns) raise(held[k]);
    }
#pragma unroll 1
    for (int at = rest; at < op.columns; at += kStep) raise(load<Floats>(scores + at));
    largest = largest_of_block(largest);

    float sum = 0;
    const auto grow = [&](Floats& pack) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum += pack.numbers[i] = __expf(pack.numbers[i] - largest);
    };
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (first + k * kStep < op.columns) grow(held[k]);
    }
#pragma unroll 1
    for (int at = rest; at < op.columns; at += kStep) {
      Floats pack = load<Floats>(scores + at);
      grow(pack);
    }
    const float factor = op.factor / sum_of_block(sum);

#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int at = first + k * kStep;
      if (at >= op.columns) break;
#pragma unroll
      for (int i = 0; i < N; ++i) held[k].numbers[i] *= factor;
      store(weights + at, narrow<T>(held[k].numbers));
    }
#pragma unroll 1
    for (int at = rest; at < op.columns; at += kStep) {
      Floats pack = load<Floats>(scores + at);
      grow(pack);
#pragma unroll
      for (int i = 0; i < N; ++i) pack.numbers[i] *= factor;
      store(weights + at, narrow<T>(pack.numbers));
    }
  }
}

}  // namespace fast_video_vae
