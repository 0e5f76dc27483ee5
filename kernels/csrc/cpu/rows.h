// Ops that normalise, gate or add to rows of channels. Included by kernels.h.

// Calls `function<T>(...)` for the type of the values.
#define FVV_BY_DTYPE(dtype, function, ...)                            \
  switch (dtype) {                                                    \
    case Dtype::float32: return function<float>(__VA_ARGS__);         \
    case Dtype::bfloat16: return function<BFloat16>(__VA_ARGS__);     \
    case Dtype::float16: return function<Float16>(__VA_ARGS__);       \
    default: return;                                                  \
  }

FVV_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Values of a row, plus the bias of their channels if there is one.
template <bool BIAS, class T, class Part>
FVV_INLINE Floats load_biased(const T* x, const float* bias, int64_t i, Part part) {
  const Floats v = load(x + i, part);
  // Values after the row are zero, also in `bias`.
  return BIAS ? v + load(bias + i, Whole()) : v;
}

template <bool BIAS, class T>
FVV_INLINE float sum_of_squares(const T* x, const float* bias, int64_t count) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    for (int64_t k = 0; k < 4; ++k) {
      const Floats v = load_biased<BIAS>(x, bias, i + k * kLanes, Whole());
      sums[k] += v * v;
    }
  }
  each_vector(count - i, [&](int64_t k, auto part) {
    const Floats v = load_biased<BIAS>(x, bias, i + k, part);
    sums[0] += v * v;
  });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y = f((x + bias) * factor * scale), elementwise.
template <bool SILU, bool BIAS, class T>
FVV_INLINE void scale_row(const T* x, const float* bias, T* y, int64_t count, float factor,
                          const float* scale) {
  each_vector(count, [&](int64_t i, auto part) {
    const Floats v = load_biased<BIAS>(x, bias, i, part) * factor * load(scale + i, Whole());
    store(y + i, SILU ? silu(v) : v, part);
  });
}

template <class T, bool SILU, bool BIAS>
static void rms_norm_silu_rows(const T* x, T* y, int64_t rows, int64_t channels,
                               const float* scale, const float* bias) {
  // As many rows at a time as a vector has lanes, if the first cache holds them: sums, roots and
  // quotients have long latencies.
  const int64_t some = lesser(kLanes, 1 + 16384 / (channels * (int64_t)sizeof(T)));
  float factors[kLanes] = {};
  for (int64_t row = 0; row < rows; row += some) {
    const int64_t count = lesser(some, rows - row);
    for (int64_t k = 0; k < count; ++k) {
      factors[k] = sum_of_squares<BIAS>(x + k * channels, bias, channels);
    }
    const Floats norms = at_least(square_root(load(factors, Whole())), 1e-12f);
    store(factors, 1.0f / norms, Whole());
    for (int64_t k = 0; k < count; ++k, x += channels, y += channels) {
      scale_row<SILU, BIAS>(x, bias, y, channels, factors[k], scale);
    }
  }
}

template <class T, bool SILU>
FVV_INLINE void rms_norm_silu_block(const RmsNormSilu& op, const T* x, T* y, int64_t rows) {
  if (op.bias) {
    rms_norm_silu_rows<T, SILU, true>(x, y, rows, op.x.channels, op.scale, op.bias);
  } else {
    rms_norm_silu_rows<T, SILU, false>(x, y, rows, op.x.channels, op.scale, nullptr);
  }
}

template <class T>
static void rms_norm_silu_of(const RmsNormSilu& op, int64_t begin, int64_t end) {
  const int64_t channels = op.x.channels, pixels = op.x.pixels(), frames = op.x.frames;
  const int64_t kept = op.tail.data ? op.tail.frames : 0;
  const int64_t blocks = ceil_div(pixels, op.rows);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / blocks, first = task % blocks * op.rows;
    const int64_t rows = lesser(op.rows, pixels - first);
    const int64_t start = first * channels, bytes = rows * channels * sizeof(T);
    for (int64_t k = 0; k < kept; ++k) {
      __builtin_memcpy(op.out.at(b, k, start), op.tail.at(b, k, start), bytes);
    }
    for (int64_t t = 0; t < frames; ++t) {
      const T* x = (const T*)op.x.at(b, t, start);
      T* y = (T*)op.out.at(b, kept + t, start);
      if (op.silu) {
        rms_norm_silu_block<T, true>(op, x, y, rows);
      } else {
        rms_norm_silu_block<T, false>(op, x, y, rows);
      }
    }
    for (int64_t k = 0; k < kept; ++k) {
      __builtin_memcpy(op.tail.at(b, k, start), op.out.at(b, frames + k, start), bytes);
    }
  }
}

static void rms_norm_silu(const RmsNormSilu& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, rms_norm_silu_of, op, begin, end);
}

