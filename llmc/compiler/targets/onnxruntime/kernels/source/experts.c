/* Experts(x float [T, H], ids int64 [T, K], shares float [T, K], gate_up uint8, down uint8) → y float [T, H]

y[t] = Σ over k of shares[t, k] · (silu(gate) · up) · down[e]ᵀ, where e = ids[t, k] and gate ‖ up = x[t] · gate_up[e]ᵀ.
The input `shares` holds the routing weights.

Attributes: experts (E), hidden (H), features (I, a multiple of 16), group and down_group of the two matrices, bits,
offsets, table. gate_up holds E consecutive matrices [2 · I, H] that alternate panels of gate and up. down holds E
consecutive matrices [H, I].

Tokens are batched by expert (expert_batches.h). A token adds its experts in ascending order of their numbers, so its
result does not depend on other tokens. */
#include "expert_batches.h"

extern void *malloc(size_t);
extern void free(void *);

enum { MAX_FEATURES = 1 << 27 };

typedef struct {
  Api api;
  Matrix gate_up, down;
  int64_t experts;
} Experts;

typedef struct {
  const Experts *op;
  const float *x, *routing_weights;
  const int64_t *ids;
  int64_t tokens, top_k; /* T and K */
  Matmul gate_up, down;
  ExpertBatches batches;
  int64_t pieces;
  int64_t *y_rows;    /* [rows] the token of each row, −1 for padding between experts */
  float *row_weights; /* [rows] */
  float *features;    /* [rows, I] */
} Step;

static void quantize_tokens(void *data, size_t at) {
  const Step *s = data;
  quantize_pairs(&s->batches, &s->gate_up, s->x, s->top_k, s->pieces, at);
}

static void quantize_features(void *data, size_t at) {
  const Step *s = data;
  quantize_pairs(&s->batches, &s->down, s->features, 0, s->pieces, at);
}

/* Multiply a share of the panel pairs of all chosen experts, which form one sequence. */
static void multiply_gate_up(void *data, size_t at) {
  const Step *s = data;
  const int64_t each = panels_of(s->gate_up.matrix) / 2;
  int64_t first = share_at(s->batches.count * each, s->pieces, at),
          end = share_at(s->batches.count * each, s->pieces, at + 1);
  while (first < end) {
    const ExpertBatch *batch = s->batches.each + first / each;
    const int64_t from = first % each, to = from + end - first < each ? from + end - first : each;
    const Matmul one = matmul_of_expert(&s->gate_up, batch->expert);
    multiply(&one, 2 * from, 2 * to, batch->row, batch->last);
    first += to - from;
  }
}

/* Multiply the same panels of every chosen expert, so that no two threads add to the same values of y. */
static void multiply_down(void *data, size_t at) {
  const Step *s = data;
  const Matrix *m = s->down.matrix;
  const int64_t first = share_at(panels_of(m), s->pieces, at), end = share_at(panels_of(m), s->pieces, at + 1);
  const int64_t stop = end * LANES < m->rows ? end * LANES : m->rows;
  for (int64_t token = 0; token < s->tokens; token++)
    for (int64_t column = first * LANES; column < stop; column++) s->down.y[token * m->rows + column] = 0;
  for (int64_t i = 0; i < s->batches.count; i++) {
    const Matmul one = matmul_of_expert(&s->down, s->batches.each[i].expert);
    multiply(&one, first, end, s->batches.each[i].row, s->batches.each[i].last);
  }
}

static Status *in_pieces(const Step *s, Context *context, void (*job)(void *, size_t)) {
  return parallel(s->op->api, context, (size_t)s->pieces, job, (void *)s);
}

static Status *run(Step *s, Context *context) {
  const Matrix *gate_up = s->gate_up.matrix, *down = s->down.matrix;
  const int64_t gate_up_size = panels_of(gate_up) * panel_bytes(gate_up),
                down_size = panels_of(down) * panel_bytes(down);
  s->pieces = shares_of(s->batches.rows * gate_up->width * QUANTIZE_BYTES, s->batches.rows);
  TRY(in_pieces(s, context, quantize_tokens));
  s->pieces = shares_of(s->batches.count * gate_up_size, s->batches.count * panels_of(gate_up) / 2);
  TRY(in_pieces(s, context, multiply_gate_up));
  s->pieces = shares_of(s->batches.rows * down->width * QUANTIZE_BYTES, s->batches.rows);
  TRY(in_pieces(s, context, quantize_features));
  s->pieces = shares_of(s->batches.count * down_size, panels_of(down));
  return in_pieces(s, context, multiply_down);
}

