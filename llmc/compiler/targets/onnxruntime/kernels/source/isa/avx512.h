/* vectors.h for AVX-512 with VNNI. A vector is one register. */
#include <immintrin.h>

typedef __mmask16 Lanes;

INLINE Lanes first_lanes(int64_t count) {
  return count >= LANES ? 0xFFFF : count > 0 ? (Lanes)((1u << count) - 1) : 0;
}
INLINE Floats load_lanes(Lanes lanes, const float *from) { return _mm512_maskz_loadu_ps(lanes, from); }
INLINE void store_lanes(float *to, Lanes lanes, Floats x) { _mm512_mask_storeu_ps(to, lanes, x); }
INLINE Halves load_half_lanes(Lanes lanes, const uint16_t *from) {
  return (Halves)_mm256_maskz_loadu_epi16(lanes, from);
}
INLINE void store_half_lanes(uint16_t *to, Lanes lanes, Halves x) { _mm256_mask_storeu_epi16(to, lanes, (__m256i)x); }
INLINE Floats from_half(Halves x) { return _mm512_cvtph_ps((__m256i)x); }
INLINE Halves to_half(Floats x) { return (Halves)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
INLINE Floats min16(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats max16(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE float max_of(Floats x) { return _mm512_reduce_max_ps(x); }
INLINE Floats select_lanes(int64_t first, int64_t end, Floats x, Floats other) {
  const Lanes lanes = first_lanes(end) & (Lanes)~first_lanes(first);
  return _mm512_mask_blend_ps(lanes, other, x);
}
INLINE Floats zero_below(Floats x, float limit, Floats y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(limit), _CMP_NLT_UQ), y);
}
INLINE Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
INLINE Ints to_ints(Floats x) { return (Ints)_mm512_cvtps_epi32(x); }
INLINE void to_bytes(int32_t *to, Ints x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8((__m512i)x)); }

#if defined(__AVX512BF16__) && !defined(__AMX_INT8__)
enum { SCORED = 4, BOTH_ROWS = 0 }; /* Zen 5 is faster with one panel at a time; Zen 4 is not measured */
#else
enum { SCORED = 4, BOTH_ROWS = 4 };
#endif
#define STRIP_ROWS 8

INLINE int32_t bias_of(int format) { return (void)format, 0; }

/* Unpack the steps k + i · steps / packed_steps, which share bytes in a panel. */
INLINE void unpack_steps(const int format, __m512i values, int64_t steps, const uint8_t *from, int64_t k,
                         __m512i *quantized) {
  const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(48);
#define BYTES(k) _mm512_loadu_si512(from + 64 * (k))
  const __m512i first = BYTES(k);
  if (format == EIGHT) {
    quantized[0] = first;
  } else if (format == FOUR || format == TABLED) {
    quantized[0] = _mm512_and_si512(first, low), quantized[1] = _mm512_and_si512(_mm512_srli_epi16(first, 4), low);
    if (format == TABLED)
      UNROLL
      for (int i = 0; i < 2; i++) quantized[i] = _mm512_shuffle_epi8(values, quantized[i]);
  } else {
    const __m512i second = BYTES(k + steps / 4), above = BYTES(k + steps / 2);
#define JOINED(low4, high2) _mm512_or_si512(_mm512_and_si512(low4, low), _mm512_and_si512(high2, high))
    quantized[0] = JOINED(first, _mm512_slli_epi16(above, 4));
    quantized[1] = JOINED(second, _mm512_slli_epi16(above, 2));
    quantized[2] = JOINED(_mm512_srli_epi16(first, 4), above);
    quantized[3] = JOINED(_mm512_srli_epi16(second, 4), _mm512_srli_epi16(above, 2));
#undef JOINED
  }
#undef BYTES
}

/* A table's 16 values as unsigned bytes with the zero point 128. Formats without a table return 0. */
INLINE __m512i table_of(const int format, const int8_t *values) {
  if (format != TABLED) return _mm512_setzero_si512();
  const __m512i each = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)values));
  return _mm512_xor_si512(each, _mm512_set1_epi8(-128));
}

INLINE Words look_up(const int8_t *values, Words x) {
  return (Words)_mm512_shuffle_epi8(table_of(TABLED, values), (__m512i)x);
}

INLINE void group_dots(const int rows, const int panels, const int format, const int8_t *values, int64_t steps,
                       const uint8_t *const *from, const int32_t *quantized, int64_t ahead, Ints *dots) {
  const int64_t step_stride = steps / packed_steps(format);
  const __m512i table = table_of(format, values);
  for (int64_t k = 0; k < step_stride; k++)
    UNROLL
    for (int n = 0; n < panels; n++) {
      __m512i w[4];
      unpack_steps(format, table, steps, from[n], k, w);
      fetch_step(format, from[n], k, ahead);
      UNROLL
      for (int r = 0; r < rows; r++) {
        Ints *dot = dots + r * panels + n;
        UNROLL
        for (int i = 0; i < packed_steps(format); i++)
          *dot = (Ints)_mm512_dpbusd_epi32((__m512i)*dot, w[i],
                                           _mm512_set1_epi32(quantized[(k + i * step_stride) * PACKED_ROWS + r]));
      }
    }
}

INLINE void transpose(const float *from, int64_t stride, int64_t rows, float *to, int64_t to_stride) {
  Floats r[16], t[16];
  UNROLL
  for (int i = 0; i < 16; i++) r[i] = i < rows ? load(from + i * stride) : splat(0.0f);
  UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL
  for (int i = 0; i < 16; i += 4)
    UNROLL
    for (int j = 0; j < 2; j++) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  UNROLL
  for (int i = 0; i < 4; i++) {
    Floats a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
    Floats c = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
    store(to + i * to_stride, _mm512_shuffle_f32x4(a, c, 0x88));
    store(to + (i + 8) * to_stride, _mm512_shuffle_f32x4(a, c, 0xDD));
    store(to + (i + 4) * to_stride, _mm512_shuffle_f32x4(b, d, 0x88));
    store(to + (i + 12) * to_stride, _mm512_shuffle_f32x4(b, d, 0xDD));
  }
}
