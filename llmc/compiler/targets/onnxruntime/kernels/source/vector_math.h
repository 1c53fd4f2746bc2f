/* Elementary functions of 16 floats. */
#ifndef LLMC_VECTOR_MATH_H
#define LLMC_VECTOR_MATH_H

#include "vectors.h"

/* eˣ for x ≤ 88, e⁸⁸ above, 0 below −87, NaN for NaN. Splits x into a power of two and a fraction, for which it uses a
polynomial (Cephes' expf, below 2 ulp). */
INLINE Floats exp16(Floats x) {
  Floats t = min16(splat(88.0f), x) * splat(1.44269504f);
  Floats power = round16(t);
  Floats f = (t - power) * splat(0.693147181f);
  Floats e = splat(1.9875691500e-4f);
  e = fma16(e, f, splat(1.3981999507e-3f));
  e = fma16(e, f, splat(8.3334519073e-3f));
  e = fma16(e, f, splat(4.1665795894e-2f));
  e = fma16(e, f, splat(1.6666665459e-1f));
  e = fma16(e, f, splat(0.5f));
  e = fma16(f * f, e, f) + splat(1.0f);
  return zero_below(x, -87.0f, times_power(e, power));
}

/* eˣ for x ≤ 0, 0 below −87, NaN for NaN, and exactly 1 for 0. The relative error is at most 3 · 10⁻⁶, for callers that
round to bfloat16. */
INLINE Floats short_exp16(Floats x) {
  const Floats t = x * splat(1.44269504f), power = round16(t), f = t - power;
  Floats e = fma16(splat(9.5828529e-3f), f, splat(5.5906427e-2f));
  e = fma16(e, f, splat(2.4024099e-1f));
  e = fma16(e, f, splat(6.9312419e-1f));
  e = fma16(e, f, splat(1.0f));
  return zero_below(x, -87.0f, times_power(e, power));
}

/* x / (1 + e⁻ˣ) */
INLINE Floats silu16(Floats x) {
  return x / (splat(1.0f) + exp16(splat(0.0f) - x));
}

#endif
