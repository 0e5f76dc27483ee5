// Vectors of `kLanes` floats, through the vector extensions of GCC and Clang, and their functions
// for the kernels. Values are float, bfloat16 or float16 in memory and rounded to nearest even; NaN
// stays NaN. Included once per instruction set, by kernels.h.

constexpr int64_t kLanes = FVV_LANES;

typedef float Floats __attribute__((vector_size(4 * FVV_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * FVV_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * FVV_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * FVV_LANES)));
typedef uint16_t Shorts __attribute__((vector_size(4 * FVV_LANES)));
typedef uint8_t Bytes __attribute__((vector_size(FVV_LANES)));

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

// Tags: all lanes, or the first `count`.
struct Whole {};

struct Part {
  int64_t count;
};

template <class V, class P>
FVV_INLINE V read(const P* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V, class P>
FVV_INLINE void write(P* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

FVV_INLINE Floats splat(float value) { return Floats{} + value; }

// `bound > v ? bound : v` and `bound < v ? bound : v`: NaN stays, as in x86 instructions.
FVV_INLINE Floats at_least(Floats v, float bound) {
#if FVV_LANES == 16
  return _mm512_max_ps(splat(bound), v);
#elif FVV_LANES == 8
  return _mm256_max_ps(splat(bound), v);
#else
  return splat(bound) > v ? splat(bound) : v;
#endif
}

FVV_INLINE Floats at_most(Floats v, float bound) {
#if FVV_LANES == 16
  return _mm512_min_ps(splat(bound), v);
#elif FVV_LANES == 8
  return _mm256_min_ps(splat(bound), v);
#else
  return splat(bound) < v ? splat(bound) : v;
#endif
}

// `v > 0 ? v : 0`: NaN becomes 0.
FVV_INLINE Floats positive(Floats v) { return (Floats)((Words)v & (Words)(v > Floats{})); }

FVV_INLINE Floats widen(Words bits, BFloat16) { return (Floats)(bits << 16); }

// The increment for rounding to nearest even, below the remaining bits.
FVV_INLINE Words rounded(Floats v) {
  const Words bits = (Words)v;
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// The exponent of float16 is re-biased by a multiplication with 2^112, which also normalises
// denormal values.
FVV_INLINE Floats widen(Words bits, Float16) {
  const Words sign = (bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  const Words finite = (Words)((Floats)(magnitude << 13) * 0x1p112f);
  const Words special = (magnitude << 13) | 0x7f800000;
  return (Floats)(sign | (magnitude >= 0x7c00 ? special : finite));
}

FVV_INLINE Words narrow(Floats v) {
  const Words sign = ((Words)v >> 16) & 0x8000, magnitude = (Words)v & 0x7fffffff;
  const Words normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // 0.5 has the ulp of float16's denormal values, so that the sum is rounded to it.
  const Words small = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;
  const Words infinite = Words{} + 0x7c00;
  Words result = magnitude < (113u << 23) ? small : normal;
  result = magnitude >= 0x477ff000 ? infinite : result;      // 65520 and more
  result = magnitude > 0x7f800000 ? (infinite | 0x200) : result;  // NaN
  return sign | result;
}

FVV_INLINE Floats load(const float* from, Whole) { return read<Floats>(from); }

FVV_INLINE void store(float* to, Floats v, Whole) { write(to, v); }

// Intrinsics where they are one instruction and `__builtin_convertvector` is several.
FVV_INLINE Words to_words(Halves v) {
#if FVV_LANES == 16
  return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#elif FVV_LANES == 8
  return (Words)_mm256_cvtepu16_epi32((__m128i)v);
#else
  return __builtin_convertvector(v, Words);
#endif
}

template <class T>
FVV_INLINE Floats load(const T* from, Whole) {
  return widen(to_words(read<Halves>(from)), T());
}

// A NaN with all upper bits set would round to zero; the bindings replace such values.
FVV_INLINE void store(BFloat16* to, Floats v, Whole) {
#if FVV_LANES == 16
  const __m512i odd = (__m512i)(Shorts{1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                       23, 25, 27, 29, 31, 1,  3,  5,  7,  9,  11,
                                       13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  write(to, _mm512_castsi512_si256(_mm512_permutexvar_epi16(odd, (__m512i)rounded(v))));
#elif FVV_LANES == 8
  const __m256i upper = (__m256i)(rounded(v) >> 16), packed = _mm256_packus_epi32(upper, upper);
  write(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  write(to, __builtin_convertvector(rounded(v) >> 16, Halves));
#endif
}

FVV_INLINE void store(Float16* to, Floats v, Whole) {
#if FVV_LANES == 16
  write(to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif FVV_LANES == 8
  write(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  write(to, __builtin_convertvector(narrow(v), Halves));
#endif
}

// Drops the fraction.
FVV_INLINE void store(uint8_t* to, Floats v, Whole) {
  const Ints whole = __builtin_convertvector(v, Ints);
#if FVV_LANES == 16
  write(to, _mm512_cvtepi32_epi8((__m512i)whole));
#else
  write(to, __builtin_convertvector(whole, Bytes));
#endif
}

// To nearest even, for |v| < 1024; others and NaN become negative or larger than 1023.
FVV_INLINE Words to_nearest(Floats v) {
#if FVV_LANES == 16
  return (Words)_mm512_cvtps_epi32(v);
#elif FVV_LANES == 8
  return (Words)_mm256_cvtps_epi32(v);
#else
  // 1.5 * 2^23 leaves the number in the low bits. The sum is not contracted with a product that
  // `v` is, because the minimum is between them.
  return (Words)(at_most(v, 1024.0f) + 12582912.0f) - 0x4b400000;
#endif
}

// Whether a lane is above 255, or negative.
FVV_INLINE bool exceeds_byte(Words v) {
#if FVV_LANES == 16
  return _mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi32(~255)) != 0;
#elif FVV_LANES == 8
  return !_mm256_testz_si256((__m256i)v, _mm256_set1_epi32(~255));
#else
  uint32_t bits = 0;
  for (int64_t i = 0; i < kLanes; ++i) bits |= v[i];
  return bits > 255;
#endif
}

// The number of lanes of a mask.
FVV_INLINE int64_t lanes_of(Words mask) {
#if FVV_LANES == 16
  return __builtin_popcount(_mm512_movepi32_mask((__m512i)mask));
#elif FVV_LANES == 8
  return __builtin_popcount(_mm256_movemask_ps((__m256)mask));
#else
  int64_t count = 0;
  for (int64_t i = 0; i < kLanes; ++i) count += mask[i] & 1;
  return count;
#endif
}

// The low bytes.
FVV_INLINE void store_bytes(uint8_t* to, Words v, Whole) {
#if FVV_LANES == 16
  write(to, _mm512_cvtepi32_epi8((__m512i)v));
#elif FVV_LANES == 8
  const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                       0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, low);
  const __m128i joined =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64((__m128i*)to, joined);
#else
  write(to, __builtin_convertvector(v, Bytes));
#endif
}

FVV_INLINE void store_bytes(uint8_t* to, Words v, Part part) {
#if FVV_LANES == 16
  const __mmask16 mask = (__mmask16)((1u << part.count) - 1);
  _mm512_mask_cvtepi32_storeu_epi8(to, mask, (__m512i)v);
#else
  uint8_t buffer[kLanes];
  store_bytes(buffer, v, Whole());
  for (int64_t i = 0; i < part.count; ++i) to[i] = buffer[i];
#endif
}

// A mask of all lanes, or of the first `count`.
FVV_INLINE Words within(Whole) { return ~Words{}; }

FVV_INLINE Words within(Part part) {
  Words mask = {};
  for (int64_t i = 0; i < part.count; ++i) mask[i] = ~0u;
  return mask;
}

// To nearest even, for v >= 0. A sum with `v` could be contracted with the product that `v` is, so
// it is only compared.
FVV_INLINE void store(uint16_t* to, Floats v, Whole) {
#if FVV_LANES == 16
  write(to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(v)));
#elif FVV_LANES == 8
  const __m256i whole = _mm256_cvtps_epi32(v), packed = _mm256_packus_epi32(whole, whole);
  write(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  const Ints whole = __builtin_convertvector(v, Ints);
  const Floats middle = __builtin_convertvector(whole, Floats) + 0.5f;
  // The bits of positive floats are in their order, so that one more lifts an odd number.
  const Ints up = (Ints)v + (whole & 1) > (Ints)middle;
  write(to, __builtin_convertvector(whole - up, Halves));
#endif
}

#if FVV_LANES == 16
FVV_INLINE Floats load(const Float16* from, Whole) {
  return _mm512_cvtph_ps(read<__m256i>(from));
}
#elif FVV_LANES == 8
FVV_INLINE Floats load(const Float16* from, Whole) {
  return _mm256_cvtph_ps(read<__m128i>(from));
}
#endif

// The rest of a row: memory after it is not accessed, and its lanes are zero.
template <class T>
FVV_INLINE Floats load(const T* from, Part part) {
#if FVV_LANES == 16
  const __mmask16 mask = (__mmask16)((1u << part.count) - 1);
  if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_ps(mask, from);
  const Halves v = (Halves)_mm256_maskz_loadu_epi16(mask, from);
  T buffer[kLanes];
  write(buffer, v);
  return load(buffer, Whole());
#else
  T buffer[kLanes] = {};
  for (int64_t i = 0; i < part.count; ++i) buffer[i] = from[i];
  return load(buffer, Whole());
#endif
}

template <class T>
FVV_INLINE void store(T* to, Floats v, Part part) {
  T buffer[kLanes];
  store(buffer, v, Whole());
#if FVV_LANES == 16
  const __mmask16 mask = (__mmask16)((1u << part.count) - 1);
  if constexpr (sizeof(T) == 4) {
    _mm512_mask_storeu_ps(to, mask, read<Floats>(buffer));
  } else if constexpr (sizeof(T) == 2) {
    _mm256_mask_storeu_epi16(to, mask, read<__m256i>(buffer));
  } else {
    _mm_mask_storeu_epi8(to, mask, read<__m128i>(buffer));
  }
#else
  for (int64_t i = 0; i < part.count; ++i) to[i] = buffer[i];
#endif
}

// Calls f(i, Whole()) for every whole vector of `count` values, then f(i, Part{n}) for the rest.
template <class F>
FVV_INLINE void each_vector(int64_t count, F f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, Whole());
  if (i < count) f(i, Part{count - i});
}

FVV_INLINE Floats square_root(Floats v) {
  for (int64_t i = 0; i < kLanes; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
}

FVV_INLINE float sum(Floats v) {
#if FVV_LANES == 16
  return _mm512_reduce_add_ps(v);
#elif FVV_LANES == 8
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += v[i];
  return total;
#endif
}

// 2^n * v for whole n in [-128, 128].
FVV_INLINE Floats scale_by_power(Floats v, Floats n) {
#if FVV_LANES == 16
  return _mm512_scalef_ps(v, n);
#else
  // In two steps, because 2^128 overflows. Adding 1.5 * 2^23 leaves n in the low bits.
  const Floats half = (Floats)(((Words)(n + 12582912.0f) << 23) + (126u << 23));
  return v * half * 2.0f;
#endif
}

FVV_INLINE Floats nearest_whole(Floats v) {
#if FVV_LANES == 16
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif FVV_LANES == 8
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (v + 12582912.0f) - 12582912.0f;  // rounds at 1, for |v| < 2^22
#endif
}

// v / (1 + e^-v). Beyond -89 the exponential is infinite and the result 0.
//
// e^-v is 2^n e^-r with a whole n and |r| <= ln(2) / 2, where ln(2) is split into two parts, of
// which the first times n is exact, and e^-r is a polynomial (minimax: relative error 1.0e-7).
FVV_INLINE Floats silu(Floats v) {
#if FVV_LANES == 16
  const Floats bounded = _mm512_range_ps(v, splat(89.0f), 2);  // the smaller magnitude
#else
  const Floats bounded = at_most(at_least(v, -89.0f), 86.0f);
#endif
  const Floats n = nearest_whole(bounded * -1.44269504f);
  const Floats r = (bounded + n * 0.693359375f) - n * 2.12194440e-4f;
  Floats p = r * -8.31252053e-3f + 4.18900411e-2f;
  p = p * r - 1.66671146e-1f;
  p = p * r + 4.99992315e-1f;
  p = p * r - 1.0f;
  p = p * r + 1.0f;
  const Floats below = 1.0f + scale_by_power(p, n);
  return v / below;
}

// Memory of a call that is freed with it; no std::vector, because its functions would be compiled
// for the instructions of one file and linked into all.
template <class T>
struct Scratch {
  T* data;
  explicit Scratch(int64_t count) : data((T*)malloc((count + kPadding) * sizeof(T))) {
    if (!data) throw std::bad_alloc();
  }
  ~Scratch() { free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
};
