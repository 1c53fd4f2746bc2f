#include "rounded_matmul.h"
#include "epilogue.h"
#if defined(__AMX_BF16__)
#include "isa/amx_bf16.h"
#endif

enum {
  ROWS_AT_ONCE = 512,             /* rows whose sums fit in the L2 cache with the panels */
  INPUTS_AT_ONCE = 1024,          /* inputs of two panels that are unpacked at once */
  TILE_PAIR_ROWS = 2 * WORD_ROWS, /* rows of two tiles */
  EPILOGUE_ROWS = 8,              /* rows in one call of the epilogue */
  MAX_PANELS = 8,                 /* most panels that multiply the same inputs of all rows before the next inputs */
  SHARED_INPUTS = 256, /* inputs at once with more panels: the L1 cache holds two unpacked panels and the rows */
  L2_ACTIVATIONS = 3 * (1 << 18) /* activations that fit in the L2 cache */
};

/* If the activations fit in the L2 cache, they stay there from one pair of panels to the next. Otherwise more panels
multiply each slice of inputs. */
int64_t panels_together(const Matrix *m, int64_t rows) {
  return min64(rows, ROWS_AT_ONCE) * m->width > L2_ACTIVATIONS ? MAX_PANELS : PANELS_AT_ONCE;
}

void round_row(const Matrix *m, const float *x, uint16_t *to, int64_t row) {
  const int64_t width = m->width;
  for (int64_t k = 0; k < width; k += DEPTH)
    store((float *)words_at(to, width, row, k),
          to_bf16_pair(load_first(x + k, width - k), load_first(x + k + LANES, width - k - LANES)));
}

/* Unpack one step of a group: four bytes of each of 16 rows. */
INLINE Words unpack_step(const int format, const int8_t *values, int64_t steps, const uint8_t *from, int64_t step) {
#define BYTES(k) *(const WordsAnywhere *)(from + 64 * (k))
  if (format == EIGHT) return BYTES(step);
  const int64_t half = steps / 2, quarter = steps / 4;
  const Words both = BYTES(step < half ? step : step - half), low = (step < half ? both : both >> 4) & 0x0F0F0F0F;
  if (format == TABLED) return look_up(values, low);
  if (format == FOUR) return low;
  return low | (BYTES(half + step % quarter) >> 2 * (uint32_t)(step / quarter) & 0x03030303) << 4;
#undef BYTES
}

/* Unpack inputs first … first + depth − 1 of a panel to words: to [depth / 2]. `first` and `depth` are multiples of
DEPTH. Prefetches what is `ahead` bytes after each read; 0 prefetches nothing. */
INLINE void unpack(const int format, const int offsets, const Matrix *m, const uint8_t *panel, int64_t first,
                   int64_t depth, int64_t ahead, Floats *to) {
  const int64_t group = m->group, groups = groups_of(m), end = first + depth, steps = group / 4;
  const int8_t *values = TABLES[format == TABLED ? m->table : 0];
  const Floats unit = splat(1.0f / SCALE_UNIT), zero = splat((float)-zero_of(format, offsets));
  for (int64_t g = first / group; g < groups && g * group < end; g++) {
    const uint8_t *header = panel + g * (offsets ? 64 : 32),
                  *quantized = panel + header_bytes(m) + g * group * LANES * m->bits / 8;
    const Floats scale = from_half(load_halves(header)) * unit;
    Floats offset = offsets ? from_half(load_halves(header + 32)) : zero;
    if (offsets != OFFSETS) offset = offset * scale;
    const int64_t last = min64((g + 1) * group, end);
    for (int64_t k = g * group > first ? g * group : first; k < last; k += 4) {
      const int64_t step = (k - g * group) / 4;
      const Words four = unpack_step(format, values, steps, quantized, step);
      if (step < steps / packed_steps(format)) fetch_step(format, quantized, step, ahead);
      Floats each[4];
      UNROLL
      for (int i = 0; i < 4; i++) each[i] = fma16(to_floats((Ints)(four >> 8 * i & 0xFF)), scale, offset);
      to[(k - first) / 2] = interleave_bf16(each[0], each[1]);
      to[(k - first) / 2 + 1] = interleave_bf16(each[2], each[3]);
    }
  }
  for (int64_t k = groups * group > first ? groups * group : first; k < end; k += 2) to[(k - first) / 2] = splat(0.0f);
}

