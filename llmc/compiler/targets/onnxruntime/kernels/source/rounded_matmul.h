/* Products in bfloat16, which Linear has for the tokens of prompts: activations and weights are rounded to it, and sums
have the order of tiles (rounded.h) in all sets. A row's results are the same whatever other rows there are. */
#ifndef LLMC_ROUNDED_MATMUL_H
#define LLMC_ROUNDED_MATMUL_H

#include "strips.h"
#include "words.h"

enum { PANELS_AT_ONCE = 2 /* shares that end between so many are fast */ };

/* Round one row of `width` floats (words.h). */
void round_row(const Matrix *m, const float *x, uint16_t *to, int64_t row);

/* How many neighbouring panels `rows` activations are best multiplied with by one share, a power of two. */
int64_t panels_together(const Matrix *m, int64_t rows);

/* Panels first … end − 1, whole pairs with a gate, times `rows` rounded activations; p's own activations are not read. */
void multiply_rounded(const Matmul *p, const uint16_t *x, int64_t first, int64_t end, int64_t rows);

#endif
