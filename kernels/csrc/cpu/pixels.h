// Ops that move pixels and add to them. Ops that only add are bit-identical to the reference: sums
// from left to right in float32, rounded once. Included by kernels.h.

// `period` is a whole number of pixels and a multiple of a vector, so that biases are whole
// vectors.
template <class T>
static void bias_residual_of(const BiasResidual& op, int64_t begin, int64_t end) {
  const int64_t count = op.x.pixels() * op.x.channels, blocks = ceil_div(count, op.block);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t frame = task / blocks, b = frame / op.x.frames, t = frame % op.x.frames;
    const int64_t first = task % blocks * op.block, stop = lesser(first + op.block, count);
    for (int64_t row = first; row < stop; row += op.period) {
      const T* x = (const T*)op.x.at(b, t, row);
      const T* residual = op.residual.data ? (const T*)op.residual.at(b, t, row) : nullptr;
      T* out = (T*)op.out.at(b, t, row);
      each_vector(lesser(op.period, stop - row), [&](int64_t i, auto part) {
        Floats v = load(x + i, part);
        if (op.bias) v += load(op.bias + i, Whole());
        if (residual) v += load(residual + i, part);
        if (op.residual_bias) v += load(op.residual_bias + i, Whole());
        store(out + i, v, part);
      });
    }
  }
}

static void bias_residual(const BiasResidual& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, bias_residual_of, op, begin, end);
}

// Copies the few hundred bytes of a pixel, where a call of memcpy is slow.
FVV_INLINE void copy_run(void* to, const void* from, int64_t bytes) {
  constexpr int64_t kStep = sizeof(Floats);
  if (bytes < kStep || bytes > 4096) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  int64_t i = 0;
  for (; i + kStep <= bytes; i += kStep) write((char*)to + i, read<Words>((const char*)from + i));
  if (i < bytes) {
    write((char*)to + bytes - kStep, read<Words>((const char*)from + bytes - kStep));
  }
}

static void interleave_time(const InterleaveTime& op, int64_t begin, int64_t end) {
  const int64_t height = op.x.height, width = op.x.width, frames = op.x.frames;
  const int64_t before = op.x.channels, after = op.out.channels;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / height / frames, t = task / height % frames;
    const int64_t first = task % height * width;
    for (int64_t p = 0; p < op.phases; ++p) {
      const char* from = op.x.at(b, t, first * before + p * after);
      char* to = op.out.at(b, op.phases * t + p, first * after);
      for (int64_t j = 0; j < width; ++j) {
        copy_run(to, from, after * op.x.item);
        from += before * op.x.item;
        to += after * op.x.item;
      }
    }
  }
}

// Copies `count` times `rows` values between two orders. The loop over four rows, the usual number,
// is unrolled.
FVV_INLINE void transpose(const float* __restrict from, int64_t from_c, int64_t from_row,
                          float* __restrict to, int64_t to_c, int64_t to_row, int64_t rows,
                          int64_t count) {
  const auto move = [&](int64_t c, int64_t row) {
    to[c * to_c + row * to_row] = from[c * from_c + row * from_row];
  };
  for (int64_t c = 0; c < count; ++c) {
    if (rows == 4) {
      for (int64_t row = 0; row < 4; ++row) move(c, row);
    } else {
      for (int64_t row = 0; row < rows; ++row) move(c, row);
    }
  }
}

// The values of a pixel of `source` that the phases of a frame repeat, as rows of C floats.
// `repeats` adjacent values among the C * phases are one value of the pixel. If that divides the
// phases, runs of them share a row, which is every `rows`-th value; otherwise each has its own.
template <class T>
FVV_INLINE void spread_source(const T* pixel, int64_t count, int64_t rows, int64_t repeats,
                              bool shared, int64_t channels, float* wide, float* spread) {
  float* to = rows == 1 ? spread : wide;
  each_vector(count, [&](int64_t c, auto part) {
    store(to + c, load(pixel + c, part), part);
  });
  if (rows == 1) return;
  if (!shared) {
    for (int64_t c = 0, k = 0; c < channels; ++c) {
      for (int64_t row = 0; row < rows; ++row, ++k) spread[row * channels + c] = wide[k / repeats];
    }
  } else {
    transpose(wide, rows, 1, spread, 1, channels, rows, channels);
  }
}

