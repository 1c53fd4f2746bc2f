/* Strips of a matrix in panels, times quantised activations: what Linear and Experts have in common. */
#ifndef LLMC_STRIPS_H
#define LLMC_STRIPS_H

#include "panels.h"

typedef struct {
  const Matrix *matrix;
  int64_t gated; /* 1: panels are those of a gate and of what it lets through in turn, and y is silu(gate) · other */
  const uint8_t *panels;
  Activations activations;
  const float *bias;    /* [matrix rows], or none */
  const int64_t *y_rows; /* none, or the line of y that each row's results are added to, in their shares */
  const float *routing_weights;  /* with lines: of each row */
  float *y;             /* [rows or lines, matrix rows, or half of them with a gate] */
  uint16_t *words;      /* with a gate: where to write in place of y, rounded (words.h), or none */
} Matmul;

/* Panels first … end − 1, an even number from an even one on with a gate, times rows row … last − 1; `row` is a multiple
of TOGETHER, and there is at least one. A row's results are the same whatever other rows there are. */
void multiply(const Matmul *p, int64_t first, int64_t end, int64_t row, int64_t last);

/* Whether activations of so many rows lie as tiles have them: where the CPU multiplies such. */
int uses_tiles(const Matrix *m, int64_t rows);

enum { MANY_ROWS = 32 };

/* In how many pieces of `each` or fewer `count` is. */
static inline int64_t ceil_div(int64_t count, int64_t each) { return (count + each - 1) / each; }

/* Whether two panels are multiplied with so many rows, three at least, at once: few, whose sums registers hold, or so many
that reading the matrix is not what takes the time, with the sums of a group in registers. */
static inline int two_at_once(int64_t rows) { return rows <= BOTH_ROWS || (STRIP_ROWS == 8 && rows >= MANY_ROWS); }

/* How many neighbouring panels are multiplied at once, where there are as many: shares that end between such are fast. */
static inline int64_t panels_at_once(const Matmul *p, int64_t rows) {
  return rows < 3 ? 4 : two_at_once(rows) ? 2 : 1 + p->gated;
}

/* Bytes of panels that take as long to read as a matrix takes with so many rows: few wait for memory, more for products. */
static inline int64_t matmul_cost(const Matrix *m, int64_t rows) {
  return panels_of(m) * panel_bytes(m) * (rows < MANY_ROWS ? 1 : rows / 16);
}

enum { QUANTIZE_BYTES = 8 /* bytes of panels that are multiplied while a number is quantised */ };
/* How many shares of so many bytes of panels, or what takes as long, threads take turns at; 1 to `most`, and as many for
each thread where there are more than threads. */
int64_t shares_of(int64_t bytes, int64_t most);
/* Where share `at` of `shares` of `all` begins. */
static inline int64_t share_at(int64_t all, int64_t shares, size_t at) { return all * (int64_t)at / shares; }

#endif
