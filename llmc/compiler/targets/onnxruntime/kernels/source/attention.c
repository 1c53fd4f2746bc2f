/* Attention, RoundedAttention, CodedAttention(q, k?, v?, past k, past v, rows int64 [N, 4], cos?, sin?, sinks?,
  slopes?) → (y, present k, present v, scratch)

Applies rotary embedding, appends keys and values to the cache, and computes causal grouped-query attention for a ragged
batch of rows.

Inputs. q is [.., heads · D] for T tokens; k is [.., kv_heads · D] and v is [.., kv_heads · V]. Without k and v, q holds
all three: [.., heads · D + kv_heads · (D + V)]. A row is (cache slot, cached tokens, first token of T, token count). y
is [.., heads · V], and 0 for tokens of no row.

Cache. Keys are [slots, kv_heads, S, D] and values are [slots, kv_heads, S, V], with S token slots for each sequence.
Attention stores float16; RoundedAttention stores bfloat16 bits as uint16. CodedAttention stores uint8, with D +
SCALE_BYTES and V + SCALE_BYTES (cache_lines.h). Present and past may share a buffer; otherwise the kernel copies past
first.

Window. With `window`, the cache is a ring buffer: token p uses token slot p mod S. S must hold the keys that a row may
see and its new tokens. A token sees the `window` latest keys, including its own (0: all keys).

Scores. cos and sin are [positions, D' / 2] and rotate the first D' values of a head, in halves. The score is q · k ·
scale, then softcap · tanh(score / softcap) unless softcap is 0. `slopes` then adds a position bias: [heads] is the
slope per key position (ALiBi), and [heads, P] is a table. sinks [heads] are scores of one extra key without a value.
RoundedAttention also rounds q · scale and the softmax weights to bfloat16 (rounded.h).

Attributes: heads, kv_heads, head_dim D, value_dim V, window, scale, softcap. D and V are at most MAX_DIM.

Scores are computed for KEYS keys at a time with an online softmax (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao et al. 2022, "FlashAttention"). Every PART keys start new sums, which are merged in order.
With few heads and many keys, threads share the parts (Dao et al. 2023, "Flash-Decoding").

Blocks and parts start at multiples of KEYS and PART, and every sum has one fixed order. Therefore a token's result does
not depend on the tokens it is batched with. */
#include "attend_rows.h"
#if defined(__AMX_BF16__) || defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "attend_few.h"
#include "attend_lanes.h"
#else
enum { LANE_ROWS = ROWS, ROWS_GIVE_SAME_BITS = 1, HAS_WORD_DOTS = 0 };
static int words_allowed(void) { return 0; }
static void attend_lanes(const Run *run, int64_t number, Job job) { (void)run, (void)number, (void)job; }
static void attend_few(const Run *run, int64_t number, Job job) { (void)run, (void)number, (void)job; }
#endif

enum {
  MAX_HEADS = 1 << 16,
  MAX_TOKENS = 1 << 30, /* of a sequence whose keys are in a ring buffer */
  FEW_TOKENS = 16,      /* tokens that one thread appends faster than it can start others */
  WANTED_JOBS = 8,
  FEW_KEYS = 384,
};

/* Append the new keys and values of one row and head. */
static void append(void *data, size_t job) {
  const Run *run = data;
  const Attention *op = run->op;
  const int64_t h = (int64_t)job % op->kv_heads;
  const Row *row = run->rows + (int64_t)job / op->kv_heads;
  float rotated[MAX_DIM] __attribute__((aligned(64)));
  for (int64_t i = 0; i < row->count; i++) {
    const int64_t token = row->first + i, position = row->past + i;
    const int64_t token_slot = (row->slot * op->kv_heads + h) * run->capacity + position % run->capacity;
    const float *value = run->v + token * run->v_stride + h * op->value_dim;
    rotate(run, run->k + token * run->k_stride + h * op->dim, position, rotated);
    write_line(op->kind, rotated, run->keys + token_slot * op->key_bytes, op->dim);
    write_line(op->kind, value, run->values + token_slot * op->value_bytes, op->value_dim);
  }
}

