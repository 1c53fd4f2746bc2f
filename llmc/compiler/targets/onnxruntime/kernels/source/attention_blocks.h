/* Scores, softmax weights and weighted sums for a block of KEYS keys. Rows are padded to whole vectors. */
#ifndef LLMC_ATTENTION_BLOCKS_H
#define LLMC_ATTENTION_BLOCKS_H

#include "panels.h"
#include "vector_math.h"

enum { KEYS = 64 };

/* Scores [rows, KEYS] of `rows` queries [rows, dim] with transposed keys [dim, KEYS]. */
INLINE void score(const int rows, const float *q, const float *keys, int64_t dim, float scale, float *to) {
  for (int64_t key = 0; key < KEYS; key += SCORED * LANES, keys += SCORED * LANES, to += SCORED * LANES) {
    Floats s[6][SCORED];
    UNROLL
    for (int r = 0; r < rows; r++) {
      UNROLL
      for (int n = 0; n < SCORED; n++) s[r][n] = splat(0.0f);
    }
    for (int64_t d = 0; d < dim; d++) {
      Floats k[SCORED];
      UNROLL
      for (int n = 0; n < SCORED; n++) k[n] = load_aligned(keys + d * KEYS + n * LANES);
      UNROLL
      for (int r = 0; r < rows; r++) {
        const Floats x = splat(q[r * dim + d]);
        UNROLL
        for (int n = 0; n < SCORED; n++) s[r][n] = fma16(x, k[n], s[r][n]);
      }
    }
    UNROLL
    for (int r = 0; r < rows; r++) {
      UNROLL
      for (int n = 0; n < SCORED; n++) store_aligned(to + r * KEYS + n * LANES, s[r][n] * splat(scale));
    }
  }
}

/* sums [rows, width] · rescale [rows] + weights [rows, KEYS] · values [count, width], where width = 16 · lines. Rows of
sums and values are `dim` floats apart. */
INLINE void weighted_sum_lines(const int rows, const int lines, const float *weights, const float *values,
                               int64_t count, int64_t dim, const float *rescale, float *sums) {
  Floats s[6][SCORED];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < lines; n++)
      s[r][n] = load_aligned(sums + r * dim + n * LANES) * splat(rescale[r]);
  }
  for (int64_t k = 0; k < count; k++) {
    Floats v[SCORED];
    UNROLL
    for (int n = 0; n < lines; n++) v[n] = load(values + k * dim + n * LANES);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const Floats x = splat(weights[r * KEYS + k]);
      UNROLL
      for (int n = 0; n < lines; n++) s[r][n] = fma16(x, v[n], s[r][n]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < lines; n++) store_aligned(sums + r * dim + n * LANES, s[r][n]);
  }
}

INLINE void weighted_sum(const int rows, const float *weights, const float *values, int64_t count, int64_t dim,
                         const float *rescale, float *sums) {
  int64_t d = 0;
  for (; d + SCORED * LANES <= dim; d += SCORED * LANES)
    weighted_sum_lines(rows, SCORED, weights, values + d, count, dim, rescale, sums + d);
  for (; d < dim; d += LANES) weighted_sum_lines(rows, 1, weights, values + d, count, dim, rescale, sums + d);
}

/* One function for each row count: if they were inlined into one caller, the sums would not stay in registers. */
#define ROW_KERNELS(T)                                                                                             \
  static __attribute__((noinline)) void score_##T(const float *q, const float *keys, int64_t dim, float scale,     \
                                                  float *to) {                                                     \
    score(T, q, keys, dim, scale, to);                                                                             \
  }                                                                                                                \
  static __attribute__((noinline)) void weighted_sum_##T(const float *weights, const float *values, int64_t count, \
                                                         int64_t dim, const float *rescale, float *sums) {         \
    weighted_sum(T, weights, values, count, dim, rescale, sums);                                                   \
  }
ROW_KERNELS(1) ROW_KERNELS(2) ROW_KERNELS(3) ROW_KERNELS(4) ROW_KERNELS(6)

#define EACH_ROWS(what, count, ...)                                      \
  for (int64_t r = 0, left = (count); left > 0; left = (count)-r) {      \
    if (left >= 6) what##_6(__VA_ARGS__), r += 6;                        \
    else if (left >= 4) what##_4(__VA_ARGS__), r += 4;                   \
    else if (left == 3) what##_3(__VA_ARGS__), r += 3;                   \
    else if (left == 2) what##_2(__VA_ARGS__), r += 2;                   \
    else what##_1(__VA_ARGS__), r += 1;                                  \
  }

/* cap · tanh(scores / cap) */
INLINE void cap_scores(float *scores, float cap) {
  const Floats one = splat(1.0f), two = splat(2.0f), max_score = splat(cap);
  UNROLL
  for (int n = 0; n < 4; n++) {
    const Floats exp2x = exp16(load_aligned(scores + n * LANES) * splat(2.0f / cap));
    const Floats tanh = one - two / (exp2x + one);
    store_aligned(scores + n * LANES, tanh * max_score);
  }
}

/* Add slope · position to each score. The block's first key is at `position`. */
INLINE void add_alibi(float *scores, float slope, int64_t position) {
  const Floats lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  UNROLL
  for (int n = 0; n < 4; n++) {
    const Floats at = lane + splat((float)(position + n * LANES));
    const Floats biased = fma16(at, splat(slope), load_aligned(scores + n * LANES));
    store_aligned(scores + n * LANES, biased);
  }
}

/* Add a bias to the scores of the block's first `count` keys. */
INLINE void add_bias_table(float *scores, const float *by, int64_t count) {
  for (int64_t n = 0; n < count; n += LANES) {
    const Floats more = load_lanes(first_lanes(count - n), by + n);
    store_aligned(scores + n, load_aligned(scores + n) + more);
  }
}

/* Turn one row's scores into the weights e^(score − maximum) of keys from … end − 1 of this block. With `bf16`, the
caller rounds the weights to bfloat16. Returns the factor by which to rescale earlier sums. */
INLINE float online_softmax(const int bf16, float *scores, int64_t from, int64_t end, float *max_score,
                            float *weight_sum) {
  const Floats none = splat(-__builtin_inff());
  Floats s[4], top = none;
  UNROLL
  for (int n = 0; n < 4; n++) {
    s[n] = select_lanes(from - n * LANES, end - n * LANES, load_aligned(scores + n * LANES), none);
    top = max16(top, s[n]);
  }
  float highest = max_of(top);
  if (highest < *max_score) highest = *max_score;
  if (highest == -__builtin_inff()) { /* no key yet, or max16 skipped NaN scores */
    UNROLL
    for (int n = 0; n < 4; n++) {
      if (__builtin_reduce_or(s[n] != s[n])) *weight_sum = __builtin_nanf("");
      store_aligned(scores + n * LANES, splat(0.0f));
    }
    return 1.0f;
  }
  const Floats maximum = splat(highest);
  Floats sum = splat(0.0f);
  UNROLL
  for (int n = 0; n < 4; n++) {
    Floats e = bf16 ? short_exp16(s[n] - maximum) : exp16(s[n] - maximum);
    store_aligned(scores + n * LANES, e);
    sum = sum + e;
  }
  float rescale = exp16(splat(*max_score - highest))[0];
  *weight_sum = __builtin_fmaf(*weight_sum, rescale, sum_of(sum));
  *max_score = highest;
  return rescale;
}

#endif
