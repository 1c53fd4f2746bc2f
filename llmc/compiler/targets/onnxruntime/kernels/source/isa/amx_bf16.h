/* attend_lanes.h's products in tiles of bfloat16, over amx.h: sums as rounded.h has them. */
#ifndef LLMC_AMX_BF16_H
#define LLMC_AMX_BF16_H

#include "avx512_words.h"

/* Tiles: sums, what they have in common, and the others. */
enum { GROWN = 0, SHARED = 4, OTHER = 5, AS_ROWS = 1 };

INLINE int words_allowed(void) { return tiles_allowed(); }

INLINE void begin_words(void) {
  Shapes shapes = {.palette = 1};
  for (int i = GROWN; i <= OTHER; i++) shapes.bytes[i] = 4 * LANES, shapes.rows[i] = TILE_ROWS;
  _tile_loadconfig(&shapes);
}

INLINE void end_words(void) { end_tiles(); }

#define FOUR_TIMES(what) what(0); what(1); what(2); what(3)

INLINE void score_words(const uint8_t *keys, int64_t apart, const float *queries, int64_t depth, float *scores) {
#define BEGIN(n) _tile_zero(GROWN + n)
#define MULTIPLY(n) _tile_loadd(OTHER, keys + n * TILE_ROWS * apart + 2 * d, apart); _tile_dpbf16ps(GROWN + n, OTHER, SHARED)
#define END(n) _tile_stored(GROWN + n, scores + n * TILE_ROWS * LANES, 4 * LANES)
  FOUR_TIMES(BEGIN);
  for (int64_t d = 0; d < depth; d += DEPTH) {
    _tile_loadd(SHARED, queries + d / 2 * LANES, 4 * LANES);
    FOUR_TIMES(MULTIPLY);
  }
  FOUR_TIMES(END);
#undef BEGIN
#undef MULTIPLY
#undef END
}

INLINE void gather_words(const int columns, int64_t rows, const float *weights, const float *values, int64_t depth,
                         int64_t apart, float *sums) {
  (void)rows;
#define IF_THERE(n, what) if (n < columns) { what; }
#define BEGIN(n) IF_THERE(n, _tile_loadd(GROWN + n, sums + n * LANES, 4 * apart))
#define MULTIPLY(n) \
  IF_THERE(n, _tile_loadd(OTHER, values + d / 2 * apart + n * LANES, 4 * apart); _tile_dpbf16ps(GROWN + n, SHARED, OTHER))
#define END(n) IF_THERE(n, _tile_stored(GROWN + n, sums + n * LANES, 4 * apart))
  FOUR_TIMES(BEGIN);
  for (int64_t d = 0; d < depth; d += DEPTH) {
    _tile_loadd(SHARED, weights + d / 2, 2 * depth);
    FOUR_TIMES(MULTIPLY);
  }
  FOUR_TIMES(END);
#undef IF_THERE
#undef BEGIN
#undef MULTIPLY
#undef END
}

#endif