// The processor does not prefetch every other run of values of x, so the values of four pixels
// later are prefetched here.
template <class T>
FVV_INLINE void add_pixels(T* out, const T* x, const float* bias, const float* added,
                           int64_t count) {
  each_vector(count, [&](int64_t c, auto part) {
    __builtin_prefetch(x + c + 16 * count);
    Floats v = load(x + c, part);
    if (bias) v += load(bias + c, part);
    if (added) v += load(added + c, part);
    store(out + c, v, part);
  });
}

template <class T>
static void add_source_row(const MergePhases& op, int64_t b, int64_t t, int64_t i) {
  const int64_t channels = op.out.channels, width = op.source.width, phases = 4 * op.times;
  const int64_t before = op.source.channels, repeats = channels * phases / before;
  const bool shared = phases % repeats == 0;
  const int64_t run = shared ? repeats : 1, rows = phases / run;
  // Some pixels at a time, so that rows of the result are written in long runs.
  const int64_t some = 1 + 8192 / (rows * channels);
  Scratch<float> wide(before), spread(some * rows * channels);
  for (int64_t first = 0; first < width; first += some) {
    const int64_t count = lesser(some, width - first);
    const T* pixel = (const T*)op.source.at(b, t, (i * width + first) * before);
    for (int64_t j = 0; j < count; ++j, pixel += before) {
      spread_source(pixel, before, rows, repeats, shared, channels, wide.data,
                    spread.data + j * rows * channels);
    }
    for (int64_t q = 2 * op.first; q < 2 * op.times; ++q) {
      const int64_t frame = op.times * t + q / 2 - op.first, a = q % 2;
      const int64_t window = ((i + a) * (width + 1) + first) * 4 + 2 * a;
      const T* grid = (const T*)op.grid.at(b, frame, window * channels);
      T* out = (T*)op.out.at(b, frame, ((2 * i + a) * width + first) * 2 * channels);
      const float* left = spread.data + 2 * q / run * channels;
      const float* right = spread.data + (2 * q + 1) / run * channels;
      for (int64_t j = 0; j < count; ++j) {
        add_pixels(out, grid, op.bias, left, channels);
        add_pixels(out + channels, grid + 5 * channels, op.bias, right, channels);
        out += 2 * channels;
        grid += 4 * channels;
        left += rows * channels;
        right += rows * channels;
      }
    }
  }
}

template <class T>
static void add_bias_row(const MergePhases& op, int64_t b, int64_t t, int64_t i) {
  const int64_t channels = op.out.channels, width = op.grid.width - 1;
  for (int64_t a = 0; a < 2; ++a) {
    T* out = (T*)op.out.at(b, t, (2 * i + a) * 2 * width * channels);
    const T* grid = (const T*)op.grid.at(b, t, ((i + a) * (width + 1) * 4 + 2 * a) * channels);
    for (int64_t j = 0; j < width; ++j, out += 2 * channels, grid += 4 * channels) {
      add_pixels(out, grid, op.bias, nullptr, channels);
      add_pixels(out + channels, grid + 5 * channels, op.bias, nullptr, channels);
    }
  }
}

static void copy_phases_row(const MergePhases& op, int64_t b, int64_t t, int64_t i) {
  const int64_t channels = op.out.channels, width = op.grid.width - 1;
  const int64_t bytes = channels * op.out.item;
  for (int64_t a = 0; a < 2; ++a) {
    char* out = op.out.at(b, t, (2 * i + a) * 2 * width * channels);
    const char* grid = op.grid.at(b, t, ((i + a) * (width + 1) * 4 + 2 * a) * channels);
    for (int64_t j = 0; j < width; ++j) {
      copy_run(out, grid, bytes);
      copy_run(out + bytes, grid + 5 * bytes, bytes);  // the window and the phase after it
      out += 2 * bytes;
      grid += 4 * bytes;
    }
  }
}

template <class T>
static void merge_phases_of(const MergePhases& op, int64_t begin, int64_t end) {
  const int64_t height = op.grid.height - 1;
  const int64_t frames = op.source.data ? op.source.frames : op.grid.frames;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / height / frames, t = task / height % frames, i = task % height;
    if (op.source.data) {
      add_source_row<T>(op, b, t, i);
    } else if (op.bias) {
      add_bias_row<T>(op, b, t, i);
    } else {
      copy_phases_row(op, b, t, i);
    }
  }
}

