/* What a decoder layer computes between its matrix products, and a whole layer, for a few rows in float32.
 *
 * A row's result does not depend on the other rows. In attention, a row sees its keys in the order of their places in
 * the cache, so a row of a tree has the same bits as in a chain.
 */

#include <math.h>
#include <stdlib.h>

#include "products.h"

typedef int Whole __attribute__((vector_size(4 * LANES)));

#define ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds to a whole number, which is then in the lowest bits */

INLINE Vector larger(Vector a, Vector b) {
    Whole first = a > b;
    return (Vector)(((Whole)a & first) | ((Whole)b & ~first));
}

/* e^x for x between -87 and 88, and for others that of the nearest of these. The relative error is about 1e-7. */
INLINE Vector exponential(Vector x) {
    const Vector none = {0};
    x = -larger(-larger(x, none - 87.0f), none - 88.0f);
    Vector shifted = x * 1.44269504f + ROUNDER, whole = shifted - ROUNDER;
    x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Vector sum = 1.9875691500e-4f * x + 1.3981999507e-3f;
    sum = sum * x + 8.3334519073e-3f;
    sum = sum * x + 4.1665795894e-2f;
    sum = sum * x + 1.6666665459e-1f;
    sum = sum * x + 5.0000001201e-1f;
    sum = sum * x * x + x + 1.0f;
    return (Vector)((Whole)sum + ((Whole)shifted << 23));
}

/* y = weight * x / sqrt(mean(x * x) + eps), of each row */
void norm(const float *x, const float *weight, float *y, long rows, long width, float eps) {
    for (long row = 0; row < rows; row++, x += width, y += width) {
        Vector squares = {0};
        for (long i = 0; i < width; i += LANES) squares += *(const Vector *)(x + i) * *(const Vector *)(x + i);
        float by = 1 / sqrtf(total(&squares) / width + eps);
        for (long i = 0; i < width; i += LANES)
            *(Vector *)(y + i) = *(const Vector *)(weight + i) * (*(const Vector *)(x + i) * by);
    }
}

/* y = silu(gate) * up */
void gate_up(const float *gate, const float *up, float *y, long count) {
    for (long i = 0; i < count; i += LANES) {
        Vector x = *(const Vector *)(gate + i);
        *(Vector *)(y + i) = x / (1.0f + exponential(-x)) * *(const Vector *)(up + i);
    }
}

/* Rotates the heads of x [rows, heads, width] by their positions, into `out`, with these steps between rows and heads. */
static void rotate(const float *x, const float *cosines, const float *sines, float *out, long rows, long heads,
                   long width, long row_step, long head_step) {
    long half = width / 2;
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < heads; head++, x += width) {
            const float *c = cosines + row * width, *s = sines + row * width;
            float *place = out + row * row_step + head * head_step;
            for (long i = 0; i < half; i++) {
                float first = x[i], second = x[half + i];
                place[i] = first * c[i] - second * s[i];
                place[half + i] = second * c[half + i] + first * s[half + i];
            }
        }
}

typedef struct {
    float *out;                /* [batch, rows, heads, width]: first the rotated queries */
    float *keys, *values;      /* [batch, kv_heads, capacity, width] */
    const unsigned char *mask; /* [batch, rows, start + rows]; 0: causal */
    long batch, rows, heads, kv_heads, width, capacity, start;
    float scale;
} Attention;

/* Writes rotated keys, and values, to the cache after `start`, and rotated queries to `out`. */
static void write_cache(const Attention *all, const float *q, const float *k, const float *v, const float *cosines,
                  const float *sines) {
    long rows = all->rows, width = all->width, kv = all->kv_heads * width, step = all->heads * width;
    for (long b = 0; b < all->batch; b++) {
        long at = (b * all->kv_heads * all->capacity + all->start) * width, angles = b * rows * width;
        rotate(k + b * rows * kv, cosines + angles, sines + angles, all->keys + at, rows, all->kv_heads, width, width,
               all->capacity * width);
        rotate(q + b * rows * step, cosines + angles, sines + angles, all->out + b * rows * step, rows, all->heads, width,
               step, width);
        for (long row = 0; row < rows; row++)
            for (long head = 0; head < all->kv_heads; head++)
                memcpy(all->values + at + (head * all->capacity + row) * width,
                       v + (b * rows + row) * kv + head * width, width * sizeof(float));
    }
}

/* The columns that a row sees, in order; returns their number. */
static long visible(const Attention *all, long row, int *columns) {
    long end = all->start + all->rows, count = 0;
    if (!all->mask) {
        for (count = 0; count <= all->start + row % all->rows; count++) columns[count] = count;
        return count;
    }
    for (long column = 0; column < end; column++) {
        columns[count] = column;
        count += all->mask[row * end + column];
    }
    return count;
}

/* N vectors of the sum of `count` values, weighted by scores and then multiplied by `by`. */
INLINE void mix(float *out, const float *values, const int *columns, const float *scores, long count, long width,
                float by, const int N) {
    Vector sums[N];
    UNROLL for (int n = 0; n < N; n++) sums[n] = (Vector){0};
    for (long at = 0; at < count; at++) {
        const Vector *value = (const Vector *)(values + columns[at] * width);
        UNROLL for (int n = 0; n < N; n++) sums[n] += scores[at] * value[n];
    }
    UNROLL for (int n = 0; n < N; n++) ((Vector *)out)[n] = sums[n] * by;
}

