/* Linear(x float [.., K], panels uint8, bias float [N]?) → (y float [.., N], scratch): x · Wᵀ + bias.

Attributes: rows (N), width (K), group, bits, offsets, and gated: with 1 panels are those of a gate and of what it lets
through in turn, and y [.., N / 2] is silu(gate) · other. The second output is memory for quantised activations. */
#include "operators.h"
#include "panels.h"
#include "vector_math.h"

enum {
  BLOCK = 3 << 17,  /* bytes of quantised activations that stay in the second-level cache while panels go by */
  SHARE = 1 << 16,  /* bytes of panels, or of activations, that are worth a thread's turn */
  MOST_SHARES = 256,
};

typedef struct {
  Api api;
  Matrix matrix;
  int64_t gated;
} Linear;

typedef struct {
  const Linear *op;
  const float *x, *bias;
  const uint8_t *panels;
  Activations activations;
  float *y;
  int64_t rows, shares;
} Product;

static void quantise_share(void *data, size_t share) {
  const Product *p = data;
  const Matrix *m = &p->op->matrix;
  int64_t first = p->rows * (int64_t)share / p->shares, end = p->rows * (int64_t)(share + 1) / p->shares;
  for (int64_t row = first; row < end; row++) quantise_row(m, p->x + row * m->width, &p->activations, row);
}

INLINE void write(float *y, __m512 value, int64_t left) {
  if (left >= LANES)
    _mm512_storeu_ps(y, value);
  else if (left > 0)
    _mm512_mask_storeu_ps(y, (__mmask16)((1u << left) - 1), value);
}

/* silu(gate) · other of one pair of panels; sums of neighbouring rows are `step` apart. */
INLINE void write_gated(const int rows, const Product *p, int64_t pair, int64_t row, const __m512 *gate,
                        const __m512 *other, const int step) {
  const int64_t width = p->op->matrix.rows / 2, column = pair * LANES;
  UNROLL
  for (int r = 0; r < rows; r++)
    write(p->y + (row + r) * width + column, _mm512_mul_ps(silu16(gate[r * step]), other[r * step]), width - column);
}

/* `panels` panels from `first` on, or a pair where one is gated, for activations row … row + rows − 1; see tile. */
INLINE void strip(const int rows, const int panels, const int bits, const int offsets, const Product *p, int64_t first,
                  int64_t row, int64_t ahead) {
  const Matrix *m = &p->op->matrix;
  const Activations *a = &p->activations;
  const uint8_t *at = p->panels + first * panel_bytes(m);
  __m512 sums[8], others[8];
  tile(rows, panels, bits, offsets, m, at, a, row, ahead, sums);
  if (p->op->gated && panels == 1) {
    tile(rows, 1, bits, offsets, m, at + panel_bytes(m), a, row, ahead, others);
    write_gated(rows, p, first / 2, row, sums, others, 1);
    return;
  }
  if (p->op->gated) {
    UNROLL
    for (int pair = 0; pair < panels / 2; pair++)
      write_gated(rows, p, first / 2 + pair, row, sums + 2 * pair, sums + 2 * pair + 1, panels);
    return;
  }
  UNROLL
  for (int n = 0; n < panels; n++) {
    int64_t column = (first + n) * LANES, left = m->rows - column;
    __mmask16 here = left >= LANES ? 0xFFFF : (__mmask16)((1u << left) - 1);
    __m512 bias = p->bias ? _mm512_maskz_loadu_ps(here, p->bias + column) : _mm512_setzero_ps();
    UNROLL
    for (int r = 0; r < rows; r++)
      write(p->y + (row + r) * m->rows + column, _mm512_add_ps(sums[r * panels + n], bias), left);
  }
}

/* One panel, or a gated pair, for fewer than eight rows. */
INLINE void partial(int64_t rows, const int bits, const int offsets, const Product *p, int64_t panel, int64_t row,
                    int64_t ahead) {
  switch (rows) {
    case 7: strip(7, 1, bits, offsets, p, panel, row, ahead); break;
    case 6: strip(6, 1, bits, offsets, p, panel, row, ahead); break;
    case 5: strip(5, 1, bits, offsets, p, panel, row, ahead); break;
    case 4: strip(4, 1, bits, offsets, p, panel, row, ahead); break;
    case 3: strip(3, 1, bits, offsets, p, panel, row, ahead); break;
    case 2: strip(2, 1, bits, offsets, p, panel, row, ahead); break;
    case 1: strip(1, 1, bits, offsets, p, panel, row, ahead); break;
    default: break;
  }
}

