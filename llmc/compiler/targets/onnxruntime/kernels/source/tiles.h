/* Blocks of keys, scores and values, as attention works them off: KEYS at a time, in rows of whole registers. */
#ifndef LLMC_TILES_H
#define LLMC_TILES_H

#include "panels.h"
#include "vector_math.h"

enum { KEYS = 64 };

/* The first `count` lanes of a register. */
INLINE __mmask16 lanes(int64_t count) { return count >= LANES ? 0xFFFF : (__mmask16)((1u << count) - 1); }

/* `count` rounded up to whole registers. */
INLINE int64_t whole(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* To float16, in which what is beyond its range is no number: an infinite key could pass for one that nobody sees. */
INLINE void narrow(const float *from, uint16_t *to, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const __mmask16 here = lanes(count - i);
    __m512 x = _mm512_maskz_loadu_ps(here, from + i);
    const __mmask16 beyond = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(65520.0f), _CMP_NLT_UQ);
    x = _mm512_mask_blend_ps(beyond, x, _mm512_set1_ps(__builtin_nanf("")));
    _mm256_mask_storeu_epi16(to + i, here, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
}

/* [count, width] in float16 → [count, width rounded up to LANES], zeros behind. */
INLINE void widen(const uint16_t *from, float *to, int64_t count, int64_t width) {
  if (width % LANES == 0) width *= count, count = 1;
  for (; count; count--, from += width)
    for (int64_t i = 0; i < width; i += LANES, to += LANES)
      _mm512_store_ps(to, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes(width - i), from + i)));
}

/* 16 rows of 16 floats, `stride` apart, become columns: to[d · KEYS + row]. */
INLINE void transpose(const float *from, int64_t stride, int64_t rows, float *to) {
  __m512 r[16], t[16];
  UNROLL
  for (int i = 0; i < 16; i++) r[i] = i < rows ? _mm512_loadu_ps(from + i * stride) : _mm512_setzero_ps();
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
    __m512 a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
    __m512 c = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
    _mm512_storeu_ps(to + i * KEYS, _mm512_shuffle_f32x4(a, c, 0x88));
    _mm512_storeu_ps(to + (i + 8) * KEYS, _mm512_shuffle_f32x4(a, c, 0xDD));
    _mm512_storeu_ps(to + (i + 4) * KEYS, _mm512_shuffle_f32x4(b, d, 0x88));
    _mm512_storeu_ps(to + (i + 12) * KEYS, _mm512_shuffle_f32x4(b, d, 0xDD));
  }
}

/* Scores [rows, KEYS] of `rows` queries [rows, dim] with turned keys [dim, KEYS]. */
INLINE void score(const int rows, const float *q, const float *keys, int64_t dim, float scale, float *to) {
  __m512 s[6][4];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < 4; n++) s[r][n] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < dim; d++) {
    __m512 k[4];
    UNROLL
    for (int n = 0; n < 4; n++) k[n] = _mm512_load_ps(keys + d * KEYS + n * LANES);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const __m512 x = _mm512_set1_ps(q[r * dim + d]);
      UNROLL
      for (int n = 0; n < 4; n++) s[r][n] = _mm512_fmadd_ps(x, k[n], s[r][n]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < 4; n++) _mm512_store_ps(to + r * KEYS + n * LANES, _mm512_mul_ps(s[r][n], _mm512_set1_ps(scale)));
  }
}

/* sums [rows, width] · shrink [rows] + weights [rows, KEYS] · values [count, width], of rows `dim` floats apart and
width = 16 · lines. */
INLINE void gather_lines(const int rows, const int lines, const float *weights, const float *values, int64_t count,
                         int64_t dim, const float *shrink, float *sums) {
  __m512 s[6][4];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < lines; n++)
      s[r][n] = _mm512_mul_ps(_mm512_load_ps(sums + r * dim + n * LANES), _mm512_set1_ps(shrink[r]));
  }
  for (int64_t k = 0; k < count; k++) {
    __m512 v[4];
    UNROLL
    for (int n = 0; n < lines; n++) v[n] = _mm512_loadu_ps(values + k * dim + n * LANES);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const __m512 x = _mm512_set1_ps(weights[r * KEYS + k]);
      UNROLL
      for (int n = 0; n < lines; n++) s[r][n] = _mm512_fmadd_ps(x, v[n], s[r][n]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < lines; n++) _mm512_store_ps(sums + r * dim + n * LANES, s[r][n]);
  }
}

INLINE void gather(const int rows, const float *weights, const float *values, int64_t count, int64_t dim,
                   const float *shrink, float *sums) {
  int64_t d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES)
    gather_lines(rows, 4, weights, values + d, count, dim, shrink, sums + d);
  for (; d < dim; d += LANES) gather_lines(rows, 1, weights, values + d, count, dim, shrink, sums + d);
}

