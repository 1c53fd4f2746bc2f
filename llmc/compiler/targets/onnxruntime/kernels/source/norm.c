/* AddNorm(x, residual?, weight [D], decoding int64 [1]?; eps) → (y, sum?, words uint16 [..]?)

x and residual are float [.., D]. sum = x + residual, or x without a residual, and y = sum / √(mean of sum² + eps) ·
weight. If `words` is requested, prefill rows (those after the first `decoding`) go there instead of to y, rounded to
bfloat16 (words.h). */
#include "operators.h"
#include "strips.h"
#include "words.h"

enum { SHARE = 1 << 13 }; /* floats that justify waking a thread */

typedef struct {
  Api api;
  float eps;
} AddNorm;

typedef struct {
  const float *x, *residual, *weight;
  float *y, *sum, eps;
  uint16_t *words;
  int64_t rows, decode_rows, width, shares;
} Job;

INLINE Floats summed(const Job *job, Lanes lanes, int64_t at) {
  const Floats x = load_lanes(lanes, job->x + at);
  return job->residual ? x + load_lanes(lanes, job->residual + at) : x;
}

/* LANES values of a normalised row, from `at` on. */
INLINE Floats normed(const Job *job, Floats inverse_rms, int64_t row, int64_t at) {
  const Lanes lanes = first_lanes(job->width - at);
  return summed(job, lanes, row * job->width + at) * inverse_rms * load_lanes(lanes, job->weight + at);
}

static void share_of(void *data, size_t share) {
  const Job *job = data;
  const int64_t width = job->width;
  const int64_t end = share_at(job->rows, job->shares, share + 1);
  for (int64_t row = share_at(job->rows, job->shares, share); row < end; row++) {
    const int64_t first = row * width;
    Floats squares = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
      const Lanes lanes = first_lanes(width - i);
      const Floats s = summed(job, lanes, first + i);
      squares = fma16(s, s, squares);
      if (job->sum) store_lanes(job->sum + first + i, lanes, s);
    }
    float mean = sum_of(squares) / (float)width + job->eps;
    if (!(mean <= 3.4028235e38f))
      mean = __builtin_nanf(""); /* a mean beyond float32 must not turn the row into zeros */
    const Floats inverse_rms = splat(1.0f) / sqrt16(splat(mean));
    if (row < job->decode_rows)
      for (int64_t i = 0; i < width; i += LANES)
        store_lanes(job->y + first + i, first_lanes(width - i), normed(job, inverse_rms, row, i));
    else
      for (int64_t i = 0; i < width; i += DEPTH)
        store((float *)words_at(job->words, width, row - job->decode_rows, i),
              to_bf16_pair(normed(job, inverse_rms, row, i), normed(job, inverse_rms, row, i + LANES)));
  }
}

static Status *compute(void *kernel, Context *context) {
  const AddNorm *op = kernel;
  Tensor x, residual, weight;
  TRY(input(op->api, context, 0, 0, &x));
  TRY(optional_input(op->api, context, 1, &residual));
  TRY(input(op->api, context, 2, 1, &weight));
  const int64_t width = weight.dims[0];
  if (!same_but_last(&x, residual.present ? &residual : &x, width) ||
      (residual.present && residual.dims[residual.rank - 1] != width))
    return fail(op->api, "llmc.AddNorm: inputs of shapes that do not belong together");
  Job job = {
      .x = x.data,
      .residual = residual.data,
      .weight = weight.data,
      .eps = op->eps,
      .rows = lines_of(&x),
      .width = width,
  };
  TRY(decode_rows_input(op->api, context, 3, job.rows, &job.decode_rows));
  const int64_t numbers = rounded_numbers(width, job.rows - job.decode_rows);
  void *y, *sum, *words;
  int requested;
  TRY(output(op->api, context, 0, x.dims, x.rank, &y));
  TRY(optional_output(op->api, context, 1, x.dims, x.rank, &requested, &sum));
  TRY(optional_output(op->api, context, 2, &numbers, 1, &requested, &words));
  if (!requested) job.decode_rows = job.rows;
  job.y = y, job.sum = sum, job.words = words;
  job.shares = job.rows * job.width / SHARE;
  if (job.shares > job.rows) job.shares = job.rows;
  if (job.shares < 1) job.shares = 1;
  return parallel(op->api, context, (size_t)job.shares, share_of, &job);
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  AddNorm op = {.api = api};
  TRY(float_attribute(api, info, "eps", &op.eps));
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "AddNorm"; }
static size_t inputs(const Operator *self) { return (void)self, 4; }
static size_t outputs(const Operator *self) { return (void)self, 3; }
static int input_kind(const Operator *self, size_t at) { return (void)self, at % 2 ? OPTIONAL : REQUIRED; }
static int output_kind(const Operator *self, size_t at) { return (void)self, at ? OPTIONAL : REQUIRED; }
static int input_type(const Operator *self, size_t at) { return (void)self, at == 3 ? INT64 : FLOAT32; }
static int output_type(const Operator *self, size_t at) { return (void)self, at == 2 ? UINT16 : FLOAT32; }

const Operator norm_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = input_kind, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = output_kind, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
