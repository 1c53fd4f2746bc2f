/* CausalConv(x, weight [C, K], bias [C]?, state [slots, K − 1, C], rows int64 [N, 4]; silu) → (y, state)

Convolves each channel over its last K tokens, for a ragged batch of rows. x and y are [.., C] with T tokens in all. A
slot's recurrent state holds the K − 1 tokens before a row, the latest last. With `silu`, y becomes y / (1 + e⁻ʸ). y is
0 for tokens of no row. Each row has its own slot. */
#include "operators.h"
#include "states.h"
#include "vector_math.h"

enum { MAX_TAPS = 64, BLOCK = 64 /* channels of a job */ };

typedef struct {
  Api api;
  int64_t silu;
} CausalConv;

typedef struct {
  const float *x, *weight, *bias;
  float *y, *state;
  const Row *rows;
  int64_t channels, taps, blocks, silu;
} Run;

/* Sixteen channels of token `at`, counted from the row's first token. Earlier tokens are in the recurrent state. */
static inline Floats load_token(const Run *run, const Row *row, const float *state, int64_t at, int64_t channel,
                                Lanes lanes) {
  const float *from = at >= 0 ? run->x + (row->first + at) * run->channels
                              : state + (run->taps - 1 + at) * run->channels;
  return load_lanes(lanes, from + channel);
}

static void convolve(const Run *run, const Row *row, float *state, int64_t channel, Lanes lanes) {
  const int64_t taps = run->taps, tail = taps - 1;
  const int64_t channels = run->channels - channel < LANES ? run->channels - channel : LANES;
  Floats weight[MAX_TAPS];
  for (int64_t i = 0; i < taps; i++) {
    float each[LANES] = {0};
    for (int64_t lane = 0; lane < channels; lane++) each[lane] = run->weight[(channel + lane) * taps + i];
    weight[i] = load(each);
  }
  const Floats bias = run->bias ? load_lanes(lanes, run->bias + channel) : splat(0.0f);
  if (row->past == 0)
    for (int64_t i = 0; i < tail; i++)
      store_lanes(state + i * run->channels + channel, lanes, splat(0.0f));
  for (int64_t t = 0; t < row->count; t++) {
    Floats sum = bias;
    for (int64_t i = 0; i < taps; i++)
      sum = fma16(load_token(run, row, state, t + i - tail, channel, lanes), weight[i], sum);
    store_lanes(run->y + (row->first + t) * run->channels + channel, lanes, run->silu ? silu16(sum) : sum);
  }
  /* this order reads every token before it is overwritten */
  for (int64_t i = 0; i < tail; i++)
    store_lanes(state + i * run->channels + channel, lanes,
                load_token(run, row, state, row->count + i - tail, channel, lanes));
}

static void job_of(void *data, size_t job) {
  const Run *run = data;
  const Row *row = run->rows + (int64_t)job / run->blocks;
  const int64_t first = (int64_t)job % run->blocks * BLOCK;
  if (!row->count) return;
  float *state = run->state + row->slot * (run->taps - 1) * run->channels;
  for (int64_t channel = first; channel < first + BLOCK && channel < run->channels; channel += 16)
    convolve(run, row, state, channel, first_lanes(run->channels - channel));
}

static Status *compute(void *kernel, Context *context) {
  const CausalConv *op = kernel;
  Tensor x, weight, bias, state;
  Api api = op->api;
  TRY(input(api, context, 0, 0, &x));
  TRY(input(api, context, 1, 2, &weight));
  TRY(optional_input(api, context, 2, &bias));
  TRY(input(api, context, 3, 3, &state));
  const int64_t channels = x.dims[x.rank - 1], taps = weight.dims[1], tokens = lines_of(&x);
  if (weight.dims[0] != channels || taps < 2 || taps > MAX_TAPS ||
      (bias.present && (bias.rank != 1 || bias.dims[0] != channels)))
    return fail(api, "llmc.CausalConv: weights of shapes that do not belong to the channels");
  if (state.dims[1] != taps - 1 || state.dims[2] != channels)
    return fail(api, "llmc.CausalConv: a state has not the tokens and channels of the convolution");
  Rows rows;
  TRY(rows_input(api, context, 4, tokens, state.dims[0], INT64_MAX, &rows));
  Run run = {
      .x = x.data, .weight = weight.data, .bias = bias.present ? bias.data : NULL, .rows = rows.each,
      .channels = channels, .taps = taps, .blocks = (channels + BLOCK - 1) / BLOCK, .silu = op->silu,
  };
  void *y;
  TRY(output(api, context, 0, x.dims, x.rank, &y));
  TRY(state_output(api, context, 1, &state, &run.state));
  run.y = y;
  clear_rest(&rows, tokens, channels, run.y);
  return rows.count && run.blocks ? parallel(api, context, (size_t)(rows.count * run.blocks), job_of, &run) : NULL;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  CausalConv op = {.api = api};
  TRY(int_attribute(api, info, "silu", &op.silu));
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "CausalConv"; }
static size_t inputs(const Operator *self) { return (void)self, 5; }
static size_t outputs(const Operator *self) { return (void)self, 2; }
static int input_type(const Operator *self, size_t at) { return (void)self, at == 4 ? INT64 : FLOAT32; }
static int input_kind(const Operator *self, size_t at) { return (void)self, at == 2 ? OPTIONAL : REQUIRED; }
static int output_type(const Operator *self, size_t at) { return (void)self, (void)at, FLOAT32; }

const Operator causal_conv_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = input_kind, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