/* One query head of one row: the softmax of its scores, and the values weighted by it, which replace the query. */
static void attend_head(float *head, const float *keys, const float *values, const int *columns, long count, long width,
                        float scale, float *scores) {
    float highest = -INFINITY;
    for (long at = 0; at < count; at += 4) {
        Vector sums[4] = {{0}};
        UNROLL for (int k = 0; k < 4; k++) {
            const float *key = keys + columns[at + k < count ? at + k : at] * width;
            for (long i = 0; i < width; i += LANES) sums[k] += *(const Vector *)(head + i) * *(const Vector *)(key + i);
        }
        *(Quad *)(scores + at) = totals(sums) * scale;
    }
    for (long at = 0; at < count; at++) highest = scores[at] > highest ? scores[at] : highest;
    for (long at = count; at < count + LANES; at++) scores[at] = -INFINITY;
    Vector sums = {0};
    for (long at = 0; at < count; at += LANES) sums += *(Vector *)(scores + at) = exponential(*(Vector *)(scores + at) - highest);
    float by = 1 / total(&sums);
    long i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) mix(head + i, values + i, columns, scores, count, width, by, 4);
    for (; i < width; i += LANES) mix(head + i, values + i, columns, scores, count, width, by, 1);
}

/* What one thread does: a range of the query heads of all rows. */
static void work(void *given) {
    const Attention *all = given;
    long end = all->start + all->rows, group = all->heads / all->kv_heads, last = -1, count = 0, width = all->width;
    long tasks = all->batch * all->rows * all->heads, thread = thread_number(), threads = thread_count();
    float *scores = malloc((end + LANES + 4) * (sizeof(float) + sizeof(int)));
    int *columns = (int *)(scores + end + LANES + 4);
    for (long task = tasks * thread / threads; scores && task < tasks * (thread + 1) / threads; task++) {
        long row = task / all->heads, head = task % all->heads;
        if (row != last) count = visible(all, row, columns);
        last = row;
        long cache = (row / all->rows * all->kv_heads + head / group) * all->capacity * width;
        attend_head(all->out + task * width, all->keys + cache, all->values + cache, columns, count, width, all->scale,
                    scores);
    }
    free(scores);
}

/* Rotates queries and keys, stores keys and values in the cache, and attends. `sizes` are those of Attention. */
void attention(const float *q, const float *k, const float *v, const float *cosines, const float *sines, float *keys,
               float *values, const unsigned char *mask, float *out, const long *sizes, float scale, int threads) {
    Attention all = {out, keys, values, mask, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], scale};
    write_cache(&all, q, k, v, cosines, sines);
    parallel(work, &all, (unsigned)threads, 0);
}

typedef struct {
    const Byte *weight;
    const float *bias; /* or 0 */
    long outputs, inputs, format;
} Linear;

typedef struct {
    Linear q, k, v, o, gate, up, down;
    const float *before_attention, *before_mlp, *query_norm, *key_norm; /* weights of norms; the last two may be 0 */
    long heads, kv_heads, width;
    float before_attention_eps, before_mlp_eps, query_eps, key_eps, scale;
} Layer;

/* Up to three linear layers on the same rows. The results lie one after the other, from `y` on. */
static void project(const Linear *linear, long count, const float *x, float *y, long rows, int threads) {
    Product products[3];
    float *place = y;
    for (long i = 0; i < count; place += rows * linear[i++].outputs)
        products[i] = (Product){x, linear[i].weight, place, rows, linear[i].outputs, linear[i].inputs, formats[linear[i].format]};
    multiply(products, count, threads);
    for (long i = 0; i < count; y += rows * linear[i++].outputs)
        for (long row = 0; linear[i].bias && row < rows; row++)
            for (long o = 0; o < linear[i].outputs; o++) y[row * linear[i].outputs + o] += linear[i].bias[o];
}

static void add(const float *x, float *y, long count) {
    for (long i = 0; i < count; i++) y[i] = x[i] + y[i];
}

/* A whole layer: x [batch, rows, hidden] → y. `sizes` are batch, rows, capacity and start. 0: there is no memory. */
int decoder_layer(const Layer *layer, const float *x, float *y, const float *cosines, const float *sines, float *keys,
                  float *values, const unsigned char *mask, const long *sizes, int threads) {
    long n = sizes[0] * sizes[1], hidden = layer->q.inputs, width = layer->width, inner = layer->gate.outputs;
    long queries = layer->heads * width, kv = layer->kv_heads * width;
    float *normed = malloc(n * (hidden + at_least(2 * queries + 2 * kv, 2 * inner)) * sizeof(float));
    if (!normed) return 0;
    float *q = normed + n * hidden, *k = q + n * queries, *v = k + n * kv, *attended = v + n * kv, *gate = q;
    Attention all = {attended,  keys,  values,   mask,     sizes[0],    sizes[1], layer->heads, layer->kv_heads,
                     width,     sizes[2], sizes[3], layer->scale};
    norm(x, layer->before_attention, normed, n, hidden, layer->before_attention_eps);
    project(&layer->q, 3, normed, q, n, threads);
    if (layer->query_norm) norm(q, layer->query_norm, q, n * layer->heads, width, layer->query_eps);
    if (layer->key_norm) norm(k, layer->key_norm, k, n * layer->kv_heads, width, layer->key_eps);
    write_cache(&all, q, k, v, cosines, sines);
    parallel(work, &all, (unsigned)threads, 0);
    project(&layer->o, 1, attended, y, n, threads);
    add(x, y, n * hidden);
    norm(y, layer->before_mlp, normed, n, hidden, layer->before_mlp_eps);
    project(&layer->gate, 2, normed, gate, n, threads);
    gate_up(gate, gate + n * inner, gate, n * inner);
    project(&layer->down, 1, gate, normed, n, threads);
    add(normed, y, n * hidden);
    free(normed);
    return 1;
}
