/* Experts(x float [T, H], ids int64 [T, K], shares float [T, K], gate_up uint8, down uint8) → y float [T, H]:
Σ over k of shares[t, k] · (silu(gate) · up) · down[e]ᵀ, where e = ids[t, k] and gate ‖ up = x[t] · gate_up[e]ᵀ.

Attributes: experts (E), hidden (H), features (I, a multiple of 16), group and down_group of the two matrices, bits,
offsets, table. gate_up holds E matrices [2 · I, H] one after the other, the panels of gate and up in turn; down E [H, I].

Tokens are put in the order of their experts (turns.h). A token's sum is in the order of its experts' numbers, whatever other tokens there are. */
#include "turns.h"

extern void *malloc(size_t);
extern void free(void *);

enum { MOST_FEATURES = 1 << 27 };

typedef struct {
  Api api;
  Matrix gate_up, down;
  int64_t experts;
} Experts;

typedef struct {
  const Experts *op;
  const float *x, *shares;
  const int64_t *ids;
  int64_t tokens, chosen; /* T and K */
  Product into, out;
  Turns turns;
  int64_t pieces;
  int64_t *lines;    /* [rows] the token of each row, −1 of those between two experts */
  float *row_shares; /* [rows] */
  float *features;   /* [rows, I] */
} Step;

static void quantise_tokens(void *data, size_t at) {
  const Step *s = data;
  quantise_pairs(&s->turns, &s->into, s->x, s->chosen, s->pieces, at);
}

static void quantise_features(void *data, size_t at) {
  const Step *s = data;
  quantise_pairs(&s->turns, &s->out, s->features, 0, s->pieces, at);
}

/* A share of the pairs of panels of all chosen experts, end to end. */
static void multiply_into(void *data, size_t at) {
  const Step *s = data;
  const int64_t each = panels_of(s->into.matrix) / 2;
  int64_t first = share_at(s->turns.count * each, s->pieces, at), end = share_at(s->turns.count * each, s->pieces, at + 1);
  while (first < end) {
    const Turn *turn = s->turns.each + first / each;
    const int64_t from = first % each, to = from + end - first < each ? from + end - first : each;
    const Product one = of_expert(&s->into, turn->expert);
    multiply(&one, 2 * from, 2 * to, turn->row, turn->last);
    first += to - from;
  }
}

/* The same panels of every chosen expert, so that no other thread adds to what these add to. */
static void multiply_out(void *data, size_t at) {
  const Step *s = data;
  const Matrix *m = s->out.matrix;
  const int64_t first = share_at(panels_of(m), s->pieces, at), end = share_at(panels_of(m), s->pieces, at + 1);
  const int64_t stop = end * LANES < m->rows ? end * LANES : m->rows;
  for (int64_t token = 0; token < s->tokens; token++)
    for (int64_t column = first * LANES; column < stop; column++) s->out.y[token * m->rows + column] = 0;
  for (int64_t i = 0; i < s->turns.count; i++) {
    const Product one = of_expert(&s->out, s->turns.each[i].expert);
    multiply(&one, first, end, s->turns.each[i].row, s->turns.each[i].last);
  }
}

static Status *in_pieces(const Step *s, Context *context, void (*job)(void *, size_t)) {
  return parallel(s->op->api, context, (size_t)s->pieces, job, (void *)s);
}

static Status *run(Step *s, Context *context) {
  const Matrix *gate_up = s->into.matrix, *down = s->out.matrix;
  const int64_t into = panels_of(gate_up) * panel_bytes(gate_up), out = panels_of(down) * panel_bytes(down);
  s->pieces = shares_of(s->turns.rows * gate_up->width * QUANTISED, s->turns.rows);
  TRY(in_pieces(s, context, quantise_tokens));
  s->pieces = shares_of(s->turns.count * into, s->turns.count * panels_of(gate_up) / 2);
  TRY(in_pieces(s, context, multiply_into));
  s->pieces = shares_of(s->turns.rows * down->width * QUANTISED, s->turns.rows);
  TRY(in_pieces(s, context, quantise_features));
  s->pieces = shares_of(s->turns.count * out, panels_of(down));
  return in_pieces(s, context, multiply_out);
}

