// Ops that normalise, gate or add to rows of channels. Included by kernels.h.

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
template <bool SILU, bool BIAS, class T, class Result>
FVV_INLINE void scale_row(const T* x, const float* bias, typename Result::Item* y, Result& result,
                          int64_t count, float factor, const float* scale) {
  each_vector(count, [&](int64_t i, auto part) {
    const Floats v = load_biased<BIAS>(x, bias, i, part) * factor * load(scale + i, Whole());
    result.put(y, i, SILU ? silu(v) : v, part);
  });
}

template <class T, bool SILU, bool BIAS, class Result>
static void rms_norm_silu_rows(const T* x, typename Result::Item* y, Result& shared, int64_t rows,
                               int64_t channels, const float* scale, const float* bias) {
  Result result = shared;  // in registers
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
      scale_row<SILU, BIAS>(x, bias, y, result, channels, factors[k], scale);
    }
    result.convert(y - count * channels, count * channels);
  }
  shared = result;
}

template <class T, bool SILU, class Result>
FVV_INLINE void rms_norm_silu_block(const RmsNormSilu& op, const T* x, typename Result::Item* y,
                                    Result& result, int64_t rows) {
  const int64_t channels = op.x.channels;
  if (op.bias) {
    rms_norm_silu_rows<T, SILU, true>(x, y, result, rows, channels, op.scale, op.bias);
  } else {
    rms_norm_silu_rows<T, SILU, false>(x, y, result, rows, channels, op.scale, nullptr);
  }
}

template <class T, class Result>
static void rms_norm_silu_of(const RmsNormSilu& op, Result result, int64_t begin, int64_t end) {
  const int64_t channels = op.x.channels, pixels = op.x.pixels();
  const int64_t blocks = ceil_div(pixels, op.rows);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / blocks, first = task % blocks * op.rows;
    const int64_t rows = lesser(op.rows, pixels - first);
    write_border(op.results, op.x, b, first, rows);
    begin_window(op.results, op.x, b, first, rows);
    for (int64_t t = 0; t < op.x.frames; ++t) {
      each_run(op.x, op.results.border, first, rows, [&](int64_t from, int64_t to, int64_t some) {
        const T* x = (const T*)op.x.at(b, t, from * channels);
        auto* y = (typename Result::Item*)op.results.new_at(b, t, to * channels);
        if (op.silu) {
          rms_norm_silu_block<T, true>(op, x, y, result, some);
        } else {
          rms_norm_silu_block<T, false>(op, x, y, result, some);
        }
      });
    }
    end_window(op.results, op.x, b, first, rows);
  }
  result.finish();
}

template <class T>
static void rms_norm_silu_to(const RmsNormSilu& op, int64_t begin, int64_t end) {
  if (op.results.codes) {
    rms_norm_silu_of<T>(op, Codes(op.results), begin, end);
  } else {
    rms_norm_silu_of<T>(op, Values<T>(op.results), begin, end);
  }
}

static void rms_norm_silu(const RmsNormSilu& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, rms_norm_silu_to, op, begin, end);
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

template <class T, bool SILU, class Result>
static void group_norm_silu_rows(const T* x, typename Result::Item* y, Result& shared,
                                 int64_t rows, int64_t channels, const float* scale,
                                 const float* offset) {
  Result result = shared;  // in registers
  for (int64_t row = 0; row < rows; ++row, x += channels, y += channels) {
    each_vector(channels, [&](int64_t c, auto part) {
      const Floats v =
          load(x + c, part) * load(scale + c, Whole()) + load(offset + c, Whole());
      result.put(y, c, SILU ? silu(v) : v, part);
    });
    result.convert(y, channels);
  }
  shared = result;
}

template <class T, class Result>
static void group_norm_silu_of(const GroupNormSilu& op, Result result, int64_t begin,
                               int64_t end) {
  const int64_t channels = op.x.channels, frames = op.x.frames, width = op.x.width;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / op.x.height, first = task % op.x.height * width;
    write_border(op.results, op.x, b, first, width);
    for (int64_t t = 0; t < frames; ++t) {
      const float* scale = op.scale + (b * frames + t) * op.padded;
      const float* offset = op.offset + (b * frames + t) * op.padded;
      each_run(op.x, op.results.border, first, width, [&](int64_t from, int64_t to, int64_t some) {
        const T* x = (const T*)op.x.at(b, t, from * channels);
        auto* y = (typename Result::Item*)op.results.new_at(b, t, to * channels);
        if (op.silu) {
          group_norm_silu_rows<T, true>(x, y, result, some, channels, scale, offset);
        } else {
          group_norm_silu_rows<T, false>(x, y, result, some, channels, scale, offset);
        }
      });
    }
    begin_window(op.results, op.x, b, first, width);
    end_window(op.results, op.x, b, first, width);
  }
  result.finish();
}

template <class T>
static void group_norm_silu_to(const GroupNormSilu& op, int64_t begin, int64_t end) {
  if (op.results.codes) {
    group_norm_silu_of<T>(op, Codes(op.results), begin, end);
  } else {
    group_norm_silu_of<T>(op, Values<T>(op.results), begin, end);
  }
}

static void group_norm_silu(const GroupNormSilu& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, group_norm_silu_to, op, begin, end);
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
