/* What the operators of layers with a state share. A state has a place for each slot, is float32, and is replaced in
place where the tensors before and after are one buffer; else what is there is copied first. A row without a past starts
from zeros, whatever its slot holds, and a row without tokens leaves its slot as it is. */
#ifndef LLMC_STATES_H
#define LLMC_STATES_H

#include "rows.h"
#include "vectors.h"

/* Output `to` [slots, ..], which begins as `before` is. */
static inline Status *state_output(Api api, Context *context, size_t to, const Tensor *before, float **out) {
  void *after;
  TRY(output(api, context, to, before->dims, before->rank, &after));
  const int64_t count = lines_of(before) * before->dims[before->rank - 1];
  if (after != before->data)
    for (int64_t i = 0; i < count; i++) ((float *)after)[i] = ((const float *)before->data)[i];
  *out = after;
  return NULL;
}

/* Zeros for tokens of no row. */
static inline void clear_rest(const Rows *rows, int64_t tokens, int64_t width, float *out) {
  if (rows->taken < tokens)
    for (int64_t i = 0; i < tokens * width; i++) out[i] = 0.0f;
}

#endif
