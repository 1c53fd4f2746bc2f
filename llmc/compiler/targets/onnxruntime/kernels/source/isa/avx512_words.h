/* The functions of words.h and word_lines.h that convert to bfloat16, over avx512.h and AVX-512 BF16. */
#ifndef LLMC_AVX512_WORDS_H
#define LLMC_AVX512_WORDS_H

INLINE Floats load_words(const uint16_t *from, int64_t count) {
  if (count <= 0) return splat(0.0f); /* a masked load of a page that was never written takes hundreds of cycles */
  return (Floats)_mm512_maskz_loadu_epi16(count >= DEPTH ? 0xFFFFFFFF : (1u << count) - 1, from);
}

INLINE Floats interleave_bf16(Floats first, Floats second) {
  static const uint16_t interleaved[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  return (Floats)_mm512_permutexvar_epi16(_mm512_loadu_si512(interleaved), both);
}

INLINE Halves to_bf16(Floats x) { return (Halves)_mm512_cvtneps_pbh(x); }

INLINE Floats to_bf16_pair(Floats first, Floats second) { return (Floats)_mm512_cvtne2ps_pbh(second, first); }

INLINE void narrow_line(const float *from, float *to, int64_t width) {
  for (int64_t i = 0; i < width; i += DEPTH, to += LANES) {
    const Floats more = i + LANES < width ? load_aligned(from + i + LANES) : splat(0.0f);
    store_aligned(to, to_bf16_pair(load_aligned(from + i), more));
  }
}

/* This order takes one instruction for each half. */
INLINE void pair_lines(Floats first, Floats second, float *to) {
  store_aligned(to, (Floats)_mm512_unpacklo_epi16((__m512i)first, (__m512i)second));
  store_aligned(to + LANES, (Floats)_mm512_unpackhi_epi16((__m512i)first, (__m512i)second));
}
INLINE void in_order(const float *from, float *to) {
  const Floats a = load_aligned(from), b = load_aligned(from + LANES);
  store_aligned(to, __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
  store_aligned(to + LANES,
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
}

#endif
