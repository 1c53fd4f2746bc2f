/* The rows of a ragged batch: for each its cache slot, number of earlier tokens, first token and token count. */
#ifndef LLMC_ROWS_H
#define LLMC_ROWS_H

#include "ort_abi.h"

typedef struct {
  int64_t slot, past, first, count;
} Row;

typedef struct {
  const Row *each;
  int64_t count;
  int64_t row_tokens; /* tokens that belong to a row */
} Rows;

/* Read rows from input `at`, int64 [N, 4]. Fails unless they are in order and within `tokens`, `slots` and `limit`
tokens of a sequence. */
static inline Status *rows_input(Api api, const Context *context, size_t at, int64_t tokens, int64_t slots,
                                 int64_t limit, Rows *out) {
  Tensor rows;
  TRY(input(api, context, at, 2, &rows));
  if (rows.dims[1] != 4) return fail(api, "llmc: a row has not four numbers");
  *out = (Rows){.each = rows.data, .count = rows.dims[0]};
  int64_t end = 0;
  for (int64_t n = 0; n < out->count; n++) {
    const Row row = out->each[n];
    if (row.slot < 0 || row.slot >= slots || row.count < 0 || row.count > limit || row.past < 0 ||
        row.past > limit - row.count || row.count > tokens || row.first < 0 || row.first > tokens - row.count)
      return fail(api, "llmc: a row is outside of the tokens, the slots, the cache or the rotary tables");
    if (row.first < end) return fail(api, "llmc: a row begins before the one before it ends");
    end = row.first + row.count;
    out->row_tokens += row.count;
  }
  return NULL;
}

#endif
