/* Products of numbers that are rounded to bfloat16, which float32 holds exactly, with the sums of instructions for them.
Tiles (Intel 64 manual, TDPBF16PS): of DEPTH products those in even places are summed in order, and those in odd places;
both sums are added, and then added to the sum so far. Tiles take what is below 2⁻¹²⁶ as zero, which here it is only
before products. */
#ifndef LLMC_ROUNDED_H
#define LLMC_ROUNDED_H

#include "vectors.h"

enum { DEPTH = 32 };

/* `count` rounded up to whole depths. */
INLINE int64_t deep(int64_t count) { return (count + DEPTH - 1) / DEPTH * DEPTH; }

/* To the nearest bfloat16, ties to even, and zero below 2⁻¹²⁶ (VCVTNE2PS2BF16). */
INLINE Floats rounded(Floats x) {
  const Ints bits = (Ints)x, none = x != x, least = magnitude(x) < filled(1.17549435e-38f);
  const Ints near = (bits + filled_ints(0x7FFF) + (Ints)((Words)bits >> 16 & 1)) & filled_ints((int32_t)0xFFFF0000);
  const Ints sign = filled_ints((int32_t)0x80000000);
  return (Floats)((none & (bits | filled_ints(0x400000))) | (~none & ~least & near) | (least & bits & sign));
}

/* `count` floats, a multiple of LANES, in place. */
INLINE void round_lines(float *x, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store_aligned(x + i, rounded(load_aligned(x + i)));
}

/* sums [4 · LANES] grow by Σ x[k] · lines[k], over `count` k, a multiple of DEPTH, of lines `apart` floats apart. */
INLINE void grow(const int vectors, const float *x, const float *lines, int64_t count, int64_t apart, Floats *sums) {
  for (int64_t k = 0; k < count; k += DEPTH) {
    Floats even[4], odd[4];
    UNROLL
    for (int n = 0; n < vectors; n++) even[n] = odd[n] = filled(0.0f);
    for (int64_t i = k; i < k + DEPTH; i += 2)
      UNROLL
      for (int n = 0; n < vectors; n++) {
        even[n] = fused(filled(x[i]), load_aligned(lines + i * apart + n * LANES), even[n]);
        odd[n] = fused(filled(x[i + 1]), load_aligned(lines + (i + 1) * apart + n * LANES), odd[n]);
      }
    UNROLL
    for (int n = 0; n < vectors; n++) sums[n] = sums[n] + (even[n] + odd[n]);
  }
}

/* Scores [KEYS] of a query [dim] with turned keys [dim, KEYS]; dim a multiple of DEPTH. */
INLINE void score_rounded(const float *q, const float *keys, int64_t dim, float *to) {
  Floats s[4] = {filled(0.0f), filled(0.0f), filled(0.0f), filled(0.0f)};
  grow(4, q, keys, dim, 4 * LANES, s);
  UNROLL
  for (int n = 0; n < 4; n++) store_aligned(to + n * LANES, s[n]);
}

/* sums [dim] + weights [count] · values [count, dim]; dim a multiple of LANES, count one of DEPTH. */
INLINE void gather_rounded(const float *weights, const float *values, int64_t count, int64_t dim, float *sums) {
  int64_t d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES) {
    Floats s[4];
    UNROLL
    for (int n = 0; n < 4; n++) s[n] = load_aligned(sums + d + n * LANES);
    grow(4, weights, values + d, count, dim, s);
    UNROLL
    for (int n = 0; n < 4; n++) store_aligned(sums + d + n * LANES, s[n]);
  }
  for (; d < dim; d += LANES) {
    Floats s = load_aligned(sums + d);
    grow(1, weights, values + d, count, dim, &s);
    store_aligned(sums + d, s);
  }
}

#endif
