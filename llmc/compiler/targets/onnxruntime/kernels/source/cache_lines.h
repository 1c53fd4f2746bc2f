/* Keys and values as the cache holds them, a line for each token and head: float16, bfloat16 (rounded.h), or 8-bit codes
with their scale behind them. A scale is a bfloat16: code · scale is exact in float32, and the largest code of a line is
always 127, so that coding what was read gives the same line. */
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

/* To float16, in which what is beyond its range is no number: an infinite key could pass for one that nobody sees. */
INLINE void narrow(const float *from, uint16_t *to, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    const Lanes lanes = first_lanes(width - i);
    Floats x = load_lanes(lanes, from + i);
    const Ints within = abs16(x) < splat(65520.0f);
    store_half_lanes(to + i, lanes, to_half((Floats)((Ints)x | (~within & splat_ints(NAN_BITS)))));
  }
}

/* To bfloat16, in the same way. */
INLINE void narrow_rounded(const float *from, uint16_t *to, int64_t width) {
  for (int64_t i = 0; i < width; i += LANES) {
    const Lanes lanes = first_lanes(width - i);
    const Floats x = load_lanes(lanes, from + i);
    const Ints within = abs16(x) < splat(0x1.ffp127f); /* from there on it would become infinite */
    const Words bits = (Words)(((Ints)rounded(x) & within) | (~within & splat_ints(NAN_BITS)));
    store_half_lanes(to + i, lanes, __builtin_convertvector(bits >> 16, Halves));
  }
}

/* To codes from −127 to 127 and the scale that the largest needs; no number where one is infinite or none. */
INLINE void quantize_line(const float *from, uint8_t *to, int64_t width) {
  Floats most = splat(0.0f);
  Ints within = splat_ints(-1);
  for (int64_t i = 0; i < width; i += LANES) {
    const Floats x = abs16(load_lanes(first_lanes(width - i), from + i));
    within &= x <= splat(3.4028235e38f);
    most = max16(most, x);
  }
  Word scale = {.value = max_of(most) / 127.0f};
  scale.bits = (scale.bits + 0x7FFF + (scale.bits >> 16 & 1)) & 0xFFFF0000;
  if (scale.value < 1e-30f) scale.bits = 0; /* its inverse would have no room */
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

/* [count, width] in float16 → [count, width rounded up to LANES], zeros behind. */
INLINE void widen(const uint16_t *from, float *to, int64_t count, int64_t width) {
  if (width % LANES == 0) width *= count, count = 1;
  for (; count; count--, from += width)
    for (int64_t i = 0; i < width; i += LANES, to += LANES)
      store_aligned(to, from_half(load_half_lanes(first_lanes(width - i), from + i)));
}

/* The same of bfloat16. */
INLINE void widen_rounded(const uint16_t *from, float *to, int64_t count, int64_t width) {
  if (width % LANES == 0) width *= count, count = 1;
  for (; count; count--, from += width)
    for (int64_t i = 0; i < width; i += LANES, to += LANES)
      store_aligned(to, (Floats)(__builtin_convertvector(load_half_lanes(first_lanes(width - i), from + i), Words) << 16));
}

/* The same of coded lines. */
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

/* Lines one behind another, `bytes` each. */
typedef struct {
  const uint8_t *from;
  int64_t bytes, count;
} Lines;

/* Have lines k … k + some − 1, as far as there are such, brought into the processor's cache. Best a few at a time between
other work: more than it can wait for hold up what is read meanwhile. */
INLINE void fetch(Lines lines, int64_t k, int64_t some) {
  const int64_t end = min64(k + some, lines.count) * lines.bytes;
  for (int64_t i = k * lines.bytes; i < end; i += 64) __builtin_prefetch(lines.from + i);
}

enum { AT_ONCE = 8 };

/* Lines as float32 [count, whole(width)], zeros behind; those that come `after` are fetched meanwhile. */
INLINE void read_lines(int kind, Lines lines, int64_t width, Lines after, float *to) {
  for (int64_t k = 0; k < lines.count; k += AT_ONCE, to += AT_ONCE * pad_lanes(width)) {
    const int64_t some = min64(lines.count - k, AT_ONCE);
    const uint8_t *from = lines.from + k * lines.bytes;
    fetch(after, k, AT_ONCE);
    if (kind == IN_INT8) dequantize_lines(from, to, some, width);
    else if (kind == IN_BFLOAT16) widen_rounded((const uint16_t *)from, to, some, width);
    else widen((const uint16_t *)from, to, some, width);
  }
  fetch(after, lines.count, after.count); /* where they are more */
}

#endif
