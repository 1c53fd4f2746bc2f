/* GatedDelta(query, key [.., K, D], value [.., H, V], decay, beta [.., H], state [slots, H, D, V], rows int64 [N, 4];
  normalise, eps) → (y [.., H, V], state)

Applies the gated delta rule (Yang et al. 2024, "Gated Delta Networks") to a ragged batch of rows with T tokens in all.
A token updates each head's recurrent state S in three steps:

  decay     S = exp(decay) · S
  correct   S += k ⊗ beta · (v − k · S)
  read      y = q · S / √D

Each of the K query and key heads serves H / K consecutive heads. With `normalise`, queries and keys are divided by
√(sum of squares + eps). y is 0 for tokens of no row. Each row has its own slot.

Columns of a state are independent, so a job handles COLUMNS of them. With g = exp(decay) and the previous S, one pass
reads both k · gS and q · gS, and y = q · gS + (q · k) · correction. */
#include "operators.h"
#include "states.h"
#include "vector_math.h"

enum { VECTORS = 4, COLUMNS = 16 * VECTORS, MAX_DIM = 1024 };

typedef struct {
  Api api;
  int64_t normalise;
  float eps;
} GatedDelta;

typedef struct {
  const float *query, *key, *value, *decay, *beta;
  float *y, *state;
  const Row *rows;
  int64_t heads, groups, dim, width, blocks; /* blocks of columns in a head */
  const GatedDelta *op;
} Run;

static float dot(const float *a, const float *b, int64_t count) {
  Floats sum = splat(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const Lanes lanes = first_lanes(count - i);
    sum = fma16(load_lanes(lanes, a + i), load_lanes(lanes, b + i), sum);
  }
  return sum_of(sum);
}

/* 1 / √(sum of squares + eps), or 1 without `normalise` */
static float inverse_norm(const GatedDelta *op, const float *x, int64_t count) {
  if (!op->normalise) return 1.0f;
  return 1.0f / sqrt16(splat(dot(x, x, count) + op->eps))[0];
}

static void token(const Run *run, int64_t at, int64_t head, int64_t column, float *state) {
  const int64_t dim = run->dim, width = run->width, group = head / (run->heads / run->groups);
  const float *q = run->query + (at * run->groups + group) * dim, *k = run->key + (at * run->groups + group) * dim;
  const float decay = exp16(splat(run->decay[at * run->heads + head]))[0];
  const float k_scale = inverse_norm(run->op, k, dim);
  const float q_scale = inverse_norm(run->op, q, dim) / sqrt16(splat((float)dim))[0];
  const float query_key = dot(q, k, dim) * q_scale * k_scale;
  Floats by_key[VECTORS], by_query[VECTORS], correction[VECTORS];
  Lanes lanes[VECTORS];
  for (int i = 0; i < VECTORS; i++) {
    by_key[i] = by_query[i] = splat(0.0f);
    lanes[i] = first_lanes(width - column - 16 * i);
  }
  for (int64_t d = 0; d < dim; d++) {
    const Floats each_k = splat(k[d]), each_q = splat(q[d]);
    for (int i = 0; i < VECTORS; i++) {
      const Floats s = load_lanes(lanes[i], state + d * width + 16 * i);
      by_key[i] = fma16(each_k, s, by_key[i]);
      by_query[i] = fma16(each_q, s, by_query[i]);
    }
  }
  const int64_t line = (at * run->heads + head) * width + column;
  const Floats rate = splat(run->beta[at * run->heads + head]);
  for (int i = 0; i < VECTORS; i++) {
    const Floats v = load_lanes(lanes[i], run->value + line + 16 * i);
    correction[i] = rate * fma16(splat(-decay * k_scale), by_key[i], v);
    const Floats y = fma16(splat(query_key), correction[i], splat(decay * q_scale) * by_query[i]);
    store_lanes(run->y + line + 16 * i, lanes[i], y);
  }
  const Floats decay_lanes = splat(decay);
  for (int64_t d = 0; d < dim; d++) {
    const Floats each = splat(k[d] * k_scale);
    for (int i = 0; i < VECTORS; i++) {
      float *location = state + d * width + 16 * i;
      const Floats s = decay_lanes * load_lanes(lanes[i], location);
      store_lanes(location, lanes[i], fma16(each, correction[i], s));
    }
  }
}

