/* A product of a few rows and a large weight, and single rows of a weight. */

#include "products.h"

/* At least STRIP outputs; inputs in whole blocks, and in multiples of 16. */
void few_rows(const float *x, const Byte *w, float *y, long rows, long outputs, long inputs, int format, int threads) {
    Product all = {x, w, y, rows, outputs, inputs, formats[format]};
    multiply(&all, 1, threads);
}

/* Rows of a weight in float32. */
void take_rows(const Byte *w, const long *rows, float *out, long count, long inputs, int format) {
    long row_bytes = inputs / formats[format].weights * formats[format].bytes;
    for (long i = 0; i < count; i++) formats[format].decode(w + rows[i] * row_bytes, out + i * inputs, inputs, 0);
}
