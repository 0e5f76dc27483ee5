// A convolution for sm_90a. One warpgroup loads boxes of pixels and of weights to stages of shared
// memory, two multiply them. A block does every `gridDim.x`-th tile.
//
// A tile is 16 x 16 pixels of a frame by `kWidth` output channels. Its sum runs over boxes: a frame
// of the window, a slab of input channels, and the pixels of the tile with the halo of the taps. A
// tap is another start of a box. Without shifts a box serves all taps of a frame; with them there
// is one for each column of taps. `cuda_ops/hopper_tile.py` has the sizes and the reasons.
#include "frames.cuh"
#include "hopper.cuh"

namespace fast_video_vae {

using V = FVV_VECTOR;  // the numbers of all vectors

struct HopperConv {
  TensorMap x, tail, weight;
  Video residual, out;  // `residual.data` may be null
  const V *bias, *residual_bias, *gamma;  // the first two may be null
  uint32 tiles;
  Divisor widths, frames, columns, rows;  // tiles of a pixel, of a place, in a row, in a column
  int height, width, outputs;             // of the result
  int inputs, known;                      // channels, and frames of the tail
  int top, left;                          // rows and columns of zeros in front of a frame
  float root;                             // of the number of output channels
};

namespace {

// Rows and columns of a tile, and of a block: a consumer has two, one below the other.
constexpr int kTile = 16, kSide = 8, kBlocks = 2;

// Threads of a warpgroup, warps of both consumers, input channels of a product.
constexpr int kGroup = 128, kWarps = 8, kDepth = 16;

// Boxes of weights for one of pixels; each has some of the taps.
constexpr int kSteps = FVV_BOX_TAPS / FVV_GROUP;

// Four lanes have the sums of a pixel: of each 8 channels two, first of one pixel, then of another.
// The epilogue does parts of 32 channels.
constexpr int kQuad = 4, kPart = kQuad * N, kHeld = 4 * kQuad;
constexpr bool kAhead = kWidth < 192;  // registers are left for the next part of the residual

using Two = PackOf<T, 2>;
using Floats2 = PackOf<float, 2>;
using Words = PackOf<uint32, 4>;  // a pack whose numbers are not looked at
using Sums = float[kBlocks][kSums];

struct Tile {
  int channel, frame, x, y, video;  // the first of each
};

__device__ __forceinline__ Tile tile_of(const HopperConv& op, uint32 number) {
  const uint32 a = divide(number, op.widths), b = divide(a, op.frames);
  const uint32 c = divide(b, op.columns), d = divide(c, op.rows);
  return {static_cast<int>(number - a * op.widths.by) * kWidth,
          static_cast<int>(a - b * op.frames.by), static_cast<int>(b - c * op.columns.by) * kTile,
          static_cast<int>(c - d * op.rows.by) * kTile, static_cast<int>(d)};
}

// Stages that are filled and emptied in turn; each has a barrier for either.
template <int kStages, int kBytes>
struct Ring {
  uint32 memory, barriers, stage = 0, phase = 0;

  __device__ __forceinline__ void create() const {
    for (int i = 0; i < kStages; ++i) {
      create_barrier(barriers + 16 * i, 1);
      create_barrier(barriers + 16 * i + 8, kWarps);
    }
  }

  __device__ __forceinline__ uint32 here() const { return memory + stage * kBytes; }
  __device__ __forceinline__ uint32 full() const { return barriers + 16 * stage; }

  __device__ __forceinline__ void wait_full() const { wait(full(), phase); }
  __device__ __forceinline__ void wait_empty() const { wait(full() + 8, phase ^ 1); }

