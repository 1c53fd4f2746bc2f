/* Vectors of 16 numbers, which the operators are written in, whatever registers a CPU has.

They are the compiler's own vectors: + − · / and comparisons go lane by lane. What instruction sets do differently is in
isa/, a file for each, with these functions:

  Lanes first_lanes(count)              the first `count` lanes, none for less than 1, all for more than 16
  Floats load_lanes(lanes, from)        zeros in other lanes, whose memory is not read
  void store_lanes(to, lanes, x)        memory of other lanes is left alone
  Halves load_half_lanes(lanes, from), void store_half_lanes(to, lanes, x)    the same of float16
  Floats from_half(x), Halves to_half(x)     float16 to float32, and back, to the nearest, ties to even
  Floats lower(a, b), higher(a, b)      the second where one is no number
  float greatest(x)                     of all lanes, by higher
  Floats between(first, end, x, other)  x in lanes first … end − 1, else other
  Floats unless_below(x, limit, y)      y where x ≥ limit or is no number, else 0
  Floats times_power(x, n)              x · 2ⁿ for whole n from −126 to 127
  Ints to_ints(x)                       to the nearest, ties to even
  void to_bytes(to, x)                  four words of four signed bytes, the nearest that these hold
  void transpose(from, stride, rows, to, apart)   16 rows of 16 floats, `stride` apart, become columns:
                                        to[d · apart + row]; those from `rows` on count as zeros
  Words looked_up(values, x)            for each byte of x, which is below 16, the one of a table of 16 signed bytes, plus 128
  enum { SCORED }                       vectors of a query's scores that registers hold for six queries
  STRIP_ROWS                            activations whose sums with a panel registers hold, a divisor of TOGETHER
  enum { BOTH_ROWS }                    activations that two panels at once are faster with than one after the other, 4 at most
  int bias_of(coding)                   what products take off codes
  void group_dots(rows, panels, coding, values, steps, from, codes, ahead, dots)    one group of neighbouring panels
                                        (panels.h): dots[r · panels + n] grow by Σ (code − bias) · x; from[n] are the codes
                                        of panel n, `values` the table of those that have one, `codes` those of the
                                        activations, 4 · steps inputs; `ahead` as tile has it

A CPU that multiplies tiles of bytes has another file, which defines HAS_TILES and has what tiled.h uses:

  enum { TILE_ROWS }                    activations of a tile, a multiple of TOGETHER
  enum { AS_THEY_LIE }                  whether tile_dots takes codes of 8 bits as they lie in a panel
  int may_tile(group)                   whether it does so in groups of so many inputs, and this process may
  void begin_tiles(group), void end_tiles()     before products in groups of so many inputs, and after them
  const uint8_t *tile_codes(coding, values, zero, steps, from, to)    where the codes of a group of a panel are as tile_dots
                                        takes them, less `zero`: made at `to`, 64 · steps bytes, or at `from`
  void tile_dots(panels, with_sign, group, from, codes, again, dots)     dots[n][r · LANES + i] = activation r · row i of
                                        panel n: `from` TILE_ROWS activations of `group` signed bytes, codes[n] what tile_codes
                                        gave, bytes with a sign or without; `again` if codes are those of the call before

All give the same bits: products that are added are fused, sums have one order. */
#ifndef LLMC_VECTORS_H
#define LLMC_VECTORS_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("clang loop unroll(full)") /* arrays indexed in the loop are to be registers */

enum { LANES = 16, PACKED_ROWS = 8 /* activations that lie together (panels.h) */ };
enum { TABLED = 1, FOUR = 4, SIX = 6, EIGHT = 8 /* how codes lie (panels.h): 4 bits for values of a table, or bits */ };

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef float FloatsAnywhere __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint32_t WordsAnywhere __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint16_t HalvesAnywhere __attribute__((vector_size(32), aligned(1), may_alias));

