/* Matrices in panels, and products with them in 8-bit integers.

A matrix [N, K] lies in panels of 16 rows. A panel begins with what each of its K / group groups has once: 16 float16
scales and, with `offsets`, 16 float16 offsets (OFFSETS) or negated zero points (ZEROS). At the next multiple of 64 bytes codes follow, in the order
that they are read in: four inputs of each of the 16 rows at a time, [group / 4][16][4] bytes for a group with 8 bits.
With 4 bits byte i of the first half of these holds, low, the code that 8 bits have there, and high, that of the second
half. With 6 bits the low 4 lie so, and then the high 2: byte i of a quarter of those that 8 bits have holds, from its
lowest bits on, those of each quarter. With a table codes of 4 bits stand for its values, which count as codes of 8 bits.

A weight is scale · (code − zero) + offset, where zero is the middle of the codes' range, and 0 with offsets; with ZEROS
the offset is scale · −zero, which float16 alone would round. N and K are padded with scales, offsets and codes of 0.
Scales are stored SCALE_UNIT times as large (see ../panels.py).

Activations are quantised in the same groups, to 8 signed bits: x ≈ scale · q, scale = max |x| / 127. Eight rows lie
together, four inputs of each at a time; for tiles (tiled.h) TILE_ROWS, a group of each at a time. */
#ifndef LLMC_PANELS_H
#define LLMC_PANELS_H

#include "vectors.h"

enum { SCALE_UNIT = 256, OFFSETS = 1, ZEROS = 2 };

typedef struct {
  int64_t rows, width, group, bits, offsets; /* N, K, inputs of a group, 4 or 6 or 8, 0 or OFFSETS or ZEROS */
  int64_t table;                             /* 0, or which of TABLES codes of 4 bits stand for values of */
} Matrix;

/* IQ4_NL's values (ggml), and twice those of float4 e2m1. */
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
static inline int64_t header_vectors(const Matrix *m) { return m->offsets ? 2 : 1; } /* float16 numbers a row and group */
static inline int64_t header_bytes(const Matrix *m) { return pad_line(groups_of(m) * 2 * LANES * header_vectors(m)); }
static inline int64_t panel_bytes(const Matrix *m) {
  return header_bytes(m) + groups_of(m) * m->group * LANES * m->bits / 8;
}
static inline int32_t zero_of(int format, int64_t offsets) {
  return offsets ? 0 : format == TABLED ? 128 : 1 << (format - 1);
}

/* Quantised activations. */
typedef struct {
  int8_t *quantized;   /* [rows / 8, groups · group / 4, 8, 4], or [rows / TILE_ROWS, groups, TILE_ROWS, group] */
  float *scales;   /* [rows / 8, groups, 8], over SCALE_UNIT */
  int32_t *starts; /* the same of (bias − zero) · sum of the group's codes, which products begin with */
  float *sums;     /* the same of scale · sum of the group's codes, which offsets are multiplied by */
  int tiled;       /* whether codes lie in the second way */
} Activations;

/* Rows that there is room for: whole tiles. */
static inline int64_t pad_tile_rows(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

/* Bytes that `place` lays activations of so many rows out in. */
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

/* The first LANES of `count` numbers, and zeros. */
INLINE Floats load_first(const float *x, int64_t count) {
  return count >= LANES ? load(x) : load_lanes(first_lanes(count), x);
}

/* Quantise `count` groups of a row, at most LANES, from group `first` on. What is one number a group is in its lane. */
INLINE void quantize_groups(const int64_t group, const int tiled, const Matrix *m, const float *x, const Activations *a,
                            int64_t row, int64_t first, int64_t count) {
  const int64_t groups = groups_of(m), block = row / PACKED_ROWS, lane = row % PACKED_ROWS;
  const int64_t stride = tiled ? 1 : PACKED_ROWS, of_group = (tiled ? TILE_ROWS : PACKED_ROWS) * group / 4;
  const int64_t left = m->width - first * group;
  const int format = format_of(m);
  int32_t *quantized = (int32_t *)a->quantized + first * of_group;
  quantized += tiled ? row / TILE_ROWS * groups * of_group + row % TILE_ROWS * group / 4 : block * groups * of_group + lane;
  x += first * group;
  Ints most[LANES]; /* as integers, numbers of one sign have their order, and NaN is the most */
  for (int64_t g = 0; g < LANES; g++) {
    Ints one = splat_ints(0);
    for (int64_t k = g * group; g < count && k < (g + 1) * group; k += LANES)
      one = __builtin_elementwise_max(one, (Ints)abs16(load_first(x + k, min64(left, (g + 1) * group) - k)));
    most[g] = one;
  }
  REDUCE_LANES(most, __builtin_elementwise_max)
  const Floats top = (Floats)most[0];
  const Ints finite = top <= splat(3.4028235e38f);
  _Alignas(64) float inverse[LANES], scales[LANES], sums[LANES];
  _Alignas(64) int32_t starts[LANES];
  store_aligned(inverse, (Floats)(finite & (top > splat(1e-30f)) & (Ints)(splat(127.0f) / top)));
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
  const Floats none = splat(__builtin_nanf("")); /* what is no number stays none, and `starts` wraps there */
  const Floats scale = (Floats)((finite & (Ints)(top / splat(127.0f))) | (~finite & (Ints)none));
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

/* Quantise one row of `width` floats. */
static inline void quantize_row(const Matrix *m, const float *x, const Activations *a, int64_t row) {
  const int64_t groups = groups_of(m);
  for (int64_t g = 0; g < groups; g += LANES) {
    const int64_t count = min64(groups - g, LANES);
    if (m->group == 32 && a->tiled) quantize_groups(32, 1, m, x, a, row, g, count);
    else if (m->group == 32) quantize_groups(32, 0, m, x, a, row, g, count);
    else quantize_groups(m->group, a->tiled, m, x, a, row, g, count);
  }
}

/* Products of `rows` activations, from `row` on, with `panels` neighbouring panels from `at` on: sums[rows · panels].

The rows are of one block of eight. `ahead` bytes on from what is read, panels that come next are fetched, for 0 none.
`rows`, `panels`, `coding` and `offsets` are constants where this is inlined; rows · panels ≤ 8 keeps sums in
registers, more those of the group alone. */
INLINE void multiply_panels(const int rows, const int panels, const int format, const int offsets, const Matrix *m,
                 const uint8_t *at, const Activations *a, int64_t row, int64_t ahead, Floats *sums) {
  const int64_t groups = groups_of(m), stride = panel_bytes(m), steps = m->group / 4;
  const int64_t bytes = m->group * LANES * m->bits / 8, block = row / PACKED_ROWS * PACKED_ROWS * groups, lane = row % PACKED_ROWS;
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