typedef void Unpack(const Matrix *m, const uint8_t *panel, int64_t first, int64_t depth, int64_t ahead, Floats *to);
#define UNPACK_OF(format, offsets)                                                                      \
  static __attribute__((noinline)) void unpack_##format##_##offsets(                                    \
      const Matrix *m, const uint8_t *panel, int64_t first, int64_t depth, int64_t ahead, Floats *to) { \
    unpack(format, offsets, m, panel, first, depth, ahead, to);                                         \
  }
UNPACK_OF(EIGHT, 2) UNPACK_OF(EIGHT, 1) UNPACK_OF(EIGHT, 0) UNPACK_OF(FOUR, 2) UNPACK_OF(FOUR, 1) UNPACK_OF(FOUR, 0)
UNPACK_OF(SIX, 1) UNPACK_OF(SIX, 0) UNPACK_OF(TABLED, 0)
static Unpack *const unpacks[EIGHT + 1][3] = {
    [EIGHT] = {unpack_EIGHT_0, unpack_EIGHT_1, unpack_EIGHT_2}, [FOUR] = {unpack_FOUR_0, unpack_FOUR_1, unpack_FOUR_2},
    [SIX] = {unpack_SIX_0, unpack_SIX_1}, [TABLED] = {unpack_TABLED_0},
};

/* Multiply up to two row tiles (`stride` numbers apart) by up to two panels (INPUTS_AT_ONCE / 2 vectors apart). Writes
sums [rows][2], or adds to them with `accumulate`. */
typedef void Dots(int tiles, int panels, const uint16_t *x, int64_t stride, const Floats *w, int64_t depth,
                  int accumulate, Floats *sums);

enum { REGISTER_ROWS = STRIP_ROWS == 8 ? 8 : 2 /* rows whose even and odd sums fit in registers */ };

/* The low and the high bfloat16 of each word, as float32. */
INLINE Floats low_bf16(Words words) { return (Floats)(words << 16); }
INLINE Floats high_bf16(Words words) { return (Floats)(words & 0xFFFF0000); }

/* Multiply REGISTER_ROWS rows by one panel. Rows of x alternate 16 values of even index and 16 of odd index. */
INLINE void register_dots(const float (*x)[INPUTS_AT_ONCE], const Floats *w, int64_t depth, int accumulate,
                          Floats *sums) {
  Floats all[REGISTER_ROWS];
  UNROLL
  for (int r = 0; r < REGISTER_ROWS; r++) all[r] = accumulate ? sums[2 * r] : splat(0.0f);
  for (int64_t k = 0; k < depth; k += DEPTH) {
    Floats even[REGISTER_ROWS], odd[REGISTER_ROWS];
    UNROLL
    for (int r = 0; r < REGISTER_ROWS; r++) even[r] = odd[r] = splat(0.0f);
    for (int64_t i = k; i < k + LANES; i++, w++) {
      UNROLL
      for (int r = 0; r < REGISTER_ROWS; r++) {
        even[r] = fma16(splat(x[r][i]), low_bf16((Words)*w), even[r]);
        odd[r] = fma16(splat(x[r][i + LANES]), high_bf16((Words)*w), odd[r]);
      }
    }
    UNROLL
    for (int r = 0; r < REGISTER_ROWS; r++) all[r] = all[r] + (even[r] + odd[r]);
  }
  UNROLL
  for (int r = 0; r < REGISTER_ROWS; r++) sums[2 * r] = all[r];
}

static void portable_dots(int tiles, int panels, const uint16_t *x, int64_t stride, const Floats *w, int64_t depth,
                          int accumulate, Floats *sums) {
  float wide[REGISTER_ROWS][INPUTS_AT_ONCE] __attribute__((aligned(64)));
  for (int row = 0; row < tiles * WORD_ROWS; row += REGISTER_ROWS) {
    const uint16_t *from = x + row / WORD_ROWS * stride + row % WORD_ROWS * DEPTH;
    for (int r = 0; r < REGISTER_ROWS; r++)
      for (int64_t k = 0; k < depth; k += DEPTH) {
        const Words words = *(const WordsAnywhere *)(from + k * WORD_ROWS + r * DEPTH);
        store_aligned(wide[r] + k, low_bf16(words));
        store_aligned(wide[r] + k + LANES, high_bf16(words));
      }
    for (int n = 0; n < panels; n++)
      register_dots(wide, w + n * INPUTS_AT_ONCE / 2, depth, accumulate, sums + 2 * row + n);
  }
}

