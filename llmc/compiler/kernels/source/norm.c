/* AddNorm(x, residual, weight [D]; eps) → (y, sum), x and residual float [.., D]: sum = x + residual, and
y = sum / √(mean of sum² + eps) · weight. */
#include "operators.h"

enum { SHARE = 1 << 13 }; /* floats that are worth a thread's turn */

typedef struct {
  Api api;
  float eps;
} AddNorm;

typedef struct {
  const float *x, *residual, *weight;
  float *y, *sum, eps;
  int64_t rows, width, shares;
} Job;

static void share_of(void *data, size_t share) {
  const Job *job = data;
  const int64_t width = job->width;
  const int64_t end = job->rows * (int64_t)(share + 1) / job->shares;
  for (int64_t row = job->rows * (int64_t)share / job->shares; row < end; row++) {
    const float *x = job->x + row * width, *residual = job->residual + row * width;
    float *y = job->y + row * width, *sum = job->sum + row * width;
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < width; i += LANES) {
      const __mmask16 here = width - i >= LANES ? 0xFFFF : (__mmask16)((1u << (width - i)) - 1);
      __m512 s = _mm512_add_ps(_mm512_maskz_loadu_ps(here, x + i), _mm512_maskz_loadu_ps(here, residual + i));
      squares = _mm512_fmadd_ps(s, s, squares);
      _mm512_mask_storeu_ps(sum + i, here, s);
    }
    float mean = _mm512_reduce_add_ps(squares) / (float)width + job->eps;
    const __m512 over = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(_mm512_set1_ps(mean)));
    for (int64_t i = 0; i < width; i += LANES) {
      const __mmask16 here = width - i >= LANES ? 0xFFFF : (__mmask16)((1u << (width - i)) - 1);
      __m512 s = _mm512_mul_ps(_mm512_maskz_loadu_ps(here, sum + i), over);
      _mm512_mask_storeu_ps(y + i, here, _mm512_mul_ps(s, _mm512_maskz_loadu_ps(here, job->weight + i)));
    }
  }
}

static Status *compute(void *kernel, Context *context) {
  const AddNorm *op = kernel;
  Tensor x, residual, weight;
  TRY(input(op->api, context, 0, &x));
  TRY(input(op->api, context, 1, &residual));
  TRY(input(op->api, context, 2, &weight));
  Job job = {.x = x.data, .residual = residual.data, .weight = weight.data, .eps = op->eps, .rows = 1};
  if (!x.rank || x.rank != residual.rank || weight.dims[0] != x.dims[x.rank - 1])
    return fail(op->api, "llmc.AddNorm: inputs of shapes that do not belong together");
  for (size_t i = 0; i < x.rank; i++) {
    if (x.dims[i] != residual.dims[i]) return fail(op->api, "llmc.AddNorm: x and residual have different shapes");
    if (i + 1 < x.rank) job.rows *= x.dims[i];
  }
  job.width = weight.dims[0];
  void *y, *sum;
  TRY(output(op->api, context, 0, x.dims, x.rank, &y));
  TRY(output(op->api, context, 1, x.dims, x.rank, &sum));
  job.y = y, job.sum = sum;
  job.shares = job.rows * job.width / SHARE;
  if (job.shares > job.rows) job.shares = job.rows;
  if (job.shares < 1) job.shares = 1;
  return parallel(op->api, context, (size_t)job.shares, share_of, &job);
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  AddNorm *op = allocate(sizeof(AddNorm));
  if (!op) return fail(api, "llmc.AddNorm: out of memory");
  op->api = api;
  *kernel = op;
  return float_attribute(api, info, "eps", &op->eps);
}

static const char *name(const Operator *self) { return (void)self, "AddNorm"; }
static size_t inputs(const Operator *self) { return (void)self, 3; }
static size_t outputs(const Operator *self) { return (void)self, 2; }
static int any_type(const Operator *self, size_t at) { return (void)self, (void)at, FLOAT32; }

const Operator norm_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = any_type, .input_kind = required, .input_memory = default_memory, .outputs = outputs,
    .output_type = any_type, .output_kind = required, .compute_or_fail = compute, .destroy = release,
    .first_version = version_one, .last_version = any_version,
};
