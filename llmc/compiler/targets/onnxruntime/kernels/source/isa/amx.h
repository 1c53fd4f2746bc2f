/* Tiles of 16 rows over avx512.h, for CPUs that multiply tiles of bytes (Intel Sapphire Rapids and later). */

enum { TILE_DEPTH = 64 /* bytes of a tile's row */ };

/* Tiles: sums of two panels, 4 · 16 inputs of each, and activations. */
enum { SUMS = 0, OTHERS = 1, PANEL = 2, OTHER_PANEL = 3, GIVEN = 4 };

typedef struct {
  uint8_t palette, start, none[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} Shapes;

/* Whether this process may use tiles, which Linux asks it to say beforehand (Documentation/arch/x86/xstate.rst). */
INLINE int may_tile(void) {
#ifdef EMULATED_TILES
  return 1;
#else
  long done;
  __asm__ volatile("syscall" : "=a"(done) : "a"(158), "D"(0x1023), "S"(18) : "rcx", "r11", "memory");
  return done == 0;
#endif
}
INLINE int tiles_allowed(void) {
  static int may; /* 1: yes, −1: no */
  if (!may) may = may_tile() ? 1 : -1;
  return may > 0;
}

/* For products of `depth` inputs at a time. */
INLINE void begin_tiles(int64_t depth) {
  Shapes shapes = {.palette = 1};
  for (int i = SUMS; i <= GIVEN; i++) shapes.bytes[i] = 4 * LANES, shapes.rows[i] = TILE_ROWS;
  shapes.rows[PANEL] = shapes.rows[OTHER_PANEL] = (uint8_t)(depth / 4);
  shapes.bytes[GIVEN] = (uint16_t)depth;
  _tile_loadconfig(&shapes);
}
INLINE void end_tiles(void) { _tile_release(); }

/* The codes of a group of a panel less `zero`, as bytes, in the order that a tile has: four inputs of each of 16 rows. */
INLINE void tile_codes(const int coding, const int8_t *values, int zero, int64_t steps, const uint8_t *from, uint8_t *to) {
  const int64_t apart = steps / sharing(coding);
  const __m512i table = table_of(coding, values), zeros = _mm512_set1_epi8((char)zero);
  for (int64_t k = 0; k < apart; k++) {
    __m512i four[4];
    unpacked(coding, table, steps, from, k, four);
    UNROLL
    for (int i = 0; i < sharing(coding); i++)
      _mm512_storeu_si512(to + 4 * LANES * (k + i * apart), _mm512_sub_epi8(four[i], zeros));
  }
}

/* dots[n] = activations · panel n: `from` 16 rows of `group` signed bytes, codes[n] bytes of the panel, with a sign or
without one, four inputs of each of 16 rows at a time. With `held` the panels are in their tiles already. */
INLINE void tile_dots(const int panels, const int with_sign, int64_t group, const int8_t *from, const uint8_t *const *codes, int held,
                      int32_t (*dots)[TILE_ROWS * LANES]) {
  _tile_zero(SUMS);
  if (panels == 2) _tile_zero(OTHERS);
  for (int64_t at = 0; at < group; at += TILE_DEPTH) {
    _tile_loadd(GIVEN, from + at, group);
    if (!held) _tile_loadd(PANEL, codes[0] + LANES * at, 4 * LANES);
    if (with_sign) _tile_dpbssd(SUMS, GIVEN, PANEL);
    else _tile_dpbsud(SUMS, GIVEN, PANEL);
    if (panels == 2) {
      if (!held) _tile_loadd(OTHER_PANEL, codes[1] + LANES * at, 4 * LANES);
      if (with_sign) _tile_dpbssd(OTHERS, GIVEN, OTHER_PANEL);
      else _tile_dpbsud(OTHERS, GIVEN, OTHER_PANEL);
    }
  }
  _tile_stored(SUMS, dots[0], 4 * LANES);
  if (panels == 2) _tile_stored(OTHERS, dots[1], 4 * LANES);
}
