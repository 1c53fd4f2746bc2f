/* Linear(x float [.., K], panels uint8, bias float [N]?, decoding int64 [1]?, words uint16 [..]?)
  → (y float [.., N], scratch, words uint16 [..]?)

Computes x · Wᵀ + bias. The first `decoding` rows of x are decode rows, or all rows if that input is absent. Activations
of decode rows are quantized to 8 bits. The other rows are prefill rows, for which activations and weights are rounded
to bfloat16 (rounded_matmul.h).

The input `words` replaces the prefill rows of x with activations that are already rounded (words.h). If the output
`words` is requested, results of prefill rows go there instead of to y. It needs a gate whose width is a multiple of 32.

Attributes: rows (N), width (K), group, bits, offsets, table, gated. With gated = 1, panels alternate between the gate
and the other factor, and y [.., N / 2] is silu(gate) · other. The output `scratch` is memory for activations. */
#include "operators.h"
#include "rounded_matmul.h"

typedef struct {
  Api api;
  Matrix matrix;
  int64_t gated;
} Linear;

typedef struct {
  Matmul decode_matmul, prefill_matmul; /* for the first `decode_rows` rows, and for the others */
  const float *x;
  uint16_t *words; /* rounded activations */
  int64_t rows, decode_rows, prepared, shares;
  int64_t unit; /* panels; shares end at multiples of it */
} Step;

static void prepare_share(void *data, size_t share) {
  const Step *s = data;
  const Matrix *m = s->decode_matmul.matrix;
  int64_t first = share_at(s->prepared, s->shares, share), end = share_at(s->prepared, s->shares, share + 1);
  for (int64_t row = first; row < end; row++) {
    const float *x = s->x + row * m->width;
    if (row < s->decode_rows) quantize_row(m, x, &s->decode_matmul.activations, row);
    else round_row(m, x, s->words, row - s->decode_rows);
  }
}

enum { SHARES_OF_EACH = 3 /* of each thread, so that all threads end at about the same time */ };

static int64_t unit_of(const Step *s) {
  if (s->rows == s->decode_rows) return panels_at_once(&s->decode_matmul, s->rows);
  const int64_t panels = panels_of(s->decode_matmul.matrix), threads = team_size();
  int64_t unit = threads ? panels_together(s->decode_matmul.matrix, s->rows - s->decode_rows) : PANELS_AT_ONCE;
  while (unit > PANELS_AT_ONCE && ceil_div(panels, unit) < SHARES_OF_EACH * threads) unit /= 2;
  return unit;
}

static void multiply_share(void *data, size_t share) {
  const Step *s = data;
  const int64_t panels = panels_of(s->decode_matmul.matrix), units = ceil_div(panels, s->unit);
  const int64_t first = share_at(units, s->shares, share) * s->unit;
  const int64_t end = min64(share_at(units, s->shares, share + 1) * s->unit, panels);
  if (s->decode_rows) multiply(&s->decode_matmul, first, end, 0, s->decode_rows);
  if (s->rows > s->decode_rows) multiply_rounded(&s->prefill_matmul, s->words, first, end, s->rows - s->decode_rows);
}

static Status *compute(void *kernel, Context *context) {
  const Linear *op = kernel;
  const Matrix *m = &op->matrix;
  Tensor x, panels, bias, words_in;
  TRY(input(op->api, context, 0, 0, &x));
  TRY(input(op->api, context, 1, 1, &panels));
  TRY(optional_input(op->api, context, 2, &bias));
  TRY(optional_input(op->api, context, 4, &words_in));
  if (x.dims[x.rank - 1] != m->width) return fail(op->api, "llmc.Linear: x has not `width` inputs");
  if (panels.dims[0] != panels_of(m) * panel_bytes(m)) return fail(op->api, "llmc.Linear: panels of another matrix");
  if (bias.present && (op->gated || bias.rank != 1 || bias.dims[0] != m->rows))
    return fail(op->api, "llmc.Linear: a bias has a number for each row, and a gate has none");
  Step s = {.x = x.data, .rows = lines_of(&x)};
  TRY(decode_rows_input(op->api, context, 3, s.rows, &s.decode_rows));
  s.decode_matmul = (Matmul){.matrix = m, .gated = op->gated, .panels = panels.data, .bias = bias.data};
  x.dims[x.rank - 1] = op->gated ? m->rows / 2 : m->rows;
  void *y, *scratch, *words;
  const int64_t prefill_rows = s.rows - s.decode_rows, numbers = rounded_numbers(m->width, prefill_rows);
  if (words_in.present && (words_in.rank != 1 || words_in.dims[0] != numbers))
    return fail(op->api, "llmc.Linear: words of other tokens, or of another width");
  const int64_t quantized_bytes = pad_line(activation_bytes(m, s.decode_rows)),
                results = rounded_numbers(m->rows / 2, prefill_rows);
  const int64_t bytes = quantized_bytes + (words_in.present ? 0 : 2 * numbers) + 64;
  int requested;
  TRY(output(op->api, context, 0, x.dims, x.rank, &y));
  TRY(output(op->api, context, 1, &bytes, 1, &scratch));
  TRY(optional_output(op->api, context, 2, &results, 1, &requested, &words));
  if (requested && (!op->gated || m->rows % (2 * DEPTH)))
    return fail(op->api, "llmc.Linear: words are results of a gate, of a multiple of 32 numbers");
  if (!s.rows) return NULL;
  uint8_t *memory = (uint8_t *)pad_line((int64_t)scratch);
  s.decode_matmul.y = y;
  s.prefill_matmul = s.decode_matmul;
  s.prefill_matmul.y += s.decode_rows * x.dims[x.rank - 1];
  s.prefill_matmul.words = words;
  s.words = words_in.present ? words_in.data : (uint16_t *)(memory + quantized_bytes);
  s.decode_matmul.activations = lay_out_activations(m, s.decode_rows, memory);
  s.decode_matmul.activations.tiled = uses_tiles(m, s.decode_rows);
  s.prepared = words_in.present ? s.decode_rows : s.rows;
  if (s.prepared) {
    s.shares = shares_of(s.prepared * m->width * QUANTIZE_BYTES, s.prepared);
    TRY(parallel(op->api, context, (size_t)s.shares, prepare_share, &s));
  }
  s.unit = unit_of(&s);
  s.shares = shares_of(matmul_cost(m, s.rows), ceil_div(panels_of(m), s.unit));
  return parallel(op->api, context, (size_t)s.shares, multiply_share, &s);
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  Linear op = {.api = api};
  TRY(matrix_attributes(api, info, &op.matrix));
  TRY(int_attribute(api, info, "gated", &op.gated));
  if (op.gated >> 1 || (op.gated && op.matrix.rows % (2 * LANES)))
    return fail(api, "llmc.Linear: gated is 0, or 1 for a multiple of 32 rows");
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "Linear"; }
static size_t inputs(const Operator *self) { return (void)self, 5; }
static size_t outputs(const Operator *self) { return (void)self, 3; }
static int input_type(const Operator *self, size_t at) {
  static const int types[] = {FLOAT32, UINT8, FLOAT32, INT64, UINT16};
  return (void)self, types[at];
}
static int input_kind(const Operator *self, size_t at) { return (void)self, at > 1 ? OPTIONAL : REQUIRED; }
static int output_type(const Operator *self, size_t at) { return (void)self, at == 2 ? UINT16 : at ? UINT8 : FLOAT32; }
static int output_kind(const Operator *self, size_t at) { return (void)self, at == 2 ? OPTIONAL : REQUIRED; }

const Operator linear_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = input_kind, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = output_kind, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
