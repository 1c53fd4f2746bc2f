/* Common code of instruction sets without lane masks: Lanes is the number of leading lanes. */

typedef int64_t Lanes;

#define LANE_NUMBERS ((Ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})

INLINE Lanes first_lanes(int64_t count) { return count >= LANES ? LANES : count > 0 ? count : 0; }
INLINE Halves load_half_lanes(Lanes lanes, const uint16_t *from) {
  if (__builtin_expect(lanes == LANES, 1)) return load_halves(from);
  uint16_t buffer[LANES] = {0};
  for (int64_t i = 0; i < lanes; i++) buffer[i] = from[i];
  return load_halves(buffer);
}
INLINE void store_half_lanes(uint16_t *to, Lanes lanes, Halves x) {
  if (__builtin_expect(lanes == LANES, 1)) {
    *(HalvesAnywhere *)to = x;
    return;
  }
  for (int64_t i = 0; i < lanes; i++) to[i] = x[i];
}
INLINE Floats select_lanes(int64_t first, int64_t end, Floats x, Floats other) {
  if (first <= 0 && end >= LANES) return x;
  const Ints lanes = (LANE_NUMBERS >= splat_ints((int32_t)first_lanes(first))) &
                    (LANE_NUMBERS < splat_ints((int32_t)first_lanes(end)));
  return (Floats)(((Ints)x & lanes) | ((Ints)other & ~lanes));
}
INLINE Floats zero_below(Floats x, float limit, Floats y) { return (Floats)((Ints)y & ~(x < splat(limit))); }
INLINE Ints to_ints(Floats x);
INLINE Floats times_power(Floats x, Floats n) { return x * (Floats)((to_ints(n) + 127) << 23); }
