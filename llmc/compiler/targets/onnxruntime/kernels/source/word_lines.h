/* Attention over words: a word is a 32-bit lane with two bfloat16 numbers, such as keys and values of the cache.

An instruction set with bfloat16 multiplication has a file in isa/ with these definitions:

  enum { ROWS_GIVE_SAME_BITS }          whether attend_rows.h gives the same bits
  enum { HAS_WORD_DOTS }                whether weighted_sum_words is cheap for few rows: one lane for each sum
  int words_allowed()                   whether the process may use it
  void begin_words(), end_words()       called before and after multiplying
  Floats load_words(from, count)        the first `count` of DEPTH numbers as words, then 0
  Floats interleave_bf16(first, second) rounds two vectors to words: the first one's lane is the low half
  void narrow_line(from, to, width)     rounds [width], a multiple of LANES, to words [pad_depth(width) / 2], then 0
  void pair_lines(first, second, to)    words [DEPTH] of two lines of DEPTH numbers, in an order that in_order undoes
  void in_order(from, to)               sorts [DEPTH] sums over such words by column
  void score_words(keys, stride, queries, depth, scores)
                                        scores [4 · LANES, LANES] of keys, lines of `depth` numbers that are `stride`
                                        bytes apart, and queries, words [depth / 2, LANES]
  void weighted_sum_words(columns, rows, weights, values, depth, stride, sums)
                                        adds weights [LANES, depth / 2] · values [depth / 2, columns · LANES] to sums
                                        [LANES, columns · LANES]. Words hold two consecutive inner numbers. `columns`
                                        is 2 or 4. Rows of sums and of values are `stride` numbers apart. Only the
                                        first `rows` rows of sums are used */
#ifndef LLMC_WORD_LINES_H
#define LLMC_WORD_LINES_H

#include "attention.h"
#if defined(__AMX_BF16__)
#include "isa/amx_bf16.h"
#elif defined(__AVX512BF16__)
#include "isa/avx512_bf16.h"
#else
#include "isa/neon_bf16.h"
#endif

/* Rotate and scale query row `r` of a job, and convert it to words [pad_depth(dim) / 2]. */
static void query_words(const Run *run, const Job *job, int64_t r, float *to) {
  const Attention *op = run->op;
  const int64_t token = r / job->group, head = job->piece.first + r % job->group, line = pad_lanes(op->dim);
  float rotated[MAX_DIM] __attribute__((aligned(64)));
  rotate(run, run->q + (job->first + token) * run->q_stride + head * op->dim, job->past + token, rotated);
  for (int64_t d = 0; d < line; d += LANES) store_aligned(rotated + d, load_aligned(rotated + d) * splat(op->scale));
  narrow_line(rotated, to, line);
}

/* The keys of a block, [KEYS, pad_depth(dim)], and the bytes between them. Returns the cache's own lines, or copies
with zeros as padding. */
static const uint8_t *load_keys(int64_t dim, Lines keys, float *copies, int64_t *stride) {
  const int64_t padded_dim = pad_depth(dim);
  const uint16_t *from = (const uint16_t *)keys.from;
  *stride = keys.bytes;
  if (keys.count == KEYS && dim == padded_dim) return keys.from;
  *stride = 2 * padded_dim;
  for (int64_t k = 0; k < KEYS; k++)
    for (int64_t d = 0; d < padded_dim; d += DEPTH)
      store_aligned(copies + (k * padded_dim + d) / 2, load_words(from + k * dim + d, k < keys.count ? dim - d : 0));
  return (const uint8_t *)copies;
}

/* Convert values to words of two keys, [KEYS / 2, pad_depth(dim)]. The first `masked` values become 0 (see
read_values). Meanwhile prefetch the lines `after`. */
static void load_values(int64_t dim, Lines values, int64_t masked, Lines after, float *to) {
  const int64_t padded_dim = pad_depth(dim), count = values.count;
  const uint16_t *from = (const uint16_t *)values.from;
  for (int64_t k = 0; k < KEYS; k += 2) {
    fetch(after, k, 2);
    for (int64_t d = 0; d < padded_dim; d += DEPTH) {
      const uint16_t *two = from + k * dim + d;
      const Floats first = load_words(two, k >= masked && k < count ? dim - d : 0);
      const Floats second = load_words(two + dim, k + 1 >= masked && k + 1 < count ? dim - d : 0);
      pair_lines(first, second, to + k / 2 * padded_dim + d);
    }
  }
}

/* Add weights [LANES, KEYS / 2] · values [KEYS / 2, wide] to sums [LANES, wide]. See weighted_sum_words. */
INLINE void weighted_sum_line(int64_t rows, const float *weights, const float *values, int64_t padded_dim,
                              float *sums) {
  int64_t d = 0;
  for (; d + 2 * DEPTH <= padded_dim; d += 2 * DEPTH)
    weighted_sum_words(4, rows, weights, values + d, KEYS, padded_dim, sums + d);
  if (d < padded_dim) weighted_sum_words(2, rows, weights, values + d, KEYS, padded_dim, sums + d);
}

/* Sort the sums of a job's rows by column, and write the rows' results. */
static void finish_rows(const Run *run, const Job *job, int64_t at, const Results *results) {
  float sums[MAX_DIM] __attribute__((aligned(64)));
  for (int64_t r = 0; r < job->rows; r++) {
    const Result all = result_of(results->all, r, results->padded_dim);
    for (int64_t d = 0; d < results->padded_dim; d += DEPTH) in_order(all.sums + d, sums + d);
    finish_row(run, job, at, r, (Result){all.max_score, all.weight_sum, sums});
  }
}

#endif
