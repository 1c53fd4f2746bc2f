/* Attention of up to FEW_ROWS query rows to a bfloat16 cache, on ISA variants with HAS_WORD_DOTS (word_lines.h). Few
queries would leave most lanes of attend_lanes.h empty, so here each lane is a key and scores are [rows, KEYS]. The
results are bit-identical to those of attend_lanes.h. */
#ifndef LLMC_ATTEND_FEW_H
#define LLMC_ATTEND_FEW_H

#include "attend_rows.h"
#include "word_lines.h"

/* For each row: the query as words, the results over the current part of the keys, and the results over all parts. */
typedef struct {
  float q[FEW_ROWS * MAX_DIM / 2], sums[FEW_ROWS * MAX_DIM], all[FEW_ROWS * MAX_DIM];
  float scores[FEW_ROWS * KEYS], weights[FEW_ROWS * KEYS / 2];
  float copies[KEYS * MAX_DIM / 2], keys[KEYS * MAX_DIM / 2], values[KEYS * MAX_DIM / 2];
  float max_score[FEW_ROWS], weight_sum[FEW_ROWS], all_max_score[FEW_ROWS], all_weight_sum[FEW_ROWS];
} FewBuffers __attribute__((aligned(64)));

/* Compute the scores of `rows` queries, and prefetch the next keys (`after`) meanwhile. */
static void score_few(int64_t dim, int64_t rows, FewBuffers *b, Lines keys, Lines after) {
  const int64_t words = pad_depth(dim) / 2;
  int64_t stride;
  const uint8_t *lines = load_keys(dim, keys, b->copies, &stride);
  for (int64_t k = 0; k < KEYS; k += LANES) {
    fetch(after, k, LANES);
    for (int64_t d = 0; d < words; d += LANES)
      transpose((const float *)(lines + k * stride) + d, stride / 4, LANES, b->keys + d * KEYS + k, KEYS);
  }
  for (int64_t i = 0; i < rows * KEYS; i += LANES) store_aligned(b->scores + i, splat(0.0f));
  weighted_sum_words(4, rows, b->q, b->keys, 2 * words, KEYS, b->scores);
}

/* Turn a row's scores into softmax weights (as words), and rescale its earlier sums. */
static void online_softmax_few(const Run *run, const Job *job, FewBuffers *b, int64_t r, int64_t at, int64_t count) {
  const int64_t last = job->past + r / job->group, padded_dim = pad_depth(run->op->value_dim);
  float *scores = b->scores + r * KEYS;
  if (run->op->softcap != 0.0f) cap_scores(scores, run->op->softcap);
  if (run->slopes) add_position_bias(run, scores, job->piece.first + r % job->group, at, count);
  const int64_t first = oldest_key(run->op, last) - at, end = min64(last + 1 - at, count);
  const Floats rescale = splat(online_softmax(1, scores, first, end, b->max_score + r, b->weight_sum + r));
  narrow_line(scores, b->weights + r * KEYS / 2, KEYS);
  for (float *sum = b->sums + r * padded_dim, *end_sum = sum + padded_dim; sum < end_sum; sum += LANES)
    store_aligned(sum, load_aligned(sum) * rescale);
}

static void attend_few(const Run *run, int64_t number, Job job) {
  const Attention *op = run->op;
  const int64_t padded_dim = pad_depth(op->value_dim);
  FewBuffers b;
  const Results results = {{b.max_score, b.weight_sum, b.sums}, {b.all_max_score, b.all_weight_sum, b.all}, padded_dim};
  for (int64_t r = 0; r < job.rows; r++) {
    query_words(run, &job, r, b.q + r * pad_depth(op->dim) / 2);
    start_row(run, &job, &results, r);
  }
  for (int64_t at = job.from; at < job.end; at += KEYS) {
    const Block block = block_of(run, &job, at), after = block_after(run, &job, number, at);
    if (at == job.from) fetch(block.values, 0, KEYS);
    score_few(op->dim, job.rows, &b, block.keys, after.keys);
    for (int64_t r = 0; r < job.rows; r++) online_softmax_few(run, &job, &b, r, at, block.keys.count);
    load_values(op->value_dim, block.values, job.first_key - at, after.values, b.values);
    weighted_sum_line(job.rows, b.weights, b.values, padded_dim, b.sums);
    end_block(&job, &results, at);
  }
  finish_rows(run, &job, number, &results);
}

#endif
