/* Numbers rounded to bfloat16, as products of prompts take them: [rows / WORD_ROWS, deep(width) / DEPTH, WORD_ROWS, DEPTH]. */
#ifndef LLMC_WORDS_H
#define LLMC_WORDS_H

#include "rounded.h"

#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include "isa/avx512_words.h"
#else
/* Words of two vectors' lanes, the first one's number below the second's, rounded. */
INLINE Floats interleave_bf16(Floats first, Floats second) {
  return (Floats)((Words)rounded(first) >> 16 | ((Words)rounded(second) & 0xFFFF0000));
}

/* A vector's lanes, rounded. */
INLINE Halves to_bf16(Floats x) { return __builtin_convertvector((Words)rounded(x) >> 16, Halves); }

/* Two vectors' lanes, one after the other, rounded. */
INLINE Floats to_bf16_pair(Floats first, Floats second) {
  union {
    Halves halves[2];
    Floats both;
  } pair = {.halves = {to_bf16(first), to_bf16(second)}};
  return pair.both;
}
#endif

enum { WORD_ROWS = 16 /* rows that lie together */ };

/* How many numbers there is room for, whole tiles, where so many rows are. */
static inline int64_t rounded_numbers(int64_t width, int64_t rows) {
  return (rows + WORD_ROWS - 1) / WORD_ROWS * WORD_ROWS * pad_depth(width);
}

/* Where a row's number `at`, a multiple of LANES, is, and those behind it up to the next multiple of DEPTH. */
INLINE uint16_t *words_at(uint16_t *words, int64_t width, int64_t row, int64_t at) {
  return words + row / WORD_ROWS * WORD_ROWS * pad_depth(width) + at / DEPTH * WORD_ROWS * DEPTH + row % WORD_ROWS * DEPTH + at % DEPTH;
}

#endif
