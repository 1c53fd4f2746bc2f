/* The part of ONNX Runtime's C API that these operators use.

The API is a table of functions. Their order never changes once a version is released, so the enum below gives each
function's index (onnxruntime_c_api.cc, API version 17). A NULL status means success. */
#ifndef LLMC_ORT_ABI_H
#define LLMC_ORT_ABI_H

#include <stddef.h>
#include <stdint.h>

#define ABI_VERSION 17

typedef void Status;
typedef void Context;
typedef void Value;
typedef void ShapeInfo;
typedef void (*const *Api)(void);

enum {
  CREATE_STATUS = 0,
  CREATE_DOMAIN = 26,
  DOMAIN_ADD = 27,
  ADD_DOMAIN = 28,
  TENSOR_DATA = 51,
  DIMENSIONS_COUNT = 61,
  DIMENSIONS = 62,
  SHAPE = 65,
  FLOAT_ATTRIBUTE = 85,
  INT_ATTRIBUTE = 86,
  CONTEXT_INPUT = 90,
  CONTEXT_OUTPUT = 91,
  RELEASE_STATUS = 93,
  RELEASE_SHAPE = 99,
  PARALLEL_FOR = 274,
};

enum { INVALID_ARGUMENT = 2 };
enum { FLOAT32 = 1, UINT8 = 2, UINT16 = 4, INT64 = 7, FLOAT16 = 10 };
enum { REQUIRED = 0, OPTIONAL = 1 };

typedef struct {
  Api (*get)(uint32_t version);
  const char *(*version)(void);
} ApiBase;

/* OrtCustomOp: the functions that ONNX Runtime calls on an operator. Later versions add fields after `last_version`. */
typedef struct Operator Operator;
struct Operator {
  uint32_t version;
  void *(*create)(const Operator *, Api, const void *info);
  const char *(*name)(const Operator *);
  const char *(*provider)(const Operator *);
  int (*input_type)(const Operator *, size_t);
  size_t (*inputs)(const Operator *);
  int (*output_type)(const Operator *, size_t);
  size_t (*outputs)(const Operator *);
  void (*compute)(void *kernel, Context *);
  void (*destroy)(void *kernel);
  int (*input_kind)(const Operator *, size_t);
  int (*output_kind)(const Operator *, size_t);
  int (*input_memory)(const Operator *, size_t);
  int (*least_inputs)(const Operator *);
  int (*alike_inputs)(const Operator *);
  int (*least_outputs)(const Operator *);
  int (*alike_outputs)(const Operator *);
  Status *(*create_or_fail)(const Operator *, Api, const void *info, void **kernel);
  Status *(*compute_or_fail)(void *kernel, Context *);
  Status *(*infer_shape)(const Operator *, void *);
  int (*first_version)(const Operator *);
  int (*last_version)(const Operator *);
};

#define TRY(call)                \
  do {                           \
    Status *failed_ = (call);    \
    if (failed_) return failed_; \
  } while (0)

static inline Status *fail(Api api, const char *why) {
  return ((Status * (*)(int, const char *)) api[CREATE_STATUS])(INVALID_ARGUMENT, why);
}

static inline Status *int_attribute(Api api, const void *info, const char *name, int64_t *out) {
  return ((Status * (*)(const void *, const char *, int64_t *)) api[INT_ATTRIBUTE])(info, name, out);
}

static inline Status *float_attribute(Api api, const void *info, const char *name, float *out) {
  return ((Status * (*)(const void *, const char *, float *)) api[FLOAT_ATTRIBUTE])(info, name, out);
}

enum { MAX_RANK = 6 };

typedef struct {
  int present; /* 0 for an optional tensor that is absent */
  void *data;
  size_t rank;
  int64_t dims[MAX_RANK];
} Tensor;

/* Read an input of the running node, with its shape. The input may be absent. */
static inline Status *optional_input(Api api, const Context *context, size_t at, Tensor *out) {
  const Value *value = NULL;
  ShapeInfo *shape = NULL;
  TRY(((Status * (*)(const Context *, size_t, const Value **)) api[CONTEXT_INPUT])(context, at, &value));
  *out = (Tensor){.present = value != NULL};
  if (!value) return NULL;
  TRY(((Status * (*)(const Value *, void **)) api[TENSOR_DATA])(value, &out->data));
  TRY(((Status * (*)(const Value *, ShapeInfo **)) api[SHAPE])(value, &shape));
  Status *bad = ((Status * (*)(const ShapeInfo *, size_t *)) api[DIMENSIONS_COUNT])(shape, &out->rank);
  if (!bad && out->rank <= MAX_RANK)
    bad = ((Status * (*)(const ShapeInfo *, int64_t *, size_t)) api[DIMENSIONS])(shape, out->dims, out->rank);
  ((void (*)(ShapeInfo *))api[RELEASE_SHAPE])(shape);
  return bad || out->rank <= MAX_RANK ? bad : fail(api, "llmc: a tensor has more than 6 dimensions");
}

/* Read a required input with `rank` dimensions, or with at least one if `rank` is 0. */
static inline Status *input(Api api, const Context *context, size_t at, size_t rank, Tensor *out) {
  TRY(optional_input(api, context, at, out));
  if (rank ? out->rank == rank : out->rank) return NULL;
  return fail(api, "llmc: an input is missing, or has another number of dimensions");
}

/* Whether the last dimension of `tensor` is `width` and its other dimensions equal those of `other`. */
static inline int same_but_last(const Tensor *tensor, const Tensor *other, int64_t width) {
  if (!tensor->rank || tensor->rank != other->rank || tensor->dims[tensor->rank - 1] != width) return 0;
  for (size_t i = 0; i + 1 < tensor->rank; i++)
    if (tensor->dims[i] != other->dims[i]) return 0;
  return 1;
}

/* The product of all dimensions but the last. */
static inline int64_t lines_of(const Tensor *tensor) {
  int64_t lines = 1;
  for (size_t i = 0; i + 1 < tensor->rank; i++) lines *= tensor->dims[i];
  return lines;
}

/* Create an output of the running node with the given shape, if the graph requests it. */
static inline Status *optional_output(Api api, Context *context, size_t at, const int64_t *dims, size_t rank,
                                      int *requested, void **data) {
  Value *value = NULL;
  *data = NULL;
  TRY(((Status * (*)(Context *, size_t, const int64_t *, size_t, Value **)) api[CONTEXT_OUTPUT])(context, at, dims,
                                                                                                 rank, &value));
  *requested = value != NULL;
  return value ? ((Status * (*)(Value *, void **)) api[TENSOR_DATA])(value, data) : NULL;
}

/* Create a required output. */
static inline Status *output(Api api, Context *context, size_t at, const int64_t *dims, size_t rank, void **data) {
  int requested;
  TRY(optional_output(api, context, at, dims, rank, &requested, data));
  return requested ? NULL : fail(api, "llmc: an output has no name");
}

/* Run job(data, 0 … count − 1) on the session's threads. */
static inline Status *session_parallel(Api api, const Context *context, size_t count, void (*job)(void *, size_t),
                                       void *data) {
  return ((Status * (*)(const Context *, void (*)(void *, size_t), size_t, size_t, void *)) api[PARALLEL_FOR])(
      context, job, count, 0, data);
}

#endif
