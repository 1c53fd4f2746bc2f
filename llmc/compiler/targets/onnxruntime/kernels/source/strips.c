#include "epilogue.h"
#include "strips.h"
#include "team.h"
#ifdef HAS_TILES
#include "tiled.h"
#endif

enum {
  BLOCK_BYTES = 3 << 17, /* bytes of quantized activations that stay in the L2 cache while panels stream through */
  SHARE_BYTES = 1 << 16, /* bytes of panels that justify waking a thread */
  MAX_SHARES = 256,
};

/* Multiply `panels` panels from `first` on (one gated pair if panels is 1) by activations row … row + rows − 1. See
multiply_panels. */
INLINE void strip(const int rows, const int panels, const int format, const int offsets, const Matmul *matmul,
                  int64_t first, int64_t row, int64_t ahead) {
  const Matrix *m = matmul->matrix;
  const Activations *a = &matmul->activations;
  const uint8_t *at = matmul->panels + first * panel_bytes(m);
  Floats sums[16], others[8];
  multiply_panels(rows, panels, format, offsets, m, at, a, row, ahead, sums);
  if (matmul->gated && panels == 1) {
    multiply_panels(rows, 1, format, offsets, m, at + panel_bytes(m), a, row, ahead, others);
    write_gated(rows, matmul, first / 2, row, sums, others, 1);
    return;
  }
  epilogue(rows, panels, matmul, first, row, sums);
}

/* One function for each shape: inlining them into one caller would take minutes to compile. */
#define STRIP(rows, panels, format, offsets)                                            \
  static __attribute__((noinline)) void strip_##rows##_##panels##_##format##_##offsets( \
      const Matmul *matmul, int64_t first, int64_t row, int64_t ahead) {                \
    strip(rows, panels, format, offsets, matmul, first, row, ahead);                    \
  }
#if STRIP_ROWS == 8
#define MORE_ROWS(what, format, offsets) \
  what(5, 1, format, offsets) what(6, 1, format, offsets) what(7, 1, format, offsets) what(8, 1, format, offsets)
#define TWO_PANELS(what, format, offsets) what(8, 2, format, offsets)
#else
#define MORE_ROWS(what, format, offsets)
#define TWO_PANELS(what, format, offsets)
#endif
#define STRIPS(format, offsets)                                                                                       \
  STRIP(1, 1, format, offsets) STRIP(2, 1, format, offsets) STRIP(3, 1, format, offsets) STRIP(4, 1, format, offsets) \
  STRIP(3, 2, format, offsets) STRIP(4, 2, format, offsets) STRIP(1, 4, format, offsets) STRIP(2, 4, format, offsets) \
  MORE_ROWS(STRIP, format, offsets) TWO_PANELS(STRIP, format, offsets)
STRIPS(EIGHT, 2) STRIPS(EIGHT, 1) STRIPS(EIGHT, 0) STRIPS(FOUR, 2) STRIPS(FOUR, 1) STRIPS(FOUR, 0)
STRIPS(SIX, 1) STRIPS(SIX, 0) STRIPS(TABLED, 0)

typedef void Strip(const Matmul *matmul, int64_t first, int64_t row, int64_t ahead);

/* The strips of one format by row count: for one panel or gated pair, for two panels, and for four. */
typedef struct {
  Strip *one[STRIP_ROWS + 1], *two[STRIP_ROWS + 1], *four[STRIP_ROWS + 1];
} Strips;

#define NAMED(rows, panels, format, offsets) [rows] = strip_##rows##_##panels##_##format##_##offsets,
#define OF_FORMAT(c, o)                                                                                              \
  [c][o] = {.one = {NAMED(1, 1, c, o) NAMED(2, 1, c, o) NAMED(3, 1, c, o) NAMED(4, 1, c, o) MORE_ROWS(NAMED, c, o)}, \
            .two = {NAMED(3, 2, c, o) NAMED(4, 2, c, o) TWO_PANELS(NAMED, c, o)},                                    \
            .four = {NAMED(1, 4, c, o) NAMED(2, 4, c, o)}}
static const Strips formats[EIGHT + 1][3] = {
    OF_FORMAT(FOUR, 0), OF_FORMAT(FOUR, 1), OF_FORMAT(FOUR, 2), OF_FORMAT(EIGHT, 0), OF_FORMAT(EIGHT, 1),
    OF_FORMAT(EIGHT, 2), OF_FORMAT(SIX, 0), OF_FORMAT(SIX, 1), OF_FORMAT(TABLED, 0),
};

/* Multiply panels first … end − 1 by activations row … last − 1, as many at a time as registers hold. Prefetches beyond
`end`, because the next share usually goes to the same thread. */
static void multiply_block(const Matmul *matmul, int64_t first, int64_t end, int64_t row, int64_t last) {
  const Strips *of = &formats[format_of(matmul->matrix)][matmul->matrix->offsets];
  const int64_t unit = 1 + matmul->gated, rows = last - row, size = panel_bytes(matmul->matrix),
                at_once = panels_at_once(matmul, rows);
  Strip *const *many = rows < 3 ? of->four : two_at_once(rows) ? of->two : of->one;
  for (int64_t panel = first, count; panel < end; panel += count) {
    count = panel + at_once <= end ? at_once : unit;
    for (int64_t r = row, ahead = count * size; r < last; r += STRIP_ROWS, ahead = 0) {
      const int64_t some = min64(last - r, STRIP_ROWS);
      Strip *const strip = count == at_once ? many[some] : NULL;
      if (strip) strip(matmul, panel, r, ahead);
      else
        for (int64_t n = 0; n < count; n += unit) of->one[some](matmul, panel + n, r, ahead);
    }
  }
}

