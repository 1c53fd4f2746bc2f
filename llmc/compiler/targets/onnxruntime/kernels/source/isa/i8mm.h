/* Tiles over neon.h for CPUs with I8MM, which multiplies 2 × 8 by 8 × 2 bytes (Neoverse V1 and N2, Graviton 3, Apple
M2). */

#define HAS_TILES

enum { TILE_ROWS = 8, TILES_READ_PANELS = 0 };

/* tile_weights unpacks pairs of steps. */
INLINE int supports_tiles(int64_t group) { return group == 16 || group % 32 == 0; }
INLINE void begin_tiles(int64_t group) { (void)group; }
INLINE void end_tiles(void) {}

/* Subtract `zeros` from two steps of four rows, and store their words interleaved. */
INLINE void store_steps(uint8_t *to, int8x16_t first, int8x16_t second, int8x16_t zeros) {
  const int32x4x2_t both = {
      {vreinterpretq_s32_s8(vsubq_s8(first, zeros)), vreinterpretq_s32_s8(vsubq_s8(second, zeros))}};
  vst2q_s32((int32_t *)to, both);
}

/* Unpack a group to bytes, eight inputs of each of 16 rows at a time: two rows form one factor. */
INLINE const uint8_t *tile_weights(const int format, const int8_t *values, int zero, int64_t steps, const uint8_t *from,
                                   uint8_t *to) {
  const int64_t stride = steps / packed_steps(format);
  const int8x16_t table = vld1q_s8(values), zeros = vdupq_n_s8((int8_t)(zero - bias_of(format)));
  for (int64_t k = 0; k < stride; k += 2)
    UNROLL
    for (int quarter = 0; quarter < 4; quarter++) {
      int8x16_t w[4], next[4];
      uint8_t *at = to + 4 * LANES * k + 32 * quarter;
      unpack_steps(format, table, steps, from, k, quarter, w);
      if (format == SIX && stride == 1) {
        store_steps(at, w[0], w[1], zeros);
        store_steps(at + 8 * LANES, w[2], w[3], zeros);
        continue;
      }
      unpack_steps(format, table, steps, from, k + 1, quarter, next);
      UNROLL
      for (int i = 0; i < packed_steps(format); i++) store_steps(at + 4 * LANES * i * stride, w[i], next[i], zeros);
    }
  return to;
}

/* dots[n] = activations · panel n. Registers hold the sums of four activation rows with a panel. */
INLINE void tile_dots(const int panels, const int is_signed, int64_t group, const int8_t *from,
                      const uint8_t *const *weights, int reuse_weights, int32_t (*dots)[TILE_ROWS * LANES]) {
  (void)reuse_weights;
  UNROLL
  for (int n = 0; n < panels; n++)
    for (int row = 0; row < TILE_ROWS; row += 4) {
      int32x4_t sums[2][8]; /* each holds the sums of two activation rows with two panel rows */
      UNROLL
      for (int i = 0; i < 16; i++) sums[i / 8][i % 8] = vdupq_n_s32(0);
      for (int64_t at = 0; at < group; at += 16) {
        int64x2_t x[4];
        UNROLL
        for (int r = 0; r < 4; r++) x[r] = vreinterpretq_s64_s8(vld1q_s8(from + (row + r) * group + at));
        UNROLL
        for (int half = 0; half < 2; half++)
          UNROLL
          for (int i = 0; i < 16; i++) {
            const int64x2_t *two = x + i / 8 * 2;
            const int8x16_t factor =
                vreinterpretq_s8_s64(half ? vzip2q_s64(two[0], two[1]) : vzip1q_s64(two[0], two[1]));
            const uint8x16_t w = vld1q_u8(weights[n] + LANES * (at + 8 * half) + 16 * (i % 8));
            int32x4_t *sum = &sums[i / 8][i % 8];
            *sum = is_signed ? vmmlaq_s32(*sum, vreinterpretq_s8_u8(w), factor) : vusmmlaq_s32(*sum, w, factor);
          }
      }
      UNROLL
      for (int i = 0; i < 8; i++) {
        const int32x4_t *four = &sums[i / 4][i % 4 * 2];
        int32_t *to = dots[n] + (row + i / 4 * 2) * LANES + i % 4 * 4;
        vst1q_s32(to, vuzp1q_s32(four[0], four[1]));
        vst1q_s32(to + LANES, vuzp2q_s32(four[0], four[1]));
      }
    }
}
