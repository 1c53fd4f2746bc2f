/* ExpertLinear(x float [T, K] or [T, C, K], ids int64 [T, C], panels uint8, bias float [E, N]?) → y float [T, C, N]

y[t, c] = x[t] · W[e]ᵀ + bias[e], or x[t, c] · W[e]ᵀ + bias[e], where e = ids[t, c]. Layers whose activation Experts
does not support use two of these, with other operators in between.

Attributes: experts (E), rows (N), width (K), group, bits, offsets, table. panels holds E consecutive matrices [N,
K]. */
#include "expert_batches.h"

extern void *malloc(size_t);
extern void free(void *);

typedef struct {
  Api api;
  Matrix matrix;
  int64_t experts;
} ExpertLinear;

typedef struct {
  const ExpertLinear *op;
  const float *x, *bias;
  const int64_t *ids;
  int64_t pairs, share; /* T · C; pairs that share a row of x: C or 1 */
  Matmul matmul;
  ExpertBatches batches;
  int64_t pieces;
} Step;

static void quantize_share(void *data, size_t at) {
  const Step *s = data;
  quantize_pairs(&s->batches, &s->matmul, s->x, s->share, s->pieces, at);
}

/* Multiply a share of the panels of every chosen expert. Results are added to the biases, or to 0. */
static void multiply_share(void *data, size_t at) {
  const Step *s = data;
  const Matrix *m = s->matmul.matrix;
  const int64_t first = share_at(panels_of(m), s->pieces, at), end = share_at(panels_of(m), s->pieces, at + 1);
  const int64_t stop = end * LANES < m->rows ? end * LANES : m->rows;
  for (int64_t pair = 0; pair < s->pairs; pair++)
    for (int64_t column = first * LANES; column < stop; column++)
      s->matmul.y[pair * m->rows + column] = s->bias ? s->bias[s->ids[pair] * m->rows + column] : 0;
  for (int64_t i = 0; i < s->batches.count; i++) {
    const ExpertBatch *batch = s->batches.each + i;
    const Matmul one = matmul_of_expert(&s->matmul, batch->expert);
    multiply(&one, first, end, batch->row, batch->last);
  }
}

static Status *in_memory(Step *s, Context *context) {
  const Matrix *m = s->matmul.matrix;
  s->batches = batches_of(s->pairs, s->op->experts);
  const int64_t rows = s->batches.max_rows;
  uint8_t *memory = malloc((size_t)(64 + batches_bytes(&s->batches) + pad_line(4 * rows) + activation_bytes(m, rows)));
  if (!memory) return fail(s->op->api, "llmc.ExpertLinear: out of memory");
  uint8_t *at = sort_pairs(&s->batches, s->ids, s->pairs, (uint8_t *)pad_line((int64_t)memory));
  float *shares = (float *)at;
  for (int64_t row = 0; row < s->batches.rows; row++) shares[row] = 1;
  s->matmul.y_rows = s->batches.pairs, s->matmul.routing_weights = shares;
  s->matmul.activations = lay_out_activations(m, s->batches.rows, at + pad_line(4 * rows));
  s->pieces = shares_of(s->batches.rows * m->width * QUANTIZE_BYTES, s->batches.rows);
  Status *failed = parallel(s->op->api, context, (size_t)s->pieces, quantize_share, s);
  s->pieces = shares_of(s->batches.count * panels_of(m) * panel_bytes(m), panels_of(m));
  if (!failed) failed = parallel(s->op->api, context, (size_t)s->pieces, multiply_share, s);
  free(memory);
  return failed;
}

static Status *compute(void *kernel, Context *context) {
  const ExpertLinear *op = kernel;
  const Matrix *m = &op->matrix;
  Tensor x, ids, panels, bias;
  TRY(input(op->api, context, 0, 0, &x));
  TRY(input(op->api, context, 1, 2, &ids));
  TRY(input(op->api, context, 2, 1, &panels));
  TRY(optional_input(op->api, context, 3, &bias));
  if (x.dims[x.rank - 1] != m->width) return fail(op->api, "llmc.ExpertLinear: x has not `width` inputs");
  if ((x.rank != 2 && x.rank != 3) || x.dims[0] != ids.dims[0] || (x.rank == 3 && x.dims[1] != ids.dims[1]))
    return fail(op->api, "llmc.ExpertLinear: ids are not of the tokens of x");
  if (!holds_experts(&panels, op->experts, m)) return fail(op->api, "llmc.ExpertLinear: panels of other matrices");
  if (bias.present && (bias.rank != 2 || bias.dims[0] != op->experts || bias.dims[1] != m->rows))
    return fail(op->api, "llmc.ExpertLinear: a bias has a number for each expert's rows");
  Step s = {.op = op, .x = x.data, .bias = bias.present ? bias.data : NULL, .ids = ids.data};
  s.pairs = ids.dims[0] * ids.dims[1], s.share = x.rank == 2 ? ids.dims[1] : 1;
  TRY(check_ids(op->api, s.ids, s.pairs, op->experts));
  const int64_t dims[3] = {ids.dims[0], ids.dims[1], m->rows};
  void *y;
  TRY(output(op->api, context, 0, dims, 3, &y));
  s.matmul = (Matmul){.matrix = m, .panels = panels.data, .y = y};
  return s.pairs ? in_memory(&s, context) : NULL;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  ExpertLinear op = {.api = api};
  TRY(matrix_attributes(api, info, &op.matrix));
  TRY(int_attribute(api, info, "experts", &op.experts));
  if (op.experts < 1 || op.experts > MAX_EXPERTS) return fail(api, "llmc.ExpertLinear: there are 1 to 65536 experts");
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "ExpertLinear"; }
static size_t inputs(const Operator *self) { return (void)self, 4; }
static size_t outputs(const Operator *self) { return (void)self, 1; }
static int input_type(const Operator *self, size_t at) {
  return (void)self, at == 1 ? INT64 : at == 2 ? UINT8 : FLOAT32;
}
static int input_kind(const Operator *self, size_t at) { return (void)self, at == 3 ? OPTIONAL : REQUIRED; }
static int output_type(const Operator *self, size_t at) { return (void)self, (void)at, FLOAT32; }

const Operator expert_linear_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = input_kind, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