/* Lay out memory and run. ONNX Runtime would keep its scratch memory of every layer until the step ends, so this uses
malloc. */
static Status *in_memory(Step *s, Context *context) {
  const Matrix *gate_up = s->gate_up.matrix, *down = s->down.matrix;
  const int64_t pairs = s->tokens * s->top_k;
  s->batches = batches_of(pairs, s->op->experts);
  const int64_t rows = s->batches.max_rows, features = pad_line(4 * rows * down->width);
  const int64_t gate_up_bytes = pad_line(activation_bytes(gate_up, rows)),
                down_bytes = pad_line(activation_bytes(down, rows));
  const int64_t bytes = 64 + batches_bytes(&s->batches) + 2 * pad_line(8 * rows) + features +
                        (gate_up_bytes > down_bytes ? gate_up_bytes : down_bytes);
  uint8_t *memory = malloc((size_t)bytes), *at = (uint8_t *)pad_line((int64_t)memory);
  if (!memory) return fail(s->op->api, "llmc.Experts: out of memory");
  at = sort_pairs(&s->batches, s->ids, pairs, at);
  s->y_rows = (int64_t *)at;
  s->row_weights = (float *)(at += pad_line(8 * rows));
  s->features = (float *)(at += pad_line(8 * rows));
  at += features; /* the rest holds the quantized tokens, and later the quantized features */
  for (int64_t row = 0; row < s->batches.rows; row++) {
    const int64_t pair = s->batches.pairs[row];
    s->y_rows[row] = pair < 0 ? -1 : pair / s->top_k;
    s->row_weights[row] = pair < 0 ? 0 : s->routing_weights[pair];
  }
  s->gate_up.y = s->features;
  s->gate_up.activations = lay_out_activations(gate_up, s->batches.rows, at);
  s->down.y_rows = s->y_rows, s->down.routing_weights = s->row_weights;
  s->down.activations = lay_out_activations(down, s->batches.rows, at);
  Status *failed = run(s, context);
  free(memory);
  return failed;
}

static Status *compute(void *kernel, Context *context) {
  const Experts *op = kernel;
  const int64_t hidden = op->down.rows;
  Tensor x, ids, routing_weights, gate_up, down;
  TRY(input(op->api, context, 0, 2, &x));
  TRY(input(op->api, context, 1, 2, &ids));
  TRY(input(op->api, context, 2, 2, &routing_weights));
  TRY(input(op->api, context, 3, 1, &gate_up));
  TRY(input(op->api, context, 4, 1, &down));
  if (x.dims[1] != hidden) return fail(op->api, "llmc.Experts: x has not `hidden` inputs");
  if (ids.dims[0] != x.dims[0] || !same_but_last(&routing_weights, &ids, ids.dims[1]))
    return fail(op->api, "llmc.Experts: ids and shares are not of the tokens of x");
  if (!holds_experts(&gate_up, op->experts, &op->gate_up) || !holds_experts(&down, op->experts, &op->down))
    return fail(op->api, "llmc.Experts: panels of other matrices");
  Step s = {.op = op,
            .x = x.data,
            .routing_weights = routing_weights.data,
            .ids = ids.data,
            .tokens = x.dims[0],
            .top_k = ids.dims[1]};
  TRY(check_ids(op->api, s.ids, s.tokens * s.top_k, op->experts));
  void *y;
  TRY(output(op->api, context, 0, x.dims, 2, &y));
  s.gate_up = (Matmul){.matrix = &op->gate_up, .gated = 1, .panels = gate_up.data};
  s.down = (Matmul){.matrix = &op->down, .panels = down.data, .y = y};
  if (s.tokens && s.top_k) return in_memory(&s, context);
  for (int64_t i = 0; i < s.tokens * hidden; i++) s.down.y[i] = 0;
  return NULL;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  Experts op = {.api = api};
  Matrix *gate_up = &op.gate_up, *down = &op.down;
  TRY(int_attribute(api, info, "experts", &op.experts));
  TRY(int_attribute(api, info, "hidden", &gate_up->width));
  TRY(int_attribute(api, info, "features", &down->width));
  TRY(int_attribute(api, info, "group", &gate_up->group));
  TRY(int_attribute(api, info, "down_group", &down->group));
  TRY(int_attribute(api, info, "bits", &gate_up->bits));
  TRY(int_attribute(api, info, "offsets", &gate_up->offsets));
  TRY(int_attribute(api, info, "table", &gate_up->table));
  if (op.experts < 1 || op.experts > MAX_EXPERTS || down->width < 1 || down->width > MAX_FEATURES ||
      down->width % LANES)
    return fail(api, "llmc.Experts: there are 1 to 65536 experts, of a multiple of 16 features");
  gate_up->rows = 2 * down->width, down->rows = gate_up->width;
  down->bits = gate_up->bits, down->offsets = gate_up->offsets, down->table = gate_up->table;
  TRY(check_matrix(api, gate_up));
  TRY(check_matrix(api, down));
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "Experts"; }
static size_t inputs(const Operator *self) { return (void)self, 5; }
static size_t outputs(const Operator *self) { return (void)self, 1; }
static int input_type(const Operator *self, size_t at) {
  return (void)self, at == 1 ? INT64 : at > 2 ? UINT8 : FLOAT32;
}
static int output_type(const Operator *self, size_t at) { return (void)self, (void)at, FLOAT32; }

const Operator experts_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = required, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
