/* Attention to a cache in bfloat16. Scores are [keys, LANES], a query row in each lane: keys are multiplied as they lie in
the cache, and nothing is summed across a vector. */
#ifndef LLMC_ATTEND_LANES_H
#define LLMC_ATTEND_LANES_H

#include "word_lines.h"

enum { LANE_ROWS = 96 /* query rows of a job */, GROUPS = LANE_ROWS / LANES };

/* Of each row its results so far: of this part of the keys, and in all; value_dim numbers are in the order of pair_lines.
Scores and weights are those of two groups, the even and the odd one, so that they stay in the first-level cache. */
typedef struct {
  float q[GROUPS * MOST_DIM / 2 * LANES], scores[2][KEYS * LANES], weights[2][KEYS / 2 * LANES];
  float sums[LANE_ROWS * MOST_DIM], all[LANE_ROWS * MOST_DIM];
  float keys[KEYS * MOST_DIM / 2], values[KEYS * MOST_DIM / 2];
  float most[LANE_ROWS], total[LANE_ROWS], all_most[LANE_ROWS], all_total[LANE_ROWS];
  Ints first[GROUPS], end[GROUPS]; /* the keys that each row sees */
} Held __attribute__((aligned(64)));

/* Query words of group `g`, [deep(dim) / 2, LANES]. */
INLINE float *queries_of(const Attention *op, Held *b, int g) { return b->q + g * deep(op->dim) / 2 * LANES; }

INLINE Floats either(Ints first, Floats a, Floats b) { return (Floats)((first & (Ints)a) | (~first & (Ints)b)); }

/* Over 16 vectors, as over the lanes of one: halves of halves. */
#define HALVED_VECTORS(x, what)                                 \
  for (int step = LANES / 2; step; step /= 2)                   \
    for (int i = 0; i < step; i++) x[i] = what(x[i], x[i + step])

/* The weights [LANES, KEYS / 2], as words, of a block's keys, of which lanes see first … end − 1, all of them with
`all_seen`; returns what older sums shrink by. See weigh. */
INLINE Floats weigh_lanes(const int all_seen, Ints first, Ints end, float *scores, float *most, float *total, float *weights) {
  const Floats none = filled(-__builtin_inff()), before = load_aligned(most);
  Floats top[LANES], sum[LANES];
  float words[KEYS / 2 * LANES] __attribute__((aligned(64)));
  for (int l = 0; l < LANES; l++) {
    top[l] = none;
    UNROLL
    for (int n = 0; n < KEYS; n += LANES) {
      const Ints key = filled_ints(n + l);
      Floats s = load_aligned(scores + (n + l) * LANES);
      if (!all_seen) store_aligned(scores + (n + l) * LANES, s = either((key >= first) & (key < end), s, none));
      top[l] = higher(top[l], s);
    }
  }
  HALVED_VECTORS(top, higher);
  const Floats highest = either(top[0] < before, before, top[0]);
  const Ints unseen = highest == none; /* no key yet: weights become zero, or no number */
  const Floats maximum = either(unseen, filled(0.0f), highest);
  for (int l = 0; l < LANES; l += 2) {
    sum[l] = sum[l + 1] = filled(0.0f);
    UNROLL
    for (int n = 0; n < KEYS; n += LANES) {
      const Floats a = short_exp16(load_aligned(scores + (n + l) * LANES) - maximum);
      const Floats b = short_exp16(load_aligned(scores + (n + l + 1) * LANES) - maximum);
      store_aligned(words + (n + l) / 2 * LANES, paired(a, b));
      sum[l] = sum[l] + a, sum[l + 1] = sum[l + 1] + b;
    }
  }
  HALVED_VECTORS(sum, ADDED);
  for (int pair = 0; pair < KEYS / 2; pair += LANES) transpose(words + pair * LANES, LANES, LANES, weights + pair, KEYS / 2);
  const Floats shrink = either(unseen, filled(1.0f), exp16(before - maximum));
  store_aligned(total, fused(load_aligned(total), shrink, sum[0]));
  store_aligned(most, highest);
  return shrink;
}

/* Let scores of `count` keys from place `at` on grow as the slope of each lane's head, or its table, says. */
static void lean_lanes(const Run *run, const Job *job, int64_t first_row, int64_t rows, int64_t at, int64_t count, float *scores) {
  const float *of[LANES];
  float by[LANES] __attribute__((aligned(64))) = {0.0f};
  const int64_t each = run->places ? run->places : 1;
  for (int64_t l = 0; l < rows; l++) {
    of[l] = run->slopes + (job->piece.first + (first_row + l) % job->group) * each;
    by[l] = *of[l];
  }
  for (int64_t k = 0; k < count; k++) {
    const Floats s = load_aligned(scores + k * LANES);
    if (run->places) {
      for (int64_t l = 0; l < rows; l++) by[l] = of[l][at + k];
      store_aligned(scores + k * LANES, s + load_aligned(by));
    } else {
      store_aligned(scores + k * LANES, fused(filled((float)(at + k)), load_aligned(by), s));
    }
  }
}

