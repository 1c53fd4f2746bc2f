/* word_lines.h over neon.h with BFMMLA, which multiplies 2 × 4 by 4 × 2 bfloat16 values. It adds pairs of products in
order, and rounds the sum of a pair to odd (Arm ARM, BFDotAdd). */
#ifndef LLMC_NEON_BF16_H
#define LLMC_NEON_BF16_H

typedef uint16_t Shorts __attribute__((vector_size(64)));

enum { ROWS_GIVE_SAME_BITS = 0, HAS_WORD_DOTS = 0 };

INLINE int words_allowed(void) { return 1; }
INLINE void begin_words(void) {}
INLINE void end_words(void) {}

INLINE Floats load_words(const uint16_t *from, int64_t count) {
  Shorts some = {0};
  if (count >= DEPTH) __builtin_memcpy(&some, from, sizeof some);
  else
    for (int64_t i = 0; i < count; i++) some[i] = from[i];
  return (Floats)some;
}

INLINE bfloat16x8_t narrow8(float32x4_t first, float32x4_t second) {
  return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second);
}

INLINE Floats interleave_bf16(Floats first, Floats second) {
  const Quarters a = {.floats = first}, b = {.floats = second};
  Quarters words;
  UNROLL
  for (int i = 0; i < 4; i++) {
    const uint16x8_t both = vreinterpretq_u16_bf16(narrow8(a.each[i], b.each[i]));
    words.each[i] = vreinterpretq_f32_u16(vzip1q_u16(both, vextq_u16(both, both, 4)));
  }
  return words.floats;
}

INLINE void narrow_line(const float *from, float *to, int64_t width) {
  for (int64_t i = 0; i < pad_depth(width); i += 8, to += 4)
    vst1q_bf16((bfloat16_t *)to, i < width ? narrow8(vld1q_f32(from + i), vld1q_f32(from + i + 4)) : vdupq_n_bf16(0));
}

INLINE void pair_lines(Floats first, Floats second, float *to) {
  const Shorts a = (Shorts)first, b = (Shorts)second;
  store_aligned(to, (Floats)__builtin_shufflevector(a, b, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40,
                                                    9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47));
  store_aligned(to + LANES,
                (Floats)__builtin_shufflevector(a, b, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                                24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63));
}
INLINE void in_order(const float *from, float *to) {
  store_aligned(to, load_aligned(from));
  store_aligned(to + LANES, load_aligned(from + LANES));
}

INLINE float32x4_t halves(int upper, float32x4_t a, float32x4_t b) {
  const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
  return vreinterpretq_f32_f64(upper ? vzip2q_f64(x, y) : vzip1q_f64(x, y));
}

/* Add lines [4, depth] · words [depth / 2, LANES] to sums [4, LANES]. Lines are `line_stride` bytes apart; rows of
words and sums are `word_stride` and `stride` floats apart. Registers hold sums of two lines and two columns each. */
INLINE void accumulate_words(const uint8_t *lines, int64_t line_stride, const float *words, int64_t word_stride,
                             int64_t depth, float *sums, int64_t stride) {
  float32x4_t accumulated[2][8];
  UNROLL
  for (int i = 0; i < 16; i++) {
    const float *at = sums + i / 8 * 2 * stride + i % 8 / 2 * 4;
    accumulated[i / 8][i % 8] = halves(i % 2, vld1q_f32(at), vld1q_f32(at + stride));
  }
  for (int64_t d = 0; d < depth; d += 4) {
    bfloat16x8_t factors[2];
    UNROLL
    for (int i = 0; i < 2; i++) {
      const uint8_t *at = lines + 2 * i * line_stride + 2 * d;
      factors[i] = vcombine_bf16(vld1_bf16((const bfloat16_t *)at), vld1_bf16((const bfloat16_t *)(at + line_stride)));
    }
    UNROLL
    for (int n = 0; n < 8; n++) {
      const float *at = words + d / 2 * word_stride + n / 2 * 4;
      const float32x4_t first = vld1q_f32(at), second = vld1q_f32(at + word_stride);
      const bfloat16x8_t two = vreinterpretq_bf16_f32(n % 2 ? vzip2q_f32(first, second) : vzip1q_f32(first, second));
      UNROLL
      for (int i = 0; i < 2; i++) accumulated[i][n] = vbfmmlaq_f32(accumulated[i][n], factors[i], two);
    }
  }
  UNROLL
  for (int i = 0; i < 8; i++) {
    const float32x4_t *two = &accumulated[i / 4][i % 4 * 2];
    float *to = sums + i / 4 * 2 * stride + i % 4 * 4;
    vst1q_f32(to, halves(0, two[0], two[1]));
    vst1q_f32(to + stride, halves(1, two[0], two[1]));
  }
}

INLINE void score_words(const uint8_t *keys, int64_t stride, const float *queries, int64_t depth, float *scores) {
  for (int k = 0; k < 4 * LANES; k += 4) {
    UNROLL
    for (int i = 0; i < 4; i++) store_aligned(scores + (k + i) * LANES, splat(0.0f));
    accumulate_words(keys + k * stride, stride, queries, LANES, depth, scores + k * LANES, LANES);
  }
}

INLINE void weighted_sum_words(const int columns, int64_t rows, const float *weights, const float *values,
                               int64_t depth, int64_t stride, float *sums) {
  for (int64_t r = 0; r < rows; r += 4)
    for (int n = 0; n < columns * LANES; n += LANES)
      accumulate_words((const uint8_t *)(weights + r * depth / 2), 2 * depth, values + n, stride, depth,
                       sums + r * stride + n, stride);
}

#endif