INLINE Floats splat(float x) { return (Floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE Ints splat_ints(int32_t x) { return (Ints){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
/* `count` rounded up to whole registers. */
INLINE int64_t pad_lanes(int64_t count) { return (count + LANES - 1) / LANES * LANES; }
INLINE Floats load(const float *from) { return *(const FloatsAnywhere *)from; }
INLINE void store(float *to, Floats x) { *(FloatsAnywhere *)to = x; }
INLINE Floats load_aligned(const float *from) { return *(const Floats *)from; }
INLINE void store_aligned(float *to, Floats x) { *(Floats *)to = x; }
INLINE float one_from_half(uint16_t x) {
  const union {
    uint16_t bits;
    _Float16 value;
  } half = {x};
  return (float)half.value;
}
INLINE Halves load_halves(const void *from) { return *(const HalvesAnywhere *)from; }

/* Steps of four inputs whose codes share bytes. */
INLINE int packed_steps(int format) { return format == EIGHT ? 1 : format == SIX ? 4 : 2; }

/* Fetch what lies `ahead` bytes on from the bytes of step `k` and of those that share them; nothing for 0. */
INLINE void fetch_step(const int format, const uint8_t *from, int64_t k, int64_t ahead) {
  const int lines = format == SIX ? 3 : 1;
  if (!ahead) return;
  UNROLL
  for (int i = 0; i < lines; i++) __builtin_prefetch(from + 64 * (lines * k + i) + ahead, 0, 2);
}

/* a · b + c, rounded once */
INLINE Floats fma16(Floats a, Floats b, Floats c) { return __builtin_elementwise_fma(a, b, c); }
INLINE Floats abs16(Floats x) { return (Floats)((Ints)x & splat_ints(0x7FFFFFFF)); }
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Floats round16(Floats x) { return __builtin_elementwise_roundeven(x); }
INLINE Floats sqrt16(Floats x) { return __builtin_elementwise_sqrt(x); }

#if defined(__AVX512VNNI__)
#include "isa/avx512.h"
#if defined(__AMX_INT8__)
#include "isa/amx.h"
#endif
#elif defined(__AVX2__)
#include "isa/avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "isa/neon.h"
#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "isa/i8mm.h"
#endif
#else
#error "no vectors for this instruction set"
#endif
#ifndef HAS_TILES
enum { TILE_ROWS = 16 };
#endif

/* Over all lanes: halves of halves. */
#define REDUCE(x, what)                                                                          \
  const __auto_type by8_ = what(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7),           \
                                __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));    \
  const __auto_type by4_ = what(__builtin_shufflevector(by8_, by8_, 0, 1, 2, 3),                 \
                                __builtin_shufflevector(by8_, by8_, 4, 5, 6, 7));                \
  const __auto_type by2_ = what(__builtin_shufflevector(by4_, by4_, 0, 1),                       \
                                __builtin_shufflevector(by4_, by4_, 2, 3));                      \
  return what(by2_[0], by2_[1]);
#define SUM(a, b) ((a) + (b))
INLINE float sum_of(Floats x) { REDUCE(x, SUM) }

/* Over the lanes of each of LANES vectors: lane i of x[0] becomes what is over those of x[i]. */
#define REDUCE_LANES(x, what)                                                       \
  MERGED(8, x, what, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),    \
         (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))          \
  MERGED(4, x, what, (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),  \
         (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))            \
  MERGED(2, x, what, (0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),  \
         (2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))            \
  MERGED(1, x, what, (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), \
         (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
#define MERGED(count, x, what, some, others)                                      \
  UNROLL                                                                          \
  for (int i_ = 0; i_ < count; i_++) x[i_] = what(PICKED(x, i_, LIST some), PICKED(x, i_, LIST others));
#define LIST(...) __VA_ARGS__
#define PICKED(x, i, ...) __builtin_shufflevector(x[2 * i], x[2 * i + 1], __VA_ARGS__)

#endif
