/* Products in tiles of bfloat16 over amx.h, attend_lanes.h's and rounded_product.c's: sums as rounded.h has them. */
#ifndef LLMC_AMX_BF16_H
#define LLMC_AMX_BF16_H

#include "avx512_words.h"

/* Tiles: sums, what they have in common, and the others; two by two are both. */
enum { GROWN = 0, SHARED = 4, OTHER = 5, FIRST = 4, SECOND = 6, LAST = 7, AS_ROWS = 1, IN_DOTS = 0 };

INLINE int words_allowed(void) { return tiles_allowed(); }

INLINE void begin_words(void) {
  Shapes shapes = {.palette = 1};
  for (int i = GROWN; i <= LAST; i++) shapes.bytes[i] = 4 * LANES, shapes.rows[i] = TILE_ROWS;
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

/* `tiles` tiles of rows, `apart` numbers apart, times `panels` panels, `beside` words apart, of `depth` inputs, a multiple
of DEPTH: sums [rows][2], which grow with `again`. */
INLINE void multiply_words(const int tiles, const int panels, const uint16_t *x, int64_t apart, const Floats *w, int64_t beside,
                           int64_t depth, int again, Floats *sums) {
#define EACH(what) what(0, 0); if (panels == 2) { what(0, 1); } if (tiles == 2) { what(1, 0); if (panels == 2) { what(1, 1); } }
#define AT(t, n) (sums + 2 * (t) * TILE_ROWS + (n))
#define CLEAR(t, n) _tile_zero(GROWN + 2 * t + n)
#define LOAD(t, n) _tile_loadd(GROWN + 2 * t + n, AT(t, n), 8 * LANES)
#define KEEP(t, n) _tile_stored(GROWN + 2 * t + n, AT(t, n), 8 * LANES)
  if (again) { EACH(LOAD) }
  else { EACH(CLEAR) }
#define ROWS_TILE(t) _tile_loadd(FIRST + t, x + t * apart, 4 * LANES)
#define PANEL_TILE(n) _tile_loadd(SECOND + n, w + n * beside, 4 * LANES)
#define MULTIPLY(t, n) _tile_dpbf16ps(GROWN + 2 * t + n, FIRST + t, SECOND + n)
  ROWS_TILE(0);
  PANEL_TILE(0);
  if (panels == 2) PANEL_TILE(1);
  if (tiles == 2) ROWS_TILE(1);
  for (int64_t k = DEPTH; k < depth; k += DEPTH) {
    x += TILE_ROWS * DEPTH, w += DEPTH / 2;
    MULTIPLY(0, 0);
    if (panels == 2) MULTIPLY(0, 1);
    ROWS_TILE(0);
    if (tiles == 2) MULTIPLY(1, 0);
    PANEL_TILE(0);
    if (tiles == 2 && panels == 2) MULTIPLY(1, 1);
    if (tiles == 2) ROWS_TILE(1);
    if (panels == 2) PANEL_TILE(1);
  }
  EACH(MULTIPLY)
  EACH(KEEP)
#undef EACH
#undef AT
#undef CLEAR
#undef LOAD
#undef KEEP
}

#endif
