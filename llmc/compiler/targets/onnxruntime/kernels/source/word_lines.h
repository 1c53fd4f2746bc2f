/* Keys and values of a cache in bfloat16 as words of two numbers, and products of words.

An instruction set that multiplies bfloat16 has a file in isa/ with these, where words are two numbers each:

  enum { AS_ROWS }                      whether attend_rows.h gives the same bits
  enum { IN_DOTS }                      whether it multiplies words, too: with a lane for each sum, as gather_words does
  int words_allowed()                   whether this process may
  void begin_words(), end_words()       before products, and after them
  Floats first_words(from, count)       the first `count` of DEPTH numbers as words, and zeros
  Floats paired(first, second)          words of two vectors' lanes, the first one's number below the second's, rounded
  void narrow_line(from, to, width)     [width], a multiple of LANES, to words [deep(width) / 2], rounded, with zeros behind
  void pair_lines(first, second, to)    words [DEPTH] of two lines of DEPTH numbers, in an order that in_order undoes
  void in_order(from, to)               [DEPTH] sums of such words' columns
  void score_words(keys, apart, queries, depth, scores)     scores [4 · LANES, LANES] of keys, lines of `depth` numbers
                                        `apart` bytes apart, and queries, [depth / 2, LANES] words
  void gather_words(columns, rows, weights, values, depth, apart, sums)     sums [LANES, columns · LANES] grow by weights
                                        [LANES, depth / 2] times values [depth / 2, columns · LANES], words of two inner
                                        numbers; columns is 2 or 4; lines of sums and of values are `apart` numbers apart,
                                        and only the first `rows` of sums matter */
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

/* Query row `r` of a job, turned and scaled, as words [deep(dim) / 2]. */
static void query_words(const Run *run, const Job *job, int64_t r, float *to) {
  const Attention *op = run->op;
  const int64_t token = r / job->group, head = job->piece.first + r % job->group, line = pad_lanes(op->dim);
  float rotated[MAX_DIM] __attribute__((aligned(64)));
  rotate(run, run->q + (job->first + token) * run->q_stride + head * op->dim, job->past + token, rotated);
  for (int64_t d = 0; d < line; d += LANES) store_aligned(rotated + d, load_aligned(rotated + d) * splat(op->scale));
  narrow_line(rotated, to, line);
}

/* The keys of a block and how far apart they are, [KEYS, deep(dim)]: those of the cache, or copies with zeros behind them. */
static const uint8_t *load_keys(int64_t dim, Lines keys, float *copies, int64_t *stride) {
  const int64_t wide = pad_depth(dim);
  const uint16_t *from = (const uint16_t *)keys.from;
  *stride = keys.bytes;
  if (keys.count == KEYS && dim == wide) return keys.from;
  *stride = 2 * wide;
  for (int64_t k = 0; k < KEYS; k++)
    for (int64_t d = 0; d < wide; d += DEPTH)
      store_aligned(copies + (k * wide + d) / 2, load_words(from + k * dim + d, k < keys.count ? dim - d : 0));
  return (const uint8_t *)copies;
}

/* Values as words of two keys, [KEYS / 2, deep(dim)], zeros for the first `gone`, which no row sees (read_values); what comes
`after` is fetched meanwhile. */
static void load_values(int64_t dim, Lines values, int64_t masked, Lines after, float *to) {
  const int64_t wide = pad_depth(dim), count = values.count;
  const uint16_t *from = (const uint16_t *)values.from;
  for (int64_t k = 0; k < KEYS; k += 2) {
    fetch(after, k, 2);
    for (int64_t d = 0; d < wide; d += DEPTH) {
      const uint16_t *two = from + k * dim + d;
      const Floats first = load_words(two, k >= masked && k < count ? dim - d : 0);
      const Floats second = load_words(two + dim, k + 1 >= masked && k + 1 < count ? dim - d : 0);
      pair_lines(first, second, to + k / 2 * wide + d);
    }
  }
}

/* sums [LANES, wide] grow by weights [LANES, KEYS / 2] times values [KEYS / 2, wide], words; see gather_words. */
INLINE void weighted_sum_line(int64_t rows, const float *weights, const float *values, int64_t wide, float *sums) {
  int64_t d = 0;
  for (; d + 2 * DEPTH <= wide; d += 2 * DEPTH) weighted_sum_words(4, rows, weights, values + d, KEYS, wide, sums + d);
  if (d < wide) weighted_sum_words(2, rows, weights, values + d, KEYS, wide, sums + d);
}

/* The results of a job's rows over all of its keys, whose sums are in the order of pair_lines. */
static void finish_rows(const Run *run, const Job *job, int64_t at, const Results *of) {
  float sums[MAX_DIM] __attribute__((aligned(64)));
  for (int64_t r = 0; r < job->rows; r++) {
    const Result all = result_of(of->all, r, of->wide);
    for (int64_t d = 0; d < of->wide; d += DEPTH) in_order(all.sums + d, sums + d);
    finish_row(run, job, at, r, (Result){all.most, all.total, sums});
  }
}

#endif
