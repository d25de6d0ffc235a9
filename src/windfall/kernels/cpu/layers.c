/* What a decoder layer computes between its matrix products, and a whole layer, for a few rows in float32.
 *
 * A row's result does not depend on the other rows. In attention, a row sees its keys in the order of their places in
 * the cache, so a row of a tree has the same bits as in a chain.
 */

#include <math.h>
#include <stdlib.h>

#include "products.h"

#define QUERIES 24 /* of a key head, whose scores are computed together */
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

typedef struct {
    const float *gate, *up;
    float *y;
    long count;
} Gate;

/* What one thread does. */
static void gate_part(void *given) {
    const Gate *all = given;
    long vectors = all->count / LANES, first = vectors * thread_number() / thread_count() * LANES;
    long last = vectors * (thread_number() + 1) / thread_count() * LANES;
    gate_up(all->gate + first, all->up + first, all->y + first, last - first);
}

/* Rotates the heads of x [rows, heads, width] by their positions, into `out`, with these steps between rows and heads. */
static void rotate(const float *x, const float *cosines, const float *sines, float *out, long rows, long heads,
                   long width, long row_step, long head_step) {
    long half = width / 2;
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < heads; head++, x += width) {
            const float *c = cosines + row * width, *s = sines + row * width;
            float *place = out + row * row_step + head * head_step;
            long i = 0;
            for (; i + LANES <= half; i += LANES) {
                Vector first = *(const Vector *)(x + i), second = *(const Vector *)(x + half + i);
                *(Vector *)(place + i) = first * *(const Vector *)(c + i) - second * *(const Vector *)(s + i);
                *(Vector *)(place + half + i) =
                    second * *(const Vector *)(c + half + i) + first * *(const Vector *)(s + half + i);
            }
            for (; i < half; i++) {
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

/* Keys [count][width] as a panel [width][PANEL]. */
static void transpose(const float *keys, long count, long width, float *panel) {
    for (long key = 0; key < count; key += 4)
        for (long i = 0; i < width; i += 4) {
            Quad rows[4], *place = (Quad *)(panel + i * PANEL + key);
            UNROLL for (int r = 0; r < 4; r++) rows[r] = *(const Quad *)(keys + at_most(key + r, count - 1) * width + i);
            Quad a = SHUFFLE(rows[0], rows[1], 0, 4, 1, 5), b = SHUFFLE(rows[0], rows[1], 2, 6, 3, 7);
            Quad c = SHUFFLE(rows[2], rows[3], 0, 4, 1, 5), d = SHUFFLE(rows[2], rows[3], 2, 6, 3, 7);
            place[0] = SHUFFLE(a, c, 0, 1, 4, 5);
            place[PANEL / 4] = SHUFFLE(a, c, 2, 3, 6, 7);
            place[2 * PANEL / 4] = SHUFFLE(b, d, 0, 1, 4, 5);
            place[3 * PANEL / 4] = SHUFFLE(b, d, 2, 3, 6, 7);
        }
}

/* The products of queries [count][width] and keys [end][width]: scores [count][step]. */
static void score(const float *queries, long count, const float *keys, long end, long width, float *panel,
                  float *scores, long step) {
    float sums[QUERIES][PARTS][PANEL] __attribute__((aligned(64)));
    for (long first = 0; first < end; first += PANEL, scores += PANEL) {
        transpose(keys + first * width, at_most(PANEL, end - first), width, panel);
        memset(sums, 0, count * sizeof *sums);
        add_panel(queries, width, count, panel, width, sums);
        for (long q = 0; q < count; q++)
            for (long key = 0; key < PANEL; key++) scores[q * step + key] = sums[q][0][key] + sums[q][1][key];
    }
}

/* Replaces scores by e^(scale * score - highest), in order of the columns; returns the sum. */
static float softmax(float *scores, const int *columns, long count, float scale) {
    Vector most = {0}, sums = {0};
    long prefix = count && columns[count - 1] == count - 1 ? count : 0;
    for (long at = prefix; at < count; at++) scores[at] = scores[columns[at]];
    for (long at = count; at < count + LANES; at++) scores[at] = -INFINITY;
    most -= INFINITY;
    for (long at = 0; at < count; at += LANES) most = larger(most, *(const Vector *)(scores + at));
    float highest = most[0];
    for (int lane = 1; lane < LANES; lane++) highest = most[lane] > highest ? most[lane] : highest;
    for (long at = 0; at < count; at += LANES)
        sums += *(Vector *)(scores + at) = exponential((*(Vector *)(scores + at) - highest) * scale);
    return total(&sums);
}

/* N vectors of the sums of `count` values, weighted by the scores of H queries and then multiplied by `by`. */
INLINE void mix(float *out, long width, const float *values, const int *columns, const float *scores, long step,
                long count, const float *by, const int H, const int N) {
    Vector sums[H][N];
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int n = 0; n < N; n++) sums[h][n] = (Vector){0};
    for (long at = 0; at < count; at++) {
        const Vector *value = (const Vector *)(values + columns[at] * width);
        UNROLL for (int h = 0; h < H; h++) UNROLL for (int n = 0; n < N; n++)
            sums[h][n] += scores[h * step + at] * value[n];
    }
    UNROLL for (int h = 0; h < H; h++) UNROLL for (int n = 0; n < N; n++)
        *(Vector *)(out + h * width + n * LANES) = sums[h][n] * by[h];
}

#define MIX(H)                                                                                                         \
    static void mix_##H(float *out, long width, const float *values, const int *columns, const float *scores,          \
                        long step, long count, const float *by) {                                                      \
        long i = 0;                                                                                                    \
        for (; i + 4 * LANES <= width; i += 4 * LANES)                                                                 \
            mix(out + i, width, values + i, columns, scores, step, count, by, H, 4);                                   \
        for (; i < width; i += LANES) mix(out + i, width, values + i, columns, scores, step, count, by, H, 1);         \
    }
