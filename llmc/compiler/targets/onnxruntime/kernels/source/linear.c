/* Linear(x float [.., K], panels uint8, bias float [N]?) → (y float [.., N], scratch): x · Wᵀ + bias.

Attributes: rows (N), width (K), group, bits, offsets, table, and gated: with 1 panels are those of a gate and of what it lets
through in turn, and y [.., N / 2] is silu(gate) · other. The second output is memory for quantised activations. */
#include "operators.h"
#include "strips.h"

typedef struct {
  Api api;
  Matrix matrix;
  int64_t gated;
} Linear;

typedef struct {
  Product product;
  const float *x;
  int64_t rows, shares;
} Step;

static void quantise_share(void *data, size_t share) {
  const Step *s = data;
  const Matrix *m = s->product.matrix;
  int64_t first = share_at(s->rows, s->shares, share), end = share_at(s->rows, s->shares, share + 1);
  for (int64_t row = first; row < end; row++) quantise_row(m, s->x + row * m->width, &s->product.activations, row);
}

static void multiply_share(void *data, size_t share) {
  const Step *s = data;
  const int64_t panels = panels_of(s->product.matrix), unit = panels_at_once(&s->product, s->rows);
  const int64_t units = pieces(panels, unit);
  const int64_t first = share_at(units, s->shares, share) * unit, end = share_at(units, s->shares, share + 1) * unit;
  multiply(&s->product, first, end < panels ? end : panels, 0, s->rows);
}

static Status *compute(void *kernel, Context *context) {
  const Linear *op = kernel;
  const Matrix *m = &op->matrix;
  Tensor x, panels, bias;
  TRY(input(op->api, context, 0, 0, &x));
  TRY(input(op->api, context, 1, 1, &panels));
  TRY(optional_input(op->api, context, 2, &bias));
  if (x.dims[x.rank - 1] != m->width) return fail(op->api, "llmc.Linear: x has not `width` inputs");
  if (panels.dims[0] != panels_of(m) * panel_bytes(m)) return fail(op->api, "llmc.Linear: panels of another matrix");
  if (bias.there && (op->gated || bias.rank != 1 || bias.dims[0] != m->rows))
    return fail(op->api, "llmc.Linear: a bias has a number for each row, and a gate has none");
  Step s = {.x = x.data, .rows = lines_of(&x)};
  s.product = (Product){.matrix = m, .gated = op->gated, .panels = panels.data, .bias = bias.data};
  x.dims[x.rank - 1] = op->gated ? m->rows / 2 : m->rows;
  void *y, *scratch;
  int64_t bytes = activation_bytes(m, s.rows);
  TRY(output(op->api, context, 0, x.dims, x.rank, &y));
  TRY(output(op->api, context, 1, &bytes, 1, &scratch));
  if (!s.rows) return NULL;
  s.product.y = y;
  s.product.activations = place(m, s.rows, scratch);
  s.product.activations.tiled = takes_tiles(m, s.rows);
  s.shares = shares_of(s.rows * m->width * QUANTISED, s.rows);
  TRY(parallel(op->api, context, (size_t)s.shares, quantise_share, &s));
  s.shares = shares_of(worth(m, s.rows), pieces(panels_of(m), panels_at_once(&s.product, s.rows)));
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
static size_t inputs(const Operator *self) { return (void)self, 3; }
static size_t outputs(const Operator *self) { return (void)self, 2; }
static int input_type(const Operator *self, size_t at) { return (void)self, at == 1 ? UINT8 : FLOAT32; }
static int input_kind(const Operator *self, size_t at) { return (void)self, at == 2 ? OPTIONAL : REQUIRED; }
static int output_type(const Operator *self, size_t at) { return (void)self, at ? UINT8 : FLOAT32; }

const Operator linear_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = input_kind, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release,
    .first_version = version_one, .last_version = any_version,
};
