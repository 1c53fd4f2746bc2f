/* bfloat16 arithmetic in float32 vectors, with the sums of AMX tiles. float32 holds every bfloat16 exactly.

Of DEPTH products, TDPBF16PS adds those with even index in order, and those with odd index in order. It then adds both
sums to each other, and the result to the previous sum (Intel 64 manual). It flushes inputs and results below 2⁻¹²⁶ to
zero; this code flushes only inputs. */
#ifndef LLMC_ROUNDED_H
#define LLMC_ROUNDED_H

#include "vectors.h"

enum { DEPTH = 32 };

/* `count` rounded up to a multiple of DEPTH. */
INLINE int64_t pad_depth(int64_t count) { return (count + DEPTH - 1) / DEPTH * DEPTH; }

/* Round to the nearest bfloat16, ties to even. Values below 2⁻¹²⁶ become 0, as with VCVTNE2PS2BF16. */
INLINE Floats rounded(Floats x) {
  const Ints bits = (Ints)x, is_nan = x != x, tiny = abs16(x) < splat(1.17549435e-38f);
  const Ints to_nearest = (bits + splat_ints(0x7FFF) + (Ints)((Words)bits >> 16 & 1)) & splat_ints((int32_t)0xFFFF0000);
  const Ints sign = splat_ints((int32_t)0x80000000);
  return (Floats)((is_nan & (bits | splat_ints(0x400000))) | (~is_nan & ~tiny & to_nearest) | (tiny & bits & sign));
}

/* Round `count` floats in place; `count` is a multiple of LANES. */
INLINE void round_lines(float *x, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store_aligned(x + i, rounded(load_aligned(x + i)));
}

/* Add Σ x[k] · lines[k] over `count` lines to sums [vectors · LANES]. `count` is a multiple of DEPTH. Lines are
`stride` floats apart. */
INLINE void accumulate(const int vectors, const float *x, const float *lines, int64_t count, int64_t stride,
                       Floats *sums) {
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

/* Scores [KEYS] of a query [dim] with transposed keys [dim, KEYS]. dim is a multiple of DEPTH. */
INLINE void score_rounded(const float *q, const float *keys, int64_t dim, float *to) {
  Floats s[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  accumulate(4, q, keys, dim, 4 * LANES, s);
  UNROLL
  for (int n = 0; n < 4; n++) store_aligned(to + n * LANES, s[n]);
}

/* sums [dim] += weights [count] · values [count, dim]. dim is a multiple of LANES, and count of DEPTH. */
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