static void merge_phases(const MergePhases& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, merge_phases_of, op, begin, end);
}

// A row of pixels that are nested in the channels of a row of x: the offsets of the values of a
// pixel and of its `wide` neighbours.
template <class Item>
struct Unfold {
  int64_t before, count, channels;
  bool run;  // each pixel is a run of values
  Scratch<int64_t> offsets;

  Unfold(const Nest& nest, int64_t before, int64_t wide, int64_t channels)
      : before(before), count(wide * channels), channels(channels), run(nest.c == 1),
        offsets(count) {
    for (int64_t k = 0; k < count; ++k) {
      offsets.data[k] = k / channels * nest.w + k % channels * nest.c;
    }
  }

  void row(const Item* __restrict pixel, Item* __restrict to, int64_t width) const {
    const int64_t* from = offsets.data;
    if (count == 6) return pixels<6>(pixel, to, width);  // two RGB pixels
    for (int64_t j = 0; j < width; ++j, pixel += before, to += count) {
      if (run) {
        for (int64_t k = 0; k < count; k += channels) {
          copy_run(to + k, pixel + from[k], channels * sizeof(Item));
        }
      } else {
        for (int64_t k = 0; k < count; ++k) to[k] = pixel[from[k]];
      }
    }
  }

  template <int COUNT>
  void pixels(const Item* __restrict pixel, Item* __restrict to, int64_t width) const {
    int64_t from[COUNT];
    for (int k = 0; k < COUNT; ++k) from[k] = offsets.data[k];
    for (int64_t j = 0; j < width; ++j, pixel += before, to += COUNT) {
      for (int k = 0; k < COUNT; ++k) to[k] = pixel[from[k]];
    }
  }
};

template <class Item>
static void pixel_shuffle_3d_of(const PixelShuffle3d& op, int64_t begin, int64_t end) {
  const int64_t height = op.x.height, width = op.x.width, frames = op.x.frames;
  const int64_t before = op.x.channels, channels = op.out.channels;
  const Unfold<Item> unfold(op.nest, before, op.wide, channels);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / height / frames, t = task / height % frames, i = task % height;
    const Item* x = (const Item*)op.x.at(b, t, i * width * before);
    for (int64_t p = 0; p < op.times; ++p) {
      const int64_t frame = op.times * t + p;
      for (int64_t h = 0; h < op.high; ++h) {
        const int64_t line = (op.high * i + h) * op.out.width * channels;
        unfold.row(x + p * op.nest.t + h * op.nest.h, (Item*)op.out.at(b, frame, line), width);
      }
    }
  }
}

static void pixel_shuffle_3d(const PixelShuffle3d& op, int64_t begin, int64_t end) {
  if (op.x.item == 2) return pixel_shuffle_3d_of<uint16_t>(op, begin, end);
  return pixel_shuffle_3d_of<uint32_t>(op, begin, end);
}

