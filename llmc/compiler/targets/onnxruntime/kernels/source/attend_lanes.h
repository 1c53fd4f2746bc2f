/* Attention to a bfloat16 cache. Scores are [keys, LANES] with one query row in each lane. Thus keys need no transpose,
and no sum crosses the lanes of a vector. */
#ifndef LLMC_ATTEND_LANES_H
#define LLMC_ATTEND_LANES_H

#include "word_lines.h"

enum { LANE_ROWS = 96 /* query rows of a job */, GROUPS = LANE_ROWS / LANES };

/* For each row: the results over the current part of the keys, and over all parts. The value_dim sums are in the order
of pair_lines. `scores` and `weights` cover only two groups (even and odd), to stay in the L1 cache. */
typedef struct {
  float q[GROUPS * MAX_DIM / 2 * LANES], scores[2][KEYS * LANES], weights[2][KEYS / 2 * LANES];
  float sums[LANE_ROWS * MAX_DIM], all[LANE_ROWS * MAX_DIM];
  float keys[KEYS * MAX_DIM / 2], values[KEYS * MAX_DIM / 2];
  float max_score[LANE_ROWS], weight_sum[LANE_ROWS], all_max_score[LANE_ROWS], all_weight_sum[LANE_ROWS];
  Ints first[GROUPS], end[GROUPS]; /* the range of keys that each row sees */
} LaneBuffers __attribute__((aligned(64)));

/* Query words of group `g`: [pad_depth(dim) / 2, LANES]. */
INLINE float *queries_of(const Attention *op, LaneBuffers *b, int g) {
  return b->q + g * pad_depth(op->dim) / 2 * LANES;
}

INLINE Floats blend_lanes(Ints first, Floats a, Floats b) { return (Floats)((first & (Ints)a) | (~first & (Ints)b)); }

/* Reduce 16 vectors lane by lane, in the same order in which REDUCE adds the lanes of one vector. */
#define REDUCE_VECTORS(x, what)                                 \
  for (int step = LANES / 2; step; step /= 2)                   \
    for (int i = 0; i < step; i++) x[i] = what(x[i], x[i + step])

/* Compute a block's softmax weights [LANES, KEYS / 2], as words. A lane sees keys first … end − 1, or all keys with
`all_seen`. Returns the factor by which to rescale earlier sums. See online_softmax. */
INLINE Floats online_softmax_lanes(const int all_seen, Ints first, Ints end, float *scores, float *max_score,
                                   float *weight_sum, float *weights) {
  const Floats none = splat(-__builtin_inff()), earlier_max = load_aligned(max_score);
  Floats top[LANES], sum[LANES];
  float words[KEYS / 2 * LANES] __attribute__((aligned(64)));
  for (int l = 0; l < LANES; l++) {
    top[l] = none;
    UNROLL
    for (int n = 0; n < KEYS; n += LANES) {
      const Ints key = splat_ints(n + l);
      Floats s = load_aligned(scores + (n + l) * LANES);
      if (!all_seen) store_aligned(scores + (n + l) * LANES, s = blend_lanes((key >= first) & (key < end), s, none));
      top[l] = max16(top[l], s);
    }
  }
  REDUCE_VECTORS(top, max16);
  const Floats highest = blend_lanes(top[0] < earlier_max, earlier_max, top[0]);
  const Ints no_key = highest == none; /* no key yet: weights become 0, or NaN */
  const Floats maximum = blend_lanes(no_key, splat(0.0f), highest);
  for (int l = 0; l < LANES; l += 2) {
    sum[l] = sum[l + 1] = splat(0.0f);
    UNROLL
    for (int n = 0; n < KEYS; n += LANES) {
      const Floats a = short_exp16(load_aligned(scores + (n + l) * LANES) - maximum);
      const Floats b = short_exp16(load_aligned(scores + (n + l + 1) * LANES) - maximum);
      store_aligned(words + (n + l) / 2 * LANES, interleave_bf16(a, b));
      sum[l] = sum[l] + a, sum[l + 1] = sum[l + 1] + b;
    }
  }
  REDUCE_VECTORS(sum, SUM);
  for (int pair = 0; pair < KEYS / 2; pair += LANES)
    transpose(words + pair * LANES, LANES, LANES, weights + pair, KEYS / 2);
  const Floats rescale = blend_lanes(no_key, splat(1.0f), exp16(earlier_max - maximum));
  store_aligned(weight_sum, fma16(load_aligned(weight_sum), rescale, sum[0]));
  store_aligned(max_score, highest);
  return rescale;
}

/* Add the position bias (slope or table) of each lane's head to the scores of `count` keys from position `at` on. */
static void add_position_bias_lanes(const Run *run, const Job *job, int64_t first_row, int64_t rows, int64_t at,
                                    int64_t count, float *scores) {
  const float *slopes[LANES];
  float bias[LANES] __attribute__((aligned(64))) = {0.0f};
  const int64_t each = run->positions ? run->positions : 1;
  for (int64_t l = 0; l < rows; l++) {
    slopes[l] = run->slopes + (job->piece.first + (first_row + l) % job->group) * each;
    bias[l] = *slopes[l];
  }
  for (int64_t k = 0; k < count; k++) {
    const Floats s = load_aligned(scores + k * LANES);
    if (run->positions) {
      for (int64_t l = 0; l < rows; l++) bias[l] = slopes[l][at + k];
      store_aligned(scores + k * LANES, s + load_aligned(bias));
    } else {
      store_aligned(scores + k * LANES, fma16(splat((float)(at + k)), load_aligned(bias), s));
    }
  }
}

