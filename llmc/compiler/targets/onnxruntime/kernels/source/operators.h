/* Functions that the operators of this library share. */
#ifndef LLMC_OPERATORS_H
#define LLMC_OPERATORS_H

#include "ort_abi.h"
#include "panels.h"
#include "team.h"

extern const Operator linear_operator, embedding_operator, attention_operator, coded_attention_operator,
    rounded_attention_operator, norm_operator, experts_operator, expert_linear_operator, causal_conv_operator,
    gated_delta_operator, state_scan_operator, adapted_operator;

/* Copy a kernel's attributes, `bytes` bytes at `from`. release_kernel frees the copy. */
Status *keep_kernel(Api api, const void *from, size_t bytes, void **kernel);
void release_kernel(void *kernel);

/* Read and check the attributes rows, width, group, bits, offsets and table of a matrix. */
Status *matrix_attributes(Api api, const void *info, Matrix *out);
/* Fail unless the format is supported and sums with such a matrix stay in range. */
Status *check_matrix(Api api, const Matrix *out);

/* Read the number of decode rows among `rows` rows from input `at`, int64 [1]. If the input is absent, all rows are
decode rows. */
static inline Status *decode_rows_input(Api api, const Context *context, size_t at, int64_t rows,
                                        int64_t *decode_rows) {
  Tensor count;
  TRY(optional_input(api, context, at, &count));
  if (count.present && (count.rank != 1 || count.dims[0] != 1)) return fail(api, "llmc: `decoding` is one number");
  *decode_rows = count.present ? *(const int64_t *)count.data : rows;
  return *decode_rows < 0 || *decode_rows > rows ? fail(api, "llmc: more rows decode than there are") : NULL;
}

const char *any_provider(const Operator *self);
int default_memory(const Operator *self, size_t at);
int required(const Operator *self, size_t at);
int version_one(const Operator *self);
int any_version(const Operator *self);

#endif
