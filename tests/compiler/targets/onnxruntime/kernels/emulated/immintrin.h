/* Those intrinsics of AVX-512, AVX-VNNI and AMX that the kernels use, over AVX2, FMA and F16C: what sources find before the
compiler's own header where tests build a set of kernels that the CPU has no instructions for.

Each gives what the instruction gives, to the bit: fused products round once, minima and maxima give their second operand
where one is no number, masked loads and stores leave other memory alone. Sums over lanes add halves, as clang's do. */
#ifndef LLMC_EMULATED_IMMINTRIN_H
#define LLMC_EMULATED_IMMINTRIN_H

#define __IMMINTRIN_H /* the compiler's headers of one instruction set want to be included by its own of this name */
#include <xmmintrin.h>
#include <emmintrin.h>
#include <pmmintrin.h>
#include <tmmintrin.h>
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>

/* vectors are passed to functions that are inlined only */
#pragma clang diagnostic ignored "-Wpsabi"

typedef float __m512 __attribute__((vector_size(64)));
typedef double __m512d __attribute__((vector_size(64)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef unsigned short __mmask16;
typedef unsigned __mmask32;

typedef int Ints __attribute__((vector_size(64)));
typedef unsigned Words __attribute__((vector_size(64)));
typedef unsigned short Shorts __attribute__((vector_size(64)));
typedef signed char Bytes __attribute__((vector_size(16)));
typedef struct {
  __m512 all;
} __attribute__((packed, may_alias)) Anywhere;
typedef struct {
  __m512i all;
} __attribute__((packed, may_alias)) AnywhereInts;

#define EMULATED static inline __attribute__((always_inline))

/* Shorts, and what they make together. */
EMULATED __m256 low(__m512 a) { return __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7); }
EMULATED __m256 high(__m512 a) { return __builtin_shufflevector(a, a, 8, 9, 10, 11, 12, 13, 14, 15); }
EMULATED __m512 both(__m256 a, __m256 b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
EMULATED __m256i low_ints(__m512i a) { return __builtin_shufflevector(a, a, 0, 1, 2, 3); }
EMULATED __m256i high_ints(__m512i a) { return __builtin_shufflevector(a, a, 4, 5, 6, 7); }
EMULATED __m512i both_ints(__m256i a, __m256i b) { return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7); }

/* −1 in the lanes of a mask, else 0. */
EMULATED Ints lanes_of(__mmask16 mask) {
  const Ints bits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const int m = mask;
  return (((Ints){m, m, m, m, m, m, m, m, m, m, m, m, m, m, m, m}) & bits) != 0;
}

/* Constants and casts */
EMULATED __m512i _mm512_setzero_si512(void) { return (__m512i){0}; }
EMULATED __m512i _mm512_set1_epi32(int x) {
  return (__m512i)(Ints){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
EMULATED __m512i _mm512_set1_epi8(char x) { return _mm512_set1_epi32((int)((unsigned char)x * 0x01010101u)); }
EMULATED __m512d _mm512_castps_pd(__m512 a) { return (__m512d)a; }
EMULATED __m512 _mm512_castpd_ps(__m512d a) { return (__m512)a; }

/* Memory */
EMULATED __m512 _mm512_loadu_ps(const void *from) { return ((const Anywhere *)from)->all; }
EMULATED void _mm512_storeu_ps(void *to, __m512 a) { ((Anywhere *)to)->all = a; }
EMULATED void _mm512_storeu_si512(void *to, __m512i a) { ((AnywhereInts *)to)->all = a; }
EMULATED __m512i _mm512_loadu_si512(const void *from) { return ((const AnywhereInts *)from)->all; }
EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void *from) {
  if (mask == 0xFFFF) return _mm512_loadu_ps(from);
  const __m512i lanes = (__m512i)lanes_of(mask);
  const float *at = from;
  return both(_mm256_maskload_ps(at, low_ints(lanes)), _mm256_maskload_ps(at + 8, high_ints(lanes)));
}
EMULATED void _mm512_mask_storeu_ps(void *to, __mmask16 mask, __m512 a) {
  if (mask == 0xFFFF) {
    _mm512_storeu_ps(to, a);
    return;
  }
  const __m512i lanes = (__m512i)lanes_of(mask);
  float *at = to;
  _mm256_maskstore_ps(at, low_ints(lanes), low(a));
  _mm256_maskstore_ps(at + 8, high_ints(lanes), high(a));
}
EMULATED __m256i _mm256_maskz_loadu_epi16(__mmask16 mask, const void *from) {
  unsigned short made[16] = {0};
  if (mask == 0xFFFF) return _mm256_loadu_si256(from);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) made[i] = ((const unsigned short *)from)[i];
  return _mm256_loadu_si256((const __m256i *)made);
}
EMULATED void _mm256_mask_storeu_epi16(void *to, __mmask16 mask, __m256i a) {
  unsigned short given[16];
  if (mask == 0xFFFF) {
    _mm256_storeu_si256(to, a);
    return;
  }
  _mm256_storeu_si256((__m256i *)given, a);
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) ((unsigned short *)to)[i] = given[i];
}

