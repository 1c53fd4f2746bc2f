/* Attention(q, k?, v?, past k, past v, rows int64 [N, 4], cos?, sin?) → (y, present k, present v, scratch).

Rotary embedding, appending to the cache, and causal attention in groups of query heads, for rows of any lengths that
lie end to end. q is [.., heads · D], T tokens in all, with k and v [.., kv_heads · D], or all three in one,
[.., (heads + 2 · kv_heads) · D], without k and v. The cache is float16 [slots, kv_heads, S, D]; present is past where
both are one buffer, and else becomes a copy first. A row is (slot, tokens in the cache, its first token of T, how many
it has); y [.., heads · D] is zero for tokens of no row. cos and sin are [positions, D' / 2] for the first D' values of
a head, which turn in halves. A token sees the `window` keys that end with its own (0: all). Attributes: heads,
kv_heads, head_dim, window, scale. D is a multiple of 16, at most MOST_DIM.

Scores are taken for KEYS keys at a time, with a running maximum (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao et al. 2022, "FlashAttention"). Every PART keys begin anew, and results of parts are put
together in order; where few heads have many keys, threads share the parts (Dao et al. 2023, "Flash-Decoding").

Blocks and parts begin at multiples of KEYS and PART, and all sums have one order: what a token gets does not depend on
which tokens, and how many, it is computed with. */
#include "operators.h"
#include "vector_math.h"

enum {
  KEYS = 64,
  ROWS = 48,        /* query rows of a job: tokens times heads of a group */
  MOST_DIM = 256,
  MOST_HEADS = 1 << 16,
  FEW_TOKENS = 16,  /* that are appended faster than threads are told to */
  PART = 512,       /* keys, a multiple of KEYS */
  WANTED_JOBS = 8,
};

typedef struct {
  Api api;
  int64_t heads, kv_heads, dim, window;
  float scale;
} Attention;

typedef struct {
  int64_t slot, past, first, count;
} Row;

typedef struct {
  int32_t row, block; /* a row's tokens are done block by block */
} Unit;

typedef struct {
  const Attention *op;
  const float *q, *k, *v, *cos, *sin;
  int64_t q_stride, k_stride, turned; /* floats from token to token; half of the values that turn */
  uint16_t *keys, *values;
  float *y, *partial;
  const Row *rows;
  const Unit *units;
  int64_t count, capacity, group, tokens, parts; /* rows; heads of a group, tokens of a unit; parts if shared out, or 0 */
} Run;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void turn(const Run *run, const float *from, int64_t position, float *to) {
  const int64_t half = run->turned, dim = run->op->dim;
  const float *cos = run->cos + position * half, *sin = run->sin + position * half;
  for (int64_t i = 0; i < half; i++) {
    float a = from[i], b = from[i + half];
    to[i] = a * cos[i] - b * sin[i];
    to[i + half] = b * cos[i] + a * sin[i];
  }
  for (int64_t i = 2 * half; i < dim; i++) to[i] = from[i];
}

/* To float16, in which what is beyond its range is no number: an infinite key could pass for one that nobody sees. */
INLINE void narrow(const float *from, uint16_t *to, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    __m512 x = _mm512_loadu_ps(from + i);
    const __mmask16 beyond = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(65520.0f), _CMP_NLT_UQ);
    x = _mm512_mask_blend_ps(beyond, x, _mm512_set1_ps(__builtin_nanf("")));
    _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
}

INLINE void widen(const uint16_t *from, float *to, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES)
    _mm512_store_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + i))));
}

/* Append the new keys and values of one row and head. */
static void append(void *data, size_t job) {
  const Run *run = data;
  const int64_t dim = run->op->dim, h = (int64_t)job % run->op->kv_heads;
  const Row *row = run->rows + (int64_t)job / run->op->kv_heads;
  float turned[MOST_DIM] __attribute__((aligned(64)));
  for (int64_t i = 0; i < row->count; i++) {
    const int64_t from = (row->first + i) * run->k_stride + h * dim, position = row->past + i;
    const int64_t to = ((row->slot * run->op->kv_heads + h) * run->capacity + position) * dim;
    turn(run, run->k + from, position, turned);
    narrow(turned, run->keys + to, dim);
    narrow(run->v + from, run->values + to, dim);
  }
}

