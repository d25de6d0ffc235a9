/* A product of a few rows and a large weight, and panels in float32. */

#include "products.h"

/* Weights in float32: at least STRIP outputs, and inputs in multiples of 16. Panels: inputs in whole blocks.
 * Returns 0 if there is no memory. */
int few_rows(const float *x, const Byte *w, float *y, long rows, long outputs, long inputs, int format, int threads) {
    Product all = {x, w, y, rows, outputs, inputs, formats + format, {0}};
    return multiply(&all, 1, threads);
}

/* Panels as float32: out [outputs][inputs]. */
void unpack(const Byte *panel, float *out, long outputs, long inputs, int format) {
    float decoded[BLOCK * PANEL];
    for (long first = 0; first < outputs; first += PANEL)
        for (long start = 0; start < inputs; start += BLOCK, panel += formats[format].bytes) {
            formats[format].decode(panel, decoded);
            for (long o = 0; o < at_most(PANEL, outputs - first); o++)
                for (long i = 0; i < BLOCK; i++) out[(first + o) * inputs + start + i] = decoded[i * PANEL + o];
        }
}