/* Few query rows leave most lanes of attend_lanes empty, which pays off only with many keys. With fewer keys,
attend_rows runs if it gives the same bits. */
static void attend(void *data, size_t number) {
  const Run *run = data;
  const Job job = job_of(run, (int64_t)number);
  const int few = job.rows <= FEW_ROWS, rows = ROWS_GIVE_SAME_BITS && few && job.end - job.from <= FEW_KEYS;
  (!run->lanes            ? attend_rows
   : HAS_WORD_DOTS && few ? attend_few
   : rows                 ? attend_rows
                          : attend_lanes)(run, (int64_t)number, job);
}

/* Merge the parts of the keys of one piece and row. The row has one token. */
static void merge_parts(const Run *run, int64_t at) {
  float sums[MAX_DIM], max_score, weight_sum;
  const Result all = {&max_score, &weight_sum, sums};
  const int64_t pieces = run->op->kv_heads * run->pieces;
  const Piece piece = piece_of(run, at % pieces);
  for (int64_t r = 0; r < piece.count; r++) {
    clear_with_sink(run, all, piece.first + r, pad_lanes(run->op->value_dim));
    for (int64_t p = 0; p < run->parts; p++)
      merge(all, partial_result(run, at * run->parts + p, r), pad_lanes(run->op->value_dim));
    write_output(run, all, run->rows[run->units[at / pieces].row].first, piece.first + r);
  }
}

/* Plan the jobs: count the units (and list them in `units` unless it is NULL), and set run->parts. Returns the unit
count. */
static int64_t plan(Run *run, Unit *units) {
  int64_t count = 0, parts = 0, most_tokens = 0;
  for (int64_t n = 0; n < run->count; n++) {
    const Row row = run->rows[n];
    for (int64_t block = 0; block * run->tokens < row.count; block++, count++)
      if (units) units[count] = (Unit){(int32_t)n, (int32_t)block};
    const int64_t row_parts =
        row.count ? (row.past + row.count + PART - 1) / PART - oldest_key(run->op, row.past) / PART : 0;
    if (row_parts > parts) parts = row_parts;
    if (row.count > most_tokens) most_tokens = row.count;
  }
  const int64_t jobs = count * run->op->kv_heads * run->pieces;
  run->parts = most_tokens == 1 && jobs < WANTED_JOBS && parts > 1 ? parts : 0;
  return count;
}

static void copy(const uint8_t *from, uint8_t *to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i++) to[i] = from[i];
}

