/* The product of a few rows and a large weight, in float32: y[rows, outputs] = x[rows, inputs] * w[outputs, inputs]^T.
 *
 * Weights are read once, in the layout in which torch keeps them. A tile is a few rows times a few outputs, whose sums
 * stay in registers. Every sum has the same order for any number of rows and threads.
 */

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#if defined(__x86_64__) && !defined(__AVX512F__) /* 16 vector registers, otherwise 32 */
#define WIDE_ROWS 2
#else
#define WIDE_ROWS 6
#endif

#define MOST_ROWS 6 /* of a tile */
#define BLOCK 32    /* outputs that a thread computes for all rows before the next ones, so that weights stay in its cache */
#define AHEAD 8     /* outputs whose weights are fetched in advance */
#define LINE 16     /* floats of a cache line */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));

/* Functions of the OpenMP library that torch uses, so that both share their threads. */
static void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
static int (*thread_number)(void), (*thread_count)(void);

void bind(void *gomp_parallel, void *omp_get_thread_num, void *omp_get_num_threads) {
    parallel = gomp_parallel;
    thread_number = omp_get_thread_num;
    thread_count = omp_get_num_threads;
}

/* Not inlined: the remainder must be summed in the same way in all tiles. */
static __attribute__((noinline)) float total(Vector sums, const float *x, const float *w, long rest) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    for (long i = 0; i < rest; i++) sum += x[i] * w[i];
    return sum;
}

#define UNROLL _Pragma("GCC unroll 16")
#define TILE(R, O)                                                                                                    \
    static void tile_##R##_##O(const float *x, const float *w, float *y, long outputs, long inputs) {                 \
        Vector sums[R][O];                                                                                            \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int o = 0; o < O; o++) sums[r][o] = (Vector){0};               \
        long whole = inputs / LANES * LANES;                                                                          \
        for (long i = 0; i < whole; i += LANES) {                                                                     \
            UNROLL for (int line = 0; line < (O * LANES + LINE - 1) / LINE; line++)                                   \
                __builtin_prefetch(w + AHEAD * inputs + O * i + LINE * line);                                         \
            Vector weights[O];                                                                                        \
            UNROLL for (int o = 0; o < O; o++) weights[o] = *(const Vector *)(w + o * inputs + i);                    \
            UNROLL for (int r = 0; r < R; r++) {                                                                      \
                Vector values = *(const Vector *)(x + r * inputs + i);                                                \
                UNROLL for (int o = 0; o < O; o++) sums[r][o] += values * weights[o];                                 \
            }                                                                                                         \
        }                                                                                                             \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int o = 0; o < O; o++)                                         \
            y[r * outputs + o] = total(sums[r][o], x + r * inputs + whole, w + o * inputs + whole, inputs - whole);   \
    }
#define TILES(O) TILE(1, O) TILE(2, O) TILE(3, O) TILE(4, O) TILE(5, O) TILE(6, O)
#define NAMES(O) {0, tile_1_##O, tile_2_##O, tile_3_##O, tile_4_##O, tile_5_##O, tile_6_##O}
TILES(1)
TILES(2)
TILES(4)

typedef void Tile(const float *, const float *, float *, long, long);
static Tile *const single[] = NAMES(1), *const pair[] = NAMES(2), *const four[] = NAMES(4);

typedef struct {
    const float *x, *w;
    float *y;
    long rows, outputs, inputs;
} Product;

static long at_most(long size, long limit) { return size < limit ? size : limit; }

/* What one thread does: a range of the outputs. */
static void work(void *given) {
    Product *all = given;
    long outputs = all->outputs, inputs = all->inputs, groups = (all->rows + MOST_ROWS - 1) / MOST_ROWS;
    long fours = (outputs + 3) / 4, thread = thread_number(), threads = thread_count();
    long end = at_most(4 * (fours * (thread + 1) / threads), outputs);
    for (long start = 4 * (fours * thread / threads); start < end; start += BLOCK) {
        long stop = at_most(start + BLOCK, end);
        for (long group = 0; group < groups; group++) {
            long first = all->rows * group / groups, rows = all->rows * (group + 1) / groups - first, o = start;
            const float *x = all->x + first * inputs;
            float *y = all->y + first * outputs;
            if (rows <= WIDE_ROWS)
                for (; o + 4 <= stop; o += 4) four[rows](x, all->w + o * inputs, y + o, outputs, inputs);
            for (; o + 2 <= stop; o += 2) pair[rows](x, all->w + o * inputs, y + o, outputs, inputs);
            for (; o < stop; o++) single[rows](x, all->w + o * inputs, y + o, outputs, inputs);
        }
    }
}

void few_rows(const float *x, const float *w, float *y, long rows, long outputs, long inputs, int threads) {
    Product all = {x, w, y, rows, outputs, inputs};
    parallel(work, &all, (unsigned)threads, 0);
}