/* 16 rows of 16 floats, `stride` apart, become columns: to[d · KEYS + row]. */
INLINE void transpose(const float *from, int64_t stride, int64_t rows, float *to) {
  __m512 r[16], t[16];
  UNROLL
  for (int i = 0; i < 16; i++) r[i] = i < rows ? _mm512_loadu_ps(from + i * stride) : _mm512_setzero_ps();
  UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL
  for (int i = 0; i < 16; i += 4)
    UNROLL
    for (int j = 0; j < 2; j++) {
      __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  UNROLL
  for (int i = 0; i < 4; i++) {
    __m512 a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
    __m512 c = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
    _mm512_storeu_ps(to + i * KEYS, _mm512_shuffle_f32x4(a, c, 0x88));
    _mm512_storeu_ps(to + (i + 8) * KEYS, _mm512_shuffle_f32x4(a, c, 0xDD));
    _mm512_storeu_ps(to + (i + 4) * KEYS, _mm512_shuffle_f32x4(b, d, 0x88));
    _mm512_storeu_ps(to + (i + 12) * KEYS, _mm512_shuffle_f32x4(b, d, 0xDD));
  }
}

/* Scores [rows, KEYS] of `rows` queries [rows, dim] with turned keys [dim, KEYS]. */
INLINE void score(const int rows, const float *q, const float *keys, int64_t dim, float scale, float *to) {
  __m512 s[6][4];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < 4; n++) s[r][n] = _mm512_setzero_ps();
  }
  for (int64_t d = 0; d < dim; d++) {
    __m512 k[4];
    UNROLL
    for (int n = 0; n < 4; n++) k[n] = _mm512_load_ps(keys + d * KEYS + n * LANES);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const __m512 x = _mm512_set1_ps(q[r * dim + d]);
      UNROLL
      for (int n = 0; n < 4; n++) s[r][n] = _mm512_fmadd_ps(x, k[n], s[r][n]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < 4; n++) _mm512_store_ps(to + r * KEYS + n * LANES, _mm512_mul_ps(s[r][n], _mm512_set1_ps(scale)));
  }
}

/* sums [rows, width] · shrink [rows] + weights [rows, KEYS] · values [count, width], of rows `dim` floats apart and
width = 16 · lines. */
INLINE void gather_lines(const int rows, const int lines, const float *weights, const float *values, int64_t count,
                         int64_t dim, const float *shrink, float *sums) {
  __m512 s[6][4];
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < lines; n++)
      s[r][n] = _mm512_mul_ps(_mm512_load_ps(sums + r * dim + n * LANES), _mm512_set1_ps(shrink[r]));
  }
  for (int64_t k = 0; k < count; k++) {
    __m512 v[4];
    UNROLL
    for (int n = 0; n < lines; n++) v[n] = _mm512_loadu_ps(values + k * dim + n * LANES);
    UNROLL
    for (int r = 0; r < rows; r++) {
      const __m512 x = _mm512_set1_ps(weights[r * KEYS + k]);
      UNROLL
      for (int n = 0; n < lines; n++) s[r][n] = _mm512_fmadd_ps(x, v[n], s[r][n]);
    }
  }
  UNROLL
  for (int r = 0; r < rows; r++) {
    UNROLL
    for (int n = 0; n < lines; n++) _mm512_store_ps(sums + r * dim + n * LANES, s[r][n]);
  }
}

INLINE void gather(const int rows, const float *weights, const float *values, int64_t count, int64_t dim,
                   const float *shrink, float *sums) {
  int64_t d = 0;
  for (; d + 4 * LANES <= dim; d += 4 * LANES)
    gather_lines(rows, 4, weights, values + d, count, dim, shrink, sums + d);
  for (; d < dim; d += LANES) gather_lines(rows, 1, weights, values + d, count, dim, shrink, sums + d);
}

/* Have memory brought into the cache that `count` float16 lie in. */
INLINE void fetch(const uint16_t *from, int64_t count) {
  for (int64_t i = 0; i < count; i += 2 * LANES) _mm_prefetch((const char *)(from + i), _MM_HINT_T0);
}

