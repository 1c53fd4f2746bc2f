/* Embedding(ids int64 [..], panels uint8) → y float [.., K]: rows of a matrix in the format of Linear (panels.h).

Attributes: rows (N), width (K), group, bits, offsets, table. */
#include "operators.h"
#include "panels.h"

typedef struct {
  Api api;
  Matrix matrix;
} Embedding;

/* The quantized weight of input k of a group. */
static int32_t quantized_at(const Matrix *m, const uint8_t *quantized, int64_t lane, int64_t k) {
  const int64_t steps = m->group / 4, step = k / 4, byte = lane * 4 + k % 4;
  if (m->bits == EIGHT) return quantized[step * 64 + byte];
  const uint8_t both = quantized[step % (steps / 2) * 64 + byte];
  const int32_t low = step < steps / 2 ? both & 15 : both >> 4;
  if (m->table) return TABLES[m->table][low] + 128;
  if (m->bits == FOUR) return low;
  const uint8_t above = quantized[(steps / 2 + step % (steps / 4)) * 64 + byte];
  return low | (above >> 2 * (step / (steps / 4)) & 3) << 4;
}

static void read_row(const Matrix *m, const uint8_t *panels, int64_t row, float *y) {
  const uint8_t *header = panels + row / LANES * panel_bytes(m), *quantized = header + header_bytes(m);
  const int64_t lane = row % LANES;
  const int32_t zero = zero_of(format_of(m), m->offsets);
  for (int64_t g = 0; g < groups_of(m); g++) {
    const uint16_t *once = (const uint16_t *)header + g * LANES * header_vectors(m) + lane;
    const float scale = one_from_half(once[0]) / SCALE_UNIT, stored = m->offsets ? one_from_half(once[LANES]) : 0.0f;
    const float offset = m->offsets == ZEROS ? stored * scale : stored;
    for (int64_t k = 0; k < m->group && g * m->group + k < m->width; k++)
      y[g * m->group + k] = scale * (float)(quantized_at(m, quantized, lane, k) - zero) + offset;
    quantized += m->group * LANES * m->bits / 8;
  }
}

static Status *compute(void *kernel, Context *context) {
  const Embedding *op = kernel;
  Tensor ids, panels;
  TRY(optional_input(op->api, context, 0, &ids));
  TRY(input(op->api, context, 1, 1, &panels));
  if (!ids.present || ids.rank + 1 > MAX_RANK)
    return fail(op->api, "llmc.Embedding: ids are missing, or have too many dimensions");
  if (panels.dims[0] != panels_of(&op->matrix) * panel_bytes(&op->matrix))
    return fail(op->api, "llmc.Embedding: panels of another matrix");
  int64_t count = 1;
  for (size_t i = 0; i < ids.rank; i++) count *= ids.dims[i];
  ids.dims[ids.rank] = op->matrix.width;
  void *y;
  TRY(output(op->api, context, 0, ids.dims, ids.rank + 1, &y));
  for (int64_t i = 0; i < count; i++) {
    int64_t row = ((const int64_t *)ids.data)[i];
    if (row < 0 || row >= op->matrix.rows) return fail(op->api, "llmc.Embedding: a token id is not in the vocabulary");
    read_row(&op->matrix, panels.data, row, (float *)y + i * op->matrix.width);
  }
  return NULL;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  Embedding op = {.api = api};
  TRY(matrix_attributes(api, info, &op.matrix));
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "Embedding"; }
static size_t inputs(const Operator *self) { return (void)self, 2; }
static size_t outputs(const Operator *self) { return (void)self, 1; }
static int input_type(const Operator *self, size_t at) { return (void)self, at ? UINT8 : INT64; }
static int output_type(const Operator *self, size_t at) { return (void)self, (void)at, FLOAT32; }

const Operator embedding_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = required, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release_kernel,
    .first_version = version_one, .last_version = any_version,
};
