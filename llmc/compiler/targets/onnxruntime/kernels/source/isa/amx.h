/* int8 tiles of AMX (Intel Sapphire Rapids and later), over avx512.h. */

#define HAS_TILES

enum { TILE_ROWS = 16, TILES_READ_PANELS = 1, TILE_DEPTH = 64 /* bytes of a tile row */ };

/* Tile registers: the sums of two panels, a step of both panels (4 · 16 inputs each), and the activations. */
enum { SUMS = 0, OTHER_SUMS = 1, PANEL = 2, OTHER_PANEL = 3, ACTIVATIONS = 4 };

typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} Shapes;

/* Ask Linux for permission to use AMX tiles, which a process needs before its first tile instruction
(Documentation/arch/x86/xstate.rst). */
INLINE int request_tiles(void) {
#ifdef EMULATED_TILES
  return 1;
#else
  long done;
  __asm__ volatile("syscall" : "=a"(done) : "a"(158), "D"(0x1023), "S"(18) : "rcx", "r11", "memory");
  return done == 0;
#endif
}

/* Whether the process may use AMX tiles. Requests the permission once. */
INLINE int tiles_allowed(void) {
  static int may; /* 1: yes, −1: no, 0: not requested yet */
  if (!may) may = request_tiles() ? 1 : -1;
  return may > 0;
}

INLINE int supports_tiles(int64_t group) {
  if (group < TILE_DEPTH / 2) return 0;
  if (group > TILE_DEPTH ? group % TILE_DEPTH : group % 4) return 0;
  return tiles_allowed();
}

INLINE void begin_tiles(int64_t group) {
  const int64_t depth = group < TILE_DEPTH ? group : TILE_DEPTH;
  Shapes shapes = {.palette = 1};
  for (int i = SUMS; i <= ACTIVATIONS; i++) shapes.bytes[i] = 4 * LANES, shapes.rows[i] = TILE_ROWS;
  shapes.rows[PANEL] = shapes.rows[OTHER_PANEL] = (uint8_t)(depth / 4);
  shapes.bytes[ACTIVATIONS] = (uint16_t)depth;
  _tile_loadconfig(&shapes);
}
INLINE void end_tiles(void) { _tile_release(); }

/* Unpack a group to bytes, in the order of a panel: four inputs of each of 16 rows at a time. */
INLINE const uint8_t *tile_weights(const int format, const int8_t *values, int zero, int64_t steps, const uint8_t *from,
                                   uint8_t *to) {
  if (format == EIGHT && !zero) return from;
  const int64_t step_stride = steps / packed_steps(format);
  const __m512i table = table_of(format, values), zeros = _mm512_set1_epi8((char)zero);
  for (int64_t k = 0; k < step_stride; k++) {
    __m512i four[4];
    unpack_steps(format, table, steps, from, k, four);
    UNROLL
    for (int i = 0; i < packed_steps(format); i++)
      _mm512_storeu_si512(to + 4 * LANES * (k + i * step_stride), _mm512_sub_epi8(four[i], zeros));
  }
  return to;
}

INLINE void tile_dots(const int panels, const int is_signed, int64_t group, const int8_t *from,
                      const uint8_t *const *weights, int reuse_weights, int32_t (*dots)[TILE_ROWS * LANES]) {
  const int load_weights = !reuse_weights || group > TILE_DEPTH;
  _tile_zero(SUMS);
  if (panels == 2) _tile_zero(OTHER_SUMS);
  for (int64_t at = 0; at < group; at += TILE_DEPTH) {
    _tile_loadd(ACTIVATIONS, from + at, group);
    if (load_weights) _tile_loadd(PANEL, weights[0] + LANES * at, 4 * LANES);
    if (is_signed) _tile_dpbssd(SUMS, ACTIVATIONS, PANEL);
    else _tile_dpbsud(SUMS, ACTIVATIONS, PANEL);
    if (panels == 2) {
      if (load_weights) _tile_loadd(OTHER_PANEL, weights[1] + LANES * at, 4 * LANES);
      if (is_signed) _tile_dpbssd(OTHER_SUMS, ACTIVATIONS, OTHER_PANEL);
      else _tile_dpbsud(OTHER_SUMS, ACTIVATIONS, OTHER_PANEL);
    }
  }
  _tile_stored(SUMS, dots[0], 4 * LANES);
  if (panels == 2) _tile_stored(OTHER_SUMS, dots[1], 4 * LANES);
}
