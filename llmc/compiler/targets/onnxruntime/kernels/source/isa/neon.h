/* vectors.h for aarch64 with byte dot products (Neoverse N1, Graviton 2, Apple M1 and later). A vector is four
registers. */
#include <arm_neon.h>

#include "counted.h"

typedef _Float16 HalfFloats __attribute__((vector_size(32)));

INLINE Floats load_lanes(Lanes lanes, const float *from) {
  if (__builtin_expect(lanes == LANES, 1)) return load(from);
  float buffer[LANES] = {0};
  for (int64_t i = 0; i < lanes; i++) buffer[i] = from[i];
  return load(buffer);
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
INLINE Floats select(Ints first, Floats a, Floats b) { return (Floats)(((Ints)a & first) | ((Ints)b & ~first)); }
INLINE Floats min16(Floats a, Floats b) { return select(a < b, a, b); }
INLINE Floats max16(Floats a, Floats b) { return select(a > b, a, b); }
INLINE float max_of(Floats x) {
  float maxima[LANES];
  store(maxima, x);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) maxima[i] = maxima[i] > maxima[i + width] ? maxima[i] : maxima[i + width];
  return maxima[0];
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

INLINE Words look_up(const int8_t *values, Words x) {
  const uint8x16_t table = veorq_u8(vld1q_u8((const uint8_t *)values), vdupq_n_u8(128));
  Quarters q = {.ints = (Ints)x};
  UNROLL
  for (int i = 0; i < 4; i++)
    q.each_int[i] = vreinterpretq_s32_u8(vqtbl1q_u8(table, vreinterpretq_u8_s32(q.each_int[i])));
  return (Words)q.ints;
}

enum { SCORED = 1, BOTH_ROWS = 4 };
#define STRIP_ROWS 4

/* Both factors of SDOT are signed. */
INLINE int32_t bias_of(int format) { return format == EIGHT || format == TABLED ? 128 : 0; }

/* Unpack a quarter of the steps k + i · steps / packed_steps, which share bytes in a panel. Subtracts bias_of. */
INLINE void unpack_steps(const int format, int8x16_t values, int64_t steps, const uint8_t *from, int64_t k, int quarter,
                         int8x16_t *quantized) {
  const uint8x16_t low = vdupq_n_u8(15), high = vdupq_n_u8(48);
#define BYTES(k) vld1q_u8(from + 64 * (k) + 16 * quarter)
  const uint8x16_t first = BYTES(k);
  if (format == EIGHT) {
    quantized[0] = vreinterpretq_s8_u8(veorq_u8(first, vdupq_n_u8(128)));
  } else if (format == TABLED) {
    quantized[0] = vqtbl1q_s8(values, vandq_u8(first, low)), quantized[1] = vqtbl1q_s8(values, vshrq_n_u8(first, 4));
  } else if (format == FOUR) {
    quantized[0] = vreinterpretq_s8_u8(vandq_u8(first, low)), quantized[1] = vreinterpretq_s8_u8(vshrq_n_u8(first, 4));
  } else {
    const uint8x16_t second = BYTES(k + steps / 4), above = BYTES(k + steps / 2);
#define JOINED(low4, high2) vreinterpretq_s8_u8(vorrq_u8(low4, vandq_u8(high2, high)))
    quantized[0] = JOINED(vandq_u8(first, low), vshlq_n_u8(above, 4));
    quantized[1] = JOINED(vandq_u8(second, low), vshlq_n_u8(above, 2));
    quantized[2] = JOINED(vshrq_n_u8(first, 4), above);
    quantized[3] = JOINED(vshrq_n_u8(second, 4), vshrq_n_u8(above, 2));
#undef JOINED
  }
#undef BYTES
}

INLINE void group_dots(const int rows, const int panels, const int format, const int8_t *values, int64_t steps,
                       const uint8_t *const *from, const int32_t *quantized, int64_t ahead, Ints *dots) {
  const int64_t step_stride = steps / packed_steps(format);
  const int8x16_t table = vld1q_s8(values);
#define INPUTS(k, r) vreinterpretq_s8_s32(vdupq_n_s32(quantized[(k)*PACKED_ROWS + (r)]))
  UNROLL
  for (int n = 0; n < panels; n++) {
    int32x4_t own[STRIP_ROWS][4];
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL
      for (int i = 0; i < 4; i++) own[r][i] = ((const Quarters *)&dots[r * panels + n])->each_int[i];
    if (ahead) {
      _Pragma("clang loop unroll_count(4)")
      for (int64_t k = 0; k < step_stride; k++) fetch_step(format, from[n], k, ahead);
    }
    _Pragma("clang loop unroll_count(4)")
    for (int64_t k = 0; k < step_stride; k++) {
      UNROLL
      for (int quarter = 0; quarter < 4; quarter++) {
        int8x16_t w[4];
        unpack_steps(format, table, steps, from[n], k, quarter, w);
        UNROLL
        for (int r = 0; r < rows; r++)
          UNROLL
          for (int i = 0; i < packed_steps(format); i++)
            own[r][quarter] = vdotq_s32(own[r][quarter], w[i], INPUTS(k + i * step_stride, r));
      }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
      UNROLL
      for (int i = 0; i < 4; i++) ((Quarters *)&dots[r * panels + n])->each_int[i] = own[r][i];
  }
#undef INPUTS
}

INLINE void transpose(const float *from, int64_t stride, int64_t rows, float *to, int64_t to_stride) {
  for (int64_t row = 0; row < LANES; row += 4)
    for (int64_t d = 0; d < LANES; d += 4) {
      float32x4_t r[4];
      UNROLL
      for (int i = 0; i < 4; i++) r[i] = row + i < rows ? vld1q_f32(from + (row + i) * stride + d) : vdupq_n_f32(0.0f);
      const float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
      float *at = to + d * to_stride + row;
      vst1q_f32(at, vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0])));
      vst1q_f32(at + to_stride, vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1])));
      vst1q_f32(at + 2 * to_stride, vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0])));
      vst1q_f32(at + 3 * to_stride, vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1])));
    }
}
