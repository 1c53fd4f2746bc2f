/* Elementary functions of 16 floats. */
#ifndef LLMC_VECTOR_MATH_H
#define LLMC_VECTOR_MATH_H

#include "vectors.h"

/* eˣ for x ≤ 88, e⁸⁸ above, 0 below −87, NaN for NaN: powers of two, and a polynomial of their fraction (Cephes' expf, below 2 ulp). */
INLINE Floats exp16(Floats x) {
  Floats t = lower(filled(88.0f), x) * filled(1.44269504f);
  Floats whole = nearest(t);
  Floats f = (t - whole) * filled(0.693147181f);
  Floats e = filled(1.9875691500e-4f);
  e = fused(e, f, filled(1.3981999507e-3f));
  e = fused(e, f, filled(8.3334519073e-3f));
  e = fused(e, f, filled(4.1665795894e-2f));
  e = fused(e, f, filled(1.6666665459e-1f));
  e = fused(e, f, filled(0.5f));
  e = fused(f * f, e, f) + filled(1.0f);
  return unless_below(x, -87.0f, times_power(e, whole));
}

/* eˣ for x ≤ 0, 0 below −87, NaN for NaN: within 3 · 10⁻⁶ of it, for what is then rounded to bfloat16, and 1 for 0. */
INLINE Floats short_exp16(Floats x) {
  const Floats t = x * filled(1.44269504f), whole = nearest(t), f = t - whole;
  Floats e = fused(filled(9.5828529e-3f), f, filled(5.5906427e-2f));
  e = fused(e, f, filled(2.4024099e-1f));
  e = fused(e, f, filled(6.9312419e-1f));
  e = fused(e, f, filled(1.0f));
  return unless_below(x, -87.0f, times_power(e, whole));
}

/* x / (1 + e⁻ˣ) */
INLINE Floats silu16(Floats x) {
  return x / (filled(1.0f) + exp16(filled(0.0f) - x));
}

#endif