/* Lay memory out and run. It is not ONNX Runtime's: that would keep every layer's until the step ends. */
static Status *in_memory(Step *s, Context *context) {
  const Matrix *gate_up = s->into.matrix, *down = s->out.matrix;
  const int64_t pairs = s->tokens * s->chosen;
  s->turns = turns_of(pairs, s->op->experts);
  const int64_t rows = s->turns.most_rows, features = padded(4 * rows * down->width);
  const int64_t given = padded(activation_bytes(gate_up, rows)), made = padded(activation_bytes(down, rows));
  const int64_t bytes = 64 + turns_bytes(&s->turns) + 2 * padded(8 * rows) + features + (given > made ? given : made);
  uint8_t *memory = malloc((size_t)bytes), *at = (uint8_t *)padded((int64_t)memory);
  if (!memory) return fail(s->op->api, "llmc.Experts: out of memory");
  at = sort_pairs(&s->turns, s->ids, pairs, at);
  s->lines = (int64_t *)at;
  s->row_shares = (float *)(at += padded(8 * rows));
  s->features = (float *)(at += padded(8 * rows));
  at += features; /* what is left holds the tokens' activations, and then the features' */
  for (int64_t row = 0; row < s->turns.rows; row++) {
    const int64_t pair = s->turns.pairs[row];
    s->lines[row] = pair < 0 ? -1 : pair / s->chosen;
    s->row_shares[row] = pair < 0 ? 0 : s->shares[pair];
  }
  s->into.y = s->features;
  s->into.activations = place(gate_up, s->turns.rows, at);
  s->out.lines = s->lines, s->out.shares = s->row_shares;
  s->out.activations = place(down, s->turns.rows, at);
  Status *failed = run(s, context);
  free(memory);
  return failed;
}

static Status *compute(void *kernel, Context *context) {
  const Experts *op = kernel;
  const int64_t hidden = op->down.rows;
  Tensor x, ids, shares, gate_up, down;
  TRY(input(op->api, context, 0, 2, &x));
  TRY(input(op->api, context, 1, 2, &ids));
  TRY(input(op->api, context, 2, 2, &shares));
  TRY(input(op->api, context, 3, 1, &gate_up));
  TRY(input(op->api, context, 4, 1, &down));
  if (x.dims[1] != hidden) return fail(op->api, "llmc.Experts: x has not `hidden` inputs");
  if (ids.dims[0] != x.dims[0] || !is_beside(&shares, &ids, ids.dims[1]))
    return fail(op->api, "llmc.Experts: ids and shares are not of the tokens of x");
  if (!holds(&gate_up, op->experts, &op->gate_up) || !holds(&down, op->experts, &op->down))
    return fail(op->api, "llmc.Experts: panels of other matrices");
  Step s = {.op = op, .x = x.data, .shares = shares.data, .ids = ids.data, .tokens = x.dims[0], .chosen = ids.dims[1]};
  TRY(check_ids(op->api, s.ids, s.tokens * s.chosen, op->experts));
  void *y;
  TRY(output(op->api, context, 0, x.dims, 2, &y));
  s.into = (Product){.matrix = &op->gate_up, .gated = 1, .panels = gate_up.data};
  s.out = (Product){.matrix = &op->down, .panels = down.data, .y = y};
  if (s.tokens && s.chosen) return in_memory(&s, context);
  for (int64_t i = 0; i < s.tokens * hidden; i++) s.out.y[i] = 0;
  return NULL;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  Experts op = {.api = api};
  Matrix *into = &op.gate_up, *out = &op.down;
  TRY(int_attribute(api, info, "experts", &op.experts));
  TRY(int_attribute(api, info, "hidden", &into->width));
  TRY(int_attribute(api, info, "features", &out->width));
  TRY(int_attribute(api, info, "group", &into->group));
  TRY(int_attribute(api, info, "down_group", &out->group));
  TRY(int_attribute(api, info, "bits", &into->bits));
  TRY(int_attribute(api, info, "offsets", &into->offsets));
  TRY(int_attribute(api, info, "table", &into->table));
  if (op.experts < 1 || op.experts > MOST_EXPERTS || out->width < 1 || out->width > MOST_FEATURES || out->width % LANES)
    return fail(api, "llmc.Experts: there are 1 to 65536 experts, of a multiple of 16 features");
  into->rows = 2 * out->width, out->rows = into->width;
  out->bits = into->bits, out->offsets = into->offsets, out->table = into->table;
  TRY(check_matrix(api, into));
  TRY(check_matrix(api, out));
  return keep(api, &op, sizeof op, kernel);
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
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release,
    .first_version = version_one, .last_version = any_version,
};
