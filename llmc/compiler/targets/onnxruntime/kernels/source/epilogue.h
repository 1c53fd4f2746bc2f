/* The epilogue of a matmul: adds biases, applies gates or routing weights, and writes y. */
#ifndef LLMC_EPILOGUE_H
#define LLMC_EPILOGUE_H

#include "strips.h"
#include "vector_math.h"
#include "words.h"

INLINE void write_lanes(float *y, Floats value, int64_t left) {
  if (left > 0) store_lanes(y, first_lanes(left), value);
}

/* Write silu(gate) · other for one pair of panels. Sums of neighbouring rows are `step` apart. */
INLINE void write_gated(const int rows, const Matmul *matmul, int64_t pair, int64_t row, const Floats *gate,
                        const Floats *other, const int step) {
  const int64_t width = matmul->matrix->rows / 2, column = pair * LANES;
  UNROLL
  for (int r = 0; r < rows; r++) {
    const Floats value = silu16(gate[r * step]) * other[r * step];
    if (matmul->words) *(HalvesAnywhere *)words_at(matmul->words, width, row + r, column) = to_bf16(value);
    else write_lanes(matmul->y + (row + r) * width + column, value, width - column);
  }
}

/* Add routing weight · sum to the row of y that each row belongs to. Sums of neighbouring rows are `step` apart. */
INLINE void add_routed(const int rows, const Matmul *matmul, int64_t column, int64_t left, int64_t row,
                       const Floats *sums, const int step) {
  const Lanes lanes = first_lanes(left);
  UNROLL
  for (int r = 0; r < rows; r++) {
    float *y = matmul->y + matmul->y_rows[row + r] * matmul->matrix->rows + column;
    const Floats weight = splat(matmul->routing_weights[row + r]);
    write_lanes(y, fma16(weight, sums[r * step], load_lanes(lanes, y)), left);
  }
}

/* Write sums[rows · panels] of `panels` panels from `first` on, for activations from `row` on. With a gate, panels come
in pairs. */
INLINE void epilogue(const int rows, const int panels, const Matmul *matmul, int64_t first, int64_t row,
                     const Floats *sums) {
  const Matrix *m = matmul->matrix;
  if (matmul->gated) {
    UNROLL
    for (int pair = 0; pair < panels / 2; pair++)
      write_gated(rows, matmul, first / 2 + pair, row, sums + 2 * pair, sums + 2 * pair + 1, panels);
    return;
  }
  UNROLL
  for (int n = 0; n < panels; n++) {
    int64_t column = (first + n) * LANES, left = m->rows - column;
    if (matmul->y_rows) {
      add_routed(rows, matmul, column, left, row, sums + n, panels);
      continue;
    }
    Lanes lanes = first_lanes(left);
    Floats bias = matmul->bias ? load_lanes(lanes, matmul->bias + column) : splat(0.0f);
    UNROLL
    for (int r = 0; r < rows; r++)
      write_lanes(matmul->y + (row + r) * m->rows + column, sums[r * panels + n] + bias, left);
  }
}

#endif
