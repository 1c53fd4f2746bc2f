/* bfloat16 tiles of AMX over amx.h, for attend_lanes.h and rounded_matmul.c. Sums have the order that rounded.h
describes. */
#ifndef LLMC_AMX_BF16_H
#define LLMC_AMX_BF16_H

#include "avx512_words.h"

/* Tile registers. score_words and weighted_sum_words use four sums, one shared factor and one other factor.
multiply_words uses 2 × 2 sums, two tiles of x and two of w. */
enum { SUM_TILE = 0, SHARED_TILE = 4, OTHER_TILE = 5, X_TILE = 4, W_TILE = 6, LAST_TILE = 7 };

enum { ROWS_GIVE_SAME_BITS = 1, HAS_WORD_DOTS = 0 };

INLINE int words_allowed(void) { return tiles_allowed(); }

INLINE void begin_words(void) {
  Shapes shapes = {.palette = 1};
  for (int i = SUM_TILE; i <= LAST_TILE; i++) shapes.bytes[i] = 4 * LANES, shapes.rows[i] = TILE_ROWS;
  _tile_loadconfig(&shapes);
}

INLINE void end_words(void) { end_tiles(); }

#define FOUR_TIMES(what) what(0); what(1); what(2); what(3)

INLINE void score_words(const uint8_t *keys, int64_t stride, const float *queries, int64_t depth, float *scores) {
#define BEGIN(n) _tile_zero(SUM_TILE + n)
#define MULTIPLY(n)                                                       \
  _tile_loadd(OTHER_TILE, keys + n * TILE_ROWS * stride + 2 * d, stride); \
  _tile_dpbf16ps(SUM_TILE + n, OTHER_TILE, SHARED_TILE)
#define END(n) _tile_stored(SUM_TILE + n, scores + n * TILE_ROWS * LANES, 4 * LANES)
  FOUR_TIMES(BEGIN);
  for (int64_t d = 0; d < depth; d += DEPTH) {
    _tile_loadd(SHARED_TILE, queries + d / 2 * LANES, 4 * LANES);
    FOUR_TIMES(MULTIPLY);
  }
  FOUR_TIMES(END);
#undef BEGIN
#undef MULTIPLY
#undef END
}

INLINE void weighted_sum_words(const int columns, int64_t rows, const float *weights, const float *values,
                               int64_t depth, int64_t stride, float *sums) {
  (void)rows;
#define IF_THERE(n, what) if (n < columns) { what; }
#define BEGIN(n) IF_THERE(n, _tile_loadd(SUM_TILE + n, sums + n * LANES, 4 * stride))
#define MULTIPLY(n)                                                                     \
  IF_THERE(n, _tile_loadd(OTHER_TILE, values + d / 2 * stride + n * LANES, 4 * stride); \
           _tile_dpbf16ps(SUM_TILE + n, SHARED_TILE, OTHER_TILE))
#define END(n) IF_THERE(n, _tile_stored(SUM_TILE + n, sums + n * LANES, 4 * stride))
  FOUR_TIMES(BEGIN);
  for (int64_t d = 0; d < depth; d += DEPTH) {
    _tile_loadd(SHARED_TILE, weights + d / 2, 2 * depth);
    FOUR_TIMES(MULTIPLY);
  }
  FOUR_TIMES(END);
#undef IF_THERE
#undef BEGIN
#undef MULTIPLY
#undef END
}

/* Multiply `tiles` row tiles (`stride` numbers apart) by `panels` panels (`panel_stride` words apart), over `depth`
inputs. `depth` is a multiple of DEPTH. Writes sums [rows][2], or adds to them with `accumulate`. */
INLINE void multiply_words(const int tiles, const int panels, const uint16_t *x, int64_t stride, const Floats *w,
                           int64_t panel_stride, int64_t depth, int accumulate, Floats *sums) {
#define EACH(what)     \
  what(0, 0);          \
  if (panels == 2) {   \
    what(0, 1);        \
  }                    \
  if (tiles == 2) {    \
    what(1, 0);        \
    if (panels == 2) { \
      what(1, 1);      \
    }                  \
  }
#define AT(t, n) (sums + 2 * (t) * TILE_ROWS + (n))
#define CLEAR(t, n) _tile_zero(SUM_TILE + 2 * t + n)
#define LOAD(t, n) _tile_loadd(SUM_TILE + 2 * t + n, AT(t, n), 8 * LANES)
#define KEEP(t, n) _tile_stored(SUM_TILE + 2 * t + n, AT(t, n), 8 * LANES)
  if (accumulate) { EACH(LOAD) }
  else { EACH(CLEAR) }
#define ROWS_TILE(t) _tile_loadd(X_TILE + t, x + t * stride, 4 * LANES)
#define PANEL_TILE(n) _tile_loadd(W_TILE + n, w + n * panel_stride, 4 * LANES)
#define MULTIPLY(t, n) _tile_dpbf16ps(SUM_TILE + 2 * t + n, X_TILE + t, W_TILE + n)
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