static Status *compute(void *kernel, Context *context) {
  const Attention *op = kernel;
  const int64_t dim = op->dim, value_dim = op->value_dim, width = op->heads * dim, y_width = op->heads * value_dim;
  const int64_t k_width = op->kv_heads * dim, v_width = op->kv_heads * value_dim, heads = op->heads / op->kv_heads;
  Tensor q, k, v, past_k, past_v, cos, sin, sinks, slopes;
  Api api = op->api;
  TRY(input(api, context, 0, 0, &q));
  TRY(optional_input(api, context, 1, &k));
  TRY(optional_input(api, context, 2, &v));
  TRY(input(api, context, 3, 4, &past_k));
  TRY(input(api, context, 4, 4, &past_v));
  TRY(optional_input(api, context, 6, &cos));
  TRY(optional_input(api, context, 7, &sin));
  TRY(optional_input(api, context, 8, &sinks));
  TRY(optional_input(api, context, 9, &slopes));
  const int packed = !k.present && !v.present, has_rotary = cos.present || sin.present;
  if (q.dims[q.rank - 1] != width + (packed ? k_width + v_width : 0))
    return fail(api, "llmc.Attention: q has not the width of its heads");
  if (!packed && (!same_but_last(&k, &q, k_width) || !same_but_last(&v, &q, v_width)))
    return fail(api, "llmc.Attention: k and v have not the tokens of q, or not the width of their heads");
  const int64_t scale_bytes = op->kind == IN_INT8 ? SCALE_BYTES : 0;
  if (past_k.dims[1] != op->kv_heads || past_k.dims[3] != dim + scale_bytes ||
      !same_but_last(&past_v, &past_k, value_dim + scale_bytes))
    return fail(api, "llmc.Attention: the caches have not the heads of k and v, or differ");
  if (has_rotary && (cos.rank != 2 || 2 * cos.dims[1] > dim || !same_but_last(&sin, &cos, cos.dims[1])))
    return fail(api, "llmc.Attention: rotary tables are wider than a head, or differ");
  if ((sinks.present && (sinks.rank != 1 || sinks.dims[0] != op->heads)) ||
      (slopes.present && (slopes.rank < 1 || slopes.rank > 2 || slopes.dims[0] != op->heads)))
    return fail(api, "llmc.Attention: sinks and slopes have not one number for each head");
  Run run = {
      .op = op,
      .lanes = is_rounded(op) && words_allowed(),
      .q = q.data,
      .k = k.data,
      .v = v.data,
      .cos = cos.data,
      .sin = sin.data,
      .sinks = sinks.present ? sinks.data : NULL,
      .slopes = slopes.present ? slopes.data : NULL,
      .q_stride = q.dims[q.rank - 1],
      .k_stride = k_width,
      .v_stride = v_width,
      .rotary_half = has_rotary ? cos.dims[1] : 0,
      .positions = slopes.present && slopes.rank == 2 ? slopes.dims[1] : 0,
      .capacity = past_k.dims[2],
      .pieces = (heads + ROWS - 1) / ROWS,
  };
  if (packed) {
    run.k = run.q + width;
    run.v = run.k + k_width;
    run.k_stride = run.v_stride = run.q_stride;
  }
  const int64_t tokens = lines_of(&q), longest = op->window ? MAX_TOKENS : run.capacity;
  const int64_t rotary_limit = has_rotary ? min64(longest, cos.dims[0]) : longest;
  const int64_t limit = slopes.present && slopes.rank == 2 ? min64(rotary_limit, run.positions) : rotary_limit;
  Rows rows;
  TRY(rows_input(api, context, 5, tokens, past_k.dims[0], limit, &rows));
  for (int64_t n = 0; n < rows.count; n++) {
    const Row row = rows.each[n];
    if (row.past + row.count > run.capacity && (run.capacity % KEYS || row.count > run.capacity - op->window + 1))
      return fail(api, "llmc.Attention: a row's window and its new tokens do not fit the ring of its cache");
  }
  run.rows = rows.each, run.count = rows.count;
  run.group = (heads + run.pieces - 1) / run.pieces;
  run.pieces = (heads + run.group - 1) / run.group; /* no piece is empty */
  run.tokens = (run.lanes ? LANE_ROWS : ROWS) / run.group;
  const int64_t units = plan(&run, NULL), jobs = units * op->kv_heads * run.pieces;
  run.jobs = jobs * (run.parts ? run.parts : 1);
  const int64_t listed = (units * (int64_t)sizeof(Unit) + 63) / 64 * 16; /* in floats */
  const int64_t scratch_floats = listed + jobs * run.parts * run.group * (pad_lanes(value_dim) + LANES);
  void *y, *keys, *values, *scratch;
  q.dims[q.rank - 1] = y_width;
  TRY(output(api, context, 0, q.dims, q.rank, &y));
  TRY(output(api, context, 1, past_k.dims, 4, &keys));
  TRY(output(api, context, 2, past_v.dims, 4, &values));
  TRY(output(api, context, 3, &scratch_floats, 1, &scratch));
  const int64_t token_slots = past_k.dims[0] * op->kv_heads * run.capacity;
  if (keys != past_k.data) copy(past_k.data, keys, token_slots * op->key_bytes);
  if (values != past_v.data) copy(past_v.data, values, token_slots * op->value_bytes);
  plan(&run, scratch);
  run.y = y, run.keys = keys, run.values = values, run.units = scratch, run.partial = (float *)scratch + listed;
  if (rows.row_tokens < tokens)
    for (int64_t i = 0; i < tokens * y_width; i++) run.y[i] = 0.0f;
  if (rows.row_tokens <= FEW_TOKENS) {
    for (int64_t job = 0; job < run.count * op->kv_heads; job++) append(&run, (size_t)job);
  } else {
    TRY(parallel(api, context, (size_t)(run.count * op->kv_heads), append, &run));
  }
  if (jobs) TRY(parallel(api, context, (size_t)run.jobs, attend, &run));
  if (run.parts)
    for (int64_t at = 0; at < jobs; at++) merge_parts(&run, at);
  return NULL;
}

