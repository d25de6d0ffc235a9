/* Products of a few rows and a large weight: y[rows, outputs] = x[rows, inputs] * w[outputs, inputs]^T.
 *
 * Weights are in panels, or as torch has them: [outputs][inputs] in float32. These are read once, in strips of a few
 * outputs, and each chunk of a strip is multiplied with all rows before the next one is read. Sums are in float32.
 * Their order is the same for any number of rows and threads.
 *
 * Panels are multiplied by AMX (tiles.h), in integers (integers.h) or in float32 (panels.h), by what the CPU has.
 */

#pragma once

#include "tiles.h"
#include "vectors.h"

#if defined(__x86_64__) && !defined(__AVX512F__) /* 16 vector registers, otherwise 32 */
#define TILE_ROWS 2
#else
#define TILE_ROWS 6
#endif

#define STRIP 4    /* outputs */
#define CHUNK 1024 /* inputs */
#define AHEAD 8    /* outputs whose weights are fetched in advance */
#define LEVEL 2    /* of the cache into which they are fetched, as __builtin_prefetch counts */
#define LINE 16    /* floats of a cache line */
#define SPARE 6144 /* bytes after split rows, which tiles may read and ignore */

/* Adds the products of R rows and `count` inputs of a strip to their sums. For each vector of inputs, LINES cache lines
 * are fetched, and the next ones lie `step` floats further. */
#define TILE(R, LINES)                                                                                                 \
    static void tile_##R##_##LINES(const float *x, long x_step, const float *w, long w_step, long count,               \
                                   const float *ahead, long step, Vector (*sums)[STRIP]) {                             \
        Vector own[R][STRIP];                                                                                          \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int o = 0; o < STRIP; o++) own[r][o] = sums[r][o];              \
        for (long i = 0; i < count; i += LANES, ahead += step) {                                                       \
            UNROLL for (int line = 0; line < LINES; line++) __builtin_prefetch(ahead + LINE * line, 0, LEVEL);         \
            Vector weights[STRIP];                                                                                     \
            UNROLL for (int o = 0; o < STRIP; o++) weights[o] = *(const Vector *)(w + o * w_step + i);                 \
            UNROLL for (int r = 0; r < R; r++) {                                                                       \
                Vector values = *(const Vector *)(x + r * x_step + i);                                                 \
                UNROLL for (int o = 0; o < STRIP; o++) add_product(&own[r][o], values, weights[o]);                    \
                USED(values);                                                                                          \
            }                                                                                                          \
            UNROLL for (int o = 0; o < STRIP; o++) USED(weights[o]);                                                   \
        }                                                                                                              \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int o = 0; o < STRIP; o++) sums[r][o] = own[r][o];              \
    }
#define TILES(LINES) TILE(1, LINES) TILE(2, LINES) TILE(3, LINES) TILE(4, LINES) TILE(5, LINES) TILE(6, LINES)
TILES(1) TILES(2) TILES(4)
typedef void Tile(const float *, long, const float *, long, long, const float *, long, Vector (*)[STRIP]);
#define ROW(L) {0, tile_1_##L, tile_2_##L, tile_3_##L, tile_4_##L, tile_5_##L, tile_6_##L}
static Tile *const tiles[][7] = {[1] = ROW(1), [2] = ROW(2), [4] = ROW(4)};

typedef struct {
    const float *x;
    const Byte *w;
    float *y;
    long rows, outputs, inputs;
    const Format *format;
    Split split; /* of x, if its method needs it */
} Product;

/* `count` inputs of a strip, from `start` on, times all rows. */
static void add_chunk(const Product *all, long output, long start, long count, Vector (*sums)[STRIP]) {
    long rows = all->rows, inputs = all->inputs, groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const float *w = (const float *)all->w + output * inputs + start, *ahead = w + AHEAD * inputs + (STRIP - 1) * start;
    long each = STRIP * LANES / groups, lines = each > 2 * LINE ? 4 : each > LINE ? 2 : 1;
    for (long group = 0; group < groups; group++) {
        long first = rows * group / groups, size = rows * (group + 1) / groups - first;
        const float *fetched = ahead + STRIP * count * group / groups;
        tiles[lines][size](all->x + first * inputs + start, inputs, w, inputs, count, fetched, each, sums + first);
    }
}

/* One thread's range of the strips of a product. The last strip overlaps the one before it, if it must. */
static void multiply_strips(const Product *all, long thread, long threads) {
    Vector sums[MOST_ROWS][STRIP];
    long strips = (all->outputs + STRIP - 1) / STRIP;
    for (long strip = strips * thread / threads; strip < strips * (thread + 1) / threads; strip++) {
        long output = at_most(strip * STRIP, all->outputs - STRIP);
        memset(sums, 0, all->rows * sizeof *sums);
        for (long start = 0; start < all->inputs; start += CHUNK)
            add_chunk(all, output, start, at_most(CHUNK, all->inputs - start), sums);
        for (long row = 0; row < all->rows; row++) *(Quad *)(all->y + row * all->outputs + output) = totals(sums[row]);
    }
}

/* How a product is computed. */
typedef enum { STRIPS, DECODED, INTEGERS_IN_ROWS, INTEGERS_IN_TILES, BF16_IN_TILES } Method;

static Method method_of(const Product *product) {
    if (!product->format->bytes) return STRIPS;
#ifdef AMX
    if (may_use_tiles && product->format->decode == bf16) return BF16_IN_TILES;
    if (may_use_tiles && product->format->bits && product->rows >= least_tiled_rows(product->format))
        return INTEGERS_IN_TILES;
#endif
#ifdef INTEGER_ROWS
    if (product->format->bits) return INTEGERS_IN_ROWS;
#endif
    return DECODED;
}

