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

static inline int coding_of(const Matrix *m) { return m->table ? TABLED : (int)m->bits; }

static inline int64_t groups_of(const Matrix *m) { return (m->width + m->group - 1) / m->group; }
static inline int64_t panels_of(const Matrix *m) { return (m->rows + LANES - 1) / LANES; }
static inline int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
static inline int64_t head_lines(const Matrix *m) { return m->offsets ? 2 : 1; } /* float16 numbers a row and group */
static inline int64_t head_bytes(const Matrix *m) { return padded(groups_of(m) * 2 * LANES * head_lines(m)); }
static inline int64_t panel_bytes(const Matrix *m) {
  return head_bytes(m) + groups_of(m) * m->group * LANES * m->bits / 8;
}
static inline int32_t zero_of(int coding, int64_t offsets) {
  return offsets ? 0 : coding == TABLED ? 128 : 1 << (coding - 1);
}

/* Quantised activations. */
typedef struct {
  int8_t *codes;   /* [rows / 8, groups · group / 4, 8, 4], or [rows / TILE_ROWS, groups, TILE_ROWS, group] */
  float *scales;   /* [rows / 8, groups, 8], over SCALE_UNIT */
  int32_t *starts; /* the same of (bias − zero) · sum of the group's codes, which products begin with */
  float *sums;     /* the same of scale · sum of the group's codes, which offsets are multiplied by */
  int tiled;       /* whether codes lie in the second way */
} Activations;