static int kind_of(const Operator *self) {
  return self == &coded_attention_operator ? IN_INT8 : self == &rounded_attention_operator ? IN_BFLOAT16 : IN_FLOAT16;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  Attention op = {.api = api, .kind = kind_of(self)};
  TRY(int_attribute(api, info, "heads", &op.heads));
  TRY(int_attribute(api, info, "kv_heads", &op.kv_heads));
  TRY(int_attribute(api, info, "head_dim", &op.dim));
  TRY(int_attribute(api, info, "value_dim", &op.value_dim));
  TRY(int_attribute(api, info, "window", &op.window));
  TRY(float_attribute(api, info, "scale", &op.scale));
  TRY(float_attribute(api, info, "softcap", &op.softcap));
  if (op.kv_heads < 1 || op.heads < op.kv_heads || op.heads > MAX_HEADS || op.heads % op.kv_heads ||
      op.dim < 1 || op.dim > MAX_DIM || op.value_dim < 1 || op.value_dim > MAX_DIM || op.window < 0 ||
      !(op.softcap >= 0.0f && op.softcap <= 3.4028235e38f))
    return fail(api, "llmc.Attention: heads of this number or size are not supported");
  op.key_bytes = line_bytes(op.kind, op.dim), op.value_bytes = line_bytes(op.kind, op.value_dim);
  return keep_kernel(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) {
  static const char *const names[] = {
      [IN_FLOAT16] = "Attention", [IN_BFLOAT16] = "RoundedAttention", [IN_INT8] = "CodedAttention"};
  return names[kind_of(self)];
}
static size_t inputs(const Operator *self) { return (void)self, 10; }
static size_t outputs(const Operator *self) { return (void)self, 4; }
static int cache_type(const Operator *self) {
  static const int types[] = {[IN_FLOAT16] = FLOAT16, [IN_BFLOAT16] = UINT16, [IN_INT8] = UINT8};
  return types[kind_of(self)];
}
static int input_type(const Operator *self, size_t at) {
  return at == 5 ? INT64 : at == 3 || at == 4 ? cache_type(self) : FLOAT32;
}
static int input_kind(const Operator *self, size_t at) {
  return (void)self, at == 1 || at == 2 || at > 5 ? OPTIONAL : REQUIRED;
}
static int output_type(const Operator *self, size_t at) { return at == 1 || at == 2 ? cache_type(self) : FLOAT32; }

#define ATTENTION                     \
  {                                   \
      .version = ABI_VERSION,         \
      .create_or_fail = create,       \
      .name = name,                   \
      .provider = any_provider,       \
      .inputs = inputs,               \
      .input_type = input_type,       \
      .input_kind = input_kind,       \
      .input_memory = default_memory, \
      .outputs = outputs,             \
      .output_type = output_type,     \
      .output_kind = required,        \
      .compute_or_fail = compute,     \
      .destroy = release_kernel,      \
      .first_version = version_one,   \
      .last_version = any_version,    \
  }
const Operator attention_operator = ATTENTION, coded_attention_operator = ATTENTION,
               rounded_attention_operator = ATTENTION;
