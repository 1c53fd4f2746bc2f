/* Common code of attend_rows.h, attend_few.h and attend_lanes.h: the work of a job, and its results. */
#ifndef LLMC_ATTENTION_H
#define LLMC_ATTENTION_H

#include "attention_blocks.h"
#include "cache_lines.h"
#include "operators.h"
#include "rows.h"

enum {
  ROWS = 48, /* query rows of a job: tokens times heads of a group */
  FEW_ROWS = 4,
  MAX_DIM = 512,
  PART = 512, /* keys of a part, a multiple of KEYS */
};

typedef struct {
  Api api;
  int64_t heads, kv_heads, dim, value_dim, window;
  int64_t key_bytes, value_bytes; /* of one line of the KV cache */
  float scale, softcap;
  int kind; /* line format of the KV cache (cache_lines.h) */
} Attention;

typedef struct {
  int32_t row, block; /* a row, and a block of run->tokens of its tokens */
} Unit;

typedef struct {
  const Attention *op;
  const float *q, *k, *v, *cos, *sin, *sinks, *slopes;
  int64_t q_stride, k_stride, v_stride, rotary_half; /* floats between tokens; half the rotated width */
  int64_t positions;                                 /* positions in the table `slopes`, or 0 */
  uint8_t *keys, *values;
  float *y, *partial;
  const Row *rows;
  const Unit *units;
  int64_t count, capacity; /* rows; token slots of a sequence */
  int64_t pieces, group;   /* pieces of a KV head's query heads; most heads in a piece */
  int64_t tokens, parts;   /* tokens of a unit; parts of the keys that threads share, or 0 */
  int64_t jobs;
  int lanes; /* whether to use attend_lanes.h and attend_few.h */
} Run;

/* Whether matmul inputs are rounded to bfloat16. */
static int is_rounded(const Attention *op) { return op->kind == IN_BFLOAT16; }

/* The first key that a token at position `past` sees. */
static int64_t oldest_key(const Attention *op, int64_t past) {
  return op->window && past + 1 > op->window ? past + 1 - op->window : 0;
}

/* Some query heads of a KV head, from `first` on. */
typedef struct {
  int64_t kv_head, first, count;
} Piece;

static Piece piece_of(const Run *run, int64_t at) {
  const int64_t heads = run->op->heads / run->op->kv_heads, skip = at % run->pieces * run->group;
  return (Piece){at / run->pieces, at / run->pieces * heads + skip, min64(run->group, heads - skip)};
}

/* The work of one job: a piece of a unit, its query rows token by token, and the range of keys. */
typedef struct {
  Piece piece;
  int64_t group, rows; /* query rows of a token, and of the job */
  int64_t first, past; /* the unit's first token: its index among the tokens, and its position */
  int64_t first_key;   /* first key that this token sees */
  int64_t from, end;   /* range of keys; `from` is a multiple of KEYS */
  int64_t base;        /* cache index of this sequence's and head's first token slot */
} Job;

static Job job_of(const Run *run, int64_t at) {
  const int64_t parts = run->parts ? run->parts : 1, pieces = run->op->kv_heads * run->pieces;
  const Piece piece = piece_of(run, at / parts % pieces);
  const Unit unit = run->units[at / parts / pieces];
  const Row row = run->rows[unit.row];
  const int64_t skip = unit.block * run->tokens, tokens = min64(run->tokens, row.count - skip), past = row.past + skip;
  Job job = {
      .piece = piece, .group = piece.count, .rows = tokens * piece.count, .first = row.first + skip, .past = past,
      .first_key = oldest_key(run->op, past), .base = (row.slot * run->op->kv_heads + piece.kv_head) * run->capacity,
  };
  job.from = job.first_key / KEYS * KEYS, job.end = past + tokens;
  if (run->parts) {
    const int64_t start = (job.first_key / PART + at % parts) * PART;
    job.from = job.from > start ? job.from : start;
    job.end = min64(job.end, start + PART);
  }
  return job;
}

/* Rotate the first values of a head, and pad it with zeros to a multiple of LANES. */
static void rotate(const Run *run, const float *from, int64_t position, float *to) {
  const int64_t half = run->rotary_half, dim = run->op->dim;
  const float *cos = run->cos + position * half, *sin = run->sin + position * half;
  for (int64_t i = 0; i < half; i++) {
    float a = from[i], b = from[i + half];
    to[i] = a * cos[i] - b * sin[i];
    to[i + half] = b * cos[i] + a * sin[i];
  }
  for (int64_t i = 2 * half; i < dim; i++) to[i] = from[i];
  for (int64_t i = dim; i < pad_lanes(dim); i++) to[i] = 0.0f;
}

/* Results over some of a row's keys: the score maximum, the sum of weights, and the sum of weighted values [dim]. */
typedef struct {
  float *max_score, *weight_sum, *sums;
} Result;