/* Panels first … end − 1 for activations row … last − 1: as many at once as registers hold. */
INLINE void block(const int bits, const int offsets, const Product *p, int64_t first, int64_t end, int64_t row,
                  int64_t last) {
  const int64_t unit = 1 + p->op->gated, rows = last - row, size = panel_bytes(&p->op->matrix);
  int64_t panel = first;
  if (rows < 3)
    for (; panel + 4 <= end; panel += 4) {
      const int64_t ahead = panel + 8 <= end ? 4 * size : 0;
      if (rows == 2) strip(2, 4, bits, offsets, p, panel, row, ahead);
      else strip(1, 4, bits, offsets, p, panel, row, ahead);
    }
  else if (rows < 5)
    for (; panel + 2 <= end; panel += 2) {
      const int64_t ahead = panel + 4 <= end ? 2 * size : 0;
      if (rows == 4) strip(4, 2, bits, offsets, p, panel, row, ahead);
      else strip(3, 2, bits, offsets, p, panel, row, ahead);
    }
  for (; panel < end; panel += unit) {
    int64_t r = row, ahead = panel + unit < end ? unit * size : 0;
    if (rows >= 8) {
      strip(8, 1, bits, offsets, p, panel, r, ahead);
      for (r += 8; r + 8 <= last; r += 8) strip(8, 1, bits, offsets, p, panel, r, 0);
      ahead = 0;
    }
    partial(last - r, bits, offsets, p, panel, r, ahead);
  }
}

static void multiply_share(void *data, size_t share) {
  const Product *p = data;
  const Matrix *m = &p->op->matrix;
  const int64_t unit = p->op->gated ? 2 : 1, units = panels_of(m) / unit;
  const int64_t first = units * (int64_t)share / p->shares * unit, end = units * (int64_t)(share + 1) / p->shares * unit;
  const int64_t blocks = (p->rows * groups_of(m) * m->group + BLOCK - 1) / BLOCK;
  const int64_t each = ((p->rows + blocks - 1) / blocks + TOGETHER - 1) / TOGETHER * TOGETHER;
  for (int64_t row = 0; row < p->rows; row += each) {
    int64_t last = row + each < p->rows ? row + each : p->rows;
    if (m->bits == 8 && m->offsets) block(8, 1, p, first, end, row, last);
    else if (m->bits == 8) block(8, 0, p, first, end, row, last);
    else if (m->offsets) block(4, 1, p, first, end, row, last);
    else block(4, 0, p, first, end, row, last);
  }
}

static int64_t shares_of(int64_t bytes, int64_t most) {
  int64_t shares = bytes / SHARE;
  if (shares > MOST_SHARES) shares = MOST_SHARES;
  if (shares > most) shares = most;
  return shares < 1 ? 1 : shares;
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
  Product p = {.op = op, .x = x.data, .bias = bias.data, .panels = panels.data, .rows = lines_of(&x)};
  x.dims[x.rank - 1] = op->gated ? m->rows / 2 : m->rows;
  void *y, *scratch;
  int64_t bytes = activation_bytes(m, p.rows);
  TRY(output(op->api, context, 0, x.dims, x.rank, &y));
  TRY(output(op->api, context, 1, &bytes, 1, &scratch));
  if (!p.rows) return NULL;
  p.y = y;
  p.activations = place(m, p.rows, scratch);
  p.shares = shares_of(p.rows * m->width / 4, p.rows);
  TRY(parallel(op->api, context, (size_t)p.shares, quantise_share, &p));
  p.shares = shares_of(panels_of(m) * panel_bytes(m), panels_of(m) / (op->gated ? 2 : 1));
  return parallel(op->api, context, (size_t)p.shares, multiply_share, &p);
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
