/* What becomes of a product's sums: biases and gates, and where they are written. */
#ifndef LLMC_FINISH_H
#define LLMC_FINISH_H

#include "strips.h"
#include "vector_math.h"
#include "words.h"

INLINE void write(float *y, Floats value, int64_t left) {
  if (left > 0) store_lanes(y, first_lanes(left), value);
}

/* silu(gate) · other of one pair of panels; sums of neighbouring rows are `step` apart. */
INLINE void write_gated(const int rows, const Product *p, int64_t pair, int64_t row, const Floats *gate,
                        const Floats *other, const int step) {
  const int64_t width = p->matrix->rows / 2, column = pair * LANES;
  UNROLL
  for (int r = 0; r < rows; r++) {
    const Floats made = silu16(gate[r * step]) * other[r * step];
    if (p->words) *(HalvesAnywhere *)words_at(p->words, width, row + r, column) = narrowed_half(made);
    else write(p->y + (row + r) * width + column, made, width - column);
  }
}

/* share · sum to each row's line; sums of neighbouring rows are `step` apart. */
INLINE void add_shares(const int rows, const Product *p, int64_t column, int64_t left, int64_t row, const Floats *sums,
                       const int step) {
  const Lanes here = first_lanes(left);
  UNROLL
  for (int r = 0; r < rows; r++) {
    float *y = p->y + p->lines[row + r] * p->matrix->rows + column;
    const Floats share = filled(p->shares[row + r]);
    write(y, fused(share, sums[r * step], load_lanes(here, y)), left);
  }
}

/* Write sums[rows · panels] of `panels` panels from `first` on, whole pairs with a gate, and activations from `row` on. */
INLINE void finish(const int rows, const int panels, const Product *p, int64_t first, int64_t row, const Floats *sums) {
  const Matrix *m = p->matrix;
  if (p->gated) {
    UNROLL
    for (int pair = 0; pair < panels / 2; pair++)
      write_gated(rows, p, first / 2 + pair, row, sums + 2 * pair, sums + 2 * pair + 1, panels);
    return;
  }
  UNROLL
  for (int n = 0; n < panels; n++) {
    int64_t column = (first + n) * LANES, left = m->rows - column;
    if (p->lines) {
      add_shares(rows, p, column, left, row, sums + n, panels);
      continue;
    }
    Lanes here = first_lanes(left);
    Floats bias = p->bias ? load_lanes(here, p->bias + column) : filled(0.0f);
    UNROLL
    for (int r = 0; r < rows; r++)
      write(p->y + (row + r) * m->rows + column, sums[r * panels + n] + bias, left);
  }
}

#endif