/* Functions of their own for each number of rows: inlined into one caller, their sums would not stay in registers. */
#define TILES(T)                                                                                                   \
  static __attribute__((noinline)) void score_##T(const float *q, const float *keys, int64_t dim, float scale,     \
                                                  float *to) {                                                     \
    score(T, q, keys, dim, scale, to);                                                                             \
  }                                                                                                                \
  static __attribute__((noinline)) void gather_##T(const float *weights, const float *values, int64_t count,       \
                                                   int64_t dim, const float *shrink, float *sums) {                \
    gather(T, weights, values, count, dim, shrink, sums);                                                          \
  }
TILES(1) TILES(2) TILES(3) TILES(4) TILES(6)

#define EACH_TILE(what, count, ...)                                      \
  for (int64_t r = 0, left = (count); left > 0; left = (count)-r) {      \
    if (left >= 6) what##_6(__VA_ARGS__), r += 6;                        \
    else if (left >= 4) what##_4(__VA_ARGS__), r += 4;                   \
    else if (left == 3) what##_3(__VA_ARGS__), r += 3;                   \
    else if (left == 2) what##_2(__VA_ARGS__), r += 2;                   \
    else what##_1(__VA_ARGS__), r += 1;                                  \
  }

/* One row's weights e^(score − maximum) of the keys from … end − 1 of this block; returns what older sums shrink by. */
INLINE float weigh(float *scores, int64_t from, int64_t end, float *most, float *total) {
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  __m512 s[4], top = none;
  UNROLL
  for (int n = 0; n < 4; n++) {
    int64_t below = from - n * LANES, above = end - n * LANES;
    uint32_t mask = above <= 0 ? 0 : above >= LANES ? 0xFFFF : (1u << above) - 1;
    if (below > 0) mask &= below >= LANES ? 0 : ~((1u << below) - 1);
    s[n] = _mm512_mask_blend_ps((__mmask16)mask, none, _mm512_load_ps(scores + n * LANES));
    top = _mm512_max_ps(top, s[n]);
  }
  float higher = _mm512_reduce_max_ps(top);
  if (higher < *most) higher = *most;
  if (higher == -__builtin_inff()) { /* no key yet, unless maxima passed over what is no number */
    UNROLL
    for (int n = 0; n < 4; n++) {
      if (_mm512_cmp_ps_mask(s[n], s[n], _CMP_UNORD_Q)) *total = __builtin_nanf("");
      _mm512_store_ps(scores + n * LANES, _mm512_setzero_ps());
    }
    return 1.0f;
  }
  const __m512 maximum = _mm512_set1_ps(higher);
  __m512 sum = _mm512_setzero_ps();
  UNROLL
  for (int n = 0; n < 4; n++) {
    __m512 e = exp16(_mm512_sub_ps(s[n], maximum));
    _mm512_store_ps(scores + n * LANES, e);
    sum = _mm512_add_ps(sum, e);
  }
  float shrink = _mm512_cvtss_f32(exp16(_mm512_set1_ps(*most - higher)));
  *total = *total * shrink + _mm512_reduce_add_ps(sum);
  *most = higher;
  return shrink;
}

/* Results over some of a row's keys: their maximum, the sum of weights, and [dim] the sum of weighted values. */
typedef struct {
  float *most, *total, *sums;
} Result;

/* Put the results over the keys that come next to those over the keys so far. */
static void join(Result so_far, Result next, int64_t dim) {
  const float higher = *so_far.most > *next.most ? *so_far.most : *next.most;
  if (higher == -__builtin_inff()) { /* no key yet */
    *so_far.total += *next.total;
    return;
  }
  const __m512 a = exp16(_mm512_set1_ps(*so_far.most - higher)), b = exp16(_mm512_set1_ps(*next.most - higher));
  *so_far.most = higher;
  *so_far.total = *so_far.total * _mm512_cvtss_f32(a) + *next.total * _mm512_cvtss_f32(b);
  for (int64_t d = 0; d < dim; d += LANES) {
    const __m512 later = _mm512_mul_ps(_mm512_loadu_ps(next.sums + d), b);
    _mm512_storeu_ps(so_far.sums + d, _mm512_fmadd_ps(_mm512_loadu_ps(so_far.sums + d), a, later));
  }
}

static void begin(Result result, int64_t dim) {
  *result.most = -__builtin_inff();
  *result.total = 0.0f;
  for (int64_t d = 0; d < dim; d += LANES) _mm512_storeu_ps(result.sums + d, _mm512_setzero_ps());
}

