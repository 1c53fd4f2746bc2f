/* Each intrinsic that has an emulation, over 64 bytes, for test_emulated.py: (a, b, c, mask, to). */
#include <immintrin.h>

#define PROBE(name)                                                                                       \
  __attribute__((visibility("default"))) void name(const void *a, const void *b, const void *c, int mask, void *to)
#define UNUSED (void)a, (void)b, (void)c, (void)mask
#define FLOATS(from) _mm512_loadu_ps(from)
#define INTS(from) _mm512_loadu_si512(from)

#define OF_FLOATS(name, ...) \
  PROBE(name) { UNUSED; _mm512_storeu_ps(to, __VA_ARGS__); }
#define OF_INTS(name, ...) \
  PROBE(name) { UNUSED; _mm512_storeu_ps(to, (__m512)(__VA_ARGS__)); }

OF_INTS(set1_epi32, _mm512_set1_epi32(*(const int *)a))
OF_INTS(set1_epi8, _mm512_set1_epi8(*(const char *)a))
OF_FLOATS(min_ps, _mm512_min_ps(FLOATS(a), FLOATS(b)))
OF_FLOATS(max_ps, _mm512_max_ps(FLOATS(a), FLOATS(b)))
OF_FLOATS(scalef_ps, _mm512_scalef_ps(FLOATS(a), FLOATS(b)))
OF_FLOATS(mask_blend_ps, _mm512_mask_blend_ps((__mmask16)mask, FLOATS(a), FLOATS(b)))
OF_FLOATS(maskz_mov_ps, _mm512_maskz_mov_ps((__mmask16)mask, FLOATS(a)))
OF_INTS(cvtps_epi32, _mm512_cvtps_epi32(FLOATS(a)))
OF_FLOATS(cvtph_ps, _mm512_cvtph_ps(_mm256_loadu_si256(a)))
OF_INTS(and_si512, _mm512_and_si512(INTS(a), INTS(b)))
OF_INTS(setzero_si512, _mm512_setzero_si512())
OF_INTS(or_si512, _mm512_or_si512(INTS(a), INTS(b)))
OF_INTS(xor_si512, _mm512_xor_si512(INTS(a), INTS(b)))
OF_INTS(sub_epi8, _mm512_sub_epi8(INTS(a), INTS(b)))
OF_INTS(slli_epi16, _mm512_slli_epi16(INTS(a), 4))
OF_INTS(shuffle_epi8, _mm512_shuffle_epi8(INTS(a), INTS(b)))
OF_INTS(broadcast_i32x4, _mm512_broadcast_i32x4(_mm_loadu_si128(a)))
OF_INTS(unpacklo_epi16, _mm512_unpacklo_epi16(INTS(a), INTS(b)))
OF_INTS(unpackhi_epi16, _mm512_unpackhi_epi16(INTS(a), INTS(b)))
OF_INTS(permutexvar_epi16, _mm512_permutexvar_epi16(INTS(a), INTS(b)))
OF_INTS(srli_epi16, _mm512_srli_epi16(INTS(a), 4))
OF_INTS(dpbusd_epi32, _mm512_dpbusd_epi32(INTS(c), INTS(a), INTS(b)))
OF_FLOATS(unpacklo_ps, _mm512_unpacklo_ps(FLOATS(a), FLOATS(b)))
OF_FLOATS(unpackhi_ps, _mm512_unpackhi_ps(FLOATS(a), FLOATS(b)))
OF_FLOATS(unpacklo_pd, _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(FLOATS(a)), _mm512_castps_pd(FLOATS(b)))))
OF_FLOATS(unpackhi_pd, _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(FLOATS(a)), _mm512_castps_pd(FLOATS(b)))))
OF_FLOATS(shuffle_88, _mm512_shuffle_f32x4(FLOATS(a), FLOATS(b), 0x88))
OF_FLOATS(shuffle_dd, _mm512_shuffle_f32x4(FLOATS(a), FLOATS(b), 0xDD))
OF_FLOATS(maskz_loadu_ps, _mm512_maskz_loadu_ps((__mmask16)mask, a))

PROBE(dpbusd_avx_epi32) {
  UNUSED;
  for (int half = 0; half < 64; half += 32)
    _mm256_storeu_si256((__m256i *)((char *)to + half),
                        _mm256_dpbusd_avx_epi32(_mm256_loadu_si256((const __m256i *)((const char *)c + half)),
                                                _mm256_loadu_si256((const __m256i *)((const char *)a + half)),
                                                _mm256_loadu_si256((const __m256i *)((const char *)b + half))));
}
OF_INTS(cvtne2ps_pbh, (__m512i)_mm512_cvtne2ps_pbh(FLOATS(b), FLOATS(a)))
PROBE(cvtneps_pbh) { UNUSED; _mm256_storeu_si256(to, (__m256i)_mm512_cvtneps_pbh(FLOATS(a))); }
OF_FLOATS(dpbf16_ps, _mm512_dpbf16_ps(FLOATS(c), (__m512bh)INTS(a), (__m512bh)INTS(b)))
/* As tile_dots, of bfloat16. */
PROBE(tile_bf16) {
  (void)mask;
  _tile_loadconfig(c);
  _tile_zero(0);
  _tile_loadd(0, to, 64);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, to, 64);
  _tile_release();
}
PROBE(storeu_si512) { UNUSED; _mm512_storeu_si512(to, INTS(a)); }
/* `to` grows by the product of a, rows of 64 bytes, and b, whose bytes have a sign or (mask) none, in shapes c. */
PROBE(tile_dots) {
  _tile_loadconfig(c);
  _tile_zero(0);
  _tile_loadd(0, to, 64);
  _tile_loadd(1, a, 64);
  _tile_loadd(2, b, 64);
  if (mask) _tile_dpbsud(0, 1, 2);
  else _tile_dpbssd(0, 1, 2);
  _tile_stored(0, to, 64);
  _tile_release();
}
PROBE(mask_storeu_ps) { UNUSED; _mm512_mask_storeu_ps(to, (__mmask16)mask, FLOATS(a)); }
PROBE(mask_storeu_epi16) { UNUSED; _mm256_mask_storeu_epi16(to, (__mmask16)mask, _mm256_loadu_si256(a)); }
PROBE(maskz_loadu_epi16) { UNUSED; _mm256_storeu_si256(to, _mm256_maskz_loadu_epi16((__mmask16)mask, a)); }
PROBE(maskz_loadu_epi16_32) { UNUSED; _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16((1u << mask) - 1, a)); }
PROBE(cvtps_ph) { UNUSED; _mm256_storeu_si256(to, _mm512_cvtps_ph(FLOATS(a), _MM_FROUND_TO_NEAREST_INT)); }
PROBE(cvtsepi32_epi8) { UNUSED; _mm_storeu_si128(to, _mm512_cvtsepi32_epi8(INTS(a))); }
PROBE(cmp_nlt) { UNUSED; *(int *)to = _mm512_cmp_ps_mask(FLOATS(a), FLOATS(b), _CMP_NLT_UQ); }
PROBE(reduce_max_ps) { UNUSED; *(float *)to = _mm512_reduce_max_ps(FLOATS(a)); }
