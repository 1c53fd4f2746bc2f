/* vectors.h for AVX2, FMA and F16C, and AVX-VNNI where it is: a vector is two registers. */
#include <immintrin.h>

#include "counted.h"

INLINE __m256 low_half(Floats x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE __m256 high_half(Floats x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Floats joined(__m256 a, __m256 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
/* −1 in the first `count` lanes from `at` on, else 0. */
INLINE __m256i mask_of(Lanes count, int at) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count - at), lane);
}

INLINE Floats load_lanes(Lanes lanes, const float *from) {
  if (__builtin_expect(lanes == LANES, 1)) return load(from);
  return joined(_mm256_maskload_ps(from, mask_of(lanes, 0)), _mm256_maskload_ps(from + 8, mask_of(lanes, 8)));
}
INLINE void store_lanes(float *to, Lanes lanes, Floats x) {
  if (__builtin_expect(lanes == LANES, 1)) {
    store(to, x);
    return;
  }
  _mm256_maskstore_ps(to, mask_of(lanes, 0), low_half(x));
  _mm256_maskstore_ps(to + 8, mask_of(lanes, 8), high_half(x));
}
INLINE Floats from_half(Halves x) {
  const __m256i all = (__m256i)x;
  return joined(_mm256_cvtph_ps(_mm256_castsi256_si128(all)), _mm256_cvtph_ps(_mm256_extracti128_si256(all, 1)));
}
INLINE Halves to_half(Floats x) {
  return (Halves)_mm256_set_m128i(_mm256_cvtps_ph(high_half(x), _MM_FROUND_TO_NEAREST_INT),
                                  _mm256_cvtps_ph(low_half(x), _MM_FROUND_TO_NEAREST_INT));
}
INLINE Floats lower(Floats a, Floats b) {
  return joined(_mm256_min_ps(low_half(a), low_half(b)), _mm256_min_ps(high_half(a), high_half(b)));
}
INLINE Floats higher(Floats a, Floats b) {
  return joined(_mm256_max_ps(low_half(a), low_half(b)), _mm256_max_ps(high_half(a), high_half(b)));
}
INLINE float greatest(Floats x) {
  const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_max_ss(two, _mm_movehdup_ps(two))[0];
}
INLINE Ints to_ints(Floats x) {
  const __m256i a = _mm256_cvtps_epi32(low_half(x)), b = _mm256_cvtps_epi32(high_half(x));
  return (Ints)joined((__m256)a, (__m256)b);
}
INLINE void to_bytes(int32_t *to, Ints x) {
  const __m256i a = (__m256i)low_half((Floats)x), b = (__m256i)high_half((Floats)x);
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
  _mm_storeu_si128((__m128i *)to,
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

enum { SCORED = 1 };
#define STRIP_ROWS 4

#if defined(__AVXVNNI__)
INLINE int32_t bias_of(int bits) { return (void)bits, 0; }
#else
/* Products of pairs of bytes are added in 16 bits, which codes of 8 bits, or of absolute values up to 128, stay in. */
INLINE int32_t bias_of(int bits) { return bits == 8 ? 128 : 0; }
#endif

/* One group of a panel times `rows` activations, STRIP_ROWS at most: their sums stay in registers. */
INLINE void panel_dots(const int rows, const int bits, const int64_t steps, const uint8_t *from, const int32_t *codes,
                       int64_t ahead, __m256i (*dots)[2]) {
  const __m256i low = _mm256_set1_epi8(15);
#define WEIGHTS(k, half) _mm256_loadu_si256((const __m256i *)(from + 64 * (k) + 32 * (half)))
#define INPUTS(k, r) _mm256_set1_epi32(codes[(k)*TOGETHER + (r)])
#define HALVES for (int half = 0; half < 2; half++)
#if defined(__AVXVNNI__)
  for (int64_t k = 0; k < (bits == 8 ? steps : steps / 2); k++) {
    if (ahead) _mm_prefetch((const char *)from + 64 * k + ahead, _MM_HINT_T1);
    UNROLL
    for (int half = 0; half < 2; half++) {
      const __m256i w = WEIGHTS(k, half);
      const __m256i first = bits == 8 ? w : _mm256_and_si256(w, low), second = _mm256_and_si256(_mm256_srli_epi16(w, 4), low);
      UNROLL
      for (int r = 0; r < rows; r++) {
        dots[r][half] = _mm256_dpbusd_avx_epi32(dots[r][half], first, INPUTS(k, r));
        if (bits == 4) dots[r][half] = _mm256_dpbusd_avx_epi32(dots[r][half], second, INPUTS(k + steps / 2, r));
      }
    }
  }
#else
  const __m256i ones = _mm256_set1_epi16(1);
  if (bits == 8) {
    const __m256i middle = _mm256_set1_epi8(-128);
    for (int64_t k = 0; k < steps; k++) {
      __m256i w[2], size[2];
      UNROLL HALVES w[half] = _mm256_xor_si256(WEIGHTS(k, half), middle), size[half] = _mm256_abs_epi8(w[half]);
      if (ahead) _mm_prefetch((const char *)from + 64 * k + ahead, _MM_HINT_T1);
      UNROLL
      for (int r = 0; r < rows; r++) {
        const __m256i x = INPUTS(k, r);
        UNROLL HALVES {
          const __m256i pairs = _mm256_maddubs_epi16(size[half], _mm256_sign_epi8(x, w[half]));
          dots[r][half] = _mm256_add_epi32(dots[r][half], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
    return;
  }
  enum { FOUR = 4 }; /* steps of two products of pairs up to 2 · 15 · 127, whose sum 16 bits hold */
  for (int64_t k = 0; k < steps / 2; k += FOUR) {
    __m256i pairs[4][2];
    UNROLL
    for (int r = 0; r < rows; r++) UNROLL HALVES pairs[r][half] = _mm256_setzero_si256();
    const int64_t end = k + FOUR < steps / 2 ? k + FOUR : steps / 2;
    for (int64_t i = k; i < end; i++) {
      __m256i w[2];
      UNROLL HALVES w[half] = WEIGHTS(i, half);
      if (ahead) _mm_prefetch((const char *)from + 64 * i + ahead, _MM_HINT_T1);
      UNROLL
      for (int high = 0; high < 2; high++) {
        __m256i own[2];
        UNROLL HALVES own[half] = _mm256_and_si256(high ? _mm256_srli_epi16(w[half], 4) : w[half], low);
        UNROLL
        for (int r = 0; r < rows; r++) {
          const __m256i x = INPUTS(i + (high ? steps / 2 : 0), r);
          UNROLL HALVES pairs[r][half] = _mm256_add_epi16(pairs[r][half], _mm256_maddubs_epi16(own[half], x));
        }
      }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL HALVES dots[r][half] = _mm256_add_epi32(dots[r][half], _mm256_madd_epi16(pairs[r][half], ones));
  }
#endif
}

INLINE void group_dots(const int rows, const int panels, const int bits, int64_t steps, const uint8_t *const *from,
                       const int32_t *codes, int64_t ahead, Ints *dots) {
  UNROLL
  for (int n = 0; n < panels; n++) {
    __m256i own[STRIP_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++) UNROLL HALVES own[r][half] = ((const __m256i *)&dots[r * panels + n])[half];
    if (steps == 8) panel_dots(rows, bits, 8, from[n], codes, ahead, own); /* a group of 32, unrolled */
    else panel_dots(rows, bits, steps, from[n], codes, ahead, own);
    UNROLL
    for (int r = 0; r < rows; r++) UNROLL HALVES ((__m256i *)&dots[r * panels + n])[half] = own[r][half];
  }
}
#undef WEIGHTS
#undef INPUTS
#undef HALVES

INLINE void transpose8(const float *from, int64_t stride, int64_t rows, float *to, int64_t apart) {
  __m256 r[8], t[8];
  UNROLL
  for (int i = 0; i < 8; i++) r[i] = i < rows ? _mm256_loadu_ps(from + i * stride) : _mm256_setzero_ps();
  UNROLL
  for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  UNROLL
  for (int i = 0; i < 8; i += 4)
    UNROLL
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xEE);
    }
  UNROLL
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * apart, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * apart, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
INLINE void transpose(const float *from, int64_t stride, int64_t rows, float *to, int64_t apart) {
  for (int64_t row = 0; row < LANES; row += 8)
    for (int64_t d = 0; d < LANES; d += 8)
      transpose8(from + row * stride + d, stride, rows - row, to + d * apart + row, apart);
}
