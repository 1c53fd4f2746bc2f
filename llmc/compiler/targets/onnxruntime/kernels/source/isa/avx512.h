/* vectors.h for AVX-512 with VNNI: a vector is a register. */
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
INLINE Floats lower(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats higher(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE float greatest(Floats x) { return _mm512_reduce_max_ps(x); }
INLINE Floats between(int64_t first, int64_t end, Floats x, Floats other) {
  const Lanes here = first_lanes(end) & (Lanes)~first_lanes(first);
  return _mm512_mask_blend_ps(here, other, x);
}
INLINE Floats unless_below(Floats x, float limit, Floats y) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, filled(limit), _CMP_NLT_UQ), y);
}
INLINE Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
INLINE Ints to_ints(Floats x) { return (Ints)_mm512_cvtps_epi32(x); }
INLINE void to_bytes(int32_t *to, Ints x) { _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8((__m512i)x)); }

enum { SCORED = 4 };
#define STRIP_ROWS 8

INLINE int32_t bias_of(int bits) { return (void)bits, 0; }

INLINE void group_dots(const int rows, const int panels, const int bits, int64_t steps, const uint8_t *const *from,
                       const int32_t *codes, int64_t ahead, Ints *dots) {
  if (bits == 8) {
    for (int64_t k = 0; k < steps; k++)
      UNROLL
      for (int n = 0; n < panels; n++) {
        const __m512i w = _mm512_loadu_si512(from[n] + 64 * k);
        if (ahead) _mm_prefetch((const char *)from[n] + 64 * k + ahead, _MM_HINT_T1);
        UNROLL
        for (int r = 0; r < rows; r++) {
          Ints *dot = dots + r * panels + n;
          *dot = (Ints)_mm512_dpbusd_epi32((__m512i)*dot, w, _mm512_set1_epi32(codes[k * TOGETHER + r]));
        }
      }
    return;
  }
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t k = 0; k < steps / 2; k++)
    UNROLL
    for (int n = 0; n < panels; n++) {
      const __m512i both = _mm512_loadu_si512(from[n] + 64 * k);
      if (ahead) _mm_prefetch((const char *)from[n] + 64 * k + ahead, _MM_HINT_T1);
      const __m512i first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      UNROLL
      for (int r = 0; r < rows; r++) {
        const int32_t *x = codes + k * TOGETHER + r;
        Ints *dot = dots + r * panels + n;
        *dot = (Ints)_mm512_dpbusd_epi32((__m512i)*dot, first, _mm512_set1_epi32(x[0]));
        *dot = (Ints)_mm512_dpbusd_epi32((__m512i)*dot, second, _mm512_set1_epi32(x[steps / 2 * TOGETHER]));
      }
    }
}

INLINE void transpose(const float *from, int64_t stride, int64_t rows, float *to, int64_t apart) {
  Floats r[16], t[16];
  UNROLL
  for (int i = 0; i < 16; i++) r[i] = i < rows ? load(from + i * stride) : filled(0.0f);
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
    store(to + i * apart, _mm512_shuffle_f32x4(a, c, 0x88));
    store(to + (i + 8) * apart, _mm512_shuffle_f32x4(a, c, 0xDD));
    store(to + (i + 4) * apart, _mm512_shuffle_f32x4(b, d, 0x88));
    store(to + (i + 12) * apart, _mm512_shuffle_f32x4(b, d, 0xDD));
  }
}