/* Have the query rows of group `g` turned, and in lanes, and results begun; those of no row stay without a key. */
static void hold_queries(const Run *run, const Job *job, Held *b, const Results *results, int g) {
  const Attention *op = run->op;
  const int64_t words = deep(op->dim) / 2, here = g * LANES, rows = least(job->rows - here, LANES);
  float lines[LANES * MOST_DIM / 2] __attribute__((aligned(64)));
  for (int64_t l = 0; l < LANES; l++) {
    const int64_t r = here + l, last = job->past + r / job->group;
    begin_row(run, job, results, r);
    b->first[g][l] = b->end[g][l] = 0;
    if (l >= rows) continue;
    query_words(run, job, r, lines + l * words);
    b->first[g][l] = (int32_t)oldest_key(op, last);
    b->end[g][l] = (int32_t)(last + 1);
  }
  for (int64_t d = 0; d < words; d += LANES) transpose(lines + d, words, rows, queries_of(op, b, g) + d * LANES, LANES);
}

/* Turn the scores of group `g` into weights, and let its older sums shrink. */
static void weigh_group(const Run *run, const Job *job, Held *b, int g, int64_t at, int64_t count) {
  float *scores = b->scores[g % 2];
  const int64_t here = g * LANES, rows = least(job->rows - here, LANES), wide = deep(run->op->value_dim);
  if (run->op->softcap != 0.0f)
    for (int64_t i = 0; i < KEYS * LANES; i += KEYS) cap_scores(scores + i, run->op->softcap);
  if (run->slopes) lean_lanes(run, job, here, rows, at, count, scores);
  const Ints from = filled_ints((int32_t)at), first = b->first[g] - from, end = b->end[g] - from;
  float *most = b->most + here, *total = b->total + here;
  const Floats shrink = at + KEYS <= job->past + 1 && !run->op->window
                            ? weigh_lanes(1, first, end, scores, most, total, b->weights[g % 2])
                            : weigh_lanes(0, first, end, scores, most, total, b->weights[g % 2]);
  if (__builtin_reduce_and(shrink == filled(1.0f))) return;
  for (int64_t l = 0; l < rows; l++)
    for (float *sum = b->sums + (here + l) * wide, *last = sum + wide; sum < last; sum += LANES)
      store_aligned(sum, load_aligned(sum) * filled(shrink[l]));
}

/* Add a block's weighted values to the sums of group `g`. */
static void gather_group(const Job *job, Held *b, int g, int64_t wide) {
  gather_line(least(job->rows - g * LANES, LANES), b->weights[g % 2], b->values, wide, b->sums + g * LANES * wide);
}

/* Steps alternate so that tiles read what was written a while ago: what was just written is not at hand to them, nor
what they write to others. Where there is work for several groups it hides where keys come from, and fetching costs more. */
static void attend_lanes(const Run *run, int64_t number, Job job) {
  const Attention *op = run->op;
  const int64_t wide = deep(op->value_dim);
  const int groups = (int)((job.rows + LANES - 1) / LANES);
  Held b;
  const Results results = {{b.most, b.total, b.sums}, {b.all_most, b.all_total, b.all}, wide};
  for (int g = 0; g < groups; g++) hold_queries(run, &job, &b, &results, g);
  begin_words();
  for (int64_t at = job.from; at < job.end; at += KEYS) {
    const Block block = block_of(run, &job, at), after = block_of(run, &job, at + KEYS);
    const int64_t count = block.keys.count;
    /* tokens before this block's first key see none of it */
    const int blind = at > job.past ? (int)((at - job.past) * job.group / LANES) : 0;
    int64_t apart;
    if (groups == 1) fetch(block.values, 0, KEYS);
    const uint8_t *keys = hold_keys(op->dim, block.keys, b.keys, &apart);
    if (groups == 1) fetch(after.keys, 0, KEYS);
    hold_values(op->value_dim, block.values, job.seen - at, (Lines){0}, b.values);
    for (int g = blind; g < groups + 2; g++) {
      if (g < groups) score_words(keys, apart, queries_of(op, &b, g), deep(op->dim), b.scores[g % 2]);
      if (g > blind && g <= groups) weigh_group(run, &job, &b, g - 1, at, count);
      if (g > blind + 1) gather_group(&job, &b, g - 2, wide);
    }
    end_block(&job, &results, at);
  }
  end_words();
  finish_words(run, &job, number, &results);
}

#endif
