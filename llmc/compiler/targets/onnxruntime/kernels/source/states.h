/* Common code of operators with a recurrent state.

A recurrent state is float32 with one entry for each slot. It is updated in place if the input and output tensors share
a buffer; otherwise it is copied first. A row without earlier tokens starts from zeros, whatever its slot holds. A row
without tokens leaves its slot unchanged. */
#ifndef LLMC_STATES_H
#define LLMC_STATES_H

#include "rows.h"
#include "vectors.h"

/* Create output `to` [slots, ..] with the contents of `before`. */
static inline Status *state_output(Api api, Context *context, size_t to, const Tensor *before, float **out) {
  void *after;
  TRY(output(api, context, to, before->dims, before->rank, &after));
  const int64_t count = lines_of(before) * before->dims[before->rank - 1];
  if (after != before->data)
    for (int64_t i = 0; i < count; i++) ((float *)after)[i] = ((const float *)before->data)[i];
  *out = after;
  return NULL;
}

/* Clear the outputs if some tokens belong to no row. */
static inline void clear_rest(const Rows *rows, int64_t tokens, int64_t width, float *out) {
  if (rows->row_tokens < tokens)
    for (int64_t i = 0; i < tokens * width; i++) out[i] = 0.0f;
}

#endif
