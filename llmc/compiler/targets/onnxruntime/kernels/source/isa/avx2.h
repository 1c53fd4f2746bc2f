/* vectors.h for AVX2, FMA and F16C, with AVX-VNNI if the CPU has it. A vector is two registers. */
#include <immintrin.h>

#include "counted.h"

INLINE __m256 low_half(Floats x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE __m256 high_half(Floats x) { return __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Floats joined(__m256 a, __m256 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
/* −1 in those of eight lanes whose number, plus `at`, is below `count`; 0 in the others. */
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
INLINE Floats min16(Floats a, Floats b) {
  return joined(_mm256_min_ps(low_half(a), low_half(b)), _mm256_min_ps(high_half(a), high_half(b)));
}
INLINE Floats max16(Floats a, Floats b) {
  return joined(_mm256_max_ps(low_half(a), low_half(b)), _mm256_max_ps(high_half(a), high_half(b)));
}
INLINE float max_of(Floats x) {
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

INLINE Words look_up(const int8_t *values, Words x) {
  const __m256i one = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values));
  const __m256i table = _mm256_xor_si256(one, _mm256_set1_epi8(-128));
  const __m256i a = (__m256i)low_half((Floats)x), b = (__m256i)high_half((Floats)x);
  return (Words)joined((__m256)_mm256_shuffle_epi8(table, a), (__m256)_mm256_shuffle_epi8(table, b));
}

enum { SCORED = 1, BOTH_ROWS = 4 };
#define STRIP_ROWS 4

#if defined(__AVXVNNI__)
enum { SIGNED = 0 };
#else
/* VPMADDUBSW adds pairs of products in 16 bits, which absolute values up to 128 cannot overflow. */
enum { SIGNED = 128 };
#endif
INLINE int32_t bias_of(int format) { return format == EIGHT || format == TABLED ? SIGNED : 0; }

/* Unpack half of the steps k + i · steps / packed_steps, which share bytes in a panel. Subtracts bias_of. */
INLINE void unpack_steps(const int format, __m256i values, int64_t steps, const uint8_t *from, int64_t k, int half,
                         __m256i *quantized) {
  const __m256i low = _mm256_set1_epi8(15), high = _mm256_set1_epi8(48);
#define BYTES(k) _mm256_loadu_si256((const __m256i *)(from + 64 * (k) + 32 * half))
  const __m256i first = BYTES(k);
  if (format == EIGHT) {
    quantized[0] = SIGNED ? _mm256_xor_si256(first, _mm256_set1_epi8(-128)) : first;
  } else if (format == FOUR || format == TABLED) {
    quantized[0] = _mm256_and_si256(first, low), quantized[1] = _mm256_and_si256(_mm256_srli_epi16(first, 4), low);
    if (format == TABLED)
      UNROLL
      for (int i = 0; i < 2; i++) quantized[i] = _mm256_shuffle_epi8(values, quantized[i]);
  } else {
    const __m256i second = BYTES(k + steps / 4), above = BYTES(k + steps / 2);
#define JOINED(low4, high2) _mm256_or_si256(_mm256_and_si256(low4, low), _mm256_and_si256(high2, high))
    quantized[0] = JOINED(first, _mm256_slli_epi16(above, 4));
    quantized[1] = JOINED(second, _mm256_slli_epi16(above, 2));
    quantized[2] = JOINED(_mm256_srli_epi16(first, 4), above);
    quantized[3] = JOINED(_mm256_srli_epi16(second, 4), _mm256_srli_epi16(above, 2));
#undef JOINED
  }
#undef BYTES
}

/* Multiply one group of a panel by up to STRIP_ROWS rows of activations. Their sums stay in registers. */
INLINE void panel_dots(const int rows, const int format, __m256i values, const int64_t steps, const uint8_t *from,
                       const int32_t *quantized, int64_t ahead, __m256i (*dots)[2]) {
  const int64_t step_stride = steps / packed_steps(format);
#define INPUTS(k, r) _mm256_set1_epi32(quantized[(k)*PACKED_ROWS + (r)])
#define HALVES for (int half = 0; half < 2; half++)
#define SHARED for (int i = 0; i < packed_steps(format); i++)
#if defined(__AVXVNNI__)
  for (int64_t k = 0; k < step_stride; k++) {
    fetch_step(format, from, k, ahead);
    UNROLL HALVES {
      __m256i w[4];
      unpack_steps(format, values, steps, from, k, half, w);
      UNROLL
      for (int r = 0; r < rows; r++)
        UNROLL SHARED dots[r][half] = _mm256_dpbusd_avx_epi32(dots[r][half], w[i], INPUTS(k + i * step_stride, r));
    }
  }
#else
  const __m256i ones = _mm256_set1_epi16(1);
  if (format == EIGHT || format == TABLED) {
    for (int64_t k = 0; k < step_stride; k++) {
      __m256i w[2][2], size[2][2];
      UNROLL HALVES {
        unpack_steps(format, values, steps, from, k, half, w[half]);
        UNROLL SHARED size[half][i] = _mm256_abs_epi8(w[half][i]);
      }
      fetch_step(format, from, k, ahead);
      UNROLL SHARED
        UNROLL
        for (int r = 0; r < rows; r++) {
          const __m256i x = INPUTS(k + i * step_stride, r);
          UNROLL HALVES {
            const __m256i pairs = _mm256_maddubs_epi16(size[half][i], _mm256_sign_epi8(x, w[half][i]));
            dots[r][half] = _mm256_add_epi32(dots[r][half], _mm256_madd_epi16(pairs, ones));
          }
        }
    }
    return;
  }
  if (format == SIX) { /* two pairs of products, at most 2 · 63 · 127 each, do not overflow 16 bits */
    for (int64_t k = 0; k < step_stride; k++) {
      __m256i w[2][4];
      UNROLL HALVES unpack_steps(format, values, steps, from, k, half, w[half]);
      fetch_step(format, from, k, ahead);
      UNROLL
      for (int i = 0; i < 4; i += 2)
        UNROLL
        for (int r = 0; r < rows; r++) {
          const __m256i x = INPUTS(k + i * step_stride, r), next = INPUTS(k + (i + 1) * step_stride, r);
          UNROLL HALVES {
            const __m256i pairs =
                _mm256_add_epi16(_mm256_maddubs_epi16(w[half][i], x), _mm256_maddubs_epi16(w[half][i + 1], next));
            dots[r][half] = _mm256_add_epi32(dots[r][half], _mm256_madd_epi16(pairs, ones));
          }
        }
    }
    return;
  }
  enum { STEPS = 4 }; /* so many steps with two pairs of products, at most 2 · 15 · 127 each, do not overflow 16 bits */
  for (int64_t k = 0; k < step_stride; k += STEPS) {
    __m256i pairs[4][2];
    UNROLL
    for (int r = 0; r < rows; r++) UNROLL HALVES pairs[r][half] = _mm256_setzero_si256();
    const int64_t end = k + STEPS < step_stride ? k + STEPS : step_stride;
    for (int64_t at = k; at < end; at++) {
      __m256i w[2][2];
      UNROLL HALVES unpack_steps(format, values, steps, from, at, half, w[half]);
      fetch_step(format, from, at, ahead);
      UNROLL SHARED
        UNROLL
        for (int r = 0; r < rows; r++) {
          const __m256i x = INPUTS(at + i * step_stride, r);
          UNROLL HALVES pairs[r][half] = _mm256_add_epi16(pairs[r][half], _mm256_maddubs_epi16(w[half][i], x));
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL HALVES dots[r][half] = _mm256_add_epi32(dots[r][half], _mm256_madd_epi16(pairs[r][half], ones));
  }
#endif
}

INLINE void group_dots(const int rows, const int panels, const int format, const int8_t *values, int64_t steps,
                       const uint8_t *const *from, const int32_t *quantized, int64_t ahead, Ints *dots) {
  __m256i table = _mm256_setzero_si256();
  if (format == TABLED) {
    table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values));
    if (!SIGNED) table = _mm256_xor_si256(table, _mm256_set1_epi8(-128));
  }
  UNROLL
  for (int n = 0; n < panels; n++) {
    __m256i own[STRIP_ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++) UNROLL HALVES own[r][half] = ((const __m256i *)&dots[r * panels + n])[half];
    /* steps of a group of 16 or 32 inputs, which the compiler unrolls */
    const int64_t common_steps = format == SIX ? 4 : 8;
    if (steps == common_steps) panel_dots(rows, format, table, common_steps, from[n], quantized, ahead, own);
    else panel_dots(rows, format, table, steps, from[n], quantized, ahead, own);
    UNROLL
    for (int r = 0; r < rows; r++) UNROLL HALVES ((__m256i *)&dots[r * panels + n])[half] = own[r][half];
  }
}
#undef SHARED
#undef INPUTS
#undef HALVES

INLINE void transpose8(const float *from, int64_t stride, int64_t rows, float *to, int64_t to_stride) {
  __m256 r[8], t[8];
  UNROLL
  for (int i = 0; i < 8; i++) r[i] = i < rows ? _mm256_loadu_ps(from + i * stride) : _mm256_setzero_ps();
  UNROLL
  for (int i = 0; i < 8; i += 2)
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  UNROLL
  for (int i = 0; i < 8; i += 4)
    UNROLL
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xEE);
    }
  UNROLL
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
INLINE void transpose(const float *from, int64_t stride, int64_t rows, float *to, int64_t to_stride) {
  for (int64_t row = 0; row < LANES; row += 8)
    for (int64_t d = 0; d < LANES; d += 8)
      transpose8(from + row * stride + d, stride, rows - row, to + d * to_stride + row, to_stride);
}
