/* Panels times whole tiles of activations; the bits are those of `tile` (panels.h). */
#ifndef LLMC_TILED_H
#define LLMC_TILED_H

#include "panels.h"

enum {
  MOST_TILED_GROUP = 256,
  LEAST_TILED = 16, /* activations that are worth the codes that are made of panels */
  TILED_ROWS = 128, /* activations whose sums with two panels stay in the first-level cache */
};

/* Products of activations row … row + rows − 1, at most TILED_ROWS, `row` a multiple of TILE_ROWS, with `panels` panels
from `at` on: sums[rows · panels]. */
INLINE void tiles(const int panels, const int coding, const int offsets, const Matrix *m, const uint8_t *at,
                  const Activations *a, int64_t row, int64_t rows, Floats *sums) {
  const int64_t groups = groups_of(m), stride = panel_bytes(m), bytes = m->group * LANES * m->bits / 8;
  const Floats unit = filled(1.0f / SCALE_UNIT);
  const int8_t *values = TABLES[coding == TABLED ? m->table : 0];
  _Alignas(64) uint8_t made[2][MOST_TILED_GROUP * LANES];
  _Alignas(64) int32_t dots[TILED_ROWS / TILE_ROWS][2][TILE_ROWS * LANES];
  for (int64_t i = 0; i < rows * panels; i++) sums[i] = filled(0.0f);
  for (int64_t g = 0; g < groups; g++) {
    Floats scale[2], offset[2];
    const uint8_t *codes[2];
    UNROLL
    for (int n = 0; n < panels; n++) {
      const uint8_t *head = at + n * stride + g * (offsets ? 64 : 32), *from = at + n * stride + head_bytes(m) + g * bytes;
      scale[n] = from_half(load_halves(head));
      if (offsets) offset[n] = from_half(load_halves(head + 32));
      if (offsets == ZEROS) offset[n] = offset[n] * scale[n] * unit;
      codes[n] = tile_codes(coding, values, zero_of(coding, offsets), m->group / 4, from, made[n]);
    }
    /* all tiles first: what they store is not at hand to those that read it right behind */
    const int8_t *given = a->codes + (row * groups + g * TILE_ROWS) * m->group;
    for (int64_t t = 0; t * TILE_ROWS < rows; t++)
      tile_dots(panels, !offsets, m->group, given + t * TILE_ROWS * groups * m->group, codes, t != 0, dots[t]);
    for (int64_t first = 0; first < rows; first += TOGETHER) {
      const int64_t beside = (row + first) * groups + g * TOGETHER;
      const int64_t left = rows - first < TOGETHER ? rows - first : TOGETHER;
      const int32_t *from = dots[first / TILE_ROWS][0] + first % TILE_ROWS * LANES;
      for (int64_t r = 0; r < left; r++) {
        const Floats x = filled(a->scales[beside + r]);
        UNROLL
        for (int n = 0; n < panels; n++) {
          const Floats dot = to_floats(*(const Ints *)(from + (n * TILE_ROWS + r) * LANES));
          Floats *sum = sums + (first + r) * panels + n;
          *sum = fused(dot, scale[n] * x, *sum);
          if (offsets) *sum = fused(filled(a->sums[beside + r]), offset[n], *sum);
        }
      }
    }
  }
}

#endif
