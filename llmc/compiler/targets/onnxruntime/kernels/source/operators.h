/* What the operators of this library share. */
#ifndef LLMC_OPERATORS_H
#define LLMC_OPERATORS_H

#include "ort_abi.h"
#include "panels.h"
#include "team.h"

extern const Operator linear_operator, embedding_operator, attention_operator, coded_attention_operator, rounded_attention_operator, norm_operator,
    experts_operator, expert_linear_operator, causal_conv_operator, gated_delta_operator, state_scan_operator,
    adapted_operator;

/* Keep a kernel's attributes, `bytes` from `made` on, until `release`. */
Status *keep(Api api, const void *made, size_t bytes, void **kernel);
void release(void *kernel);

/* A matrix of attributes rows, width, group, bits, offsets and table, checked. */
Status *matrix_attributes(Api api, const void *info, Matrix *out);
/* Whether products stay in range with such a matrix. */
Status *check_matrix(Api api, const Matrix *out);

/* How many of the first of `rows` rows decode: what input `at`, int64 [1], says, all of them where it is not there. */
static inline Status *decoding_input(Api api, const Context *context, size_t at, int64_t rows, int64_t *decoding) {
  Tensor given;
  TRY(optional_input(api, context, at, &given));
  if (given.there && (given.rank != 1 || given.dims[0] != 1)) return fail(api, "llmc: `decoding` is one number");
  *decoding = given.there ? *(const int64_t *)given.data : rows;
  return *decoding < 0 || *decoding > rows ? fail(api, "llmc: more rows decode than there are") : NULL;
}

const char *any_provider(const Operator *self);
int default_memory(const Operator *self, size_t at);
int required(const Operator *self, size_t at);
int version_one(const Operator *self);
int any_version(const Operator *self);

#endif
