/* Attention with one row of scores per query, in float32 (attention_blocks.h) or rounded to bfloat16 (rounded.h). */
#ifndef LLMC_ATTEND_ROWS_H
#define LLMC_ATTEND_ROWS_H

#include "attention.h"

/* Add a head's position bias (its slope or table) to the scores of `count` keys from position `at` on. */
static void add_position_bias(const Run *run, float *scores, int64_t head, int64_t at, int64_t count) {
  if (run->positions) add_bias_table(scores, run->slopes + head * run->positions + at, count);
  else add_alibi(scores, run->slopes[head], at);
}

/* Read values, with zeros for the first `masked`. In a ring buffer, a token slot before the window may hold a later
token or stale data, and 0 · NaN would be NaN. */
static void read_values(const Attention *op, Lines values, int64_t masked, Lines after, float *to) {
  read_lines(op->kind, values, op->value_dim, after, to);
  const int64_t zeros = min64(masked, values.count) * pad_lanes(op->value_dim);
  for (int64_t i = 0; i < zeros; i++) to[i] = 0.0f;
}

/* Scores of `rows` queries with a block's transposed keys. */
INLINE void score_rows(const Attention *op, const float *q, const float *transposed, int64_t padded_dim, int64_t rows,
                       float *to) {
  if (!is_rounded(op)) {
    EACH_ROWS(score, rows, q + r * padded_dim, transposed, padded_dim, op->scale, to + r * KEYS)
    return;
  }
  for (int64_t r = 0; r < rows; r++) score_rounded(q + r * padded_dim, transposed, padded_dim, to + r * KEYS);
}

/* For `rows` rows: sums · rescale + weights · values. */
INLINE void weighted_sum_rows(const Attention *op, float *weights, float *values, int64_t count, const float *rescale,
                              int64_t rows, float *sums) {
  const int64_t padded_dim = pad_lanes(op->value_dim);
  if (!is_rounded(op)) {
    EACH_ROWS(weighted_sum, rows, weights + r * KEYS, values, count, padded_dim, rescale + r, sums + r * padded_dim)
    return;
  }
  for (int64_t i = count * padded_dim; i < KEYS * padded_dim; i += LANES) store_aligned(values + i, splat(0.0f));
  round_lines(weights, rows * KEYS);
  for (int64_t r = 0; r < rows; r++) {
    float *at = sums + r * padded_dim;
    for (int64_t d = 0; d < padded_dim; d += LANES) store_aligned(at + d, load_aligned(at + d) * splat(rescale[r]));
    weighted_sum_rounded(weights + r * KEYS, values, KEYS, padded_dim, at);
  }
}

static void attend_rows(const Run *run, int64_t number, Job job) {
  const Attention *op = run->op;
  const int64_t rows = job.rows, group = job.group;
  const int is_bf16 = is_rounded(op);
  const int64_t line = pad_lanes(op->dim), value_line = pad_lanes(op->value_dim),
                padded_dim = is_bf16 ? pad_depth(op->dim) : line;
  float q[ROWS * MAX_DIM] __attribute__((aligned(64))), sums[ROWS * MAX_DIM] __attribute__((aligned(64)));
  float lines[KEYS * MAX_DIM] __attribute__((aligned(64))), transposed[KEYS * MAX_DIM] __attribute__((aligned(64)));
  float scores[ROWS * KEYS] __attribute__((aligned(64))), all[ROWS * MAX_DIM] __attribute__((aligned(64)));
  float max_score[ROWS], weight_sum[ROWS], rescale[ROWS], all_max_score[ROWS], all_weight_sum[ROWS];
  const Results results = {{max_score, weight_sum, sums}, {all_max_score, all_weight_sum, all}, value_line};
  for (int64_t r = 0; r < rows; r++) {
    const int64_t head = job.piece.first + r % group;
    float *x = q + r * padded_dim;
    rotate(run, run->q + (job.first + r / group) * run->q_stride + head * op->dim, job.past + r / group, x);
    for (int64_t d = 0; is_bf16 && d < padded_dim; d += LANES)
      store_aligned(x + d, d < line ? rounded(load_aligned(x + d) * splat(op->scale)) : splat(0.0f));
    start_row(run, &job, &results, r);
  }
  for (int64_t i = line * KEYS; i < padded_dim * KEYS; i += LANES) store_aligned(transposed + i, splat(0.0f));
  for (int64_t at = job.from; at < job.end; at += KEYS) {
    const Block block = block_of(run, &job, at), after = block_after(run, &job, number, at);
    const int64_t count = block.keys.count;
    if (at == job.from) fetch(block.values, 0, KEYS);
    read_lines(op->kind, block.keys, op->dim, after.keys, lines);
    for (int64_t k = 0; k < KEYS; k += LANES)
      for (int64_t d = 0; d < line; d += LANES)
        transpose(lines + k * line + d, line, count - k, transposed + d * KEYS + k, KEYS);
    /* tokens before this block's first key see none of its keys */
    const int64_t masked_rows = at > job.past ? (at - job.past) * group : 0;
    score_rows(op, q + masked_rows * padded_dim, transposed, padded_dim, rows - masked_rows,
               scores + masked_rows * KEYS);
    for (int64_t r = masked_rows; r < rows; r++) {
      const int64_t last = job.past + r / group + 1, oldest = op->window ? last - op->window : 0;
      if (op->softcap != 0.0f) cap_scores(scores + r * KEYS, op->softcap);
      if (run->slopes) add_position_bias(run, scores + r * KEYS, job.piece.first + r % group, at, count);
      const int64_t first = oldest - at, end = min64(last - at, count);
      rescale[r] = is_bf16 ? online_softmax(1, scores + r * KEYS, first, end, max_score + r, weight_sum + r)
                           : online_softmax(0, scores + r * KEYS, first, end, max_score + r, weight_sum + r);
    }
    read_values(op, block.values, job.first_key - at, after.values, lines);
    weighted_sum_rows(op, scores + masked_rows * KEYS, lines, count, rescale + masked_rows, rows - masked_rows,
                      sums + masked_rows * value_line);
    end_block(&job, &results, at);
  }
  for (int64_t r = 0; r < rows; r++) finish_row(run, &job, number, r, result_of(results.all, r, value_line));
}

#endif