MIX(1) MIX(2)
typedef void Mix(float *, long, const float *, const int *, const float *, long, long, const float *);
#if PANEL_ROWS > 3 || !defined(__x86_64__) /* enough registers */
#define MIXED 4
MIX(3) MIX(4)
static Mix *const mixes[] = {0, mix_1, mix_2, mix_3, mix_4};
#else
#define MIXED 2
static Mix *const mixes[] = {0, mix_1, mix_2};
#endif

/* `count` queries of one key head, from `first` on: the heads of the first row, then those of the next one. */
static void attend(const Attention *all, long head, long first, long count, float *scores, long step, int *columns) {
    long group = all->heads / all->kv_heads, width = all->width, last = -1, seen = 0;
    long end = all->start + all->rows, batch = head / all->kv_heads, cache = head * all->capacity * width;
    float *queries = scores + QUERIES * step, *panel = queries + QUERIES * width;
    float *out = all->out + (batch * all->rows * all->heads + head % all->kv_heads * group) * width;
    for (long q = first; q < first + count; q++)
        memcpy(queries + (q - first) * width, out + (q / group * all->heads + q % group) * width, width * sizeof(float));
    score(queries, count, all->keys + cache, end, width, panel, scores, step);
    for (long q = first, some; q < first + count; q += some, scores += some * step) {
        long row = q / group;
        float by[MIXED];
        some = at_most(MIXED, at_most(first + count - q, group - q % group));
        if (row != last) seen = visible(all, batch * all->rows + row, columns);
        last = row;
        for (long i = 0; i < some; i++) by[i] = 1 / softmax(scores + i * step, columns, seen, all->scale);
        mixes[some](out + (row * all->heads + q % group) * width, width, all->values + cache, columns, scores, step, seen,
                    by);
    }
}

static int no_memory; /* a thread has found none */

