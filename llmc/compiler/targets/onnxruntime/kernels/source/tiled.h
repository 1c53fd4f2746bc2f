/* Panels times whole tiles of activations; the bits are those of `tile` (panels.h). */
#ifndef LLMC_TILED_H
#define LLMC_TILED_H

#include "panels.h"

enum {
  MOST_TILED_GROUP = 256,
  LEAST_TILED = 16, /* activations that are worth a tile */
  TILED_ROWS = 128, /* activations whose sums with two panels stay in the first-level cache */
  SOON = 1 << 11,   /* bytes from what is read to what is brought to that cache */
  LATER = 2,        /* groups: what a tile stores is not at hand to those that read it right behind */
  TURNS = 4,        /* more than that, a power of two */
};

/* Have bytes `ahead` of a group of a panel brought to the second-level cache, and what is read soon nearer. */
INLINE void fetch_group(const uint8_t *from, int64_t bytes, int64_t ahead) {
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(from + ahead + i, 0, 2);
    __builtin_prefetch(from + SOON + i, 0, 3);
  }
}

/* Scales of a group, and its offsets as they are added. */
INLINE void read_head(const int offsets, const uint8_t *head, Floats *scale, Floats *offset) {
  *scale = from_half(load_halves(head));
  if (offsets) *offset = from_half(load_halves(head + 32));
  if (offsets == ZEROS) *offset = *offset * *scale * filled(1.0f / SCALE_UNIT);
}

/* Products of activations row … row + rows − 1, at most TILED_ROWS, `row` a multiple of TILE_ROWS, with `panels` panels
from `at` on: sums[rows · panels]. */
INLINE void tiles(const int panels, const int coding, const int offsets, const Matrix *m, const uint8_t *at,
                  const Activations *a, int64_t row, int64_t rows, Floats *sums) {
  const int64_t groups = groups_of(m), stride = panel_bytes(m), bytes = m->group * LANES * m->bits / 8;
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
      read_head(offsets, head, scale + n, offset + n);
      fetch_group(from, bytes, panels * stride);
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

/* The same of one tile of activations, from `row` on, with the panel `at`, whose codes of 8 bits are taken as they lie:
sums[TILE_ROWS], which registers hold. */
INLINE void one_tile(const int offsets, const Matrix *m, const uint8_t *at, const Activations *a, int64_t row,
                     Floats *sums) {
  const int64_t groups = groups_of(m), bytes = m->group * LANES;
  _Alignas(64) int32_t dots[TURNS][TILE_ROWS * LANES];
  Floats of[TILE_ROWS];
  UNROLL
  for (int r = 0; r < TILE_ROWS; r++) of[r] = filled(0.0f);
  for (int64_t g = 0; g < groups + LATER; g++) {
    if (g < groups) {
      const uint8_t *codes = at + head_bytes(m) + g * bytes;
      fetch_group(codes, bytes, panel_bytes(m));
      tile_dots(1, 0, m->group, a->codes + (row * groups + g * TILE_ROWS) * m->group, &codes, 0, dots + g % TURNS);
    }
    const int64_t then = g - LATER;
    if (then < 0) continue;
    Floats scale, offset;
    read_head(offsets, at + then * (offsets ? 64 : 32), &scale, &offset);
    UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
      const int64_t beside = (row + r / TOGETHER * TOGETHER) * groups + then * TOGETHER + r % TOGETHER;
      Ints dot = *(const Ints *)(dots[then % TURNS] + r * LANES);
      if (!offsets) dot += filled_ints(a->starts[beside]);
      of[r] = fused(to_floats(dot), scale * filled(a->scales[beside]), of[r]);
      if (offsets) of[r] = fused(filled(a->sums[beside]), offset, of[r]);
    }
  }
  UNROLL
  for (int r = 0; r < TILE_ROWS; r++) sums[r] = of[r];
}

#endif