static void job_of(void *data, size_t job) {
  const Run *run = data;
  const int64_t block = (int64_t)job % run->blocks, head = (int64_t)job / run->blocks % run->heads;
  const Row *row = run->rows + (int64_t)job / run->blocks / run->heads;
  const int64_t column = block * COLUMNS, end = column + COLUMNS < run->width ? column + COLUMNS : run->width;
  if (!row->count) return;
  float *state = run->state + (row->slot * run->heads + head) * run->dim * run->width + column;
  if (row->past == 0)
    for (int64_t d = 0; d < run->dim; d++)
      for (int64_t i = 0; i < end - column; i++) state[d * run->width + i] = 0.0f;
  for (int64_t t = 0; t < row->count; t++) token(run, row->first + t, head, column, state);
}

static Status *compute(void *kernel, Context *context) {
  const GatedDelta *op = kernel;
  Tensor query, key, value, decay, beta, state;
  Api api = op->api;
  TRY(input(api, context, 0, 4, &query));
  TRY(input(api, context, 1, 4, &key));
  TRY(input(api, context, 2, 4, &value));
  TRY(input(api, context, 3, 3, &decay));
  TRY(input(api, context, 4, 3, &beta));
  TRY(input(api, context, 5, 4, &state));
  const int64_t groups = query.dims[2], dim = query.dims[3], heads = value.dims[2], width = value.dims[3];
  const int64_t tokens = value.dims[0] * value.dims[1];
  if (groups < 1 || dim < 1 || dim > MAX_DIM || heads < groups || heads % groups || width < 1)
    return fail(api, "llmc.GatedDelta: heads of this number or size are not supported");
  if (!same_but_last(&key, &query, dim) || !same_but_last(&beta, &decay, heads) || decay.dims[2] != heads)
    return fail(api, "llmc.GatedDelta: keys, decay and beta have not the shapes of queries and heads");
  for (size_t i = 0; i < 2; i++)
    if (query.dims[i] != value.dims[i] || decay.dims[i] != value.dims[i])
      return fail(api, "llmc.GatedDelta: inputs have not the same tokens");
  if (state.dims[1] != heads || state.dims[2] != dim || state.dims[3] != width)
    return fail(api, "llmc.GatedDelta: a state has not the heads and sizes of keys and values");
  Rows rows;
  TRY(rows_input(api, context, 6, tokens, state.dims[0], INT64_MAX, &rows));
  Run run = {
      .query = query.data, .key = key.data, .value = value.data, .decay = decay.data, .beta = beta.data,
      .rows = rows.each, .heads = heads, .groups = groups, .dim = dim, .width = width,
      .blocks = (width + COLUMNS - 1) / COLUMNS, .op = op,
  };
  void *y;
  TRY(output(api, context, 0, value.dims, value.rank, &y));
  TRY(state_output(api, context, 1, &state, &run.state));
  run.y = y;
  clear_rest(&rows, tokens, heads * width, run.y);
  return rows.count ? parallel(api, context, (size_t)(rows.count * heads * run.blocks), job_of, &run) : NULL;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  GatedDelta op = {.api = api};
  TRY(int_attribute(api, info, "normalise", &op.normalise));
  TRY(float_attribute(api, info, "eps", &op.eps));
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "GatedDelta"; }
static size_t inputs(const Operator *self) { return (void)self, 7; }
static size_t outputs(const Operator *self) { return (void)self, 2; }
static int input_type(const Operator *self, size_t at) { return (void)self, at == 6 ? INT64 : FLOAT32; }
static int output_type(const Operator *self, size_t at) { return (void)self, (void)at, FLOAT32; }

const Operator gated_delta_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = required, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