/* Have memory brought into the cache that `count` float16 lie in. */
INLINE void fetch(const uint16_t *from, int64_t count) {
  for (int64_t i = 0; i < count; i += 2 * LANES) _mm_prefetch((const char *)(from + i), _MM_HINT_T0);
}

/* Functions of their own for each number of rows: inlined into one caller, their sums would not stay in registers. */
#define TILES(T)                                                                                                   \
  static __attribute__((noinline)) void score_##T(const float *q, const float *keys, int64_t dim, float scale,     \
                                                  float *to) {                                                     \
    score(T, q, keys, dim, scale, to);                                                                             \
  }                                                                                                                \
  static __attribute__((noinline)) void gather_##T(const float *weights, const float *values, int64_t count,       \
                                                   int64_t dim, const float *shrink, float *sums) {                \
    gather(T, weights, values, count, dim, shrink, sums);                                                          \
  }
TILES(1) TILES(2) TILES(3) TILES(4) TILES(6)

#define EACH_TILE(what, count, ...)                                      \
  for (int64_t r = 0, left = (count); left > 0; left = (count)-r) {      \
    if (left >= 6) what##_6(__VA_ARGS__), r += 6;                        \
    else if (left >= 4) what##_4(__VA_ARGS__), r += 4;                   \
    else if (left == 3) what##_3(__VA_ARGS__), r += 3;                   \
    else if (left == 2) what##_2(__VA_ARGS__), r += 2;                   \
    else what##_1(__VA_ARGS__), r += 1;                                  \
  }

/* cap · tanh(scores / cap) */
INLINE void cap_scores(float *scores, float cap) {
  const __m512 one = _mm512_set1_ps(1.0f), two = _mm512_set1_ps(2.0f), most = _mm512_set1_ps(cap);
  UNROLL
  for (int n = 0; n < 4; n++) {
    const __m512 twice = exp16(_mm512_mul_ps(_mm512_load_ps(scores + n * LANES), _mm512_set1_ps(2.0f / cap)));
    const __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(twice, one)));
    _mm512_store_ps(scores + n * LANES, _mm512_mul_ps(tanh, most));
  }
}

/* Add `slope` for each place of a key, the first one of this block being at `place`. */
INLINE void lean_scores(float *scores, float slope, int64_t place) {
  const __m512 lane = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  UNROLL
  for (int n = 0; n < 4; n++) {
    const __m512 at = _mm512_add_ps(lane, _mm512_set1_ps((float)(place + n * LANES)));
    const __m512 leant = _mm512_fmadd_ps(at, _mm512_set1_ps(slope), _mm512_load_ps(scores + n * LANES));
    _mm512_store_ps(scores + n * LANES, leant);
  }
}

/* Add what each of the first `count` keys of this block has. */
INLINE void raise_scores(float *scores, const float *by, int64_t count) {
  for (int64_t n = 0; n < count; n += LANES) {
    const __m512 more = _mm512_maskz_loadu_ps(lanes(count - n), by + n);
    _mm512_store_ps(scores + n, _mm512_add_ps(_mm512_load_ps(scores + n), more));
  }
}

/* One row's weights e^(score − maximum) of the keys from … end − 1 of this block; returns what older sums shrink by. */
INLINE float weigh(float *scores, int64_t from, int64_t end, float *most, float *total) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  __m512 s[4], top = none;
  UNROLL
  for (int n = 0; n < 4; n++) {
    int64_t below = from - n * LANES, above = end - n * LANES;
    uint32_t mask = above <= 0 ? 0 : above >= LANES ? 0xFFFF : (1u << above) - 1;
    if (below > 0) mask &= below >= LANES ? 0 : ~((1u << below) - 1);
    s[n] = _mm512_mask_blend_ps((__mmask16)mask, none, _mm512_load_ps(scores + n * LANES));
    top = _mm512_max_ps(top, s[n]);
  }
  float higher = _mm512_reduce_max_ps(top);
  if (higher < *most) higher = *most;
  if (higher == -__builtin_inff()) { /* no key yet, unless maxima passed over what is no number */
    UNROLL
    for (int n = 0; n < 4; n++) {
      if (_mm512_cmp_ps_mask(s[n], s[n], _CMP_UNORD_Q)) *total = __builtin_nanf("");
      _mm512_store_ps(scores + n * LANES, _mm512_setzero_ps());
    }
    return 1.0f;
  }
  const __m512 maximum = _mm512_set1_ps(higher);
  __m512 sum = _mm512_setzero_ps();
  UNROLL
  for (int n = 0; n < 4; n++) {
    __m512 e = exp16(_mm512_sub_ps(s[n], maximum));
    _mm512_store_ps(scores + n * LANES, e);
    sum = _mm512_add_ps(sum, e);
  }
  float shrink = _mm512_cvtss_f32(exp16(_mm512_set1_ps(*most - higher)));
  *total = *total * shrink + _mm512_reduce_add_ps(sum);
  *most = higher;
  return shrink;
}

#endif
