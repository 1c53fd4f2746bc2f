/* vectors.h for aarch64 with dot products of bytes (Neoverse N1, Graviton 2, Apple M1 and later): a vector is four registers. */
#include <arm_neon.h>

#include "counted.h"

typedef _Float16 HalfFloats __attribute__((vector_size(32)));

INLINE Floats load_lanes(Lanes lanes, const float *from) {
  if (__builtin_expect(lanes == LANES, 1)) return load(from);
  float made[LANES] = {0};
  for (int64_t i = 0; i < lanes; i++) made[i] = from[i];
  return load(made);
}
INLINE void store_lanes(float *to, Lanes lanes, Floats x) {
  if (__builtin_expect(lanes == LANES, 1)) {
    store(to, x);
    return;
  }
  for (int64_t i = 0; i < lanes; i++) to[i] = x[i];
}
INLINE Floats from_half(Halves x) { return __builtin_convertvector((HalfFloats)x, Floats); }
INLINE Halves to_half(Floats x) { return (Halves)__builtin_convertvector(x, HalfFloats); }
INLINE Floats chosen(Ints first, Floats a, Floats b) { return (Floats)(((Ints)a & first) | ((Ints)b & ~first)); }
INLINE Floats lower(Floats a, Floats b) { return chosen(a < b, a, b); }
INLINE Floats higher(Floats a, Floats b) { return chosen(a > b, a, b); }
INLINE float greatest(Floats x) {
  float most[LANES];
  store(most, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) most[i] = most[i] > most[i + width] ? most[i] : most[i + width];
  return most[0];
}

typedef union {
  Floats floats;
  Ints ints;
  float32x4_t each[4];
  int32x4_t each_int[4];
} Quarters;

INLINE Ints to_ints(Floats x) {
  Quarters q = {.floats = x};
  UNROLL
  for (int i = 0; i < 4; i++) q.each_int[i] = vcvtnq_s32_f32(q.each[i]);
  return q.ints;
}
INLINE void to_bytes(int32_t *to, Ints x) {
  const Quarters q = {.ints = x};
  int16x8_t words[2];
  UNROLL
  for (int i = 0; i < 2; i++) words[i] = vcombine_s16(vqmovn_s32(q.each_int[2 * i]), vqmovn_s32(q.each_int[2 * i + 1]));
  vst1q_s8((int8_t *)to, vcombine_s8(vqmovn_s16(words[0]), vqmovn_s16(words[1])));
}

enum { SCORED = 1 };
#define STRIP_ROWS 4

/* Both factors are signed. */
INLINE int32_t bias_of(int bits) { return bits == 8 ? 128 : 0; }

INLINE void group_dots(const int rows, const int panels, const int bits, int64_t steps, const uint8_t *const *from,
                       const int32_t *codes, int64_t ahead, Ints *dots) {
#define INPUTS(k, r) vreinterpretq_s8_s32(vdupq_n_s32(codes[(k)*TOGETHER + (r)]))
  UNROLL
  for (int n = 0; n < panels; n++) {
    int32x4_t own[STRIP_ROWS][4];
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL
      for (int i = 0; i < 4; i++) own[r][i] = ((const Quarters *)&dots[r * panels + n])->each_int[i];
    for (int64_t k = 0; k < (bits == 8 ? steps : steps / 2); k++) {
      if (ahead) __builtin_prefetch(from[n] + 64 * k + ahead, 0, 2);
      UNROLL
      for (int i = 0; i < 4; i++) {
        const uint8x16_t w = vld1q_u8(from[n] + 64 * k + 16 * i);
        const int8x16_t first = vreinterpretq_s8_u8(bits == 8 ? veorq_u8(w, vdupq_n_u8(128)) : vandq_u8(w, vdupq_n_u8(15)));
        const int8x16_t second = vreinterpretq_s8_u8(vshrq_n_u8(w, 4));
        UNROLL
        for (int r = 0; r < rows; r++) {
          own[r][i] = vdotq_s32(own[r][i], first, INPUTS(k, r));
          if (bits == 4) own[r][i] = vdotq_s32(own[r][i], second, INPUTS(k + steps / 2, r));
        }
      }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL
      for (int i = 0; i < 4; i++) ((Quarters *)&dots[r * panels + n])->each_int[i] = own[r][i];
  }
#undef INPUTS
}

INLINE void transpose(const float *from, int64_t stride, int64_t rows, float *to, int64_t apart) {
  for (int64_t row = 0; row < LANES; row += 4)
    for (int64_t d = 0; d < LANES; d += 4) {
      float32x4_t r[4];
      UNROLL
      for (int i = 0; i < 4; i++) r[i] = row + i < rows ? vld1q_f32(from + (row + i) * stride + d) : vdupq_n_f32(0.0f);
      const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
      float *at = to + d * apart + row;
      vst1q_f32(at, vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0])));
      vst1q_f32(at + apart, vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1])));
      vst1q_f32(at + 2 * apart, vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0])));
      vst1q_f32(at + 3 * apart, vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1])));
    }
}