#if defined(__AMX_BF16__)
static void tile_dots_rounded(int tiles, int panels, const uint16_t *x, int64_t stride, const Floats *w, int64_t depth,
                              int accumulate, Floats *sums) {
#define CALL(t, n) multiply_words(t, n, x, stride, w, INPUTS_AT_ONCE / 2, depth, accumulate, sums)
  if (tiles == 2 && panels == 2) CALL(2, 2);
  else if (tiles == 2) CALL(2, 1);
  else if (panels == 2) CALL(1, 2);
  else CALL(1, 1);
#undef CALL
}
#endif

/* Run the epilogue for `count` rows from `row` on, with sums [count][2] of one or two panels. */
static void epilogue_rows(const Matmul *matmul, int panels, int64_t panel, int64_t row, int64_t count,
                          const Floats *sums) {
  int64_t r = 0;
  if (panels == 2)
    for (; r + EPILOGUE_ROWS <= count; r += EPILOGUE_ROWS)
      epilogue(EPILOGUE_ROWS, 2, matmul, panel, row + r, sums + 2 * r);
  for (; r < count; r++) {
    if (panels == 2) epilogue(1, 2, matmul, panel, row + r, sums + 2 * r);
    else epilogue(1, 1, matmul, panel, row + r, sums + 2 * r);
  }
}

void multiply_rounded(const Matmul *matmul, const uint16_t *x, int64_t first, int64_t end, int64_t rows) {
  const Matrix *m = matmul->matrix;
  const int64_t width = pad_depth(m->width), stride = WORD_ROWS * width, size = panel_bytes(m);
  const int64_t together = panels_together(m, rows),
                at_once = together > PANELS_AT_ONCE ? SHARED_INPUTS : INPUTS_AT_ONCE;
  Unpack *const unpack_panel = unpacks[format_of(m)][m->offsets];
  Dots *dots = portable_dots;
  Floats all[MAX_PANELS / 2][2 * ROWS_AT_ONCE], w[INPUTS_AT_ONCE];
#if defined(__AMX_BF16__)
  if (words_allowed()) dots = tile_dots_rounded, begin_words();
#endif
  for (int64_t begin = first; begin < end; begin += together)
    for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE)
      for (int64_t k = 0; k < width; k += at_once)
        for (int64_t panel = begin; panel < min64(begin + together, end); panel += 2) {
          const int panels = (int)min64(2, end - panel);
          const int64_t block_rows = min64(rows - row, ROWS_AT_ONCE), depth = min64(width - k, at_once),
                        ends = k + depth == width;
          Floats *sums = all[(panel - begin) / 2];
          for (int n = 0; n < panels; n++)
            unpack_panel(m, matmul->panels + (panel + n) * size, k, depth, row ? 0 : 2 * size,
                         w + n * INPUTS_AT_ONCE / 2);
          for (int64_t r = 0; r < block_rows; r += TILE_PAIR_ROWS) {
            const uint16_t *from = x + (row + r) * width + k * WORD_ROWS;
            dots(block_rows - r > WORD_ROWS ? 2 : 1, panels, from, stride, w, depth, k > 0, sums + 2 * r);
            /* one pair of tiles later: loads stall on sums that a tile just stored */
            if (ends && r)
              epilogue_rows(matmul, panels, panel, row + r - TILE_PAIR_ROWS, TILE_PAIR_ROWS,
                            sums + 2 * (r - TILE_PAIR_ROWS));
          }
          const int64_t left = (block_rows - 1) / TILE_PAIR_ROWS * TILE_PAIR_ROWS;
          if (ends) epilogue_rows(matmul, panels, panel, row + left, block_rows - left, sums + 2 * left);
        }
#if defined(__AMX_BF16__)
  if (dots != portable_dots) end_words();
#endif
}
