/* Tokens in the order of the experts chosen for them: what Experts and ExpertLinear have in common.

A pair is a token and one of its experts, token · chosen + k. The panels of an expert that was chosen are read once for
all of its pairs, and others not at all. */
#ifndef LLMC_TURNS_H
#define LLMC_TURNS_H

#include "operators.h"
#include "strips.h"

enum { MOST_EXPERTS = 1 << 16 };

typedef struct {
  int64_t expert, row, last; /* a chosen expert, and the rows of its pairs: `row` is a multiple of TOGETHER */
} Turn;

typedef struct {
  int64_t experts;   /* that there are */
  int64_t most_rows; /* that `rows` may become */
  Turn *each;
  int64_t count, rows;
  int64_t *pairs; /* [rows] the pair of each row, −1 of those between two experts */
  int64_t *ends;  /* [experts] */
} Turns;

/* How many rows and bytes these pairs of so many experts need at the most; nothing is laid out yet. */
static inline Turns turns_of(int64_t pairs, int64_t experts) {
  const int64_t most = pairs < experts ? pairs : experts;
  return (Turns){.experts = experts, .most_rows = pairs + most * (TOGETHER - 1)};
}
static inline int64_t turns_bytes(const Turns *t) {
  return padded(8 * t->experts) + padded((int64_t)sizeof(Turn) * t->experts) + padded(8 * t->most_rows);
}

/* Lay out at `at`, and sort pairs by their experts `ids`, each one that there is. Returns where the memory ends. */
static inline uint8_t *sort_pairs(Turns *t, const int64_t *ids, int64_t pairs, uint8_t *at) {
  t->ends = (int64_t *)at;
  t->each = (Turn *)(at += padded(8 * t->experts));
  t->pairs = (int64_t *)(at += padded((int64_t)sizeof(Turn) * t->experts));
  for (int64_t e = 0; e < t->experts; e++) t->ends[e] = 0;
  for (int64_t i = 0; i < pairs; i++) t->ends[ids[i]]++;
  for (int64_t e = 0; e < t->experts; e++) {
    const int64_t count = t->ends[e];
    if (count) t->each[t->count++] = (Turn){e, t->rows, t->rows + count};
    t->ends[e] = t->rows;
    t->rows += (count + TOGETHER - 1) / TOGETHER * TOGETHER;
  }
  for (int64_t row = 0; row < t->rows; row++) t->pairs[row] = -1;
  for (int64_t i = 0; i < pairs; i++) t->pairs[t->ends[ids[i]]++] = i;
  return at + padded(8 * t->most_rows);
}

/* Quantise share `at` of the rows that are pairs for `product`: of x, a line of which `together` pairs have in common,
or, with 0, each row its own. */
static inline void quantise_pairs(const Turns *t, const Product *product, const float *x, int64_t together,
                                  int64_t pieces, size_t at) {
  const Matrix *m = product->matrix;
  for (int64_t row = share_at(t->rows, pieces, at), end = share_at(t->rows, pieces, at + 1); row < end; row++) {
    if (t->pairs[row] < 0) continue;
    const int64_t line = together ? t->pairs[row] / together : row;
    quantise_row(m, x + line * m->width, &product->activations, row);
  }
}

/* The product with one expert's matrix, of those that lie one after the other. */
static inline Product of_expert(const Product *all, int64_t expert) {
  Product one = *all;
  one.panels += expert * panels_of(all->matrix) * panel_bytes(all->matrix);
  return one;
}

/* Whether panels hold a matrix for each expert. */
static inline int holds(const Tensor *panels, int64_t experts, const Matrix *m) {
  const int64_t each = panels_of(m) * panel_bytes(m);
  return panels->dims[0] / each == experts && panels->dims[0] % each == 0;
}

static inline Status *check_ids(Api api, const int64_t *ids, int64_t pairs, int64_t experts) {
  for (int64_t i = 0; i < pairs; i++)
    if (ids[i] < 0 || ids[i] >= experts) return fail(api, "llmc: there is no expert of this number");
  return NULL;
}

#endif