/* Load the query rows of group `g`: rotate them, transpose them into lanes and clear their results. Lanes without a row
see no key. */
static void load_queries(const Run *run, const Job *job, LaneBuffers *b, const Results *results, int g) {
  const Attention *op = run->op;
  const int64_t words = pad_depth(op->dim) / 2, first_row = g * LANES, rows = min64(job->rows - first_row, LANES);
  float lines[LANES * MAX_DIM / 2] __attribute__((aligned(64)));
  for (int64_t l = 0; l < LANES; l++) {
    const int64_t r = first_row + l, last = job->past + r / job->group;
    start_row(run, job, results, r);
    b->first[g][l] = b->end[g][l] = 0;
    if (l >= rows) continue;
    query_words(run, job, r, lines + l * words);
    b->first[g][l] = (int32_t)oldest_key(op, last);
    b->end[g][l] = (int32_t)(last + 1);
  }
  for (int64_t d = 0; d < words; d += LANES) transpose(lines + d, words, rows, queries_of(op, b, g) + d * LANES, LANES);
}

/* Turn the scores of group `g` into weights, and rescale its earlier sums. */
static void online_softmax_group(const Run *run, const Job *job, LaneBuffers *b, int g, int64_t at, int64_t count) {
  float *scores = b->scores[g % 2];
  const int64_t first_row = g * LANES, rows = min64(job->rows - first_row, LANES),
                padded_dim = pad_depth(run->op->value_dim);
  if (run->op->softcap != 0.0f)
    for (int64_t i = 0; i < KEYS * LANES; i += KEYS) cap_scores(scores + i, run->op->softcap);
  if (run->slopes) add_position_bias_lanes(run, job, first_row, rows, at, count, scores);
  const Ints from = splat_ints((int32_t)at), first = b->first[g] - from, end = b->end[g] - from;
  float *max_score = b->max_score + first_row, *weight_sum = b->weight_sum + first_row;
  const Floats rescale = at + KEYS <= job->past + 1 && !run->op->window
                             ? online_softmax_lanes(1, first, end, scores, max_score, weight_sum, b->weights[g % 2])
                             : online_softmax_lanes(0, first, end, scores, max_score, weight_sum, b->weights[g % 2]);
  if (__builtin_reduce_and(rescale == splat(1.0f))) return;
  for (int64_t l = 0; l < rows; l++)
    for (float *sum = b->sums + (first_row + l) * padded_dim, *last = sum + padded_dim; sum < last; sum += LANES)
      store_aligned(sum, load_aligned(sum) * splat(rescale[l]));
}

/* Add a block's weighted values to the sums of group `g`. */
static void weighted_sum_group(const Job *job, LaneBuffers *b, int g, int64_t padded_dim) {
  weighted_sum_line(min64(job->rows - g * LANES, LANES), b->weights[g % 2], b->values, padded_dim,
                    b->sums + g * LANES * padded_dim);
}

/* The three steps of different groups are interleaved: an AMX tile load stalls on data that was just stored. With
several groups, this work hides the latency of the keys, and prefetching only costs time. */
static void attend_lanes(const Run *run, int64_t number, Job job) {
  const Attention *op = run->op;
  const int64_t padded_dim = pad_depth(op->value_dim);
  const int groups = (int)((job.rows + LANES - 1) / LANES);
  LaneBuffers b;
  const Results results = {{b.max_score, b.weight_sum, b.sums}, {b.all_max_score, b.all_weight_sum, b.all}, padded_dim};
  for (int g = 0; g < groups; g++) load_queries(run, &job, &b, &results, g);
  begin_words();
  for (int64_t at = job.from; at < job.end; at += KEYS) {
    const Block block = block_of(run, &job, at), after = block_of(run, &job, at + KEYS);
    const int64_t count = block.keys.count;
    /* tokens before this block's first key see none of its keys */
    const int masked_groups = at > job.past ? (int)((at - job.past) * job.group / LANES) : 0;
    int64_t stride;
    if (groups == 1) fetch(block.values, 0, KEYS);
    const uint8_t *keys = load_keys(op->dim, block.keys, b.keys, &stride);
    if (groups == 1) fetch(after.keys, 0, KEYS);
    load_values(op->value_dim, block.values, job.first_key - at, (Lines){0}, b.values);
    for (int g = masked_groups; g < groups + 2; g++) {
      if (g < groups) score_words(keys, stride, queries_of(op, &b, g), pad_depth(op->dim), b.scores[g % 2]);
      if (g > masked_groups && g <= groups) online_softmax_group(run, &job, &b, g - 1, at, count);
      if (g > masked_groups + 1) weighted_sum_group(&job, &b, g - 2, padded_dim);
    }
    end_block(&job, &results, at);
  }
  end_words();
  finish_rows(run, &job, number, &results);
}

#endif