static void finish(const Run *run, Result result, int64_t token, int64_t head) {
  const int64_t dim = run->op->dim;
  const __m512 over = _mm512_set1_ps(1.0f / *result.total);
  float *y = run->y + (token * run->op->heads + head) * dim;
  for (int64_t d = 0; d < dim; d += LANES) _mm512_storeu_ps(y + d, _mm512_mul_ps(_mm512_loadu_ps(result.sums + d), over));
}

/* Memory of one row's result over one part, where parts are shared out. */
static Result shared(const Run *run, int64_t job, int64_t r) {
  const int64_t size = run->op->dim + LANES;
  float *at = run->partial + (job * run->group + r) * size;
  return (Result){at, at + 1, at + LANES};
}

/* Attention of one unit and head to its keys, or to one part of them. */
static void attend(void *data, size_t job) {
  const Run *run = data;
  const Attention *op = run->op;
  const int64_t dim = op->dim, group = run->group, parts = run->parts ? run->parts : 1, part = (int64_t)job % parts;
  const int64_t h = (int64_t)job / parts % op->kv_heads;
  const Unit unit = run->units[(int64_t)job / parts / op->kv_heads];
  const Row row = run->rows[unit.row];
  const int64_t skip = unit.block * run->tokens, tokens = least(run->tokens, row.count - skip), rows = tokens * group;
  const int64_t first = row.first + skip, past = row.past + skip; /* of the unit's first token: its place, its keys */
  float q[ROWS * MOST_DIM] __attribute__((aligned(64))), sums[ROWS * MOST_DIM] __attribute__((aligned(64)));
  float keys[KEYS * MOST_DIM] __attribute__((aligned(64))), turned[KEYS * MOST_DIM] __attribute__((aligned(64)));
  float values[KEYS * MOST_DIM] __attribute__((aligned(64))), scores[ROWS * KEYS] __attribute__((aligned(64)));
  float all[ROWS * MOST_DIM] __attribute__((aligned(64)));
  float most[ROWS], total[ROWS], shrink[ROWS], all_most[ROWS], all_total[ROWS];
  for (int64_t r = 0; r < rows; r++) {
    turn(run, run->q + (first + r / group) * run->q_stride + (h * group + r % group) * dim, past + r / group,
         q + r * dim);
    begin((Result){most + r, total + r, sums + r * dim}, dim);
    begin((Result){all_most + r, all_total + r, all + r * dim}, dim);
  }
  int64_t from = op->window && past + 1 > op->window ? (past + 1 - op->window) / KEYS * KEYS : 0, end = past + tokens;
  if (run->parts) {
    from = from > part * PART ? from : part * PART;
    end = least(end, (part + 1) * PART);
  }
  const int64_t place = (row.slot * op->kv_heads + h) * run->capacity * dim;
  for (int64_t at = from; at < end; at += KEYS) {
    const int64_t count = least(end - at, KEYS);
    fetch(run->values + place + at * dim, count * dim);
    widen(run->keys + place + at * dim, keys, count * dim);
    /* tokens before this block's first key see none of it */
    const int64_t blind = at > past ? (at - past) * group : 0;
    for (int64_t k = 0; k < KEYS; k += LANES)
      for (int64_t d = 0; d < dim; d += LANES) transpose(keys + k * dim + d, dim, count - k, turned + d * KEYS + k);
    EACH_TILE(score, rows - blind, q + (blind + r) * dim, turned, dim, op->scale, scores + (blind + r) * KEYS)
    if (at + KEYS < end) fetch(run->keys + place + (at + KEYS) * dim, least(end - at - KEYS, KEYS) * dim);
    for (int64_t r = blind; r < rows; r++) {
      const int64_t last = past + r / group + 1, oldest = op->window ? last - op->window : 0;
      shrink[r] = weigh(scores + r * KEYS, oldest - at, least(last - at, count), most + r, total + r);
    }
    widen(run->values + place + at * dim, values, count * dim);
    EACH_TILE(gather, rows - blind, scores + (blind + r) * KEYS, values, count, dim, shrink + blind + r,
              sums + (blind + r) * dim)
    if ((at + KEYS) % PART == 0 || at + KEYS >= end)
      for (int64_t r = 0; r < rows; r++) {
        const Result one = {most + r, total + r, sums + r * dim};
        join((Result){all_most + r, all_total + r, all + r * dim}, one, dim);
        begin(one, dim);
      }
  }
  for (int64_t r = 0; r < rows; r++) {
    const Result one = {all_most + r, all_total + r, all + r * dim};
    if (!run->parts) {
      finish(run, one, first + r / group, h * group + r % group);
    } else {
      begin(shared(run, (int64_t)job, r), dim);
      join(shared(run, (int64_t)job, r), one, dim);
    }
  }
}

