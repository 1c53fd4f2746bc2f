/* Elementary functions of 16 floats. */
#ifndef LLMC_VECTOR_MATH_H
#define LLMC_VECTOR_MATH_H

#include <immintrin.h>

/* eˣ for x ≤ 88, e⁸⁸ above, 0 below −87, NaN for NaN: powers of two, and a polynomial of their fraction (Cephes' expf, below 2 ulp). */
static inline __attribute__((always_inline)) __m512 exp16(__m512 x) {
  const __mmask16 there = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  __m512 t = _mm512_mul_ps(_mm512_min_ps(_mm512_set1_ps(88.0f), x), _mm512_set1_ps(1.44269504f));
  __m512 whole = _mm512_roundscale_ps(t, 8);
  __m512 f = _mm512_mul_ps(_mm512_sub_ps(t, whole), _mm512_set1_ps(0.693147181f));
  __m512 e = _mm512_set1_ps(1.9875691500e-4f);
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(1.3981999507e-3f));
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(8.3334519073e-3f));
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(4.1665795894e-2f));
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(1.6666665459e-1f));
  e = _mm512_fmadd_ps(e, f, _mm512_set1_ps(0.5f));
  e = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(f, f), e, f), _mm512_set1_ps(1.0f));
  return _mm512_maskz_mov_ps(there, _mm512_scalef_ps(e, whole));
}

/* x / (1 + e⁻ˣ) */
static inline __attribute__((always_inline)) __m512 silu16(__m512 x) {
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

#endif
