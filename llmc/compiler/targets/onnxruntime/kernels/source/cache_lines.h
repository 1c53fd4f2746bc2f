/* Lines of the KV cache. A line holds one head's key or value of one token.

A line is float16, bfloat16 (rounded.h), or 8-bit quantized values followed by their scale. The scale is a bfloat16, so
value · scale is exact in float32. The largest quantized value of a line is always 127. Therefore quantizing a line that
was read gives the same line. */
#ifndef LLMC_CACHE_LINES_H
#define LLMC_CACHE_LINES_H

#include "rounded.h"

enum { SCALE_BYTES = 2, NAN_BITS = 0x7FC00000 };
enum { IN_FLOAT16, IN_BFLOAT16, IN_INT8 };

typedef int8_t BytesAnywhere __attribute__((vector_size(16), aligned(1), may_alias));

typedef union {
  float value;
  uint32_t bits;
} Word;

INLINE int64_t line_bytes(int kind, int64_t width) { return kind == IN_INT8 ? width + SCALE_BYTES : 2 * width; }

/* Convert to float16. Values out of range become NaN, because a key with an infinite score could look like a masked
one. */
INLINE void narrow(const float *from, uint16_t *to, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    const Lanes lanes = first_lanes(width - i);
    Floats x = load_lanes(lanes, from + i);
    const Ints within = abs16(x) < splat(65520.0f);
    store_half_lanes(to + i, lanes, to_half((Floats)((Ints)x | (~within & splat_ints(NAN_BITS)))));
  }
}

/* Convert to bfloat16. Values out of range become NaN, as in `narrow`. */
INLINE void narrow_rounded(const float *from, uint16_t *to, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    const Lanes lanes = first_lanes(width - i);
    const Floats x = load_lanes(lanes, from + i);
    const Ints within = abs16(x) < splat(0x1.ffp127f); /* larger values would round to infinity */
    const Words bits = (Words)(((Ints)rounded(x) & within) | (~within & splat_ints(NAN_BITS)));
    store_half_lanes(to + i, lanes, __builtin_convertvector(bits >> 16, Halves));
  }
}

/* Quantize to −127 … 127 with the scale of the largest value. If an input is infinite or NaN, the scale becomes NaN. */
INLINE void quantize_line(const float *from, uint8_t *to, int64_t width) {
  Floats largest = splat(0.0f);
  Ints within = splat_ints(-1);
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats x = abs16(load_lanes(first_lanes(width - i), from + i));
    within &= x <= splat(3.4028235e38f);
    largest = max16(largest, x);
  }
  Word scale = {.value = max_of(largest) / 127.0f};
  scale.bits = (scale.bits + 0x7FFF + (scale.bits >> 16 & 1)) & 0xFFFF0000;
  if (scale.value < 1e-30f) scale.bits = 0; /* the inverse would overflow */
  const int not_finite = !__builtin_reduce_and(within);
  const float inverse = not_finite || scale.value == 0.0f ? 0.0f : 1.0f / scale.value;
  if (not_finite) scale.bits = NAN_BITS;
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats x = load_lanes(first_lanes(width - i), from + i);
    int32_t quantized[4];
    to_bytes(quantized, not_finite ? splat_ints(0) : to_ints(x * splat(inverse)));
    for (int64_t n = 0; n < LANES && i + n < width; n++) to[i + n] = ((const uint8_t *)quantized)[n];
  }
  to[width] = (uint8_t)(scale.bits >> 16), to[width + 1] = (uint8_t)(scale.bits >> 24);
}

/* [count, width] in float16 → [count, pad_lanes(width)] in float32, with zeros in the padding. */
INLINE void widen(const uint16_t *from, float *to, int64_t count, int64_t width) {
  if (width % LANES == 0) width *= count, count = 1;
  for (; count; count--, from += width)
    for (int64_t i = 0; i < width; i += LANES, to += LANES)
      store_aligned(to, from_half(load_half_lanes(first_lanes(width - i), from + i)));
}

/* The same for bfloat16. */
INLINE void widen_rounded(const uint16_t *from, float *to, int64_t count, int64_t width) {
  if (width % LANES == 0) width *= count, count = 1;
  for (; count; count--, from += width)
    for (int64_t i = 0; i < width; i += LANES, to += LANES)
      store_aligned(to,
                    (Floats)(__builtin_convertvector(load_half_lanes(first_lanes(width - i), from + i), Words) << 16));
}

/* The same for quantized lines. */
INLINE void dequantize_lines(const uint8_t *from, float *to, int64_t count, int64_t width) {
  for (; count; count--, from += width + SCALE_BYTES) {
    const Word scale = {.bits = (uint32_t)from[width] << 16 | (uint32_t)from[width + 1] << 24};
    for (int64_t i = 0; i < width; i += LANES, to += LANES) {
      int8_t last[LANES] = {0};
      const int8_t *quantized = (const int8_t *)from + i;
      if (width - i < LANES) {
        for (int64_t n = 0; n < width - i; n++) last[n] = quantized[n];
        quantized = last;
      }
      store_aligned(to, __builtin_convertvector(*(const BytesAnywhere *)quantized, Floats) * splat(scale.value));
    }
  }
}

INLINE void write_line(int kind, const float *from, uint8_t *to, int64_t width) {
  if (kind == IN_INT8) quantize_line(from, to, width);
  else if (kind == IN_BFLOAT16) narrow_rounded(from, (uint16_t *)to, width);
  else narrow(from, (uint16_t *)to, width);
}

/* Consecutive lines of `bytes` bytes each. */
typedef struct {
  const uint8_t *from;
  int64_t bytes, count;
} Lines;

/* Prefetch up to `some` lines from line `k` on. Callers mix a few prefetches with other work: too many at once delay
the loads. */
INLINE void fetch(Lines lines, int64_t k, int64_t some) {
  const int64_t end = min64(k + some, lines.count) * lines.bytes;
  for (int64_t i = k * lines.bytes; i < end; i += 64) __builtin_prefetch(lines.from + i);
}

enum { AT_ONCE = 8 };

/* Read lines as float32 [count, pad_lanes(width)], with zeros in the padding. Meanwhile prefetch the lines `after`. */
INLINE void read_lines(int kind, Lines lines, int64_t width, Lines after, float *to) {
  for (int64_t k = 0; k < lines.count; k += AT_ONCE, to += AT_ONCE * pad_lanes(width)) {
    const int64_t some = min64(lines.count - k, AT_ONCE);
    const uint8_t *from = lines.from + k * lines.bytes;
    fetch(after, k, AT_ONCE);
    if (kind == IN_INT8) dequantize_lines(from, to, some, width);
    else if (kind == IN_BFLOAT16) widen_rounded((const uint16_t *)from, to, some, width);
    else widen((const uint16_t *)from, to, some, width);
  }
  fetch(after, lines.count, after.count); /* if there are more of them */
}

#endif