/* Put the parts of the keys of one head and row, which has one token, together. */
static void combine(const Run *run, int64_t at) {
  float sums[MOST_DIM], most, total;
  const Result all = {&most, &total, sums};
  for (int64_t r = 0; r < run->group; r++) {
    begin(all, run->op->dim);
    for (int64_t p = 0; p < run->parts; p++) join(all, shared(run, at * run->parts + p, r), run->op->dim);
    finish(run, all, run->rows[at / run->op->kv_heads].first, at % run->op->kv_heads * run->group + r);
  }
}

/* Fill in how the work is shared out: the units, in `units` where that is not NULL, and the parts. Returns how many. */
static int64_t share_out(Run *run, Unit *units) {
  int64_t made = 0, longest = 0, most = 0;
  for (int64_t n = 0; n < run->count; n++) {
    const Row row = run->rows[n];
    for (int64_t block = 0; block * run->tokens < row.count; block++, made++)
      if (units) units[made] = (Unit){(int32_t)n, (int32_t)block};
    if (row.past + row.count > longest) longest = row.past + row.count;
    if (row.count > most) most = row.count;
  }
  const int64_t jobs = made * run->op->kv_heads;
  run->parts = most == 1 && jobs < WANTED_JOBS && longest > PART ? (longest + PART - 1) / PART : 0;
  return made;
}

static void copy(const uint16_t *from, uint16_t *to, int64_t count) {
  for (int64_t i = 0; i < count; i++) to[i] = from[i];
}

static Status *compute(void *kernel, Context *context) {
  const Attention *op = kernel;
  const int64_t dim = op->dim, width = op->heads * dim, beside = op->kv_heads * dim;
  Tensor q, k, v, past_k, past_v, rows, cos, sin;
  Api api = op->api;
  TRY(input(api, context, 0, 0, &q));
  TRY(optional_input(api, context, 1, &k));
  TRY(optional_input(api, context, 2, &v));
  TRY(input(api, context, 3, 4, &past_k));
  TRY(input(api, context, 4, 4, &past_v));
  TRY(input(api, context, 5, 2, &rows));
  TRY(optional_input(api, context, 6, &cos));
  TRY(optional_input(api, context, 7, &sin));
  const int packed = !k.there && !v.there, turns = cos.there || sin.there;
  if (q.dims[q.rank - 1] != width + (packed ? 2 * beside : 0))
    return fail(api, "llmc.Attention: q has not the width of its heads");
  if (!packed && (!is_beside(&k, &q, beside) || !is_beside(&v, &q, beside)))
    return fail(api, "llmc.Attention: k and v have not the tokens of q, or not the width of their heads");
  if (past_k.dims[1] != op->kv_heads || past_k.dims[3] != dim || !is_beside(&past_v, &past_k, dim))
    return fail(api, "llmc.Attention: the caches have not the heads of k and v, or differ");
  if (turns && (cos.rank != 2 || 2 * cos.dims[1] > dim || !is_beside(&sin, &cos, cos.dims[1])))
    return fail(api, "llmc.Attention: rotary tables are wider than a head, or differ");
  if (rows.dims[1] != 4) return fail(api, "llmc.Attention: a row has not four numbers");
  Run run = {
      .op = op, .q = q.data, .k = k.data, .v = v.data, .cos = cos.data, .sin = sin.data,
      .q_stride = q.dims[q.rank - 1], .k_stride = beside, .turned = turns ? cos.dims[1] : 0, .rows = rows.data,
      .count = rows.dims[0], .capacity = past_k.dims[2], .group = op->heads / op->kv_heads,
  };
  if (packed) {
    run.k = run.q + width;
    run.v = run.k + beside;
    run.k_stride = run.q_stride;
  }
  const int64_t tokens = lines_of(&q), limit = turns ? least(run.capacity, cos.dims[0]) : run.capacity;
  int64_t taken = 0, end = 0; /* of the tokens so far: how many are some row's, and where the last row ends */
  for (int64_t n = 0; n < run.count; n++) {
    const Row row = run.rows[n];
    if (row.slot < 0 || row.slot >= past_k.dims[0] || row.count < 0 || row.count > limit || row.past < 0 ||
        row.past > limit - row.count || row.count > tokens || row.first < 0 || row.first > tokens - row.count)
      return fail(api, "llmc.Attention: a row is outside of the tokens, the slots, the cache or the rotary tables");
    if (row.first < end) return fail(api, "llmc.Attention: a row begins before the one before it ends");
    end = row.first + row.count;
    taken += row.count;
  }
  run.tokens = ROWS / run.group;
  const int64_t units = share_out(&run, NULL), jobs = units * op->kv_heads;
  const int64_t listed = (units * (int64_t)sizeof(Unit) + 63) / 64 * 16; /* in floats */
  const int64_t room = listed + jobs * run.parts * run.group * (dim + LANES);
  void *y, *keys, *values, *scratch;
  q.dims[q.rank - 1] = width;
  TRY(output(api, context, 0, q.dims, q.rank, &y));
  TRY(output(api, context, 1, past_k.dims, 4, &keys));
  TRY(output(api, context, 2, past_v.dims, 4, &values));
  TRY(output(api, context, 3, &room, 1, &scratch));
  const int64_t count = past_k.dims[0] * op->kv_heads * run.capacity * dim;
  if (keys != past_k.data) copy(past_k.data, keys, count);
  if (values != past_v.data) copy(past_v.data, values, count);
  share_out(&run, scratch);
  run.y = y, run.keys = keys, run.values = values, run.units = scratch, run.partial = (float *)scratch + listed;
  if (taken < tokens)
    for (int64_t i = 0; i < tokens * width; i++) run.y[i] = 0.0f;
  if (taken <= FEW_TOKENS) {
    for (int64_t job = 0; job < run.count * op->kv_heads; job++) append(&run, (size_t)job);
  } else {
    TRY(parallel(api, context, (size_t)(run.count * op->kv_heads), append, &run));
  }
  if (jobs) TRY(parallel(api, context, (size_t)(jobs * (run.parts ? run.parts : 1)), attend, &run));
  if (run.parts)
    for (int64_t at = 0; at < jobs; at++) combine(&run, at);
  return NULL;
}

