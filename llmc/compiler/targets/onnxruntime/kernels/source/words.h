/* Activations rounded to bfloat16 for the prefill matmul: [rows / WORD_ROWS, pad_depth(width) / DEPTH, WORD_ROWS,
DEPTH]. */
#ifndef LLMC_WORDS_H
#define LLMC_WORDS_H

#include "rounded.h"

#if defined(__AVX512BF16__) || defined(__AMX_BF16__)
#include "isa/avx512_words.h"
#else
/* Round two vectors to words: the first one's lane is the low half. */
INLINE Floats interleave_bf16(Floats first, Floats second) {
  return (Floats)((Words)rounded(first) >> 16 | ((Words)rounded(second) & 0xFFFF0000));
}

/* Round each lane to bfloat16. */
INLINE Halves to_bf16(Floats x) { return __builtin_convertvector((Words)rounded(x) >> 16, Halves); }

/* Round two vectors, one after the other. */
INLINE Floats to_bf16_pair(Floats first, Floats second) {
  union {
    Halves halves[2];
    Floats both;
  } pair = {.halves = {to_bf16(first), to_bf16(second)}};
  return pair.both;
}
#endif

enum { WORD_ROWS = 16 /* rows that are interleaved */ };

/* bfloat16 numbers to allocate for so many rows: whole tiles. */
static inline int64_t rounded_numbers(int64_t width, int64_t rows) {
  return (rows + WORD_ROWS - 1) / WORD_ROWS * WORD_ROWS * pad_depth(width);
}

/* The location of number `at` of a row. `at` is a multiple of LANES. Numbers up to the next multiple of DEPTH follow
it. */
INLINE uint16_t *words_at(uint16_t *words, int64_t width, int64_t row, int64_t at) {
  return words + row / WORD_ROWS * WORD_ROWS * pad_depth(width) + at / DEPTH * WORD_ROWS * DEPTH +
         row % WORD_ROWS * DEPTH + at % DEPTH;
}

#endif
