/* The library's entry point. ONNX Runtime calls RegisterCustomOps for each session that loads the library. */
#include "operators.h"

extern void *malloc(size_t);
extern void free(void *);

enum { MAX_ROWS = 1 << 28, MAX_GROUP = 1 << 14 }; /* with these limits, sizes and 32-bit sums stay in range */

Status *keep_kernel(Api api, const void *from, size_t bytes, void **kernel) {
  uint8_t *kept = malloc(bytes);
  if (!kept) return fail(api, "llmc: out of memory");
  for (size_t i = 0; i < bytes; i++) kept[i] = ((const uint8_t *)from)[i];
  *kernel = kept;
  return NULL;
}

void release_kernel(void *kernel) { free(kernel); }

Status *matrix_attributes(Api api, const void *info, Matrix *out) {
  TRY(int_attribute(api, info, "rows", &out->rows));
  TRY(int_attribute(api, info, "width", &out->width));
  TRY(int_attribute(api, info, "group", &out->group));
  TRY(int_attribute(api, info, "bits", &out->bits));
  TRY(int_attribute(api, info, "offsets", &out->offsets));
  TRY(int_attribute(api, info, "table", &out->table));
  return check_matrix(api, out);
}

Status *check_matrix(Api api, const Matrix *out) {
  if (out->rows < 1 || out->rows > MAX_ROWS || out->width < 1 || out->width > MAX_ROWS || out->group < 8 ||
      out->group > MAX_GROUP || out->group % (out->bits == SIX ? 16 : 8) || out->offsets < 0 || out->offsets > ZEROS ||
      (out->bits != FOUR && out->bits != SIX && out->bits != EIGHT) || (out->bits == SIX && out->offsets == ZEROS) ||
      out->table < 0 || out->table >= TABLE_COUNT || (out->table && (out->bits != FOUR || out->offsets)))
    return fail(api,
                "llmc: a matrix needs rows, width, 4, 6 or 8 bits, a group that is a multiple of 8, or 16 with 6 "
                "bits, and offsets 0 to 2; zero points are not for 6 bits, a table is for 4 without offsets");
  return NULL;
}

const char *any_provider(const Operator *self) { return (void)self, (const char *)NULL; }
int default_memory(const Operator *self, size_t at) { return (void)self, (void)at, 0; }
int required(const Operator *self, size_t at) { return (void)self, (void)at, REQUIRED; }
int version_one(const Operator *self) { return (void)self, 1; }
int any_version(const Operator *self) { return (void)self, 0x7FFFFFFF; }

__attribute__((visibility("default"))) Status *RegisterCustomOps(void *options, const ApiBase *base) {
  static const Operator *const all[] = {&linear_operator,          &embedding_operator,         &attention_operator,
                                        &coded_attention_operator, &rounded_attention_operator, &norm_operator,
                                        &experts_operator,         &expert_linear_operator,     &causal_conv_operator,
                                        &gated_delta_operator,     &state_scan_operator,        &adapted_operator};
  Api api = base->get(ABI_VERSION);
  void *domain = NULL;
  TRY(((Status * (*)(const char *, void **)) api[CREATE_DOMAIN])("llmc", &domain));
  for (size_t i = 0; i < sizeof all / sizeof *all; i++)
    TRY(((Status * (*)(void *, const Operator *)) api[DOMAIN_ADD])(domain, all[i]));
  return ((Status * (*)(void *, void *)) api[ADD_DOMAIN])(options, domain);
}