/* Rows that there is room for: whole tiles. */
static inline int64_t whole_tiles(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

/* Bytes that `place` lays activations of so many rows out in. */
static inline int64_t activation_bytes(const Matrix *m, int64_t rows) {
  int64_t groups = groups_of(m), all = whole_tiles(rows);
  return padded(all * groups * m->group) + (1 + head_lines(m)) * padded(4 * all * groups) + 64;
}

static inline Activations place(const Matrix *m, int64_t rows, uint8_t *at) {
  int64_t groups = groups_of(m), all = whole_tiles(rows), each = padded(4 * all * groups);
  at = (uint8_t *)padded((int64_t)at);
  Activations a = {.codes = (int8_t *)at};
  at += padded(all * groups * m->group);
  a.scales = (float *)at;
  a.starts = (int32_t *)(at + each);
  a.sums = m->offsets ? (float *)(at + 2 * each) : NULL;
  return a;
}

/* The first LANES of `count` numbers, and zeros. */
INLINE Floats some_of(const float *x, int64_t count) {
  return count >= LANES ? load(x) : load_lanes(first_lanes(count), x);
}

/* Quantise `count` groups of a row, at most LANES, from group `first` on. What is one number a group is in its lane. */
INLINE void quantise_groups(const int64_t group, const int tiled, const Matrix *m, const float *x, const Activations *a,
                            int64_t row, int64_t first, int64_t count) {
  const int64_t groups = groups_of(m), block = row / TOGETHER, beside = row % TOGETHER;
  const int64_t apart = tiled ? 1 : TOGETHER, of_group = (tiled ? TILE_ROWS : TOGETHER) * group / 4;
  const int64_t left = m->width - first * group;
  const int coding = coding_of(m);
  int32_t *codes = (int32_t *)a->codes + first * of_group;
  codes += tiled ? row / TILE_ROWS * groups * of_group + row % TILE_ROWS * group / 4 : block * groups * of_group + beside;
  x += first * group;
  Ints most[LANES]; /* as integers, numbers of one sign have their order, and NaN is the most */
  for (int64_t g = 0; g < LANES; g++) {
    Ints one = filled_ints(0);
    for (int64_t k = g * group; g < count && k < (g + 1) * group; k += LANES)
      one = __builtin_elementwise_max(one, (Ints)magnitude(some_of(x + k, least(left, (g + 1) * group) - k)));
    most[g] = one;
  }
  EACH_LANES(most, __builtin_elementwise_max)
  const Floats top = (Floats)most[0];
  const Ints finite = top <= filled(3.4028235e38f);
  _Alignas(64) float inverse[LANES], scales[LANES], sums[LANES];
  _Alignas(64) int32_t starts[LANES];
  store_aligned(inverse, (Floats)(finite & (top > filled(1e-30f)) & (Ints)(filled(127.0f) / top)));
  Words total[LANES];
  for (int64_t g = 0; g < LANES; g++) {
    Words one = (Words)filled_ints(0);
    for (int64_t k = 0; g < count && k < group; k += LANES) {
      const Ints q = to_ints(some_of(x + g * group + k, least(left - g * group, group) - k) * filled(inverse[g]));
      int32_t four[4], *to = codes + g * of_group + k / 4 * apart;
      one += (Words)q;
      to_bytes(four, q);
      for (int64_t i = 0; i < 4 && k + 4 * i < group; i++) to[i * apart] = four[i];
    }
    total[g] = one;
  }
  EACH_LANES(total, ADDED)
  const Floats none = filled(__builtin_nanf("")); /* what is no number stays none, and `starts` wraps there */
  const Floats scale = (Floats)((finite & (Ints)(top / filled(127.0f))) | (~finite & (Ints)none));
  store_aligned(scales, scale / filled(SCALE_UNIT));
  store_aligned(sums, scale * to_floats((Ints)total[0]));
  *(Words *)starts = total[0] * (uint32_t)(bias_of(coding) - zero_of(coding, m->offsets));
  for (int64_t g = 0; g < count; g++) {
    const int64_t at = (block * groups + first + g) * TOGETHER + beside;
    a->scales[at] = scales[g];
    a->starts[at] = starts[g];
    if (a->sums) a->sums[at] = sums[g];
  }
}

/* Quantise one row of `width` floats. */
static inline void quantise_row(const Matrix *m, const float *x, const Activations *a, int64_t row) {
  const int64_t groups = groups_of(m);
  for (int64_t g = 0; g < groups; g += LANES) {
    const int64_t count = least(groups - g, LANES);
    if (m->group == 32 && a->tiled) quantise_groups(32, 1, m, x, a, row, g, count);
    else if (m->group == 32) quantise_groups(32, 0, m, x, a, row, g, count);
    else quantise_groups(m->group, a->tiled, m, x, a, row, g, count);
  }
}

/* Products of `rows` activations, from `row` on, with `panels` neighbouring panels from `at` on: sums[rows · panels].

The rows are of one block of eight. `ahead` bytes on from what is read, panels that come next are fetched, for 0 none.
`rows`, `panels`, `coding` and `offsets` are constants where this is inlined; rows · panels ≤ 8 keeps sums in
registers, more those of the group alone. */
INLINE void tile(const int rows, const int panels, const int coding, const int offsets, const Matrix *m,
                 const uint8_t *at, const Activations *a, int64_t row, int64_t ahead, Floats *sums) {
  const int64_t groups = groups_of(m), stride = panel_bytes(m), steps = m->group / 4;
  const int64_t bytes = m->group * LANES * m->bits / 8, block = row / TOGETHER * TOGETHER * groups, beside = row % TOGETHER;
  const int32_t *codes = (const int32_t *)a->codes + block * steps + beside;
  const float *scales = a->scales + block + beside;
  const int32_t *starts = a->starts + block + beside;
  const float *totals = offsets ? a->sums + block + beside : NULL;
  const uint8_t *head[4], *from[4];
  UNROLL
  for (int n = 0; n < panels; n++) head[n] = at + n * stride, from[n] = head[n] + head_bytes(m);
  UNROLL
  for (int i = 0; i < rows * panels; i++) sums[i] = filled(0.0f);
  const Floats unit = filled(1.0f / SCALE_UNIT);
  const int begins = bias_of(coding) != zero_of(coding, offsets);
  for (int64_t g = 0; g < groups; g++) {
    Ints dots[16];
    Floats scale[4], offset[4];
    UNROLL
    for (int n = 0; n < panels; n++) {
      scale[n] = from_half(load_halves(head[n]));
      if (offsets) offset[n] = from_half(load_halves(head[n] + 32));
      if (offsets == ZEROS) offset[n] = offset[n] * scale[n] * unit;
      head[n] += offsets ? 64 : 32;
    }
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL
      for (int n = 0; n < panels; n++)
        dots[r * panels + n] = filled_ints(begins ? starts[r] : 0);
    group_dots(rows, panels, coding, TABLES[coding == TABLED ? m->table : 0], steps, from, codes, ahead, dots);
    UNROLL
    for (int n = 0; n < panels; n++) from[n] += bytes;
    codes += steps * TOGETHER;
    UNROLL
    for (int r = 0; r < rows; r++) {
      Floats x = filled(scales[r]);
      UNROLL
      for (int n = 0; n < panels; n++) {
        Floats *sum = sums + r * panels + n;
        *sum = fused(to_floats(dots[r * panels + n]), scale[n] * x, *sum);
        if (offsets) *sum = fused(filled(totals[r]), offset[n], *sum);
      }
    }
    scales += TOGETHER, starts += TOGETHER;
    if (offsets) totals += TOGETHER;
  }
}

#endif
