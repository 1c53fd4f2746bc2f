/* Products of numbers that are rounded to bfloat16, which float32 holds exactly, with the sums of instructions for them.
Tiles (Intel 64 manual, TDPBF16PS): of DEPTH products those in even places are summed in order, and those in odd places;
both sums are added, and then added to the sum so far. Tiles take what is below 2⁻¹²⁶ as zero, which here it is only
before products. */
#ifndef LLMC_ROUNDED_H
#define LLMC_ROUNDED_H

#include "vectors.h"

enum { DEPTH = 32 };

/* `count` rounded up to whole depths. */
INLINE int64_t pad_depth(int64_t count) { return (count + DEPTH - 1) / DEPTH * DEPTH; }

/* To the nearest bfloat16, ties to even, and zero below 2⁻¹²⁶ (VCVTNE2PS2BF16). */
INLINE Floats rounded(Floats x) {
  const Ints bits = (Ints)x, is_nan = x != x, tiny = abs16(x) < splat(1.17549435e-38f);
  const Ints to_nearest = (bits + splat_ints(0x7FFF) + (Ints)((Words)bits >> 16 & 1)) & splat_ints((int32_t)0xFFFF0000);
  const Ints sign = splat_ints((int32_t)0x80000000);
  return (Floats)((is_nan & (bits | splat_ints(0x400000))) | (~is_nan & ~tiny & to_nearest) | (tiny & bits & sign));
}

/* `count` floats, a multiple of LANES, in place. */
INLINE void round_lines(float *x, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store_aligned(x + i, rounded(load_aligned(x + i)));
}

/* sums [4 · LANES] grow by Σ x[k] · lines[k], over `count` k, a multiple of DEPTH, of lines `apart` floats apart. */
INLINE void accumulate(const int vectors, const float *x, const float *lines, int64_t count, int64_t stride, Floats *sums) {
  for (int64_t k = 0; k < count; k += DEPTH) {
    Floats even[4], odd[4];
    UNROLL
    for (int n = 0; n < vectors; n++) even[n] = odd[n] = splat(0.0f);
    for (int64_t i = k; i < k + DEPTH; i += 2)
      UNROLL
      for (int n = 0; n < vectors; n++) {
        even[n] = fma16(splat(x[i]), load_aligned(lines + i * stride + n * LANES), even[n]);
        odd[n] = fma16(splat(x[i + 1]), load_aligned(lines + (i + 1) * stride + n * LANES), odd[n]);
      }
    UNROLL
    for (int n = 0; n < vectors; n++) sums[n] = sums[n] + (even[n] + odd[n]);
  }
}

/* Scores [KEYS] of a query [dim] with turned keys [dim, KEYS]; dim a multiple of DEPTH. */
INLINE void score_rounded(const float *q, const float *keys, int64_t dim, float *to) {
  Floats s[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  accumulate(4, q, keys, dim, 4 * LANES, s);
  UNROLL
  for (int n = 0; n < 4; n++) store_aligned(to + n * LANES, s[n]);
}

/* sums [dim] + weights [count] · values [count, dim]; dim a multiple of LANES, count one of DEPTH. */
INLINE void weighted_sum_rounded(const float *weights, const float *values, int64_t count, int64_t dim, float *sums) {
  int64_t d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) {
    Floats s[4];
    UNROLL
    for (int n = 0; n < 4; n++) s[n] = load_aligned(sums + d + n * LANES);
    accumulate(4, weights, values + d, count, dim, s);
    UNROLL
    for (int n = 0; n < 4; n++) store_aligned(sums + d + n * LANES, s[n]);
  }
  for (; d < dim; d += LANES) {
    Floats s = load_aligned(sums + d);
    accumulate(1, weights, values + d, count, dim, &s);
    store_aligned(sums + d, s);
  }
}

#endif