static Status *create(const Operator *self, Api api, const void *info, void **kernel) {
  (void)self;
  Attention op = {.api = api};
  TRY(int_attribute(api, info, "heads", &op.heads));
  TRY(int_attribute(api, info, "kv_heads", &op.kv_heads));
  TRY(int_attribute(api, info, "head_dim", &op.dim));
  TRY(int_attribute(api, info, "window", &op.window));
  TRY(float_attribute(api, info, "scale", &op.scale));
  if (op.kv_heads < 1 || op.heads < op.kv_heads || op.heads > MOST_HEADS || op.heads % op.kv_heads ||
      op.heads / op.kv_heads > ROWS || op.dim % LANES || op.dim < LANES || op.dim > MOST_DIM || op.window < 0)
    return fail(api, "llmc.Attention: heads of this number or size are not supported");
  return keep(api, &op, sizeof op, kernel);
}

static const char *name(const Operator *self) { return (void)self, "Attention"; }
static size_t inputs(const Operator *self) { return (void)self, 8; }
static size_t outputs(const Operator *self) { return (void)self, 4; }
static int input_type(const Operator *self, size_t at) {
  return (void)self, at == 5 ? INT64 : at == 3 || at == 4 ? FLOAT16 : FLOAT32;
}
static int input_kind(const Operator *self, size_t at) {
  return (void)self, at == 1 || at == 2 || at > 5 ? OPTIONAL : REQUIRED;
}
static int output_type(const Operator *self, size_t at) { return (void)self, at == 1 || at == 2 ? FLOAT16 : FLOAT32; }

const Operator attention_operator = {
    .version = ABI_VERSION, .create_or_fail = create, .name = name, .provider = any_provider, .inputs = inputs,
    .input_type = input_type, .input_kind = input_kind, .input_memory = default_memory, .outputs = outputs,
    .output_type = output_type, .output_kind = required, .compute_or_fail = compute, .destroy = release,
    .first_version = version_one, .last_version = any_version,
};