/* Arithmetic */
EMULATED __m512 _mm512_min_ps(__m512 a, __m512 b) {
  return both(_mm256_min_ps(low(a), low(b)), _mm256_min_ps(high(a), high(b)));
}
EMULATED __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return both(_mm256_max_ps(low(a), low(b)), _mm256_max_ps(high(a), high(b)));
}
EMULATED __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
EMULATED __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
EMULATED __m512i _mm512_sub_epi8(__m512i a, __m512i b) {
  return both_ints(_mm256_sub_epi8(low_ints(a), low_ints(b)), _mm256_sub_epi8(high_ints(a), high_ints(b)));
}
EMULATED __m512i _mm512_slli_epi16(__m512i a, unsigned count) {
  return count > 15 ? _mm512_setzero_si512() : (__m512i)((Shorts)a << (unsigned short)count);
}
EMULATED __m512i _mm512_shuffle_epi8(__m512i a, __m512i b) {
  return both_ints(_mm256_shuffle_epi8(low_ints(a), low_ints(b)), _mm256_shuffle_epi8(high_ints(a), high_ints(b)));
}
EMULATED __m512i _mm512_broadcast_i32x4(__m128i a) {
  return both_ints(_mm256_broadcastsi128_si256(a), _mm256_broadcastsi128_si256(a));
}
EMULATED __m512i _mm512_srli_epi16(__m512i a, unsigned count) {
  return count > 15 ? _mm512_setzero_si512() : (__m512i)((Shorts)a >> (unsigned short)count);
}

/* a · 2^⌊b⌋, rounded once. In float64 no product of a float32 and a power within ±300 is rounded, or left the range. */
EMULATED __m256 scaled(__m256 a, __m256 b) {
  const __m256 infinite = _mm256_set1_ps(__builtin_inff()), none = _mm256_setzero_ps();
  const __m256 most = _mm256_set1_ps(300.0f), least = _mm256_set1_ps(-300.0f);
  const __m256i power = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(_mm256_floor_ps(b), least), most));
  __m128 half[2];
  for (int i = 0; i < 2; i++) {
    const __m128i own = i ? _mm256_extracti128_si256(power, 1) : _mm256_castsi256_si128(power);
    const __m256i bits = _mm256_slli_epi64(_mm256_add_epi64(_mm256_cvtepi32_epi64(own), _mm256_set1_epi64x(1023)), 52);
    const __m256d value = _mm256_cvtps_pd(i ? _mm256_extractf128_ps(a, 1) : _mm256_castps256_ps128(a));
    half[i] = _mm256_cvtpd_ps(_mm256_mul_pd(value, _mm256_castsi256_pd(bits)));
  }
  const __m256 made = _mm256_set_m128(half[1], half[0]);
  /* an infinite power, or none that is a number: a number times that, and of what is no number the limit alone */
  const __m256 limit = _mm256_blendv_ps(b, none, _mm256_cmp_ps(b, none, _CMP_LT_OQ));
  const __m256 odd = _mm256_cmp_ps(_mm256_and_ps(b, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF))), infinite, _CMP_NLT_UQ);
  const __m256 alone = _mm256_and_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q), _mm256_cmp_ps(b, b, _CMP_ORD_Q));
  return _mm256_blendv_ps(made, _mm256_blendv_ps(_mm256_mul_ps(a, limit), limit, alone), odd);
}
EMULATED __m512 _mm512_scalef_ps(__m512 a, __m512 b) { return both(scaled(low(a), low(b)), scaled(high(a), high(b))); }

/* Sums of four products of an unsigned and a signed byte, more by `sum`. */
EMULATED __m256i _mm256_dpbusd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  return both_ints(_mm256_dpbusd_avx_epi32(low_ints(sum), low_ints(a), low_ints(b)),
                   _mm256_dpbusd_avx_epi32(high_ints(sum), high_ints(a), high_ints(b)));
}

/* Masks */
#define _mm512_cmp_ps_mask(a, b, how)                                                            \
  __extension__({                                                                                \
    const __m512 one_ = (a), other_ = (b);                                                       \
    (__mmask16)(_mm256_movemask_ps(_mm256_cmp_ps(low(one_), low(other_), (how))) |               \
                _mm256_movemask_ps(_mm256_cmp_ps(high(one_), high(other_), (how))) << 8);        \
  })
