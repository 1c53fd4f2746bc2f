/* See rounded_product.h. */
#include "rounded_product.h"
#include "finish.h"
#if defined(__AMX_BF16__)
#include "isa/amx_bf16.h"
#endif

enum {
  ROWS_AT_ONCE = 512,      /* whose sums the second-level cache holds beside the panels */
  INPUTS_AT_ONCE = 1024,   /* of two panels, unpacked */
  BOTH = 2 * WORD_ROWS,    /* rows of two tiles */
  FINISHED = 8,            /* rows that are finished at once */
  MOST_TOGETHER = 8,       /* panels that are multiplied with the same inputs of all rows before the next inputs */
  INPUTS_TOGETHER = 256,   /* of so many panels; the first-level cache holds two of these beside rows */
  HELD = 3 * (1 << 18)     /* activations that the second-level cache holds */
};

/* The second-level cache holds activations from one pair of panels to the next, or else of some inputs at a time. */
int64_t panels_together(const Matrix *m, int64_t rows) {
  return least(rows, ROWS_AT_ONCE) * m->width > HELD ? MOST_TOGETHER : PANELS_AT_ONCE;
}

void round_row(const Matrix *m, const float *x, uint16_t *to, int64_t row) {
  const int64_t width = m->width;
  for (int64_t k = 0; k < width; k += DEPTH)
    store((float *)words_at(to, width, row, k), narrowed(some_of(x + k, width - k), some_of(x + k + LANES, width - k - LANES)));
}

/* The codes of one step of a group, four bytes of each of 16 rows. */
INLINE Words step_codes(const int coding, const int8_t *values, int64_t steps, const uint8_t *from, int64_t step) {
#define BYTES(k) *(const WordsAnywhere *)(from + 64 * (k))
  if (coding == EIGHT) return BYTES(step);
  const int64_t half = steps / 2, quarter = steps / 4;
  const Words both = BYTES(step < half ? step : step - half), low = (step < half ? both : both >> 4) & 0x0F0F0F0F;
  if (coding == TABLED) return looked_up(values, low);
  if (coding == FOUR) return low;
  return low | (BYTES(half + step % quarter) >> 2 * (uint32_t)(step / quarter) & 0x03030303) << 4;
#undef BYTES
}

/* Inputs first … first + depth − 1 of a panel, both multiples of DEPTH, as words of two: to [depth / 2]. What lies
`ahead` bytes on is fetched, nothing for 0. */
INLINE void unpack(const int coding, const int offsets, const Matrix *m, const uint8_t *panel, int64_t first, int64_t depth,
                   int64_t ahead, Floats *to) {
  const int64_t group = m->group, groups = groups_of(m), end = first + depth, steps = group / 4;
  const int8_t *values = TABLES[coding == TABLED ? m->table : 0];
  const Floats unit = filled(1.0f / SCALE_UNIT), zero = filled((float)-zero_of(coding, offsets));
  for (int64_t g = first / group; g < groups && g * group < end; g++) {
    const uint8_t *head = panel + g * (offsets ? 64 : 32), *codes = panel + head_bytes(m) + g * group * LANES * m->bits / 8;
    const Floats scale = from_half(load_halves(head)) * unit;
    Floats offset = offsets ? from_half(load_halves(head + 32)) : zero;
    if (offsets != OFFSETS) offset = offset * scale;
    const int64_t last = least((g + 1) * group, end);
    for (int64_t k = g * group > first ? g * group : first; k < last; k += 4) {
      const int64_t step = (k - g * group) / 4;
      const Words four = step_codes(coding, values, steps, codes, step);
      if (step < steps / sharing(coding)) fetch_step(coding, codes, step, ahead);
      Floats each[4];
      UNROLL
      for (int i = 0; i < 4; i++) each[i] = fused(to_floats((Ints)(four >> 8 * i & 0xFF)), scale, offset);
      to[(k - first) / 2] = paired(each[0], each[1]);
      to[(k - first) / 2 + 1] = paired(each[2], each[3]);
    }
  }
  for (int64_t k = groups * group > first ? groups * group : first; k < end; k += 2) to[(k - first) / 2] = filled(0.0f);
}