  // Gives the stage before the current one back; each warp does.
  __device__ __forceinline__ void release_last() const {
    const uint32 last = (stage ? stage : kStages) - 1;
    if (threadIdx.x % kWarp == 0) arrive(barriers + 16 * last + 8);
  }

  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

using Pixels = Ring<FVV_X_STAGES, FVV_X_BYTES>;
using Weights = Ring<FVV_W_STAGES, FVV_W_BYTES>;

// One thread loads all boxes of all tiles of the block.
__device__ __forceinline__ void load_tiles(const HopperConv& op, Pixels pixels, Weights weights) {
  for (uint32 number = blockIdx.x; number < op.tiles; number += gridDim.x) {
    const Tile tile = tile_of(op, number);
    for (int kt = 0; kt < FVV_FRAMES; ++kt) {
      const int frame = tile.frame + kt;
      const TensorMap& map = frame < op.known ? op.tail : op.x;
      const int moment = frame < op.known ? frame : frame - op.known;
      for (int channel = 0; channel < op.inputs; channel += FVV_SLAB) {
        for (int shift = 0; shift < FVV_SHIFTS; ++shift) {
          pixels.wait_empty();
          arrive(pixels.full(), FVV_X_EXPECTED);
          load_box(pixels.here(), map, pixels.full(), channel, tile.x - op.left + shift,
                   tile.y - op.top, moment, tile.video);
          int value = (kt * FVV_FRAME_TAPS + shift) * op.inputs + channel;
          for (int step = 0; step < kSteps; ++step) {
            weights.wait_empty();
            arrive(weights.full(), FVV_W_EXPECTED);
#pragma unroll 1
            for (int tap = 0; tap < FVV_GROUP; ++tap) {
              load_weight(weights.here() + tap * FVV_W_TAP, op.weight, weights.full(), value,
                          tile.channel);
              value += FVV_TAP_STEP * op.inputs;
            }
            weights.next();
          }
          pixels.next();
        }
      }
    }
  }
}

// A warp has 16 pixels by 32 channels in shared memory, where pairs of channels become packs of 8,
// and the reverse. Packs are permuted so that neither meets a bank twice.
template <class P>
__device__ __forceinline__ P* shared(int row, int pack, int part = 0) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp - kWarps / 2;
  const int pixel = (warp * 2 + row) * kSide + lane / kQuad;
  const int place = FVV_EXCHANGE + (pixel * kQuad + (pack ^ lane / 8)) * sizeof(Words);
  return reinterpret_cast<P*>(shared_memory + place) + part;
}

// Begins all sums with the biases of their channels.
__device__ __forceinline__ void begin(const float* biases, Sums& sums) {
#pragma unroll
  for (int i = 0; i < kSums; i += 4) {
    const auto two = load<Floats2>(biases + i / 4 * N);
    for (int n = 0; n < 4; ++n) sums[0][i + n] = sums[1][i + n] = two.numbers[n % 2];
  }
}

// Numbers of one word; those of bfloat16 are its halves.
template <class Number>
__device__ __forceinline__ Floats2 widen(const PackOf<Number, 2>& two) {
  return {widen(two.numbers[0]), widen(two.numbers[1])};
}

__device__ __forceinline__ Floats2 widen(const PackOf<bfloat16, 2>& two) {
  const uint32 word = load<uint32>(&two);
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
}

// Adds the residual, applies the norm, and writes 64 pixels, of which a thread has sums of two.
__device__ __forceinline__ void finish(const HopperConv& op, const Tile& tile, int left, int top,
                                       float (&sums)[kSums], const float* scales) {
  const int quad = threadIdx.x % kQuad, x = left + threadIdx.x % kWarp / kQuad;
  const int first = (top * op.width + x) * op.outputs + tile.channel + quad * N;
  const int step = op.width * op.outputs;
  const T* const residual = frame_of(op.residual, tile.video, tile.frame) + first;
  T* const out = frame_of(op.out, tile.video, tile.frame) + first;
  const bool exists[] = {x < op.width && top < op.height, x < op.width && top + 1 < op.height};
  const auto read = [&](int part, int row) {
    return exists[row] ? load<Words>(residual + row * step + part * kPart) : Words{};
  };
  const auto write = [&](int part) {
#pragma unroll
    for (int i = 0; i < 2 * kQuad; ++i) {
      const float* v = sums + part * kHeld + 2 * i;
      narrow(v[0], v[1], shared<Two>(i % 2, i / 2, quad)->numbers);
    }
    sync_warp();
    for (int row = 0; row < 2; ++row) {
      const Words pack = *shared<Words>(row, quad);
      if (exists[row]) store(out + row * step + part * kPart, pack);
    }
    sync_warp();
  };
  Words next[2];
  if (kAhead && op.residual.data) next[0] = read(0, 0), next[1] = read(0, 1);
#pragma unroll
  for (int part = 0; part < kWidth / kPart; ++part) {
    float* const v = sums + part * kHeld;
    if (op.residual.data) {
      for (int row = 0; row < 2; ++row) {
        *shared<Words>(row, quad) = kAhead ? next[row] : read(part, row);
        if (kAhead && part + 1 < kWidth / kPart) next[row] = read(part + 1, row);
      }
      sync_warp();
#pragma unroll
      for (int i = 0; i < 2 * kQuad; ++i) {
        const Floats2 two = widen(*shared<Two>(i % 2, i / 2, quad));
        v[2 * i] += two.numbers[0], v[2 * i + 1] += two.numbers[1];
      }
      sync_warp();
    }
    if (!FVV_NORM) write(part);
  }
  if constexpr (FVV_NORM) {
    float squares[2] = {};
#pragma unroll
    for (int i = 0; i < kSums; ++i) squares[i / 2 % 2] += sums[i] * sums[i];
    for (float& square : squares) {
      square += exchange(square, 1);
      square += exchange(square, 2);
      const float length = sqrtf(square);
      square = 1 / (length < 1e-12f ? 1e-12f : length);  // not fmaxf, which drops NaN
    }
#pragma unroll
    for (int part = 0; part < kWidth / kPart; ++part) {
#pragma unroll
      for (int i = 0; i < kHeld; i += 4) {
        float* const v = sums + part * kHeld + i;
        const auto scale = load<Floats2>(scales + part * kPart + i / 4 * N);
        for (int n = 0; n < 4; ++n) v[n] = gated(v[n] * squares[n / 2] * scale.numbers[n % 2]);
      }
      write(part);
    }
  }
}

// A consumer multiplies the boxes, and writes the 16 rows of its 8 columns.
__device__ __forceinline__ void multiply_tiles(const HopperConv& op, Pixels pixels, Weights weights,
                                               const float* vectors) {
  constexpr int offsets[] = {FVV_OFFSETS};
  const int thread = threadIdx.x % kGroup, side = uniform(threadIdx.x / kGroup) - 1;
  for (uint32 number = blockIdx.x; number < op.tiles; number += gridDim.x) {
    const Tile tile = tile_of(op, number);
    const int left = tile.x + side * kSide, y = tile.y + thread / kSide;
    const int count = op.width - left < kSide ? op.width - left : kSide;
    if (op.residual.data && thread % kSide == 0 && count > 0 && y < op.height) {
      const int at = (y * op.width + left) * op.outputs;
      prefetch(frame_of(op.residual, tile.video, tile.frame) + at, count * op.outputs * sizeof(T));
    }
    Sums sums;
    begin(vectors + tile.channel, sums);
    const int boxes = FVV_FRAMES * FVV_SHIFTS * (op.inputs / FVV_SLAB);
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      pixels.wait_full();
      const uint64 a = FVV_X_DESCRIPTOR + (pixels.here() >> 4) + side * FVV_X_SIDE;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        weights.wait_full();
        const uint64 b = FVV_W_DESCRIPTOR + (weights.here() >> 4);
        begin_group();
#pragma unroll
        for (int tap = 0; tap < FVV_GROUP; ++tap) {
          for (int k = 0; k < FVV_SLAB / kDepth; ++k) {
            for (int block = 0; block < kBlocks; ++block) {
              multiply(sums[block],
                       a + offsets[step * FVV_GROUP + tap] + block * FVV_X_BLOCK + k * FVV_K_STEP,
                       b + tap * (FVV_W_TAP >> 4) + k * FVV_K_STEP);
            }
          }
        }
        end_group();
        wait_groups<1>();
        // The group before this one is done.
        if (box | step) weights.release_last();
        if (box && !step) pixels.release_last();
        weights.next();
      }
      pixels.next();
    }
    wait_groups<0>();
    weights.release_last();
    pixels.release_last();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      hold(sums[block]);
      const int top = tile.y + block * kSide + thread / kWarp * 2;
      finish(op, tile, left, top, sums[block], vectors + op.outputs);
    }
  }
}

}  // namespace

// Block: three warpgroups, the first of which loads.
FVV_KERNEL convolve_boxes(const __grid_constant__ HopperConv op) {
  const uint32 memory = shared_address(), barriers = memory + FVV_BARRIERS;
  const Pixels pixels{memory, barriers};
  const Weights weights{memory + FVV_X_STAGES * FVV_X_BYTES, barriers + 16 * FVV_X_STAGES};
  if (threadIdx.x == 0) {
    pixels.create();
    weights.create();
    publish_barriers();
  }
  // The sums of both biases, then the factors of the norm.
  float* const vectors = reinterpret_cast<float*>(shared_memory + FVV_VECTORS);
  for (int i = threadIdx.x; i < op.outputs; i += kThreads) {
    vectors[i] = op.bias ? widen(op.bias[i]) : 0;
    if (op.residual_bias) vectors[i] += widen(op.residual_bias[i]);
    if (FVV_NORM) vectors[op.outputs + i] = op.root * widen(op.gamma[i]);
  }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    drop_registers();
    if (threadIdx.x == 0) load_tiles(op, pixels, weights);
  } else {
    take_registers();
    multiply_tiles(op, pixels, weights, vectors + threadIdx.x % kQuad * 2);
  }
}

}  // namespace fast_video_vae
