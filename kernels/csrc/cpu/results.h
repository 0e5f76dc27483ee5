// Where the norms write their results: as values, or as 8-bit codes, and the frames around them.
// Included by kernels.h.

// Calls `function<T>(...)` for the type of the values.
#define FVV_BY_DTYPE(dtype, function, ...)                            \
  switch (dtype) {                                                    \
    case Dtype::float32: return function<float>(__VA_ARGS__);         \
    case Dtype::bfloat16: return function<BFloat16>(__VA_ARGS__);     \
    case Dtype::float16: return function<Float16>(__VA_ARGS__);       \
    default: return;                                                  \
  }

FVV_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Values of the dtype of the activations.
template <class T>
struct Values {
  using Item = T;

  explicit Values(const Results&) {}

  template <class Part>
  FVV_METHOD void put(T* to, int64_t channel, Floats v, Part part) {
    store(to + channel, v, part);
  }

  FVV_METHOD void convert(T*, int64_t) {}

  FVV_METHOD void finish() {}
};

// Codes: `clamp(round(v * steps) + zero, 0, 255)`, and `zero` for NaN.
struct Codes {
  using Item = uint8_t;

  const float* steps;  // codes per unit of each channel, padded
  int64_t* saturated;
  bool is_signed;
  int64_t outside = 0, missing = 0;

  explicit Codes(const Results& given)
      : steps(given.codes), saturated(given.saturated), is_signed(given.is_signed) {}

  template <class Part>
  FVV_METHOD void put(uint8_t* to, int64_t channel, Floats v, Part part) {
    const Floats scaled = v * load(steps + channel, Whole());
    Words code = to_nearest(scaled) + kZeroCode;
    if (__builtin_expect(exceeds_byte(code), 0)) code = corrected(scaled, within(part));
    store_bytes(to + channel, code, part);
  }

  // Counts the lanes of `used` without a code of their own, and returns the nearest codes.
  FVV_METHOD Words corrected(Floats scaled, Words used) {
    // One code more on both sides, so that values outside show.
    const Floats bounded = at_most(at_least(scaled, -1.0f - kZeroCode), 256.0f - kZeroCode);
    const Words code = to_nearest(bounded) + kZeroCode;
    const Words no_number = (Words)(scaled != scaled);
    const Words below = (Words)((Ints)code < 0), above = (Words)((Ints)code > 255);
    missing += lanes_of(no_number & used);
    outside += lanes_of((below | above) & ~no_number & used);
    const Words kept = (above & 255) | (~(above | below) & code);
    return (no_number & kZeroCode) | (~no_number & kept);
  }

  // Subtracts 128 from codes that are int8, while they are in the first cache.
  FVV_METHOD void convert(uint8_t* codes, int64_t count) {
    for (int64_t i = 0; i < count && is_signed; ++i) codes[i] ^= 128;
  }

  FVV_METHOD void finish() {
    if (outside) __atomic_fetch_add(saturated, outside, __ATOMIC_RELAXED);
    if (missing) __atomic_fetch_add(saturated + 1, missing, __ATOMIC_RELAXED);
  }
};

// Calls `run(pixel of x, pixel of a frame with a border, count)` for runs of adjacent pixels of
// both, which together are `count` pixels of a frame from `first` on.
template <class Run>
FVV_INLINE void each_run(const Video& x, int64_t border, int64_t first, int64_t count, Run run) {
  if (!border) return run(first, first, count);
  for (int64_t pixel = first; pixel < first + count;) {
    const int64_t row = pixel / x.width, column = pixel % x.width;
    const int64_t some = lesser(x.width - column, first + count - pixel);
    run(pixel, (row + border) * (x.width + 2 * border) + border + column, some);
    pixel += some;
  }
}

// Writes the border of all frames next to the rows of `x` that begin in `count` pixels from `first`
// on; above the first row and below the last one too.
FVV_INLINE void write_border(const Results& results, const Video& x, int64_t b, int64_t first,
                             int64_t count) {
  const int64_t border = results.border, wide = x.width + 2 * border;
  if (!border) return;
  const Video& out = results.out;
  const auto fill = [&](int64_t t, int64_t pixel, int64_t pixels) {
    __builtin_memset(out.at(b, t, pixel * x.channels), results.zero,
                     pixels * x.channels * out.item);
  };
  const int64_t stop = ceil_div(first + count, x.width);
  for (int64_t row = ceil_div(first, x.width); row < stop; ++row) {
    for (int64_t t = 0; t < out.frames; ++t) {
      if (row == 0) fill(t, 0, border * wide);
      fill(t, (row + border) * wide, border);
      fill(t, (row + border) * wide + border + x.width, border);
      if (row == x.height - 1) fill(t, (x.height + border) * wide, border * wide);
    }
  }
}

// Copies pixels of the tail to the first frames of the result.
FVV_INLINE void begin_window(const Results& results, const Video& x, int64_t b, int64_t first,
                             int64_t count) {
  const Video &tail = results.tail, &out = results.out;
  for (int64_t k = 0; k < results.known(); ++k) {
    each_run(x, results.border, first, count, [&](int64_t from, int64_t to, int64_t some) {
      __builtin_memcpy(out.at(b, k, to * x.channels), tail.at(b, k, from * x.channels),
                       some * x.channels * out.item);
    });
  }
}

// Copies pixels of the last frames of the result to the tail.
FVV_INLINE void end_window(const Results& results, const Video& x, int64_t b, int64_t first,
                           int64_t count) {
  const Video &tail = results.tail, &out = results.out;
  for (int64_t k = 0; k < results.known(); ++k) {
    each_run(x, results.border, first, count, [&](int64_t from, int64_t to, int64_t some) {
      __builtin_memcpy(tail.at(b, k, from * x.channels), out.at(b, x.frames + k, to * x.channels),
                       some * x.channels * out.item);
    });
  }
}
