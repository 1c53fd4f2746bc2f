/* Tokens batched by expert, for Experts and ExpertLinear.

A pair is a token and one of its experts, with the number token · top_k + k. Batching reads the panels of each chosen
expert once for all its pairs, and does not read the others. */
#ifndef LLMC_EXPERT_BATCHES_H
#define LLMC_EXPERT_BATCHES_H

#include "operators.h"
#include "strips.h"

enum { MAX_EXPERTS = 1 << 16 };

typedef struct {
  int64_t expert, row, last; /* a chosen expert and its range of rows; `row` is a multiple of PACKED_ROWS */
} ExpertBatch;

typedef struct {
  int64_t experts;  /* experts of the layer */
  int64_t max_rows; /* upper bound of `rows` */
  ExpertBatch *each;
  int64_t count, rows;
  int64_t *pairs; /* [rows] the pair of each row, −1 for padding between experts */
  int64_t *ends;  /* [experts] */
} ExpertBatches;

/* Compute upper bounds of rows and bytes for these pairs. Memory is laid out later, by sort_pairs. */
static inline ExpertBatches batches_of(int64_t pairs, int64_t experts) {
  const int64_t max_batches = pairs < experts ? pairs : experts;
  return (ExpertBatches){.experts = experts, .max_rows = pairs + max_batches * (PACKED_ROWS - 1)};
}
static inline int64_t batches_bytes(const ExpertBatches *batches) {
  return pad_line(8 * batches->experts) + pad_line((int64_t)sizeof(ExpertBatch) * batches->experts) +
         pad_line(8 * batches->max_rows);
}

/* Lay out the memory at `at`, and sort the pairs by their experts `ids`. Returns the end of the memory. */
static inline uint8_t *sort_pairs(ExpertBatches *batches, const int64_t *ids, int64_t pairs, uint8_t *at) {
  batches->ends = (int64_t *)at;
  batches->each = (ExpertBatch *)(at += pad_line(8 * batches->experts));
  batches->pairs = (int64_t *)(at += pad_line((int64_t)sizeof(ExpertBatch) * batches->experts));
  for (int64_t e = 0; e < batches->experts; e++) batches->ends[e] = 0;
  for (int64_t i = 0; i < pairs; i++) batches->ends[ids[i]]++;
  for (int64_t e = 0; e < batches->experts; e++) {
    const int64_t count = batches->ends[e];
    if (count) batches->each[batches->count++] = (ExpertBatch){e, batches->rows, batches->rows + count};
    batches->ends[e] = batches->rows;
    batches->rows += (count + PACKED_ROWS - 1) / PACKED_ROWS * PACKED_ROWS;
  }
  for (int64_t row = 0; row < batches->rows; row++) batches->pairs[row] = -1;
  for (int64_t i = 0; i < pairs; i++) batches->pairs[batches->ends[ids[i]]++] = i;
  return at + pad_line(8 * batches->max_rows);
}

/* Quantize share `at` of the rows that are pairs. `together` pairs share a row of x; with 0, each row has its own. */
static inline void quantize_pairs(const ExpertBatches *batches, const Matmul *matmul, const float *x, int64_t together,
                                  int64_t pieces, size_t at) {
  const Matrix *m = matmul->matrix;
  for (int64_t row = share_at(batches->rows, pieces, at), end = share_at(batches->rows, pieces, at + 1); row < end;
       row++) {
    if (batches->pairs[row] < 0) continue;
    const int64_t line = together ? batches->pairs[row] / together : row;
    quantize_row(m, x + line * m->width, &matmul->activations, row);
  }
}

/* The matmul with one expert's matrix. The matrices of all experts are consecutive. */
static inline Matmul matmul_of_expert(const Matmul *all, int64_t expert) {
  Matmul one = *all;
  one.panels += expert * panels_of(all->matrix) * panel_bytes(all->matrix);
  return one;
}

/* Whether the panels hold one matrix for each expert. */
static inline int holds_experts(const Tensor *panels, int64_t experts, const Matrix *m) {
  const int64_t each = panels_of(m) * panel_bytes(m);
  return panels->dims[0] / each == experts && panels->dims[0] % each == 0;
}

static inline Status *check_ids(Api api, const int64_t *ids, int64_t pairs, int64_t experts) {
  for (int64_t i = 0; i < pairs; i++)
    if (ids[i] < 0 || ids[i] >= experts) return fail(api, "llmc: there is no expert of this number");
  return NULL;
}

#endif