// The fine value ((c * times + p) * size + h) * size + w is the pixel (h, w) of frame p, and
// `group` adjacent values are averaged to one value of the result. Values of the same result (all
// pixels of all frames, of one frame, a part of them, or one) are summed first, for all channels at
// once.
template <class T>
static void average_down_of(const AverageDown& op, int64_t begin, int64_t end) {
  const int64_t before = op.x.channels, after = op.out.channels, size = op.size;
  const int64_t area = size * size, fine = op.times * area, group = before * fine / after;
  const int64_t together = group % fine == 0   ? fine
                           : group % area == 0 ? area
                           : area % group == 0 ? group
                                               : 1;
  const int64_t rows = fine / together, left = group / together;
  const int64_t distance = before + kPadding;
  Scratch<float> sums(rows * distance), mixed(rows * before);
  Scratch<const T*> scratch(together);
  const T** pixels = scratch.data;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / op.out.height / op.out.frames;
    const int64_t t = task / op.out.height % op.out.frames, i = task % op.out.height;
    T* out = (T*)op.out.at(b, t, i * op.out.width * after);
    for (int64_t j = 0; j < op.out.width; ++j, out += after) {
      for (int64_t row = 0; row < rows; ++row) {
        int64_t count = 0;
        for (int64_t k = row * together; k < (row + 1) * together; ++k) {
          const int64_t frame = op.times * t + k / area - op.missing;
          const int64_t line = size * i + k % area / size, column = size * j + k % size;
          if (frame < 0) continue;
          pixels[count++] = (const T*)op.x.at(b, frame, (line * op.x.width + column) * before);
        }
        float* total = sums.data + row * distance;
        each_vector(before, [&](int64_t c, auto part) {
          Floats v = {};
          for (int64_t k = 0; k < count; ++k) v += load(pixels[k] + c, part);
          store(total + c, v, part);
        });
      }
      const float* numbers = sums.data;
      if (rows > 1) {
        transpose(sums.data, 1, distance, mixed.data, rows, 1, rows, before);
        numbers = mixed.data;
      }
      if (left > 1) {
        for (int64_t k = 0; k < after; ++k) {
          float total = numbers[k * left];
          for (int64_t n = 1; n < left; ++n) total += numbers[k * left + n];
          sums.data[k] = total;
        }
        numbers = sums.data;
      }
      each_vector(after, [&](int64_t c, auto part) {
        store(out + c, load(numbers + c, part) / (float)group, part);
      });
    }
  }
}

static void average_down(const AverageDown& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, average_down_of, op, begin, end);
}

FVV_INLINE Floats to_image(Floats v, const float*, float) {
  return at_most(at_least((v + 1.0f) * 0.5f, 0.0f), 1.0f);
}

// Integers, which `store` rounds.
template <class I>
FVV_INLINE Floats to_image(Floats v, const I*, float white) {
  return at_most(positive((v + 1.0f) * 0.5f), 1.0f) * white;
}

template <class T, class I>
FVV_INLINE void to_images(const T* from, I* to, int64_t count, float white) {
  each_vector(count, [&](int64_t k, auto part) {
    store(to + k, to_image(load(from + k, part), to, white), part);
  });
}

template <class T, class I>
static void frames_to_images_as(const FramesToImages& op, int64_t begin, int64_t end) {
  const int64_t frames = op.frames.frames, count = op.frames.pixels() * op.frames.channels;
  const int64_t blocks = ceil_div(count, op.block);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / blocks / frames, t = task / blocks % frames;
    const int64_t first = task % blocks * op.block;
    to_images((const T*)op.frames.at(b, t, first), (I*)op.out.at(b, t, first),
              lesser(op.block, count - first), op.white);
  }
}

template <class T, class I>
static void patches_to_images_as(const FramesToImages& op, int64_t begin, int64_t end) {
  const int64_t frames = op.frames.frames, height = op.frames.height;
  const int64_t line = op.out.width * op.out.channels;
  const Unfold<T> unfold(op.nest, op.frames.channels, op.patch, op.out.channels);
  Scratch<T> row(line);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t b = task / height / frames, t = task / height % frames, i = task % height;
    const T* x = (const T*)op.frames.at(b, t, i * op.frames.width * op.frames.channels);
    for (int64_t h = 0; h < op.patch; ++h) {
      unfold.row(x + h * op.nest.h, row.data, op.frames.width);
      to_images(row.data, (I*)op.out.at(b, t, (op.patch * i + h) * line), line, op.white);
    }
  }
}

template <class T, class I>
static void frames_to_images_in(const FramesToImages& op, int64_t begin, int64_t end) {
  if (op.patch > 1) return patches_to_images_as<T, I>(op, begin, end);
  return frames_to_images_as<T, I>(op, begin, end);
}

template <class T>
static void frames_to_images_of(const FramesToImages& op, int64_t begin, int64_t end) {
  if (op.out_dtype == Dtype::uint8) return frames_to_images_in<T, uint8_t>(op, begin, end);
  if (op.out_dtype == Dtype::uint16) return frames_to_images_in<T, uint16_t>(op, begin, end);
  return frames_to_images_in<T, float>(op, begin, end);
}

static void frames_to_images(const FramesToImages& op, int64_t begin, int64_t end) {
  FVV_BY_DTYPE(op.dtype, frames_to_images_of, op, begin, end);
}
