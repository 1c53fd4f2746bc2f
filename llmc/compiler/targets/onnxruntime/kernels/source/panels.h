/* Weight matrices in panels, and their matmul with 8-bit activations.

Layout. A matrix [N, K] consists of panels of 16 rows. A panel starts with a header that holds 16 float16 scales for
each of its K / group groups. With `offsets`, 16 float16 offsets (OFFSETS) or negated zero points (ZEROS) follow each
group's scales. The quantized weights start at the next multiple of 64 bytes, in the order in which the kernel reads
them.

  8 bits   [group / 4][16][4] bytes for a group: steps of four inputs of each of the 16 rows.
  4 bits   Byte i holds byte i of the 8-bit layout's first half in its low 4 bits, and of the second half in its high 4.
  6 bits   The low 4 bits of all values, in the 4-bit layout, then their high 2 bits. Byte i of the high bits holds
           byte i of each quarter of the 8-bit layout, from the lowest bits up.

With a table, a 4-bit value is an index into the table, and the table's entry counts as an 8-bit value.

A weight is scale · (quantized − zero) + offset. `zero` is the middle of the quantized range, or 0 with offsets. With
ZEROS the offset is scale · −zero, which the kernel computes because float16 would round it. The padding of N and K has
scale, offset and quantized weight 0. Scales are stored multiplied by SCALE_UNIT (see ../panels.py).

Activations are quantized in the same groups to signed 8 bits: x ≈ scale · q, where scale = max |x| / 127. The packed
layout interleaves PACKED_ROWS rows, four inputs of each at a time. The tiled layout (tiled.h) interleaves TILE_ROWS
rows, one group of each at a time. */
#ifndef LLMC_PANELS_H
#define LLMC_PANELS_H

#include "vectors.h"

enum { SCALE_UNIT = 256, OFFSETS = 1, ZEROS = 2 };

typedef struct {
  int64_t rows, width, group, bits, offsets; /* N, K, inputs of a group, 4 or 6 or 8, 0 or OFFSETS or ZEROS */
  int64_t table;                             /* 0, or the index in TABLES for 4-bit values */
} Matrix;