/* Merge the results over the next keys into the results so far. */
static void merge(Result so_far, Result next, int64_t dim) {
  const float highest = *so_far.max_score > *next.max_score ? *so_far.max_score : *next.max_score;
  if (highest == -__builtin_inff()) { /* no key yet */
    *so_far.weight_sum += *next.weight_sum;
    return;
  }
  const Floats a = exp16(splat(*so_far.max_score - highest)), b = exp16(splat(*next.max_score - highest));
  *so_far.max_score = highest;
  *so_far.weight_sum = __builtin_fmaf(*so_far.weight_sum, a[0], *next.weight_sum * b[0]);
  for (int64_t d = 0; d < dim; d += LANES) {
    const Floats later = load(next.sums + d) * b;
    store(so_far.sums + d, fma16(load(so_far.sums + d), a, later));
  }
}

static void clear_result(Result result, int64_t dim) {
  *result.max_score = -__builtin_inff();
  *result.weight_sum = 0.0f;
  for (int64_t d = 0; d < dim; d += LANES) store(result.sums + d, splat(0.0f));
}

/* Clear a result, and start it with the head's sink if there are sinks. */
static void clear_with_sink(const Run *run, Result result, int64_t head, int64_t dim) {
  clear_result(result, dim);
  if (run->sinks) *result.max_score = run->sinks[head], *result.weight_sum = 1.0f;
}

/* The results of a job's rows, with `padded_dim` sums each: over the current part of the keys, and over all earlier
parts. */
typedef struct {
  Result part, all;
  int64_t padded_dim;
} Results;

static Result result_of(Result first, int64_t r, int64_t padded_dim) {
  return (Result){first.max_score + r, first.weight_sum + r, first.sums + r * padded_dim};
}

static void start_row(const Run *run, const Job *job, const Results *results, int64_t r) {
  clear_result(result_of(results->part, r, results->padded_dim), results->padded_dim);
  const Result all = result_of(results->all, r, results->padded_dim);
  if (run->parts) clear_result(all, results->padded_dim); /* merge_parts adds the sinks */
  else clear_with_sink(run, all, job->piece.first + r % job->group, results->padded_dim);
}

/* Called after the block of keys from `at` on. At the end of a part, merges its results into those of earlier parts. */
static void end_block(const Job *job, const Results *results, int64_t at) {
  if ((at + KEYS) % PART && at + KEYS < job->end) return;
  for (int64_t r = 0; r < job->rows; r++) {
    const Result part = result_of(results->part, r, results->padded_dim);
    merge(result_of(results->all, r, results->padded_dim), part, results->padded_dim);
    clear_result(part, results->padded_dim);
  }
}

/* Divide the weighted values by the sum of weights, and write them to y. */
static void write_output(const Run *run, Result result, int64_t token, int64_t head) {
  const int64_t dim = run->op->value_dim;
  const Floats inverse_sum = splat(1.0f / *result.weight_sum);
  float *y = run->y + (token * run->op->heads + head) * dim;
  for (int64_t d = 0; d < dim; d += LANES)
    store_lanes(y + d, first_lanes(dim - d), load(result.sums + d) * inverse_sum);
}

/* Memory for one row's result over one part, when threads share the parts. */
static Result partial_result(const Run *run, int64_t job, int64_t r) {
  const int64_t size = pad_lanes(run->op->value_dim) + LANES;
  float *at = run->partial + (job * run->group + r) * size;
  return (Result){at, at + 1, at + LANES};
}

/* Write a row's output, or keep its partial result when threads share the parts. */
static void finish_row(const Run *run, const Job *job, int64_t at, int64_t r, Result one) {
  if (!run->parts) {
    write_output(run, one, job->first + r / job->group, job->piece.first + r % job->group);
    return;
  }
  clear_result(partial_result(run, at, r), pad_lanes(run->op->value_dim));
  merge(partial_result(run, at, r), one, pad_lanes(run->op->value_dim));
}

/* Up to KEYS keys of a job, and their values. */
typedef struct {
  Lines keys, values;
} Block;

/* The block from key `at` on. It is empty after the job's last key. */
static Block block_of(const Run *run, const Job *job, int64_t at) {
  const Attention *op = run->op;
  const int64_t token_slot = job->base + at % run->capacity, count = at < job->end ? min64(job->end - at, KEYS) : 0;
  return (Block){{run->keys + token_slot * op->key_bytes, op->key_bytes, count},
                 {run->values + token_slot * op->value_bytes, op->value_bytes, count}};
}

/* The block to read after that one: the job's next block, or the next job's first block. */
static Block block_after(const Run *run, const Job *job, int64_t number, int64_t at) {
  if (at + KEYS < job->end || number + 1 == run->jobs) return block_of(run, job, at + KEYS);
  const Job next = job_of(run, number + 1);
  return block_of(run, &next, next.from);
}

#endif
