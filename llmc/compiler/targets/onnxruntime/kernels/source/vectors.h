/* Vectors of 16 numbers, which the operators use on every CPU regardless of its register width.

They are the compiler's vector types: + − · / and comparisons work lane by lane. Each instruction set has a file in isa/
with these definitions:

  Lanes first_lanes(count)              the first `count` lanes: none below 1, all above 16
  Floats load_lanes(lanes, from)        0 in the other lanes, whose memory is not read
  void store_lanes(to, lanes, x)        leaves the memory of the other lanes unchanged
  Halves load_half_lanes(lanes, from), void store_half_lanes(to, lanes, x)    the same for float16
  Floats from_half(x), Halves to_half(x)     float16 to float32 and back; rounds to nearest, ties to even
  Floats min16(a, b), max16(a, b)       b in lanes where either is NaN
  float max_of(x)                       maximum of all lanes, by max16
  Floats select_lanes(first, end, x, other)  x in lanes first … end − 1, other elsewhere
  Floats zero_below(x, limit, y)        y where x ≥ limit or x is NaN, 0 elsewhere
  Floats times_power(x, n)              x · 2ⁿ for integers n from −126 to 127
  Ints to_ints(x)                       rounds to nearest, ties to even
  void to_bytes(to, x)                  16 signed bytes, with saturation
  void transpose(from, stride, rows, to, to_stride)   turns 16 rows of 16 floats, `stride` apart, into columns:
                                        to[d · to_stride + row]; rows from `rows` on count as 0
  Words look_up(values, x)              for each byte of x (below 16): that entry of 16 signed bytes, plus 128
  enum { SCORED }                       vectors of a query's scores that fit in registers for six queries
  STRIP_ROWS                            activations whose sums with a panel fit in registers; divides PACKED_ROWS
  enum { BOTH_ROWS }                    up to so many activations (4 at most), two panels at once are faster than one
  int bias_of(format)                   constant that group_dots subtracts from quantized weights
  void group_dots(rows, panels, format, values, steps, from, quantized, ahead, dots)
                                        adds Σ (weight − bias) · x to dots[r · panels + n], over a group of 4 · steps
                                        inputs. from[n]: quantized weights of panel n; `values`: the table of formats
                                        that have one; `quantized`: activations; `ahead`: see multiply_panels (panels.h)

A CPU with tile instructions for bytes has another file, which defines HAS_TILES and this interface for tiled.h:

  enum { TILE_ROWS }                    activations of a tile, a multiple of PACKED_ROWS
  enum { TILES_READ_PANELS }            whether tile_dots reads 8-bit weights directly from a panel
  int supports_tiles(group)             whether it handles groups of this size, and the process has permission
  void begin_tiles(group), void end_tiles()     called before and after multiplying with groups of this size
  const uint8_t *tile_weights(format, values, zero, steps, from, to)
                                        unpacks a group of a panel, less `zero`, for tile_dots. Returns `to` (64 · steps
                                        bytes), or `from` if nothing changes
  void tile_dots(panels, is_signed, group, from, weights, reuse_weights, dots)
                                        dots[n][r · LANES + i] = activation r · row i of panel n. `from`: TILE_ROWS
                                        activations of `group` signed bytes; weights[n]: results of tile_weights,
                                        signed or unsigned; `reuse_weights`: the previous call had the same weights

All instruction sets give the same bits: products are added with fused multiply-add, and each sum has one fixed
order. */
#ifndef LLMC_VECTORS_H
#define LLMC_VECTORS_H

#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("clang loop unroll(full)") /* keeps arrays that the loop indexes in registers */

enum { LANES = 16, PACKED_ROWS = 8 /* activations that are interleaved (panels.h) */ };
enum { TABLED = 1, FOUR = 4, SIX = 6, EIGHT = 8 /* weight formats (panels.h): 4 bits with a table, or bits */ };

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
/* `count` rounded up to a multiple of LANES. */
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

/* Steps of four inputs that share bytes in a format. */
INLINE int packed_steps(int format) { return format == EIGHT ? 1 : format == SIX ? 4 : 2; }

/* Prefetch `ahead` bytes after the bytes of step `k` and of the steps that share them. 0 prefetches nothing. */
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

/* Reduce all lanes: combine halves until one value remains. */
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

/* Reduce each of LANES vectors: lane i of x[0] becomes the result for x[i]. */
#define REDUCE_LANES(x, what)                                                     \
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