#ifdef HAS_TILES
/* Multiply panels first … end − 1 by activations row … row + rows − 1; rows is at most TILED_ROWS. */
INLINE void tiled(const int format, const int offsets, const Matmul *matmul, int64_t first, int64_t end, int64_t row,
                  int64_t rows) {
  const Matrix *m = matmul->matrix;
  Floats sums[2 * TILED_ROWS];
  int64_t panel = first;
  if (TILES_READ_PANELS && format == EIGHT && rows <= TILE_ROWS) {
    for (const int64_t unit = 1 + matmul->gated; panel < end; panel += unit) {
      for (int64_t n = 0; n < unit; n++)
        multiply_one_tile(offsets, m, matmul->panels + (panel + n) * panel_bytes(m), &matmul->activations, row,
                          sums + n * TILE_ROWS);
      for (int64_t r = 0; r < rows; r++) {
        if (matmul->gated) write_gated(1, matmul, panel / 2, row + r, sums + r, sums + TILE_ROWS + r, 1);
        else epilogue(1, 1, matmul, panel, row + r, sums + r);
      }
    }
    return;
  }
  for (; panel + 2 <= end; panel += 2) {
    multiply_panels_tiled(2, format, offsets, m, matmul->panels + panel * panel_bytes(m), &matmul->activations, row,
                          rows, sums);
    for (int64_t r = 0; r < rows; r++) epilogue(1, 2, matmul, panel, row + r, sums + 2 * r);
  }
  if (panel < end) {
    multiply_panels_tiled(1, format, offsets, m, matmul->panels + panel * panel_bytes(m), &matmul->activations, row,
                          rows, sums);
    for (int64_t r = 0; r < rows; r++) epilogue(1, 1, matmul, panel, row + r, sums + r);
  }
}

typedef void Tiled(const Matmul *matmul, int64_t first, int64_t end, int64_t row, int64_t rows);
#define TILED_OF(format, offsets)                                                                                    \
  static __attribute__((noinline)) void tiled_##format##_##offsets(const Matmul *matmul, int64_t first, int64_t end, \
                                                                   int64_t row, int64_t rows) {                      \
    tiled(format, offsets, matmul, first, end, row, rows);                                                           \
  }
TILED_OF(EIGHT, 2) TILED_OF(EIGHT, 1) TILED_OF(EIGHT, 0) TILED_OF(FOUR, 2) TILED_OF(FOUR, 1) TILED_OF(FOUR, 0)
TILED_OF(SIX, 1) TILED_OF(SIX, 0) TILED_OF(TABLED, 0)
static Tiled *const tiled_kernels[EIGHT + 1][3] = {
    [EIGHT] = {tiled_EIGHT_0, tiled_EIGHT_1, tiled_EIGHT_2}, [FOUR] = {tiled_FOUR_0, tiled_FOUR_1, tiled_FOUR_2},
    [SIX] = {tiled_SIX_0, tiled_SIX_1}, [TABLED] = {tiled_TABLED_0},
};

int uses_tiles(const Matrix *m, int64_t rows) {
  return rows >= MIN_TILED_ROWS && m->group <= MAX_TILED_GROUP && supports_tiles(m->group);
}

static void multiply_tiles(const Matmul *matmul, int64_t first, int64_t end, int64_t row, int64_t last) {
  Tiled *const of = tiled_kernels[format_of(matmul->matrix)][matmul->matrix->offsets];
  begin_tiles(matmul->matrix->group);
  for (; row < last; row += TILED_ROWS) of(matmul, first, end, row, last - row < TILED_ROWS ? last - row : TILED_ROWS);
  end_tiles();
}
#else
int uses_tiles(const Matrix *m, int64_t rows) { return (void)m, (void)rows, 0; }
static void multiply_tiles(const Matmul *matmul, int64_t first, int64_t end, int64_t row, int64_t last) {
  (void)matmul, (void)first, (void)end, (void)row, (void)last;
}
#endif

void multiply(const Matmul *matmul, int64_t first, int64_t end, int64_t row, int64_t last) {
  if (matmul->activations.tiled) {
    multiply_tiles(matmul, first, end, row, last);
    return;
  }
  const Matrix *m = matmul->matrix;
  const int64_t rows = last - row, blocks = (rows * groups_of(m) * m->group + BLOCK_BYTES - 1) / BLOCK_BYTES;
  const int64_t each = ((rows + blocks - 1) / blocks + PACKED_ROWS - 1) / PACKED_ROWS * PACKED_ROWS;
  for (; row < last; row += each) multiply_block(matmul, first, end, row, row + each < last ? row + each : last);
}

int64_t shares_of(int64_t bytes, int64_t max_shares) {
  int64_t shares = bytes / SHARE_BYTES;
  if (shares > MAX_SHARES) shares = MAX_SHARES;
  if (shares > max_shares) shares = max_shares;
  const int64_t threads = team_size();
  if (threads && shares > threads) shares -= shares % threads;
  return shares < 1 ? 1 : shares;
}
