/* The matmul of panels and quantized activations, for Linear and Experts. A strip is a few rows times a few panels. */
#ifndef LLMC_STRIPS_H
#define LLMC_STRIPS_H

#include "panels.h"

typedef struct {
  const Matrix *matrix;
  int64_t gated; /* 1: panels alternate between a gate and the other factor, and y is silu(gate) · other */
  const uint8_t *panels;
  Activations activations;
  const float *bias;            /* [matrix rows], or NULL */
  const int64_t *y_rows;        /* NULL, or for each row the row of y to add its results to */
  const float *routing_weights; /* with y_rows: a factor for each row */
  float *y;                     /* [rows, matrix rows], or half as wide with a gate */
  uint16_t *words;              /* NULL, or with a gate: the output for rounded results instead of y (words.h) */
} Matmul;

/* Multiply panels first … end − 1 by rows row … last − 1. `row` is a multiple of PACKED_ROWS, and row < last. With a
gate, `first` and the panel count are even. A row's results do not depend on the other rows. */
void multiply(const Matmul *matmul, int64_t first, int64_t end, int64_t row, int64_t last);

/* Whether so many rows of activations use the tiled layout, which needs a CPU with tiles. */
int uses_tiles(const Matrix *m, int64_t rows);

enum { MANY_ROWS = 32 };

static inline int64_t ceil_div(int64_t count, int64_t each) { return (count + each - 1) / each; }

/* Whether to multiply two panels at once by `rows` rows, at least three. It pays with few rows, whose sums stay in
registers. It also pays with many rows, where reading the matrix is not the bottleneck. */
static inline int two_at_once(int64_t rows) { return rows <= BOTH_ROWS || (STRIP_ROWS == 8 && rows >= MANY_ROWS); }

/* How many neighbouring panels are multiplied at once. Shares that end at a multiple of it are fast. */
static inline int64_t panels_at_once(const Matmul *matmul, int64_t rows) {
  return rows < 3 ? 4 : two_at_once(rows) ? 2 : 1 + matmul->gated;
}

/* The cost of a matmul, in bytes of panels that take as long to read. Few rows are limited by memory, many by
arithmetic. */
static inline int64_t matmul_cost(const Matrix *m, int64_t rows) {
  return panels_of(m) * panel_bytes(m) * (rows < MANY_ROWS ? 1 : rows / 16);
}

enum { QUANTIZE_BYTES = 8 /* cost of quantizing one number, in bytes of panels */ };
/* How many shares to split work into that costs so many bytes of panels: 1 to `max_shares`. With more shares than
threads, each thread gets the same number. */
int64_t shares_of(int64_t bytes, int64_t max_shares);
/* The start of share `at` when `all` items are split into `shares`. */
static inline int64_t share_at(int64_t all, int64_t shares, size_t at) { return all * (int64_t)at / shares; }

#endif