/* What one thread does: a range of the queries of all key heads. */
static void work(void *given) {
    const Attention *all = given;
    long each = all->rows * all->heads / all->kv_heads, total = all->batch * all->kv_heads * each;
    long thread = thread_number(), threads = thread_count(), end = total * (thread + 1) / threads, count;
    long step = (all->start + all->rows + PANEL - 1) / PANEL * PANEL + LANES;
    long floats = QUERIES * (step + all->width) + PANEL * all->width;
    float *scores = malloc(floats * sizeof(float) + step * sizeof(int));
    if (!scores) no_memory = 1;
    for (long at = total * thread / threads; scores && at < end; at += count) {
        count = at_most(at_most(QUERIES, end - at), each - at % each);
        attend(all, at / each, at % each, count, scores, step, (int *)(scores + floats));
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
        products[i] = (Product){x, linear[i].weight, place, rows, linear[i].outputs, linear[i].inputs,
                                formats + linear[i].format, {0}};
    if (!multiply(products, count, threads)) no_memory = 1;
    for (long i = 0; i < count; y += rows * linear[i++].outputs)
        for (long row = 0; linear[i].bias && row < rows; row++)
            for (long o = 0; o < linear[i].outputs; o++) y[row * linear[i].outputs + o] += linear[i].bias[o];
}

static void add(const float *x, float *y, long count) {
    for (long i = 0; i < count; i++) y[i] = x[i] + y[i];
}

/* What a layer adds to `x` [rows, hidden], which becomes y. `normed` [rows, inputs] is what its attention reads, and
 * `place` has room for what is computed between. */
static void run_layer(const Layer *layer, float *normed, const float *x, float *y, const float *cosines,
                      const float *sines, Attention all, float *place, int threads) {
    long n = all.batch * all.rows, hidden = layer->o.outputs, width = layer->width, inner = layer->gate.outputs;
    long queries = layer->heads * width, kv = layer->kv_heads * width;
    float *q = place, *k = q + n * queries, *v = k + n * kv, *gate = q;
    all.out = v + n * kv;
    project(&layer->q, 3, normed, q, n, threads);
    if (layer->query_norm) norm(q, layer->query_norm, q, n * layer->heads, width, layer->query_eps);
    if (layer->key_norm) norm(k, layer->key_norm, k, n * layer->kv_heads, width, layer->key_eps);
    write_cache(&all, q, k, v, cosines, sines);
    parallel(work, &all, (unsigned)threads, 0);
    project(&layer->o, 1, all.out, y, n, threads);
    add(x, y, n * hidden);
    norm(y, layer->before_mlp, normed, n, hidden, layer->before_mlp_eps);
    project(&layer->gate, 2, normed, gate, n, threads);
    Gate gates = {gate, gate + n * inner, gate, n * inner};
    parallel(gate_part, &gates, (unsigned)threads, 0);
    project(&layer->down, 1, gate, normed, n, threads);
    add(normed, y, n * hidden);
}

/* The numbers of a row that a layer computes. */
static long room(const Layer *layer) {
    return layer->q.inputs + at_least(2 * layer->width * (layer->heads + layer->kv_heads), 2 * layer->gate.outputs);
}

static Attention attention_of(const Layer *layer, float *keys, float *values, const unsigned char *mask, const long *sizes) {
    return (Attention){0, keys, values, mask, sizes[0], sizes[1], layer->heads, layer->kv_heads, layer->width, sizes[2],
                       sizes[3], layer->scale};
}

/* `count` layers, one after the other: x [batch, rows, hidden] → y [count, batch, rows, hidden]. `caches` are the keys
 * and the values of each layer. `sizes` are batch, rows, capacity and start. Returns 0 if there is no memory. */
int decoder_layers(const Layer *const *layers, long count, const float *x, float *y, const float *cosines,
                   const float *sines, float *const *caches, const unsigned char *mask, const long *sizes, int threads) {
    long n = sizes[0] * sizes[1], most = 0;
    for (long i = 0; i < count; i++) most = at_least(most, room(layers[i]));
    float *normed = malloc(n * most * sizeof(float));
    no_memory = 0;
    for (long i = 0; normed && i < count; i++, x = y, y += n * layers[i - 1]->o.outputs) {
        const Layer *own = layers[i];
        long hidden = own->o.outputs;
        norm(x, own->before_attention, normed, n, hidden, own->before_attention_eps);
        run_layer(own, normed, x, y, cosines, sines, attention_of(own, caches[2 * i], caches[2 * i + 1], mask, sizes),
                  normed + n * hidden, threads);
    }
    free(normed);
    return normed && !no_memory;
}

/* The first layer of an EAGLE-3 head, whose attention reads embeddings and features side by side, each normed. It adds
 * to the features, or to the normed ones. */
int concat_layer(const Layer *layer, const float *feature_norm, int add_normed, const float *embedded,
                 const float *features, float *y, const float *cosines, const float *sines, float *keys, float *values,
                 const unsigned char *mask, const long *sizes, int threads) {
    long n = sizes[0] * sizes[1], hidden = layer->o.outputs;
    float *both = malloc(n * (room(layer) + hidden) * sizeof(float)), *own = both + 2 * n * hidden;
    if (!both) return 0;
    no_memory = 0;
    norm(features, feature_norm, own, n, hidden, layer->before_attention_eps);
    for (long row = 0; row < n; row++) {
        float *place = both + 2 * row * hidden;
        norm(embedded + row * hidden, layer->before_attention, place, 1, hidden, layer->before_attention_eps);
        memcpy(place + hidden, own + row * hidden, hidden * sizeof(float));
    }
    run_layer(layer, both, add_normed ? own : features, y, cosines, sines,
              attention_of(layer, keys, values, mask, sizes), own + n * hidden, threads);
    free(both);
    return !no_memory;
}
