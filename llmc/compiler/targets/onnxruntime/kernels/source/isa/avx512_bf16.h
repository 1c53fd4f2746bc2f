/* word_lines.h over avx512.h with VDPBF16PS, which multiplies two bfloat16 pairs per lane. It adds the second product
of a word first, then the first product, and rounds each sum (Intel 64 manual). */
#ifndef LLMC_AVX512_BF16_H
#define LLMC_AVX512_BF16_H

#include "avx512_words.h"

enum { ROWS_GIVE_SAME_BITS = 1, HAS_WORD_DOTS = 1 };

INLINE int words_allowed(void) { return 1; }
INLINE void begin_words(void) {}
INLINE void end_words(void) {}

/* sum + the dot product of each lane's word with the word at `word`. */
INLINE Floats dot_word(Floats sum, Floats words, const void *word) {
  int32_t bits;
  __builtin_memcpy(&bits, word, sizeof bits);
  return _mm512_dpbf16_ps(sum, (__m512bh)words, (__m512bh)_mm512_set1_epi32(bits));
}

enum { KEYS_AT_ONCE = 16, ROWS_AT_ONCE = 4 }; /* their sums fit in registers */

INLINE void score_words(const uint8_t *keys, int64_t stride, const float *queries, int64_t depth, float *scores) {
  for (int k = 0; k < 4 * LANES; k += KEYS_AT_ONCE) {
    Floats sums[KEYS_AT_ONCE];
    UNROLL
    for (int i = 0; i < KEYS_AT_ONCE; i++) sums[i] = splat(0.0f);
    for (int64_t d = 0; d < depth; d += 2) {
      const Floats words = load_aligned(queries + d / 2 * LANES);
      UNROLL
      for (int i = 0; i < KEYS_AT_ONCE; i++) sums[i] = dot_word(sums[i], words, keys + (k + i) * stride + 2 * d);
    }
    UNROLL
    for (int i = 0; i < KEYS_AT_ONCE; i++) store_aligned(scores + (k + i) * LANES, sums[i]);
  }
}

/* weighted_sum_words for at most ROWS_AT_ONCE rows. */
INLINE void weighted_sum_some(const int columns, const int rows, const float *weights, const float *values,
                              int64_t depth, int64_t stride, float *sums) {
  Floats s[ROWS_AT_ONCE * 4];
  UNROLL
  for (int i = 0; i < rows * columns; i++) s[i] = load_aligned(sums + i / columns * stride + i % columns * LANES);
  for (int64_t d = 0; d < depth; d += 2) {
    UNROLL
    for (int i = 0; i < rows * columns; i++)
      s[i] = dot_word(s[i], load_aligned(values + d / 2 * stride + i % columns * LANES),
                      weights + (i / columns * depth + d) / 2);
  }
  UNROLL
  for (int i = 0; i < rows * columns; i++) store_aligned(sums + i / columns * stride + i % columns * LANES, s[i]);
}

INLINE void weighted_sum_words(const int columns, int64_t rows, const float *weights, const float *values,
                               int64_t depth, int64_t stride, float *sums) {
  for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE, weights += ROWS_AT_ONCE * depth / 2, sums += ROWS_AT_ONCE * stride)
    switch (min64(rows - r, ROWS_AT_ONCE)) {
      case 1: weighted_sum_some(columns, 1, weights, values, depth, stride, sums); break;
      case 2: weighted_sum_some(columns, 2, weights, values, depth, stride, sums); break;
      case 3: weighted_sum_some(columns, 3, weights, values, depth, stride, sums); break;
      default: weighted_sum_some(columns, ROWS_AT_ONCE, weights, values, depth, stride, sums);
    }
}

#endif