/* Sets the sizes of tiles that a product needs, in each thread. */
static void use_tiles(const Product *own) {
#ifdef AMX
    Method method = method_of(own);
    if (method == BF16_IN_TILES) set_tiles(divided(own->rows).side, 2 * BLOCK);
    if (method == INTEGERS_IN_TILES) set_tiles(divided(own->rows).side, own->format->group);
#else
    (void)own;
#endif
}

/* Tiles that are in use would be saved whenever a thread is interrupted. */
static void release_tiles(void) {
#ifdef AMX
    if (may_use_tiles) _tile_release();
#endif
}

/* Whether two products need their rows in the same form. */
static int alike(const Product *a, const Product *b) {
    return a->x == b->x && a->format->bits == b->format->bits && a->format->group == b->format->group &&
           a->format->addend == b->format->addend && method_of(a) == method_of(b);
}

/* Splits the rows of a product as its method needs them. Returns 0 if there is no memory. */
static int split_rows(Product *own) {
    Method method = method_of(own);
    if (method == STRIPS || method == DECODED) return 1;
#ifdef INTEGER_ROWS
    long rows = own->rows, inputs = own->inputs, each = method == BF16_IN_TILES ? 2 : 1;
    long bytes = rows * DIGITS * inputs * each + SPARE, groups = each == 2 ? 0 : inputs / own->format->group;
    bytes = (bytes + 63) / 64 * 64;
    Byte *place = aligned_alloc(64, (bytes + (groups * (DIGITS + 1) + 1) * rows * 4 + 63) / 64 * 64);
    if (!place) return 0;
    own->split.parts = place;
    own->split.offsets = (int *)(place + bytes);
    own->split.totals = (float *)(own->split.offsets + groups * DIGITS * rows);
    own->split.units = own->split.totals + groups * rows;
    for (long row = 0; row < rows; row++) {
        const float *x = own->x + row * inputs;
#ifdef AMX
        if (method == BF16_IN_TILES) {
            split_bf16(x, inputs, place + 2 * row * DIGITS * BLOCK, 2 * rows * DIGITS * BLOCK);
            continue;
        }
#endif
        split_row(x, inputs, own->format, rows, row, &own->split);
    }
#endif
    return 1;
}

/* One panel times all rows. */
static void multiply_panel(const Product *own, long number) {
    const Byte *panel = own->w + number * (own->inputs / BLOCK * own->format->bytes);
    float sums[MOST_ROWS][PANEL] __attribute__((aligned(64)));
    long count = at_most(PANEL, own->outputs - number * PANEL), rows = own->rows;
    const float *units = 0;
    switch (method_of(own)) {
#ifdef AMX
    case BF16_IN_TILES: bf16_tiles_panel(panel, &own->split, own->inputs, rows, divided(rows), sums); break;
    case INTEGERS_IN_TILES:
        memset(sums, 0, rows * sizeof *sums);
        integer_tiles_panel(panel, own->format, &own->split, own->inputs, rows, divided(rows), sums);
        units = own->split.units;
        break;
#endif
#ifdef INTEGER_ROWS
    case INTEGERS_IN_ROWS:
        memset(sums, 0, rows * sizeof *sums);
        integer_panel(panel, own->format, &own->split, own->inputs, rows, sums);
        units = own->split.units;
        break;
#endif
    default: decoded_panel(panel, own->format, own->x, own->inputs, rows, sums);
    }
    for (long row = 0; row < rows; row++)
        for (long o = 0; o < count; o++)
            own->y[row * own->outputs + number * PANEL + o] = units ? sums[row][o] * units[row] : sums[row][o];
}

typedef struct {
    const Product *each;
    long count;
} Products;

static long panels(const Product *product) {
    return product->format->bytes ? (product->outputs + PANEL - 1) / PANEL : 0;
}

/* What one thread does: its range of the strips of each product, and of the panels of all of them. */
static void multiply_part(void *given) {
    const Products *all = given;
    long thread = thread_number(), threads = thread_count(), total = 0, before = 0;
    for (long i = 0; i < all->count; i++) total += panels(all->each + i);
    for (const Product *own = all->each; own < all->each + all->count; before += panels(own++)) {
        long first = at_least(total * thread / threads - before, 0);
        long last = at_most(total * (thread + 1) / threads - before, panels(own));
        if (!own->format->bytes) multiply_strips(own, thread, threads);
        if (first < last) use_tiles(own);
        for (long panel = first; panel < last; panel++) multiply_panel(own, panel);
    }
    release_tiles();
}

/* Products with the same number of rows. Returns 0 if there is no memory. */
static int multiply(const Product *each, long count, int threads) {
    long rows = each->rows, done = 1;
    for (long first = 0; done && first < rows; first += MOST_ROWS) {
        Product some[3];
        for (long i = 0; i < count; i++) {
            some[i] = each[i];
            some[i].rows = at_most(MOST_ROWS, rows - first);
            some[i].x += first * some[i].inputs;
            some[i].y += first * some[i].outputs;
            if (i && alike(some + i, some + i - 1)) some[i].split = some[i - 1].split;
            else done = done && split_rows(some + i);
        }
        Products all = {some, count};
        if (done) parallel(multiply_part, &all, (unsigned)threads, 0);
        for (long i = 0; i < count; i++)
            if (!i || some[i].split.parts != some[i - 1].split.parts) free(some[i].split.parts);
    }
    return done;
}
