/* Multiplication of panels by whole tiles of activations. Results are bit-identical to multiply_panels (panels.h). */
#ifndef LLMC_TILED_H
#define LLMC_TILED_H

#include "panels.h"

enum {
  MAX_TILED_GROUP = 256,
  MIN_TILED_ROWS = 16,  /* activations that justify a tile */
  TILED_ROWS = 128,     /* activations whose sums with two panels stay in the L1 cache */
  NEAR_BYTES = 1 << 11, /* distance of the prefetch to the L1 cache */
  DELAY = 2,            /* groups between a tile's store and the load of its sums, which would stall earlier */
  DOTS_BUFFERS = 4,     /* a power of two above DELAY */
};

/* Prefetch a group of a panel: `ahead` bytes ahead to the L2 cache, and NEAR_BYTES ahead to the L1 cache. */
INLINE void fetch_group(const uint8_t *from, int64_t bytes, int64_t ahead) {
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(from + ahead + i, 0, 2);
    __builtin_prefetch(from + NEAR_BYTES + i, 0, 3);
  }
}

/* Read a group's scales, and its offsets as float32. */
INLINE void read_header(const int offsets, const uint8_t *header, Floats *scale, Floats *offset) {
  *scale = from_half(load_halves(header));
  if (offsets) *offset = from_half(load_halves(header + 32));
  if (offsets == ZEROS) *offset = *offset * *scale * splat(1.0f / SCALE_UNIT);
}

/* Multiply activations row … row + rows − 1 by `panels` panels from `at` on: sums[rows · panels]. rows is at most
TILED_ROWS, and `row` is a multiple of TILE_ROWS. */
INLINE void multiply_panels_tiled(const int panels, const int format, const int offsets, const Matrix *m,
                                  const uint8_t *at, const Activations *a, int64_t row, int64_t rows, Floats *sums) {
  const int64_t groups = groups_of(m), stride = panel_bytes(m), bytes = m->group * LANES * m->bits / 8;
  const int8_t *values = TABLES[format == TABLED ? m->table : 0];
  _Alignas(64) uint8_t buffers[2][MAX_TILED_GROUP * LANES];
  _Alignas(64) int32_t dots[TILED_ROWS / TILE_ROWS][2][TILE_ROWS * LANES];
  for (int64_t i = 0; i < rows * panels; i++) sums[i] = splat(0.0f);
  for (int64_t g = 0; g < groups; g++) {
    Floats scale[2], offset[2];
    const uint8_t *quantized[2];
    UNROLL
    for (int n = 0; n < panels; n++) {
      const uint8_t *header = at + n * stride + g * (offsets ? 64 : 32),
                    *from = at + n * stride + header_bytes(m) + g * bytes;
      read_header(offsets, header, scale + n, offset + n);
      fetch_group(from, bytes, panels * stride);
      quantized[n] = tile_weights(format, values, zero_of(format, offsets), m->group / 4, from, buffers[n]);
    }
    /* run all tiles before reading sums: loads stall on sums that a tile just stored */
    const int8_t *activations = a->quantized + (row * groups + g * TILE_ROWS) * m->group;
    for (int64_t t = 0; t * TILE_ROWS < rows; t++)
      tile_dots(panels, !offsets, m->group, activations + t * TILE_ROWS * groups * m->group, quantized, t != 0,
                dots[t]);
    for (int64_t first = 0; first < rows; first += PACKED_ROWS) {
      const int64_t index = (row + first) * groups + g * PACKED_ROWS;
      const int64_t left = rows - first < PACKED_ROWS ? rows - first : PACKED_ROWS;
      const int32_t *from = dots[first / TILE_ROWS][0] + first % TILE_ROWS * LANES;
      for (int64_t r = 0; r < left; r++) {
        const Floats x = splat(a->scales[index + r]);
        UNROLL
        for (int n = 0; n < panels; n++) {
          const Floats dot = to_floats(*(const Ints *)(from + (n * TILE_ROWS + r) * LANES));
          Floats *sum = sums + (first + r) * panels + n;
          *sum = fma16(dot, scale[n] * x, *sum);
          if (offsets) *sum = fma16(splat(a->sums[index + r]), offset[n], *sum);
        }
      }
    }
  }
}

/* The same for one tile of activations, from `row` on, and one 8-bit panel, which needs no unpacking. Registers hold
sums[TILE_ROWS]. */
INLINE void multiply_one_tile(const int offsets, const Matrix *m, const uint8_t *at, const Activations *a, int64_t row,
                              Floats *sums) {
  const int64_t groups = groups_of(m), bytes = m->group * LANES;
  _Alignas(64) int32_t dots[DOTS_BUFFERS][TILE_ROWS * LANES];
  Floats totals[TILE_ROWS];
  UNROLL
  for (int r = 0; r < TILE_ROWS; r++) totals[r] = splat(0.0f);
  for (int64_t g = 0; g < groups + DELAY; g++) {
    if (g < groups) {
      const uint8_t *quantized = at + header_bytes(m) + g * bytes;
      fetch_group(quantized, bytes, panel_bytes(m));
      tile_dots(1, 0, m->group, a->quantized + (row * groups + g * TILE_ROWS) * m->group, &quantized, 0,
                dots + g % DOTS_BUFFERS);
    }
    const int64_t previous = g - DELAY;
    if (previous < 0) continue;
    Floats scale, offset;
    read_header(offsets, at + previous * (offsets ? 64 : 32), &scale, &offset);
    UNROLL
    for (int r = 0; r < TILE_ROWS; r++) {
      const int64_t index = (row + r / PACKED_ROWS * PACKED_ROWS) * groups + previous * PACKED_ROWS + r % PACKED_ROWS;
      Ints dot = *(const Ints *)(dots[previous % DOTS_BUFFERS] + r * LANES);
      if (!offsets) dot += splat_ints(a->starts[index]);
      totals[r] = fma16(to_floats(dot), scale * splat(a->scales[index]), totals[r]);
      if (offsets) totals[r] = fma16(splat(a->sums[index]), offset, totals[r]);
    }
  }
  UNROLL
  for (int r = 0; r < TILE_ROWS; r++) sums[r] = totals[r];
}

#endif