EMULATED __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 a, __m512 b) {
  const __m512 lanes = (__m512)lanes_of(mask);
  return both(_mm256_blendv_ps(low(a), low(b), low(lanes)), _mm256_blendv_ps(high(a), high(b), high(lanes)));
}
EMULATED __m512 _mm512_maskz_mov_ps(__mmask16 mask, __m512 a) { return (__m512)((Ints)a & lanes_of(mask)); }

/* Conversions */
EMULATED __m512i _mm512_cvtps_epi32(__m512 a) {
  return both_ints(_mm256_cvtps_epi32(low(a)), _mm256_cvtps_epi32(high(a)));
}
EMULATED __m512 _mm512_cvtph_ps(__m256i a) {
  return both(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}
#define _mm512_cvtps_ph(a, how)                                                                      \
  __extension__({                                                                                    \
    const __m512 given_ = (a);                                                                       \
    _mm256_set_m128i(_mm256_cvtps_ph(high(given_), (how)), _mm256_cvtps_ph(low(given_), (how)));     \
  })
EMULATED __m128i _mm512_cvtsepi32_epi8(__m512i a) {
  const Ints most = (Ints)_mm512_set1_epi32(127), least = (Ints)_mm512_set1_epi32(-128);
  const Ints x = __builtin_elementwise_max(__builtin_elementwise_min((Ints)a, most), least);
  return (__m128i)__builtin_convertvector(x, Bytes);
}

/* Lanes */
EMULATED __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
EMULATED __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
  return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
EMULATED __m512d _mm512_unpacklo_pd(__m512d a, __m512d b) {
  return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
}
EMULATED __m512d _mm512_unpackhi_pd(__m512d a, __m512d b) {
  return __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
#define FOUR_LANES_(first) (first), (first) + 1, (first) + 2, (first) + 3
#define _mm512_shuffle_f32x4(a, b, which)                                                                      \
  __builtin_shufflevector((a), (b), FOUR_LANES_(((which) & 3) * 4), FOUR_LANES_(((which) >> 2 & 3) * 4),       \
                          FOUR_LANES_(((which) >> 4 & 3) * 4 + 16), FOUR_LANES_(((which) >> 6 & 3) * 4 + 16))

#define QUARTER_(at) (at), (at) + 32, (at) + 1, (at) + 33, (at) + 2, (at) + 34, (at) + 3, (at) + 35
#define OF_QUARTERS_(first) QUARTER_(first), QUARTER_((first) + 8), QUARTER_((first) + 16), QUARTER_((first) + 24)
EMULATED __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return (__m512i)__builtin_shufflevector((Shorts)a, (Shorts)b, OF_QUARTERS_(0));
}
EMULATED __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return (__m512i)__builtin_shufflevector((Shorts)a, (Shorts)b, OF_QUARTERS_(4));
}
EMULATED __m512i _mm512_permutexvar_epi16(__m512i which, __m512i a) {
  Shorts found;
  for (int i = 0; i < 32; i++) found[i] = ((Shorts)a)[((Shorts)which)[i] & 31];
  return (__m512i)found;
}
EMULATED __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void *from) {
  Shorts found = {0};
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) found[i] = ((const unsigned short *)from)[i];
  return (__m512i)found;
}

/* bfloat16: the upper half of a float, to the nearest, ties to even; what is below 2⁻¹²⁶ is zero. */
typedef union {
  float value;
  unsigned bits;
} Float_;
EMULATED unsigned short narrow_(float x) {
  const Float_ f = {x};
  if (x != x) return (unsigned short)(f.bits >> 16 | 0x40);
  if (!(f.bits & 0x7F800000)) return (unsigned short)(f.bits >> 16 & 0x8000);
  return (unsigned short)((f.bits + 0x7FFF + (f.bits >> 16 & 1)) >> 16);
}
EMULATED __m512i narrowed_(__m512 upper, __m512 lower) {
  Shorts found;
  for (int i = 0; i < 16; i++) found[i] = narrow_(lower[i]), found[i + 16] = narrow_(upper[i]);
  return (__m512i)found;
}
EMULATED __m256i narrowed_half_(__m512 x) {
  union {
    unsigned short each[16];
    __m256i all;
  } found;
  for (int i = 0; i < 16; i++) found.each[i] = narrow_(x[i]);
  return found.all;
}
/* the types of the real ones are others: sources cast them at once */
#define _mm512_cvtne2ps_pbh(upper, lower) narrowed_((upper), (lower))
#define _mm512_cvtneps_pbh(x) narrowed_half_(x)
EMULATED float flushed_(float x) {
  return x < 1.17549435e-38f && x > -1.17549435e-38f ? __builtin_copysignf(0.0f, x) : x;
}
EMULATED float widened_(const unsigned char *from) {
  const Float_ f = {.bits = (unsigned)from[0] << 16 | (unsigned)from[1] << 24};
  return flushed_(f.value);
}

