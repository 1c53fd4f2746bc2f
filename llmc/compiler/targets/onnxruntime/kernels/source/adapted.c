/* Adapted(base float [.., N], x float [.., K], adapters int64 [..], low uint8 [R, K'], high uint8 [R, N'],
  scales float [R], ends int64 [A + 1]) → (y float [.., N], scratch)

Adds each token's LoRA update to `base`. `low` holds the quantized A matrices and `high` the quantized B matrices.

All adapters share the R ranks. Adapter a owns ranks ends[a − 1] … ends[a] − 1; adapter 0 owns none. A token of adapter
a gets y = base + Σ (low_r · x) · scales_r · high_r over the ranks of a. The kernel reads no other ranks.

`low` and `high` are signed 8-bit values. K' and N' are K and N rounded up to a multiple of LANES; the padding is 0. The
second output is scratch memory for (low_r · x) · scales_r. */
#include "operators.h"
#include "strips.h"

enum {
  FEW = 4 /* ranks, or vectors of y, whose sums fit in registers */,
  WEIGHT_BYTES = 4 /* cost of an 8-bit weight here, in bytes of panels */
};

typedef int8_t Int8x16 __attribute__((vector_size(16), aligned(1), may_alias));

typedef struct {
  Api api;
} Adapted;

typedef struct {
  const float *base, *x, *scales;
  const int64_t *adapters, *ends;
  const uint8_t *low, *high;
  float *y, *projected; /* projected [tokens, max_ranks] */
  int64_t tokens, rows, width, max_ranks, shares;
} Step;

static inline Floats load_quantized(const uint8_t *at) { return __builtin_convertvector(*(const Int8x16 *)at, Floats); }
static inline int64_t first_of(const Step *s, int64_t token) {
  return s->adapters[token] ? s->ends[s->adapters[token] - 1] : 0;
}
static inline int64_t count_of(const Step *s, int64_t token) {
  return s->adapters[token] ? s->ends[s->adapters[token]] - first_of(s, token) : 0;
}

/* Project x onto up to FEW of the token's ranks, from `rank` on. */
static void project_low(const Step *s, int64_t token, int64_t rank) {
  const int64_t line = pad_lanes(s->width), left = count_of(s, token) - rank, first = first_of(s, token) + rank;
  if (left <= 0) return;
  const float *x = s->x + token * s->width;
  const uint8_t *quantized[FEW];
  Floats sums[FEW];
  UNROLL
  for (int i = 0; i < FEW; i++) quantized[i] = s->low + (first + (i < left ? i : 0)) * line, sums[i] = splat(0.0f);
  for (int64_t k = 0; k < s->width; k += LANES) {
    const Floats x_lanes = load_lanes(first_lanes(s->width - k), x + k);
    UNROLL
    for (int i = 0; i < FEW; i++) sums[i] = fma16(load_quantized(quantized[i] + k), x_lanes, sums[i]);
  }
  for (int i = 0; i < FEW && i < left; i++)
    s->projected[token * s->max_ranks + rank + i] = sum_of(sums[i]) * s->scales[first + i];
}

/* Add the projected values to up to FEW vectors of y, from `column` on. */
static void add_high(const Step *s, int64_t token, int64_t column) {
  const int64_t line = pad_lanes(s->rows), count = count_of(s, token), at = token * s->rows + column;
  const int64_t vectors = ceil_div(s->rows - column, LANES);
  const uint8_t *quantized = s->high + first_of(s, token) * line + column;
  const float *projected = s->projected + token * s->max_ranks;
  Floats sums[FEW];
  UNROLL
  for (int i = 0; i < FEW; i++)
    if (i < vectors) sums[i] = load_lanes(first_lanes(s->rows - column - i * LANES), s->base + at + i * LANES);
  for (int64_t r = 0; r < count; r++, quantized += line) {
    const Floats value = splat(projected[r]);
    UNROLL
    for (int i = 0; i < FEW; i++)
      if (i < vectors) sums[i] = fma16(load_quantized(quantized + i * LANES), value, sums[i]);
  }
  UNROLL
  for (int i = 0; i < FEW; i++)
    if (i < vectors) store_lanes(s->y + at + i * LANES, first_lanes(s->rows - column - i * LANES), sums[i]);
}

