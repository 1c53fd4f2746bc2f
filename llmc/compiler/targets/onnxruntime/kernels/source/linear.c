/* Linear(x float [.., K], panels uint8, bias float [N]?, decoding int64 [1]?, words uint16 [..]?) → (y float [.., N],
scratch, words uint16 [..]?): x · Wᵀ + bias.

Of the rows of x the first `decoding` are quantised to 8 bits, all of them where it is not there; the others, tokens of
prompts, are rounded to bfloat16 as the matrix is (rounded_product.h), or are those of the input `words`, which are
rounded already (words.h), and x is not read for them. Where the output `words` is asked for, which takes a gate of a multiple
of 32 numbers, results of prompts go there, and not to y.

Attributes: rows (N), width (K), group, bits, offsets, table, and gated: with 1 panels are those of a gate and of what it lets
through in turn, and y [.., N / 2] is silu(gate) · other. The second output is memory for activations. */
#include "operators.h"
#include "rounded_product.h"

typedef struct {
  Api api;
  Matrix matrix;
  int64_t gated;
} Linear;

typedef struct {
  Product product, prompts; /* those of the first `decoding` rows, and of the others */
  const float *x;
  uint16_t *words; /* rounded activations */
  int64_t rows, decoding, prepared, shares;
  int64_t unit; /* panels that shares end between */
} Step;

static void prepare_share(void *data, size_t share) {
  const Step *s = data;
  const Matrix *m = s->product.matrix;
  int64_t first = share_at(s->prepared, s->shares, share), end = share_at(s->prepared, s->shares, share + 1);
  for (int64_t row = first; row < end; row++) {
    const float *x = s->x + row * m->width;
    if (row < s->decoding) quantise_row(m, x, &s->product.activations, row);
    else round_row(m, x, s->words, row - s->decoding);
  }
}

enum { SHARES_OF_EACH = 3 /* of a thread, so that all end at about the same time */ };

static int64_t unit_of(const Step *s) {
  if (s->rows == s->decoding) return panels_at_once(&s->product, s->rows);
  const int64_t panels = panels_of(s->product.matrix), threads = team_size();
  int64_t unit = threads ? panels_together(s->product.matrix, s->rows - s->decoding) : PANELS_AT_ONCE;
  while (unit > PANELS_AT_ONCE && pieces(panels, unit) < SHARES_OF_EACH * threads) unit /= 2;
  return unit;
}

static void multiply_share(void *data, size_t share) {
  const Step *s = data;
  const int64_t panels = panels_of(s->product.matrix), units = pieces(panels, s->unit);
  const int64_t first = share_at(units, s->shares, share) * s->unit;
  const int64_t end = least(share_at(units, s->shares, share + 1) * s->unit, panels);
  if (s->decoding) multiply(&s->product, first, end, 0, s->decoding);
  if (s->rows > s->decoding) multiply_rounded(&s->prompts, s->words, first, end, s->rows - s->decoding);
}

static Status *compute(void *kernel, Context *context) {
  const Linear *op = kernel;
  const Matrix *m = &op->matrix;
  Tensor x, panels, bias, given;
  TRY(input(op->api, context, 0, 0, &x));
  TRY(input(op->api, context, 1, 1, &panels));
  TRY(optional_input(op->api, context, 2, &bias));
  TRY(optional_input(op->api, context, 4, &given));
  if (x.dims[x.rank - 1] != m->width) return fail(op->api, "llmc.Linear: x has not `width` inputs");
  if (panels.dims[0] != panels_of(m) * panel_bytes(m)) return fail(op->api, "llmc.Linear: panels of another matrix");
  if (bias.there && (op->gated || bias.rank != 1 || bias.dims[0] != m->rows))
    return fail(op->api, "llmc.Linear: a bias has a number for each row, and a gate has none");
  Step s = {.x = x.data, .rows = lines_of(&x)};
  TRY(decoding_input(op->api, context, 3, s.rows, &s.decoding));
  s.product = (Product){.matrix = m, .gated = op->gated, .panels = panels.data, .bias = bias.data};
  x.dims[x.rank - 1] = op->gated ? m->rows / 2 : m->rows;
  void *y, *scratch, *words;
  const int64_t prompts = s.rows - s.decoding, numbers = rounded_numbers(m->width, prompts);
  if (given.there && (given.rank != 1 || given.dims[0] != numbers))
    return fail(op->api, "llmc.Linear: words of other tokens, or of another width");
  const int64_t quantised = padded(activation_bytes(m, s.decoding)), results = rounded_numbers(m->rows / 2, prompts);
  const int64_t bytes = quantised + (given.there ? 0 : 2 * numbers) + 64;
  int asked;
  TRY(output(op->api, context, 0, x.dims, x.rank, &y));
  TRY(output(op->api, context, 1, &bytes, 1, &scratch));
  TRY(optional_output(op->api, context, 2, &results, 1, &asked, &words));
  if (asked && (!op->gated || m->rows % (2 * DEPTH)))
    return fail(op->api, "llmc.Linear: words are results of a gate, of a multiple of 32 numbers");
  if (!s.rows) return NULL;
  uint8_t *memory = (uint8_t *)padded((int64_t)scratch);
  s.product.y = y;
  s.prompts = s.product;
  s.prompts.y += s.decoding * x.dims[x.rank - 1];
  s.prompts.words = words;
  s.words = given.there ? given.data : (uint16_t *)(memory + quantised);
  s.product.activations = place(m, s.decoding, memory);
  s.product.activations.tiled = takes_tiles(m, s.decoding);
  s.prepared = given.there ? s.decoding : s.rows;
  if (s.prepared) {
    s.shares = shares_of(s.prepared * m->width * QUANTISED, s.prepared);
    TRY(parallel(op->api, context, (size_t)s.shares, prepare_share, &s));
  }
  s.unit = unit_of(&s);
  s.shares = shares_of(worth(m, s.rows), pieces(panels_of(m), s.unit));
  return parallel(op->api, context, (size_t)s.shares, multiply_share, &s);
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  Linear op = {.api = api};
  TRY(matrix_attributes(api, info, &op.matrix));
  TRY(int_attribute(api, info, "gated", &op.gated));
  if (op.gated >> 1 || (op.gated && op.matrix.rows % (2 * LANES)))
    return fail(api, "llmc.Linear: gated is 0, or 1 for a multiple of 32 rows");
  return keep(api, &op, sizeof op, kernel);
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
    .output_type = output_type, .output_kind = output_kind, .compute_or_fail = compute, .destroy = release,
    .first_version = version_one, .last_version = any_version,
};
