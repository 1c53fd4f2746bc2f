/* Attention of a few query rows to a cache in bfloat16, where IN_DOTS (word_lines.h): scores are [rows, KEYS], so that a
lane is a key and not a query, of which there are not as many. Bits are those of attend_lanes.h. */
#ifndef LLMC_ATTEND_FEW_H
#define LLMC_ATTEND_FEW_H

#include "attend_rows.h"
#include "word_lines.h"

/* Of each row its query, as words, and its results: of this part of the keys, and in all. */
typedef struct {
  float q[FEW_ROWS * MOST_DIM / 2], sums[FEW_ROWS * MOST_DIM], all[FEW_ROWS * MOST_DIM];
  float scores[FEW_ROWS * KEYS], weights[FEW_ROWS * KEYS / 2];
  float copies[KEYS * MOST_DIM / 2], keys[KEYS * MOST_DIM / 2], values[KEYS * MOST_DIM / 2];
  float most[FEW_ROWS], total[FEW_ROWS], all_most[FEW_ROWS], all_total[FEW_ROWS];
} Few __attribute__((aligned(64)));

static Result part_of(Few *b, int64_t r, int64_t wide) { return (Result){b->most + r, b->total + r, b->sums + r * wide}; }
static Result all_of(Few *b, int64_t r, int64_t wide) { return (Result){b->all_most + r, b->all_total + r, b->all + r * wide}; }

static void begin_row(const Run *run, const Job *job, Few *b, int64_t r) {
  const Attention *op = run->op;
  const int64_t token = r / job->group, head = job->piece.first + r % job->group, wide = deep(op->value_dim);
  float turned[MOST_DIM] __attribute__((aligned(64)));
  turn(run, run->q + (job->first + token) * run->q_stride + head * op->dim, job->past + token, turned);
  for (int64_t d = 0; d < op->dim; d += LANES) store_aligned(turned + d, load_aligned(turned + d) * filled(op->scale));
  narrow_line(turned, b->q + r * deep(op->dim) / 2, whole(op->dim));
  begin(part_of(b, r, wide), wide);
  begin(all_of(b, r, wide), wide);
  if (run->sinks && !run->parts) b->all_most[r] = run->sinks[head], b->all_total[r] = 1.0f;
}

/* A block's scores. */
static void score_few(const Run *run, const Job *job, Few *b, int64_t at, int64_t count) {
  const int64_t words = deep(run->op->dim) / 2;
  int64_t apart;
  const uint8_t *lines = hold_keys(run, job, b->copies, at, count, &apart);
  for (int64_t k = 0; k < KEYS; k += LANES)
    for (int64_t d = 0; d < words; d += LANES)
      transpose((const float *)(lines + k * apart) + d, apart / 4, LANES, b->keys + d * KEYS + k, KEYS);
  for (int64_t i = 0; i < job->rows * KEYS; i += LANES) store_aligned(b->scores + i, filled(0.0f));
  gather_words(4, job->rows, b->q, b->keys, 2 * words, KEYS, b->scores);
}

/* Turn the scores of a row into weights, as words, and let its older sums shrink. */
static void weigh_few(const Run *run, const Job *job, Few *b, int64_t r, int64_t at, int64_t count) {
  const int64_t last = job->past + r / job->group, wide = deep(run->op->value_dim);
  float *scores = b->scores + r * KEYS;
  if (run->op->softcap != 0.0f) cap_scores(scores, run->op->softcap);
  if (run->slopes) lean(run, scores, job->piece.first + r % job->group, at, count);
  const int64_t first = oldest_key(run->op, last) - at, end = least(last + 1 - at, count);
  const Floats shrink = filled(weigh(1, scores, first, end, b->most + r, b->total + r));
  narrow_line(scores, b->weights + r * KEYS / 2, KEYS);
  for (float *sum = b->sums + r * wide, *behind = sum + wide; sum < behind; sum += LANES)
    store_aligned(sum, load_aligned(sum) * shrink);
}

static void attend_few(const Run *run, int64_t number, Job job) {
  const Attention *op = run->op;
  const int64_t wide = deep(op->value_dim);
  Few b;
  for (int64_t r = 0; r < job.rows; r++) begin_row(run, &job, &b, r);
  for (int64_t at = job.from; at < job.end; at += KEYS) {
    const int64_t count = least(job.end - at, KEYS);
    fetch_lines(run, &job, run->values, op->value_bytes, at);
    score_few(run, &job, &b, at, count);
    fetch_lines(run, &job, run->keys, op->key_bytes, at + KEYS);
    for (int64_t r = 0; r < job.rows; r++) weigh_few(run, &job, &b, r, at, count);
    hold_values(run, &job, b.values, at, count);
    gather_line(job.rows, b.weights, b.values, wide, b.sums);
    if ((at + KEYS) % PART == 0 || at + KEYS >= job.end)
      for (int64_t r = 0; r < job.rows; r++) {
        join(all_of(&b, r, wide), part_of(&b, r, wide), wide);
        begin(part_of(&b, r, wide), wide);
      }
  }
  for (int64_t r = 0; r < job.rows; r++) {
    const Result all = all_of(&b, r, wide);
    for (int64_t d = 0; d < wide; d += DEPTH) in_order(all.sums + d, b.sums + r * wide + d);
    finish_row(run, &job, number, r, (Result){all.most, all.total, b.sums + r * wide});
  }
}

#endif