/* a sum grows by the second of two products, and then by the first */
EMULATED __m512 dot_words_(__m512 sums, __m512i a, __m512i b) {
  for (int i = 0; i < 16; i++)
    for (int half = 1; half >= 0; half--) {
      const Float_ x = {.bits = (unsigned)((Shorts)a)[2 * i + half] << 16};
      const Float_ y = {.bits = (unsigned)((Shorts)b)[2 * i + half] << 16};
      sums[i] = flushed_(__builtin_fmaf(flushed_(x.value), flushed_(y.value), flushed_(sums[i])));
    }
  return sums;
}
typedef __m512i __m512bh;
#define _mm512_dpbf16_ps(sums, a, b) dot_words_((sums), (a), (b))

/* Tiles: each thread has eight, of 16 rows of 64 bytes, and their shapes. */
static __thread struct {
  struct {
    unsigned char palette, start, none[14];
    unsigned short bytes[16];
    unsigned char rows[16];
  } shapes;
  unsigned char values[8][16][64];
} tiles_ __attribute__((unused));

EMULATED void _tile_loadconfig(const void *from) { __builtin_memcpy(&tiles_.shapes, from, 64); }
EMULATED void _tile_release(void) { __builtin_memset(&tiles_, 0, sizeof tiles_); }
EMULATED void _tile_zero(int tile) { __builtin_memset(tiles_.values[tile], 0, sizeof tiles_.values[tile]); }
EMULATED void _tile_loadd(int tile, const void *from, long stride) {
  _tile_zero(tile);
  for (int row = 0; row < tiles_.shapes.rows[tile]; row++)
    __builtin_memcpy(tiles_.values[tile][row], (const char *)from + row * stride, tiles_.shapes.bytes[tile]);
}
EMULATED void _tile_stored(int tile, void *to, long stride) {
  for (int row = 0; row < tiles_.shapes.rows[tile]; row++)
    __builtin_memcpy((char *)to + row * stride, tiles_.values[tile][row], tiles_.shapes.bytes[tile]);
}
/* sums[m][n] grow by Σ a[m][k] · b[k / 4][4 n + k mod 4], bytes of a with a sign, of b with one or without. */
EMULATED void tile_dots_(int sums, int a, int b, int with_sign) {
  for (int m = 0; m < tiles_.shapes.rows[sums]; m++)
    for (int n = 0; n < tiles_.shapes.bytes[sums] / 4; n++) {
      unsigned sum;
      __builtin_memcpy(&sum, tiles_.values[sums][m] + 4 * n, 4);
      for (int k = 0; k < tiles_.shapes.bytes[a]; k++) {
        const unsigned char other = tiles_.values[b][k / 4][4 * n + k % 4];
        sum += (unsigned)((signed char)tiles_.values[a][m][k] * (with_sign ? (signed char)other : other));
      }
      __builtin_memcpy(tiles_.values[sums][m] + 4 * n, &sum, 4);
    }
}
/* sums[m][n] grow by the sum of Σ a[m][2 k] · b[k][2 n] and Σ a[m][2 k + 1] · b[k][2 n + 1], each in order, of bfloat16. */
EMULATED void _tile_dpbf16ps(int sums, int a, int b) {
  for (int m = 0; m < tiles_.shapes.rows[sums]; m++)
    for (int n = 0; n < tiles_.shapes.bytes[sums] / 4; n++) {
      float each[2] = {0.0f, 0.0f}, sum;
      for (int k = 0; k < tiles_.shapes.bytes[a] / 4; k++)
        for (int i = 0; i < 2; i++)
          each[i] = flushed_(__builtin_fmaf(widened_(tiles_.values[a][m] + 4 * k + 2 * i),
                                            widened_(tiles_.values[b][k] + 4 * n + 2 * i), each[i]));
      __builtin_memcpy(&sum, tiles_.values[sums][m] + 4 * n, 4);
      sum = flushed_(flushed_(sum) + flushed_(each[0] + each[1]));
      __builtin_memcpy(tiles_.values[sums][m] + 4 * n, &sum, 4);
    }
}
EMULATED void _tile_dpbssd(int sums, int a, int b) { tile_dots_(sums, a, b, 1); }
EMULATED void _tile_dpbsud(int sums, int a, int b) { tile_dots_(sums, a, b, 0); }

/* Over all lanes: halves of halves. */
EMULATED float _mm512_reduce_max_ps(__m512 a) {
  const __m256 eight = _mm256_max_ps(low(a), high(a));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_max_ss(two, _mm_movehdup_ps(two))[0];
}

#endif
