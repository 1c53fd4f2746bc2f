/* Attention over rows of scores: products of floats (tiles.h), or of what is rounded (rounded.h). */
#ifndef LLMC_ATTEND_ROWS_H
#define LLMC_ATTEND_ROWS_H

#include "attention.h"

/* Let a head's scores of `count` keys from place `at` on grow as its slope, or its table, says. */
static void lean(const Run *run, float *scores, int64_t head, int64_t at, int64_t count) {
  if (run->places) raise_scores(scores, run->slopes + head * run->places + at, count);
  else lean_scores(scores, run->slopes[head], at);
}

/* Read values, and zeros for the first `gone`. A ring's place before the window may hold a later token, or nobody's: 0 times
what is no number is none. */
static void read_values(const Attention *op, Lines values, int64_t gone, Lines after, float *to) {
  read_lines(op->kind, values, op->value_dim, after, to);
  const int64_t zeros = least(gone, values.count) * whole(op->value_dim);
  for (int64_t i = 0; i < zeros; i++) to[i] = 0.0f;
}

/* Scores of `rows` queries with a block's turned keys. */
INLINE void score_rows(const Attention *op, const float *q, const float *turned, int64_t wide, int64_t rows, float *to) {
  if (!is_rounded(op)) {
    EACH_TILE(score, rows, q + r * wide, turned, wide, op->scale, to + r * KEYS)
    return;
  }
  for (int64_t r = 0; r < rows; r++) score_rounded(q + r * wide, turned, wide, to + r * KEYS);
}

/* sums · shrink + weights · values of `rows` rows. */
INLINE void gather_rows(const Attention *op, float *weights, float *values, int64_t count, const float *shrink,
                        int64_t rows, float *sums) {
  const int64_t wide = whole(op->value_dim);
  if (!is_rounded(op)) {
    EACH_TILE(gather, rows, weights + r * KEYS, values, count, wide, shrink + r, sums + r * wide)
    return;
  }
  for (int64_t i = count * wide; i < KEYS * wide; i += LANES) store_aligned(values + i, filled(0.0f));
  round_lines(weights, rows * KEYS);
  for (int64_t r = 0; r < rows; r++) {
    float *at = sums + r * wide;
    for (int64_t d = 0; d < wide; d += LANES) store_aligned(at + d, load_aligned(at + d) * filled(shrink[r]));
    gather_rounded(weights + r * KEYS, values, KEYS, wide, at);
  }
}

static void attend_rows(const Run *run, int64_t number, Job job) {
  const Attention *op = run->op;
  const int64_t rows = job.rows, group = job.group;
  const int rounds = is_rounded(op);
  const int64_t line = whole(op->dim), value_line = whole(op->value_dim), wide = rounds ? deep(op->dim) : line;
  float q[ROWS * MOST_DIM] __attribute__((aligned(64))), sums[ROWS * MOST_DIM] __attribute__((aligned(64)));
  float lines[KEYS * MOST_DIM] __attribute__((aligned(64))), turned[KEYS * MOST_DIM] __attribute__((aligned(64)));
  float scores[ROWS * KEYS] __attribute__((aligned(64))), all[ROWS * MOST_DIM] __attribute__((aligned(64)));
  float most[ROWS], total[ROWS], shrink[ROWS], all_most[ROWS], all_total[ROWS];
  const Results results = {{most, total, sums}, {all_most, all_total, all}, value_line};
  for (int64_t r = 0; r < rows; r++) {
    const int64_t head = job.piece.first + r % group;
    float *x = q + r * wide;
    turn(run, run->q + (job.first + r / group) * run->q_stride + head * op->dim, job.past + r / group, x);
    for (int64_t d = 0; rounds && d < wide; d += LANES)
      store_aligned(x + d, d < line ? rounded(load_aligned(x + d) * filled(op->scale)) : filled(0.0f));
    begin_row(run, &job, &results, r);
  }
  for (int64_t i = line * KEYS; i < wide * KEYS; i += LANES) store_aligned(turned + i, filled(0.0f));
  for (int64_t at = job.from; at < job.end; at += KEYS) {
    const Block block = block_of(run, &job, at), after = block_after(run, &job, number, at);
    const int64_t count = block.keys.count;
    if (at == job.from) fetch(block.values, 0, KEYS);
    read_lines(op->kind, block.keys, op->dim, after.keys, lines);
    for (int64_t k = 0; k < KEYS; k += LANES)
      for (int64_t d = 0; d < line; d += LANES) transpose(lines + k * line + d, line, count - k, turned + d * KEYS + k, KEYS);
    /* tokens before this block's first key see none of it */
    const int64_t blind = at > job.past ? (at - job.past) * group : 0;
    score_rows(op, q + blind * wide, turned, wide, rows - blind, scores + blind * KEYS);
    for (int64_t r = blind; r < rows; r++) {
      const int64_t last = job.past + r / group + 1, oldest = op->window ? last - op->window : 0;
      if (op->softcap != 0.0f) cap_scores(scores + r * KEYS, op->softcap);
      if (run->slopes) lean(run, scores + r * KEYS, job.piece.first + r % group, at, count);
      const int64_t first = oldest - at, end = least(last - at, count);
      shrink[r] = rounds ? weigh(1, scores + r * KEYS, first, end, most + r, total + r)
                           : weigh(0, scores + r * KEYS, first, end, most + r, total + r);
    }
    read_values(op, block.values, job.seen - at, after.values, lines);
    gather_rows(op, scores + blind * KEYS, lines, count, shrink + blind, rows - blind, sums + blind * value_line);
    end_block(&job, &results, at);
  }
  for (int64_t r = 0; r < rows; r++) finish_row(run, &job, number, r, result_of(results.all, r, value_line));
}

#endif