static void low_share(void *data, size_t share) {
  const Step *s = data;
  const int64_t each = ceil_div(s->max_ranks, FEW), all = s->tokens * each, end = share_at(all, s->shares, share + 1);
  for (int64_t i = share_at(all, s->shares, share); i < end; i++) project_low(s, i / each, i % each * FEW);
}

static void high_share(void *data, size_t share) {
  const Step *s = data;
  const int64_t each = ceil_div(s->rows, FEW * LANES), all = s->tokens * each,
                end = share_at(all, s->shares, share + 1);
  for (int64_t i = share_at(all, s->shares, share); i < end; i++) add_high(s, i / each, i % each * FEW * LANES);
}

/* Check the adapter numbers and rank ranges, and set s->max_ranks to the largest rank count of any token. */
static Status *check(const Adapted *op, Step *s, int64_t adapters, int64_t ranks) {
  for (int64_t a = 0; a < adapters; a++)
    if (s->ends[a] < 0 || s->ends[a + 1] < s->ends[a] || s->ends[a + 1] > ranks)
      return fail(op->api, "llmc.Adapted: the ranks of an adapter are not among those of the matrices");
  for (int64_t t = 0; t < s->tokens; t++) {
    if (s->adapters[t] < 0 || s->adapters[t] > adapters)
      return fail(op->api, "llmc.Adapted: there is no adapter of this number");
    if (count_of(s, t) > s->max_ranks) s->max_ranks = count_of(s, t);
  }
  return NULL;
}

static Status *compute(void *kernel, Context *context) {
  const Adapted *op = kernel;
  Tensor base, x, adapters, low, high, scales, ends;
  TRY(input(op->api, context, 0, 0, &base));
  TRY(input(op->api, context, 1, base.rank, &x));
  TRY(optional_input(op->api, context, 2, &adapters));
  TRY(input(op->api, context, 3, 2, &low));
  TRY(input(op->api, context, 4, 2, &high));
  TRY(input(op->api, context, 5, 1, &scales));
  TRY(input(op->api, context, 6, 1, &ends));
  Step s = {
      .base = base.data, .x = x.data, .scales = scales.data, .adapters = adapters.data, .ends = ends.data,
      .low = low.data, .high = high.data, .tokens = lines_of(&x), .rows = base.dims[base.rank - 1],
      .width = x.dims[x.rank - 1],
  };
  const int64_t ranks = scales.dims[0];
  if (adapters.rank >= MAX_RANK) return fail(op->api, "llmc.Adapted: adapters have too many dimensions");
  adapters.dims[adapters.rank++] = s.width;
  if (!same_but_last(&x, &base, s.width) || !same_but_last(&x, &adapters, s.width) || !s.rows || !s.width ||
      !ends.dims[0] || low.dims[0] != ranks || high.dims[0] != ranks || low.dims[1] != pad_lanes(s.width) ||
      high.dims[1] != pad_lanes(s.rows))
    return fail(op->api, "llmc.Adapted: inputs of shapes that do not belong together");
  TRY(check(op, &s, ends.dims[0] - 1, ranks));
  void *y, *scratch;
  const int64_t bytes = s.tokens * s.max_ranks * 4;
  TRY(output(op->api, context, 0, base.dims, base.rank, &y));
  TRY(output(op->api, context, 1, &bytes, 1, &scratch));
  if (!s.tokens) return NULL;
  s.y = y, s.projected = scratch;
  if (s.max_ranks) {
    s.shares = shares_of(s.tokens * s.max_ranks * s.width * WEIGHT_BYTES, s.tokens * ceil_div(s.max_ranks, FEW));
    TRY(parallel(op->api, context, (size_t)s.shares, low_share, &s));
  }
  s.shares = shares_of(s.tokens * s.max_ranks * s.rows * WEIGHT_BYTES, s.tokens * ceil_div(s.rows, FEW * LANES));
  return parallel(op->api, context, (size_t)s.shares, high_share, &s);
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self, (void)info;
  Adapted op = {.api = api};
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "Adapted"; }
static size_t inputs(const Operator *self) { return (void)self, 7; }
static size_t outputs(const Operator *self) { return (void)self, 2; }
static int input_type(const Operator *self, size_t at) {
  static const int types[] = {FLOAT32, FLOAT32, INT64, UINT8, UINT8, FLOAT32, INT64};
  return (void)self, types[at];
}
static int output_type(const Operator *self, size_t at) { return (void)self, at ? UINT8 : FLOAT32; }

const Operator adapted_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = required, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
