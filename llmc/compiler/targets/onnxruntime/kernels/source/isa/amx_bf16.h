/* Tiles of bfloat16 over amx.h: rounded.h's products. Words are two numbers each, as tiles pair them. */
#ifndef LLMC_AMX_BF16_H
#define LLMC_AMX_BF16_H

/* Tiles: sums, what they have in common, and the others. */
enum { GROWN = 0, SHARED = 4, OTHER = 5 };

INLINE void begin_bf16_tiles(void) {
  Shapes shapes = {.palette = 1};
  for (int i = GROWN; i <= OTHER; i++) shapes.bytes[i] = 4 * LANES, shapes.rows[i] = TILE_ROWS;
  _tile_loadconfig(&shapes);
}

/* The first `count` of DEPTH numbers as words, and zeros. */
INLINE Floats first_words(const uint16_t *from, int64_t count) {
  return (Floats)_mm512_maskz_loadu_epi16(count >= DEPTH ? 0xFFFFFFFF : count > 0 ? (1u << count) - 1 : 0, from);
}

/* Words of two vectors' lanes, the first one's number below the second's, rounded. */
INLINE Floats paired(Floats first, Floats second) {
  static const uint16_t in_turn[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  return (Floats)_mm512_permutexvar_epi16(_mm512_loadu_si512(in_turn), both);
}

/* [width], a multiple of LANES, to words [deep(width) / 2], rounded, with zeros behind. */
INLINE void narrow_line(const float *from, float *to, int64_t width) {
  for (int64_t i = 0; i < width; i += DEPTH, to += LANES) {
    const Floats more = i + LANES < width ? load_aligned(from + i + LANES) : filled(0.0f);
    store_aligned(to, (Floats)_mm512_cvtne2ps_pbh(more, load_aligned(from + i)));
  }
}

/* Words [DEPTH] of two lines of DEPTH numbers, in the order that `in_order` undoes: this one takes one instruction each. */
INLINE void pair_lines(Floats first, Floats second, float *to) {
  store_aligned(to, (Floats)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second));
  store_aligned(to + LANES, (Floats)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second));
}
INLINE void in_order(const float *from, float *to) {
  const Floats a = load_aligned(from), b = load_aligned(from + LANES);
  store_aligned(to, __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
  store_aligned(to + LANES, __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
}

#define FOUR_TIMES(what) what(0); what(1); what(2); what(3)

/* Scores [4 · 16 keys, LANES] of keys, lines of `depth` numbers `apart` bytes apart, and queries, [depth / 2, LANES] words. */
INLINE void score_tiles(const uint8_t *keys, int64_t apart, const float *queries, int64_t depth, float *scores) {
#define BEGIN(n) _tile_zero(GROWN + n)
#define MULTIPLY(n) _tile_loadd(OTHER, keys + n * TILE_ROWS * apart + 2 * d, apart); _tile_dpbf16ps(GROWN + n, OTHER, SHARED)
#define END(n) _tile_stored(GROWN + n, scores + n * TILE_ROWS * LANES, 4 * LANES)
  FOUR_TIMES(BEGIN);
  for (int64_t d = 0; d < depth; d += DEPTH) {
    _tile_loadd(SHARED, queries + d / 2 * LANES, 4 * LANES);
    FOUR_TIMES(MULTIPLY);
  }
  FOUR_TIMES(END);
#undef BEGIN
#undef MULTIPLY
#undef END
}

/* sums [16, 32 or 64] grow by weights [16, depth / 2] words times values [depth / 2, as many] words; lines of sums and of
values are `apart` numbers apart. */
INLINE void gather_tiles(const int columns, const float *weights, const float *values, int64_t depth, int64_t apart, float *sums) {
#define IF_THERE(n, what) if (n < columns) { what; }
#define BEGIN(n) IF_THERE(n, _tile_loadd(GROWN + n, sums + n * LANES, 4 * apart))
#define MULTIPLY(n) \
  IF_THERE(n, _tile_loadd(OTHER, values + d / 2 * apart + n * LANES, 4 * apart); _tile_dpbf16ps(GROWN + n, SHARED, OTHER))
#define END(n) IF_THERE(n, _tile_stored(GROWN + n, sums + n * LANES, 4 * apart))
  FOUR_TIMES(BEGIN);
  for (int64_t d = 0; d < depth; d += DEPTH) {
    _tile_loadd(SHARED, weights + d / 2, 2 * depth);
    FOUR_TIMES(MULTIPLY);
  }
  FOUR_TIMES(END);
#undef IF_THERE
#undef BEGIN
#undef MULTIPLY
#undef END
}

#endif
