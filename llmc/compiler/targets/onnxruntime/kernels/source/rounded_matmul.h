/* The bfloat16 matmul of prefill rows in Linear. It rounds activations and weights to bfloat16. Every ISA variant adds
in the order of AMX tiles (rounded.h). A row's results do not depend on the other rows. */
#ifndef LLMC_ROUNDED_MATMUL_H
#define LLMC_ROUNDED_MATMUL_H

#include "strips.h"
#include "words.h"

enum { PANELS_AT_ONCE = 2 /* shares that end at a multiple of it are fast */ };

/* Round one row of m->width floats to bfloat16 (words.h). */
void round_row(const Matrix *m, const float *x, uint16_t *to, int64_t row);

/* How many neighbouring panels one share should multiply by `rows` activations. A power of two. */
int64_t panels_together(const Matrix *m, int64_t rows);

/* Multiply `rows` rounded activations by panels first … end − 1 (whole pairs with a gate). Ignores
matmul->activations. */
void multiply_rounded(const Matmul *matmul, const uint16_t *x, int64_t first, int64_t end, int64_t rows);

#endif
