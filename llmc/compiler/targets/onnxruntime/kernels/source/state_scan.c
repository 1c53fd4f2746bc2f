/* StateScan(x [.., H, P], step [.., H], rate [H] or [H, S], write, read [.., G, S], state [slots, H, P, S],
  rows int64 [N, 4]) → (y [.., H, P], state)

Applies Mamba's selective state space model (Gu and Dao 2023, "Mamba"; Dao and Gu 2024, "Transformers are SSMs") to a
ragged batch of rows with T tokens in all. A token updates each head's recurrent state S in three steps:

  decay   S = exp(step · rate) · S
  write   S += step · x ⊗ write
  read    y = S · read

Each of the G groups of `write` and `read` serves H / G consecutive heads. y is 0 for tokens of no row. Each row has its
own slot. The H · P lines of a state are independent, so a job handles a block of them. */
#include "operators.h"
#include "states.h"
#include "vector_math.h"

enum { JOB_NUMBERS = 1 << 12 /* numbers of a state that justify waking a thread */, MAX_SIZE = 1 << 20 };

typedef struct {
  Api api;
} StateScan;

typedef struct {
  const float *x, *step, *rate, *write, *read;
  float *y, *state;
  const Row *rows;
  int64_t heads, lines, groups, size, per_column; /* lines of a head; whether each column has its own rate */
  int64_t block, blocks;                          /* lines of a job, and jobs of a row */
} Run;

/* Apply one token to lines first … end − 1 of the row's recurrent state. */
static void token(const Run *run, int64_t at, int64_t first, int64_t end, float *state) {
  const int64_t size = run->size, partial_result = run->heads / run->groups;
  Floats decay = splat(0.0f);
  for (int64_t line = first; line < end; line++) {
    const int64_t head = line / run->lines, group = head / partial_result;
    const float step = run->step[at * run->heads + head], scaled_x = step * run->x[at * run->heads * run->lines + line];
    const float *write = run->write + (at * run->groups + group) * size,
                *read = run->read + (at * run->groups + group) * size;
    if (!run->per_column && (line == first || line % run->lines == 0)) decay = exp16(splat(step * run->rate[head]));
    Floats sum = splat(0.0f);
    for (int64_t i = 0; i < size; i += 16) {
      const Lanes lanes = first_lanes(size - i);
      float *location = state + line * size + i;
      if (run->per_column)
        decay = exp16(splat(step) * load_lanes(lanes, run->rate + head * size + i));
      const Floats kept = decay * load_lanes(lanes, location);
      const Floats s = fma16(splat(scaled_x), load_lanes(lanes, write + i), kept);
      store_lanes(location, lanes, s);
      sum = fma16(s, load_lanes(lanes, read + i), sum);
    }
    run->y[at * run->heads * run->lines + line] = sum_of(sum);
  }
}

static void job_of(void *data, size_t job) {
  const Run *run = data;
  const Row *row = run->rows + (int64_t)job / run->blocks;
  const int64_t all = run->heads * run->lines, first = (int64_t)job % run->blocks * run->block;
  const int64_t end = first + run->block < all ? first + run->block : all;
  if (!row->count) return;
  float *state = run->state + row->slot * all * run->size;
  if (row->past == 0)
    for (int64_t i = first * run->size; i < end * run->size; i++) state[i] = 0.0f;
  for (int64_t t = 0; t < row->count; t++) token(run, row->first + t, first, end, state);
}

static Status *compute(void *kernel, Context *context) {
  const StateScan *op = kernel;
  Tensor x, step, rate, write, read, state;
  Api api = op->api;
  TRY(input(api, context, 0, 4, &x));
  TRY(input(api, context, 1, 3, &step));
  TRY(input(api, context, 2, 0, &rate));
  TRY(input(api, context, 3, 4, &write));
  TRY(input(api, context, 4, 4, &read));
  TRY(input(api, context, 5, 4, &state));
  const int64_t heads = x.dims[2], lines = x.dims[3], groups = write.dims[2], size = write.dims[3];
  const int64_t tokens = x.dims[0] * x.dims[1];
  if (groups < 1 || heads < groups || heads % groups || heads > MAX_SIZE || lines < 1 || lines > MAX_SIZE || size < 1 ||
      size > MAX_SIZE)
    return fail(api, "llmc.StateScan: heads of this number or size are not supported");
  if (step.dims[2] != heads || rate.rank > 2 || rate.dims[0] != heads || (rate.rank == 2 && rate.dims[1] != size) ||
      !same_but_last(&read, &write, size))
    return fail(api, "llmc.StateScan: steps, rates and what is written and read have not the shapes of the heads");
  for (size_t i = 0; i < 2; i++)
    if (step.dims[i] != x.dims[i] || write.dims[i] != x.dims[i])
      return fail(api, "llmc.StateScan: inputs have not the same tokens");
  if (state.dims[1] != heads || state.dims[2] != lines || state.dims[3] != size)
    return fail(api, "llmc.StateScan: a state has not the heads and sizes of the inputs");
  Rows rows;
  TRY(rows_input(api, context, 6, tokens, state.dims[0], INT64_MAX, &rows));
  Run run = {
      .x = x.data, .step = step.data, .rate = rate.data, .write = write.data, .read = read.data, .rows = rows.each,
      .heads = heads, .lines = lines, .groups = groups, .size = size, .per_column = rate.rank == 2,
      .block = size < JOB_NUMBERS ? JOB_NUMBERS / size : 1,
  };
  run.blocks = (heads * lines + run.block - 1) / run.block;
  void *y;
  TRY(output(api, context, 0, x.dims, x.rank, &y));
  TRY(state_output(api, context, 1, &state, &run.state));
  run.y = y;
  clear_rest(&rows, tokens, heads * lines, run.y);
  return rows.count ? parallel(api, context, (size_t)(rows.count * run.blocks), job_of, &run) : NULL;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self, (void)info;
  const StateScan op = {.api = api};
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "StateScan"; }
static size_t inputs(const Operator *self) { return (void)self, 7; }
static size_t outputs(const Operator *self) { return (void)self, 2; }
static int input_type(const Operator *self, size_t at) { return (void)self, at == 6 ? INT64 : FLOAT32; }
static int output_type(const Operator *self, size_t at) { return (void)self, (void)at, FLOAT32; }

const Operator state_scan_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = required, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