typedef void Unpack(const Matrix *m, const uint8_t *panel, int64_t first, int64_t depth, int64_t ahead, Floats *to);
#define UNPACK_OF(coding, offsets)                                                                                      \
  static __attribute__((noinline)) void unpack_##coding##_##offsets(const Matrix *m, const uint8_t *panel, int64_t first, \
                                                                    int64_t depth, int64_t ahead, Floats *to) {         \
    unpack(coding, offsets, m, panel, first, depth, ahead, to);                                                         \
  }
UNPACK_OF(EIGHT, 2) UNPACK_OF(EIGHT, 1) UNPACK_OF(EIGHT, 0) UNPACK_OF(FOUR, 2) UNPACK_OF(FOUR, 1) UNPACK_OF(FOUR, 0)
UNPACK_OF(SIX, 1) UNPACK_OF(SIX, 0) UNPACK_OF(TABLED, 0)
static Unpack *const unpacks[EIGHT + 1][3] = {
    [EIGHT] = {unpack_EIGHT_0, unpack_EIGHT_1, unpack_EIGHT_2}, [FOUR] = {unpack_FOUR_0, unpack_FOUR_1, unpack_FOUR_2},
    [SIX] = {unpack_SIX_0, unpack_SIX_1}, [TABLED] = {unpack_TABLED_0},
};

/* Two tiles of rows at most, `apart` numbers apart, times two panels at most, INPUTS_AT_ONCE / 2 words apart: sums
[rows][2], those of before with `again`. */
typedef void Dots(int tiles, int panels, const uint16_t *x, int64_t apart, const Floats *w, int64_t depth, int again,
                  Floats *sums);

enum { SOME_ROWS = STRIP_ROWS == 8 ? 8 : 2 /* whose sums of even and of odd places registers hold */ };

/* The numbers of each word below and above. */
INLINE Floats below(Words words) { return (Floats)(words << 16); }
INLINE Floats above(Words words) { return (Floats)(words & 0xFFFF0000); }

/* SOME_ROWS rows, of each 16 numbers of even places and 16 of odd ones in turn, times one panel. */
INLINE void some_dots(const float (*x)[INPUTS_AT_ONCE], const Floats *w, int64_t depth, int again, Floats *sums) {
  Floats all[SOME_ROWS];
  UNROLL
  for (int r = 0; r < SOME_ROWS; r++) all[r] = again ? sums[2 * r] : filled(0.0f);
  for (int64_t k = 0; k < depth; k += DEPTH) {
    Floats even[SOME_ROWS], odd[SOME_ROWS];
    UNROLL
    for (int r = 0; r < SOME_ROWS; r++) even[r] = odd[r] = filled(0.0f);
    for (int64_t i = k; i < k + LANES; i++, w++) {
      UNROLL
      for (int r = 0; r < SOME_ROWS; r++) {
        even[r] = fused(filled(x[r][i]), below((Words)*w), even[r]);
        odd[r] = fused(filled(x[r][i + LANES]), above((Words)*w), odd[r]);
      }
    }
    UNROLL
    for (int r = 0; r < SOME_ROWS; r++) all[r] = all[r] + (even[r] + odd[r]);
  }
  UNROLL
  for (int r = 0; r < SOME_ROWS; r++) sums[2 * r] = all[r];
}

