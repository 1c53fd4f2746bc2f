/* One operator of the kernels without ONNX Runtime, for CPUs that are emulated: what ort_abi.h asks of it, over a case
from stdin, its outputs to stdout; on a team of as many threads as the first argument says. Numbers are int64. A case: the operator's name; attributes, each a name, 1 for a float,
8 bytes; inputs, each 1 if it is there, the rank, dims, bytes; outputs that are wanted. Names and bytes have their length before
them. An output: the rank, dims, bytes; of an operator that fails, −1 and why. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ort_abi.h"

enum { MOST = 16 };
typedef struct {
  int64_t there, rank, dims[MAX_RANK], bytes;
  void *data;
} Held;
typedef struct {
  char name[64];
  int64_t is_float;
  union {
    int64_t whole;
    float real;
  } value;
} Attribute;

static Attribute attributes[MOST];
static int64_t attribute_count;
static Held inputs[MOST], outputs[MOST];
static const Operator *operators[MOST], *running;
static size_t operator_count;
static int64_t wanted; /* outputs */

static int64_t number(void) {
  int64_t x;
  if (fread(&x, 8, 1, stdin) != 1) exit(3);
  return x;
}
static void bytes(void *to, int64_t count) {
  if (count && fread(to, (size_t)count, 1, stdin) != 1) exit(3);
}
static void told(int64_t x) { fwrite(&x, 8, 1, stdout); }
static Status *failed(Status *why) {
  told(-1), told((int64_t)strlen(why)), fputs(why, stdout);
  exit(0);
}

static Status *create_status(int code, const char *why) { return (void)code, strdup(why); }
static Status *create_domain(const char *name, void **domain) { return (void)name, *domain = operators, NULL; }
static Status *domain_add(void *domain, const Operator *one) {
  return (void)domain, operators[operator_count++] = one, NULL;
}
static Status *add_domain(void *options, void *domain) { return (void)options, (void)domain, NULL; }
static const Attribute *attribute(const char *name, int64_t is_float) {
  for (int64_t i = 0; i < attribute_count; i++)
    if (!strcmp(attributes[i].name, name) && attributes[i].is_float == is_float) return attributes + i;
  return NULL;
}
static Status *int_of(const void *info, const char *name, int64_t *out) {
  const Attribute *found = attribute(name, ((void)info, 0));
  return found ? (*out = found->value.whole, NULL) : strdup(name);
}
static Status *float_of(const void *info, const char *name, float *out) {
  const Attribute *found = attribute(name, ((void)info, 1));
  return found ? (*out = found->value.real, NULL) : strdup(name);
}
static Status *context_input(const Context *context, size_t at, const Value **out) {
  return (void)context, *out = inputs[at].there ? inputs + at : NULL, NULL;
}
static int64_t size_of(int type) { return type == FLOAT32 ? 4 : type == INT64 ? 8 : type == FLOAT16 || type == UINT16 ? 2 : 1; }
static Status *context_output(Context *context, size_t at, const int64_t *dims, size_t rank, Value **out) {
  if ((int64_t)at >= wanted) return (void)context, *out = NULL, NULL;
  Held *made = outputs + at;
  made->there = 1, made->rank = (int64_t)rank, made->bytes = size_of(running->output_type(running, at));
  for (size_t i = 0; i < rank; i++) made->bytes *= made->dims[i] = dims[i];
  made->data = aligned_alloc(64, (size_t)(made->bytes + 127) / 64 * 64);
  return (void)context, *out = made, NULL;
}
static Status *tensor_data(const Held *value, void **out) { return *out = value->data, NULL; }
static Status *shape(const Held *value, const Held **out) { return *out = value, NULL; }
static Status *dimensions_count(const Held *value, size_t *out) { return *out = (size_t)value->rank, NULL; }
static Status *dimensions(const Held *value, int64_t *out, size_t count) {
  return memcpy(out, value->dims, 8 * count), NULL;
}
static void release_shape(ShapeInfo *info) { (void)info; }
static Status *parallel_for(const Context *context, void (*job)(void *, size_t), size_t count, size_t batch, void *data) {
  (void)context, (void)batch;
  for (size_t i = count; i--;) job(data, i); /* in any order */
  return NULL;
}

#define ENTRY(f) (void (*)(void)) f
static void (*const api[300])(void) = {
    [CREATE_STATUS] = ENTRY(create_status), [CREATE_DOMAIN] = ENTRY(create_domain), [DOMAIN_ADD] = ENTRY(domain_add),
    [ADD_DOMAIN] = ENTRY(add_domain), [TENSOR_DATA] = ENTRY(tensor_data), [DIMENSIONS_COUNT] = ENTRY(dimensions_count),
    [DIMENSIONS] = ENTRY(dimensions), [SHAPE] = ENTRY(shape), [FLOAT_ATTRIBUTE] = ENTRY(float_of),
    [INT_ATTRIBUTE] = ENTRY(int_of), [CONTEXT_INPUT] = ENTRY(context_input), [CONTEXT_OUTPUT] = ENTRY(context_output),
    [RELEASE_SHAPE] = ENTRY(release_shape), [PARALLEL_FOR] = ENTRY(parallel_for),
};
static Api get(uint32_t version) { return (void)version, (Api)api; }
static const char *version(void) { return "standalone"; }

Status *RegisterCustomOps(void *options, const ApiBase *base);
uint32_t SetThreads(uint32_t threads);

int main(int argc, char **argv) {
  if (argc > 1) SetThreads((uint32_t)atoi(argv[1]));
  const ApiBase base = {get, version};
  Status *bad = RegisterCustomOps(NULL, &base);
  if (bad) failed(bad);
  char name[64] = {0};
  bytes(name, number());
  attribute_count = number();
  for (int64_t i = 0; i < attribute_count; i++) {
    bytes(attributes[i].name, number());
    attributes[i].is_float = number();
    bytes(&attributes[i].value, 8);
  }
  const int64_t given = number();
  for (int64_t i = 0; i < given; i++) {
    Held *in = inputs + i;
    if (!(in->there = number())) continue;
    in->rank = number();
    for (int64_t d = 0; d < in->rank; d++) in->dims[d] = number();
    in->bytes = number();
    in->data = aligned_alloc(64, (size_t)(in->bytes + 127) / 64 * 64);
    bytes(in->data, in->bytes);
  }
  wanted = number();
  for (size_t i = 0; i < operator_count; i++)
    if (!strcmp(operators[i]->name(operators[i]), name)) running = operators[i];
  if (!running) failed("no such operator");
  void *kernel = NULL;
  if ((bad = running->create_or_fail(running, (Api)api, NULL, &kernel))) failed(bad);
  if ((bad = running->compute_or_fail(kernel, NULL))) failed(bad);
  running->destroy(kernel);
  for (int64_t i = 0; i < wanted; i++) {
    told(outputs[i].rank);
    for (int64_t d = 0; d < outputs[i].rank; d++) told(outputs[i].dims[d]);
    told(outputs[i].bytes);
    fwrite(outputs[i].data, 1, (size_t)outputs[i].bytes, stdout);
  }
  return 0;
}