/* Codebooks: IQ4_NL's values (ggml), and float4 e2m1's values times two. */
enum { TABLE_COUNT = 3 };
static const int8_t TABLES[TABLE_COUNT][16] = {
    {0},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

static inline int format_of(const Matrix *m) { return m->table ? TABLED : (int)m->bits; }

static inline int64_t groups_of(const Matrix *m) { return (m->width + m->group - 1) / m->group; }
static inline int64_t panels_of(const Matrix *m) { return (m->rows + LANES - 1) / LANES; }
static inline int64_t pad_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static inline int64_t header_vectors(const Matrix *m) { return m->offsets ? 2 : 1; } /* float16s per row and group */
static inline int64_t header_bytes(const Matrix *m) { return pad_line(groups_of(m) * 2 * LANES * header_vectors(m)); }
static inline int64_t panel_bytes(const Matrix *m) {
  return header_bytes(m) + groups_of(m) * m->group * LANES * m->bits / 8;
}
static inline int32_t zero_of(int format, int64_t offsets) {
  return offsets ? 0 : format == TABLED ? 128 : 1 << (format - 1);
}

/* Quantized activations. */
typedef struct {
  int8_t *quantized; /* [rows / 8, groups · group / 4, 8, 4]; tiled: [rows / TILE_ROWS, groups, TILE_ROWS, group] */
  float *scales;     /* [rows / 8, groups, 8], divided by SCALE_UNIT */
  int32_t *starts;   /* same shape: (bias − zero) · sum of the group, where integer sums start */
  float *sums;       /* same shape: scale · sum of the group, the factor of offsets */
  int tiled;         /* whether `quantized` has the tiled layout */
} Activations;

/* Rows rounded up to whole tiles. */
static inline int64_t pad_tile_rows(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

/* Bytes that lay_out_activations needs for so many rows. */
static inline int64_t activation_bytes(const Matrix *m, int64_t rows) {
  int64_t groups = groups_of(m), all = pad_tile_rows(rows);
  return pad_line(all * groups * m->group) + (1 + header_vectors(m)) * pad_line(4 * all * groups) + 64;
}

static inline Activations lay_out_activations(const Matrix *m, int64_t rows, uint8_t *at) {
  int64_t groups = groups_of(m), all = pad_tile_rows(rows), each = pad_line(4 * all * groups);
  at = (uint8_t *)pad_line((int64_t)at);
  Activations a = {.quantized = (int8_t *)at};
  at += pad_line(all * groups * m->group);
  a.scales = (float *)at;
  a.starts = (int32_t *)(at + each);
  a.sums = m->offsets ? (float *)(at + 2 * each) : NULL;
  return a;
}

/* The first LANES of `count` floats, with zeros in the other lanes. */
INLINE Floats load_first(const float *x, int64_t count) {
  return count >= LANES ? load(x) : load_lanes(first_lanes(count), x);
}

/* Quantize up to LANES groups of a row, from group `first` on. Per-group values use one lane for each group. */
INLINE void quantize_groups(const int64_t group, const int tiled, const Matrix *m, const float *x, const Activations *a,
                            int64_t row, int64_t first, int64_t count) {
  const int64_t groups = groups_of(m), block = row / PACKED_ROWS, lane = row % PACKED_ROWS;
  const int64_t stride = tiled ? 1 : PACKED_ROWS, of_group = (tiled ? TILE_ROWS : PACKED_ROWS) * group / 4;
  const int64_t left = m->width - first * group;
  const int format = format_of(m);
  int32_t *quantized = (int32_t *)a->quantized + first * of_group;
  quantized += tiled ? row / TILE_ROWS * groups * of_group + row % TILE_ROWS * group / 4
                     : block * groups * of_group + lane;
  x += first * group;
  Ints max_bits[LANES]; /* as integers: non-negative floats compare alike, and NaN is the greatest */
  for (int64_t g = 0; g < LANES; g++) {
    Ints one = splat_ints(0);
    for (int64_t k = g * group; g < count && k < (g + 1) * group; k += LANES)
      one = __builtin_elementwise_max(one, (Ints)abs16(load_first(x + k, min64(left, (g + 1) * group) - k)));
    max_bits[g] = one;
  }
  REDUCE_LANES(max_bits, __builtin_elementwise_max)
  const Floats maximum = (Floats)max_bits[0];
  const Ints finite = maximum <= splat(3.4028235e38f);
  _Alignas(64) float inverse[LANES], scales[LANES], sums[LANES];
  _Alignas(64) int32_t starts[LANES];
  store_aligned(inverse, (Floats)(finite & (maximum > splat(1e-30f)) & (Ints)(splat(127.0f) / maximum)));
  Words total[LANES];
  for (int64_t g = 0; g < LANES; g++) {
    Words one = (Words)splat_ints(0);
    for (int64_t k = 0; g < count && k < group; k += LANES) {
      const Ints q = to_ints(load_first(x + g * group + k, min64(left - g * group, group) - k) * splat(inverse[g]));
      int32_t four[4], *to = quantized + g * of_group + k / 4 * stride;
      one += (Words)q;
      to_bytes(four, q);
      for (int64_t i = 0; i < 4 && k + 4 * i < group; i++) to[i * stride] = four[i];
    }
    total[g] = one;
  }
  REDUCE_LANES(total, SUM)
  const Floats nan = splat(__builtin_nanf("")); /* NaN and infinity become a NaN scale; `starts` may wrap */
  const Floats scale = (Floats)((finite & (Ints)(maximum / splat(127.0f))) | (~finite & (Ints)nan));
  store_aligned(scales, scale / splat(SCALE_UNIT));
  store_aligned(sums, scale * to_floats((Ints)total[0]));
  *(Words *)starts = total[0] * (uint32_t)(bias_of(format) - zero_of(format, m->offsets));
  for (int64_t g = 0; g < count; g++) {
    const int64_t at = (block * groups + first + g) * PACKED_ROWS + lane;
    a->scales[at] = scales[g];
    a->starts[at] = starts[g];
    if (a->sums) a->sums[at] = sums[g];
  }
}

/* Quantize one row of m->width floats. */
static inline void quantize_row(const Matrix *m, const float *x, const Activations *a, int64_t row) {
  const int64_t groups = groups_of(m);
  for (int64_t g = 0; g < groups; g += LANES) {
    const int64_t count = min64(groups - g, LANES);
    if (m->group == 32 && a->tiled) quantize_groups(32, 1, m, x, a, row, g, count);
    else if (m->group == 32) quantize_groups(32, 0, m, x, a, row, g, count);
    else quantize_groups(m->group, a->tiled, m, x, a, row, g, count);
  }
}

/* Multiply `rows` activations, from `row` on, by `panels` neighbouring panels from `at` on: sums[rows · panels].

The rows belong to one block of PACKED_ROWS. Prefetches what is `ahead` bytes after each read; 0 prefetches nothing.
`rows`, `panels`, `format` and `offsets` are compile-time constants of each inlined copy. If rows · panels ≤ 8, all sums
stay in registers; otherwise only the sums of the current group do. */
INLINE void multiply_panels(const int rows, const int panels, const int format, const int offsets, const Matrix *m,
                            const uint8_t *at, const Activations *a, int64_t row, int64_t ahead, Floats *sums) {
  const int64_t groups = groups_of(m), stride = panel_bytes(m), steps = m->group / 4;
  const int64_t bytes = m->group * LANES * m->bits / 8, block = row / PACKED_ROWS * PACKED_ROWS * groups,
                lane = row % PACKED_ROWS;
  const int32_t *quantized = (const int32_t *)a->quantized + block * steps + lane;
  const float *scales = a->scales + block + lane;
  const int32_t *starts = a->starts + block + lane;
  const float *totals = offsets ? a->sums + block + lane : NULL;
  const uint8_t *header[4], *from[4];
  UNROLL
  for (int n = 0; n < panels; n++) header[n] = at + n * stride, from[n] = header[n] + header_bytes(m);
  UNROLL
  for (int i = 0; i < rows * panels; i++) sums[i] = splat(0.0f);
  const Floats unit = splat(1.0f / SCALE_UNIT);
  const int begins = bias_of(format) != zero_of(format, offsets);
  for (int64_t g = 0; g < groups; g++) {
    Ints dots[16];
    Floats scale[4], offset[4];
    UNROLL
    for (int n = 0; n < panels; n++) {
      scale[n] = from_half(load_halves(header[n]));
      if (offsets) offset[n] = from_half(load_halves(header[n] + 32));
      if (offsets == ZEROS) offset[n] = offset[n] * scale[n] * unit;
      header[n] += offsets ? 64 : 32;
    }
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL
      for (int n = 0; n < panels; n++)
        dots[r * panels + n] = splat_ints(begins ? starts[r] : 0);
    group_dots(rows, panels, format, TABLES[format == TABLED ? m->table : 0], steps, from, quantized, ahead, dots);
    UNROLL
    for (int n = 0; n < panels; n++) from[n] += bytes;
    quantized += steps * PACKED_ROWS;
    UNROLL
    for (int r = 0; r < rows; r++) {
      Floats x = splat(scales[r]);
      UNROLL
      for (int n = 0; n < panels; n++) {
        Floats *sum = sums + r * panels + n;
        *sum = fma16(to_floats(dots[r * panels + n]), scale[n] * x, *sum);
        if (offsets) *sum = fma16(splat(totals[r]), offset[n], *sum);
      }
    }
    scales += PACKED_ROWS, starts += PACKED_ROWS;
    if (offsets) totals += PACKED_ROWS;
  }
}

#endif