static void any_dots(int tiles, int panels, const uint16_t *x, int64_t apart, const Floats *w, int64_t depth, int again,
                     Floats *sums) {
  float wide[SOME_ROWS][INPUTS_AT_ONCE] __attribute__((aligned(64)));
  for (int row = 0; row < tiles * WORD_ROWS; row += SOME_ROWS) {
    const uint16_t *from = x + row / WORD_ROWS * apart + row % WORD_ROWS * DEPTH;
    for (int r = 0; r < SOME_ROWS; r++)
      for (int64_t k = 0; k < depth; k += DEPTH) {
        const Words words = *(const WordsAnywhere *)(from + k * WORD_ROWS + r * DEPTH);
        store_aligned(wide[r] + k, below(words));
        store_aligned(wide[r] + k + LANES, above(words));
      }
    for (int n = 0; n < panels; n++) some_dots(wide, w + n * INPUTS_AT_ONCE / 2, depth, again, sums + 2 * row + n);
  }
}

#if defined(__AMX_BF16__)
static void tile_dots_rounded(int tiles, int panels, const uint16_t *x, int64_t apart, const Floats *w, int64_t depth,
                              int again, Floats *sums) {
#define CALL(t, n) multiply_words(t, n, x, apart, w, INPUTS_AT_ONCE / 2, depth, again, sums)
  if (tiles == 2 && panels == 2) CALL(2, 2);
  else if (tiles == 2) CALL(2, 1);
  else if (panels == 2) CALL(1, 2);
  else CALL(1, 1);
#undef CALL
}
#endif

/* Of `count` rows from `row` on: sums [count][2] of so many panels. */
static void finish_rows(const Product *p, int panels, int64_t panel, int64_t row, int64_t count, const Floats *sums) {
  int64_t r = 0;
  if (panels == 2)
    for (; r + FINISHED <= count; r += FINISHED) finish(FINISHED, 2, p, panel, row + r, sums + 2 * r);
  for (; r < count; r++) {
    if (panels == 2) finish(1, 2, p, panel, row + r, sums + 2 * r);
    else finish(1, 1, p, panel, row + r, sums + 2 * r);
  }
}

void multiply_rounded(const Product *p, const uint16_t *x, int64_t first, int64_t end, int64_t rows) {
  const Matrix *m = p->matrix;
  const int64_t width = deep(m->width), apart = WORD_ROWS * width, size = panel_bytes(m);
  const int64_t together = panels_together(m, rows), at_once = together > PANELS_AT_ONCE ? INPUTS_TOGETHER : INPUTS_AT_ONCE;
  Unpack *const unpack_panel = unpacks[coding_of(m)][m->offsets];
  Dots *dots = any_dots;
  Floats all[MOST_TOGETHER / 2][2 * ROWS_AT_ONCE], w[INPUTS_AT_ONCE];
#if defined(__AMX_BF16__)
  if (words_allowed()) dots = tile_dots_rounded, begin_words();
#endif
  for (int64_t begin = first; begin < end; begin += together)
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE)
      for (int64_t k = 0; k < width; k += at_once)
        for (int64_t panel = begin; panel < least(begin + together, end); panel += 2) {
          const int panels = (int)least(2, end - panel);
          const int64_t here = least(rows - row, ROWS_AT_ONCE), depth = least(width - k, at_once), ends = k + depth == width;
          Floats *sums = all[(panel - begin) / 2];
          for (int n = 0; n < panels; n++)
            unpack_panel(m, p->panels + (panel + n) * size, k, depth, row ? 0 : 2 * size, w + n * INPUTS_AT_ONCE / 2);
          for (int64_t r = 0; r < here; r += BOTH) {
            const uint16_t *from = x + (row + r) * width + k * WORD_ROWS;
            dots(here - r > WORD_ROWS ? 2 : 1, panels, from, apart, w, depth, k > 0, sums + 2 * r);
            /* what a tile stores is not at hand to those that read it right behind */
            if (ends && r) finish_rows(p, panels, panel, row + r - BOTH, BOTH, sums + 2 * (r - BOTH));
          }
          const int64_t left = (here - 1) / BOTH * BOTH;
          if (ends) finish_rows(p, panels, panel, row + left, here - left, sums + 2 * left);
        }
#if defined(__AMX_BF16__)
  if (dots != any_dots) end_words();
#endif
}