// Adds the sums of x - shift and of its square over rows to `sums`, for each channel. The shift
// keeps float32 precise enough where the mean is large against the deviation.
template <class T>
FVV_INLINE void add_sums(const T* x, int64_t rows, int64_t channels, const float* shift,
                         float* sums, float* squares) {
  each_vector(channels, [&](int64_t c, auto part) {
    const Floats s = load(shift + c, Whole());
    Floats total = load(sums + c, Whole()), square = load(squares + c, Whole());
    for (int64_t row = 0; row < rows; ++row) {
      const Floats v = load(x + row * channels + c, part) - s;
      total += v;
      square += v * v;
    }
    store(sums + c, total, Whole());
    store(squares + c, square, Whole());
  });
}

// Mean of some pixels of a frame, the same for every task of the frame.
template <class T>
FVV_INLINE void mean_of_some(const T* x, int64_t pixels, int64_t channels, float* mean) {
  const int64_t count = lesser(pixels, 8), step = pixels / count;
  each_vector(channels, [&](int64_t c, auto part) {
    Floats total = {};
    for (int64_t k = 0; k < count; ++k) total += load(x + k * step * channels + c, part);
    store(mean + c, total * (1.0f / (float)count), Whole());
  });
}

template <class T>
static void group_norm_sums_of(const GroupNormSums& op, int64_t begin, int64_t end) {
  const int64_t channels = op.x.channels, pixels = op.x.pixels();
  Scratch<float> scratch(3 * op.padded);
  float *sums = scratch.data, *squares = sums + op.padded, *shift = squares + op.padded;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t frame = task / op.chunks, first = task % op.chunks * op.rows;
    const T* x = (const T*)op.x.at(frame / op.x.frames, frame % op.x.frames, 0);
    mean_of_some(x, pixels, channels, shift);
    if (first == 0) __builtin_memcpy(op.shift + frame * op.padded, shift, channels * sizeof(float));
    const int64_t last = lesser(first + op.rows, pixels);
    double* total = op.sums + task * 2 * channels;
    for (int64_t i = 0; i < 2 * channels; ++i) total[i] = 0;
    // float32 within 128 rows, float64 beyond.
    for (int64_t block = first; block < last; block += 128) {
      const int64_t stop = lesser(block + 128, last);
      __builtin_memset(sums, 0, 2 * op.padded * sizeof(float));
      // Few rows at a time, so that memory is read nearly sequentially.
      for (int64_t row = block; row < stop; row += 4) {
        const T* rows = x + row * channels;
        if (row + 4 <= stop) {
          add_sums(rows, 4, channels, shift, sums, squares);
        } else {
          add_sums(rows, stop - row, channels, shift, sums, squares);
        }
      }
      for (int64_t c = 0; c < channels; ++c) {
        total[c] += sums[c];
        total[channels + c] += squares[c];
      }
    }
  }
}

static void group_norm_sums(const GroupNormSums& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, group_norm_sums_of, op, begin, end);
}

template <class T, bool SILU>
static void group_norm_silu_rows(const T* x, T* y, int64_t rows, int64_t channels,
                                 const float* scale, const float* offset) {
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels) {
    each_vector(channels, [&](int64_t c, auto part) {
      const Floats v =
          load(x + c, part) * load(scale + c, Whole()) + load(offset + c, Whole());
      store(y + c, SILU ? silu(v) : v, part);
    });
  }
}

template <class T>
static void group_norm_silu_of(const GroupNormSilu& op, int64_t begin, int64_t end) {
  const int64_t channels = op.x.channels, frames = op.x.frames, width = op.x.width;
  const int64_t kept = op.tail.data ? op.tail.frames : 0, bytes = width * channels * sizeof(T);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / op.x.height, start = task % op.x.height * width * channels;
    for (int64_t t = 0; t < frames; ++t) {
      const T* x = (const T*)op.x.at(b, t, start);
      T* y = (T*)op.out.at(b, kept + t, start);
      const float* scale = op.scale + (b * frames + t) * op.padded;
      const float* offset = op.offset + (b * frames + t) * op.padded;
      if (op.silu) {
        group_norm_silu_rows<T, true>(x, y, width, channels, scale, offset);
      } else {
        group_norm_silu_rows<T, false>(x, y, width, channels, scale, offset);
      }
    }
    for (int64_t k = 0; k < kept; ++k) {
      __builtin_memcpy(op.out.at(b, k, start), op.tail.at(b, k, start), bytes);
    }
    for (int64_t k = 0; k < kept; ++k) {
      __builtin_memcpy(op.tail.at(b, k, start), op.out.at(b, frames + k, start), bytes);
    }
  }
}

static void group_norm_silu(const GroupNormSilu& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, group_norm_silu_of, op, begin, end);
}

template <class T>
static void silu_mul_of(const SiluMul& op, int64_t begin, int64_t end) {
  const int64_t blocks = ceil_div(op.x.channels, op.block);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / blocks, start = task % blocks * op.block;
    const T* x = (const T*)op.x.at(row) + start;
    const T* gate = (const T*)op.gate.at(row) + start;
    T* out = (T*)op.out.at(row) + start;
    each_vector(lesser(op.block, op.x.channels - start), [&](int64_t i, auto part) {
      store(out + i, silu(load(x + i, part)) * load(gate + i, part), part);
    });
  }
}

static void silu_mul(const SiluMul& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, silu_mul_of, op, begin, end);
}
