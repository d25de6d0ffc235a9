/* Products of a few rows and a weight in panels: y[rows, outputs] = x[rows, inputs] * w[outputs, inputs]^T.
 *
 * A panel has the weights of 32 outputs side by side, so that a vector of weights belongs to one input. It is a row of
 * blocks of 32 inputs, so a thread reads its panels from the first byte to the last. A block has words [words][outputs]
 * of 32 bits, each with 2 numbers of half precision, 4 integers of 8 bits or 8 of 4 bits, which belong to successive
 * inputs; the lowest bits are the first. Integers are signed, but those of 4 bits with an addend are not. A block of
 * integers has groups of 16 or 32 inputs. It starts with the scale, and perhaps the addend, of each group and output:
 * [groups][1 or 2][outputs] in float32.
 *
 * Weights are decoded in chunks that stay in the L1 cache, and each chunk is multiplied with all rows before the next
 * one is decoded. Sums are in float32. Their order is the same for any number of rows and threads.
 */

#pragma once

#include "vectors.h"

#define PANEL 32                /* outputs */
#define BLOCK 32                /* inputs */
#define CHUNK_BLOCKS 4          /* that are decoded at a time */
#define FETCHED 4096            /* bytes that a thread fetches in advance */
#define PARTS 2                 /* sums of each output: of inputs with even and with odd numbers */
#define GROUP_BYTES (4 * PANEL) /* of the scales, or the addends, of a group */

#if LANES == 16 /* 32 vector registers, and 32 outputs in two of them */
#define PANEL_ROWS 6
#define TILE_VECTORS 2
#elif defined(__x86_64__) /* 16 vector registers */
#define PANEL_ROWS 3
#define TILE_VECTORS 2
#else
#define PANEL_ROWS 3
#define TILE_VECTORS 4
#endif

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int Integers __attribute__((vector_size(64), aligned(4), may_alias));
typedef unsigned Words __attribute__((vector_size(64)));

INLINE Floats numbers(Integers integers) { return __builtin_convertvector(integers, Floats); }

/* A block in half precision → out [inputs][outputs]. */
INLINE void halves(const Byte *p, float *out, Floats number(Words)) {
    for (int i = 0; i < BLOCK * PANEL; i += 2 * PANEL)
        UNROLL for (int half = 0; half < PANEL; half += 16) {
            Words pair = (Words) * (const Integers *)(p + 2 * i + 4 * half);
            *(Floats *)(out + i + half) = number(pair << 16);
            *(Floats *)(out + i + PANEL + half) = number(pair & 0xffff0000);
        }
}

/* Of 16 bits in the upper half of a word. */
INLINE Floats bf16_number(Words bits) { return (Floats)bits; }
INLINE Floats f16_number(Words bits) {
    Floats size = (Floats)((bits & 0x7fffffff) >> 3) * 0x1p112f;
    return (Floats)((Words)size | (bits & 0x80000000));
}

static void bf16(const Byte *p, float *out) { halves(p, out, bf16_number); }
static void f16(const Byte *p, float *out) { halves(p, out, f16_number); }

/* A block of integers. The scale and the addend of 16 outputs stay in registers for a group of inputs. */
INLINE void integers(const Byte *p, float *out, const int BITS, const int GROUP, const int ADDEND) {
    const Integers *words = (const Integers *)(p + BLOCK / GROUP * (1 + ADDEND) * GROUP_BYTES);
    for (int group = 0; group < BLOCK / GROUP; group++, p += (1 + ADDEND) * GROUP_BYTES)
        for (int word = 0; word < GROUP * BITS / 32; word++)
            UNROLL for (int half = 0; half < 2; half++, words++) {
                Floats scale = ((const Floats *)p)[half], addend = ((const Floats *)p)[ADDEND * 2 + half];
                UNROLL for (int i = 0; i < 32 / BITS; i++, out += PANEL) {
                    Integers low = *words << (32 - BITS - BITS * i);
                    Floats number = numbers(BITS == 4 && ADDEND ? (Integers)((Words)low >> 28) : low >> (32 - BITS));
                    ((Floats *)out)[half] = ADDEND ? number * scale + addend : number * scale;
                }
                if (!half) out -= 32 / BITS * PANEL;
            }
}

#define INTEGERS(BITS, GROUP, ADDEND)                                                                                  \
    static void integers_##BITS##_##GROUP##_##ADDEND(const Byte *p, float *out) {                                      \
        integers(p, out, BITS, GROUP, ADDEND);                                                                         \
    }
INTEGERS(8, 32, 0) INTEGERS(8, 32, 1) INTEGERS(8, 16, 0) INTEGERS(8, 16, 1)
INTEGERS(4, 32, 0) INTEGERS(4, 32, 1) INTEGERS(4, 16, 0) INTEGERS(4, 16, 1)

typedef struct {
    long bytes; /* of a block; 0: weights are no panels, but [outputs][inputs] in float32 */
    void (*decode)(const Byte *block, float *out);
    int bits, group, addend; /* of integers */
} Format;

#define FORMAT(BITS, GROUP, ADDEND)                                                                                    \
    {BLOCK / GROUP * (1 + ADDEND) * GROUP_BYTES + BLOCK * PANEL * BITS / 8, integers_##BITS##_##GROUP##_##ADDEND,      \
     BITS, GROUP, ADDEND}
static const Format formats[] = { /* in the order of kernels/panels.py */
    {0}, {.bytes = 2 * BLOCK * PANEL, .decode = bf16}, {.bytes = 2 * BLOCK * PANEL, .decode = f16},
    FORMAT(8, 32, 0), FORMAT(8, 32, 1), FORMAT(8, 16, 0), FORMAT(8, 16, 1),
    FORMAT(4, 32, 0), FORMAT(4, 32, 1), FORMAT(4, 16, 0), FORMAT(4, 16, 1),
};

/* Adds the products of R rows and `count` inputs of a panel to their sums [rows][PARTS][PANEL]. */
#define PANEL_TILE(R)                                                                                                  \
    static void panel_tile_##R(const float *x, long x_step, const float *w, long count, float *sums) {                 \
        Vector own[R][PARTS][TILE_VECTORS];                                                                            \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int part = 0; part < PARTS; part++)                             \
            UNROLL for (int v = 0; v < TILE_VECTORS; v++)                                                              \
                own[r][part][v] = *(Vector *)(sums + (r * PARTS + part) * PANEL + v * LANES);                          \
        for (long i = 0; i < count; i += PARTS)                                                                        \
            UNROLL for (int part = 0; part < PARTS; part++) {                                                          \
                Vector weights[TILE_VECTORS];                                                                          \
                UNROLL for (int v = 0; v < TILE_VECTORS; v++)                                                          \
                    weights[v] = *(const Vector *)(w + (i + part) * PANEL + v * LANES);                                \
                UNROLL for (int r = 0; r < R; r++) {                                                                   \
                    Vector value = x[r * x_step + i + part] - (Vector){0};                                             \
                    UNROLL for (int v = 0; v < TILE_VECTORS; v++) add_product(&own[r][part][v], value, weights[v]);    \
                    USED(value);                                                                                       \
                }                                                                                                      \
                UNROLL for (int v = 0; v < TILE_VECTORS; v++) USED(weights[v]);                                        \
            }                                                                                                          \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int part = 0; part < PARTS; part++)                             \
            UNROLL for (int v = 0; v < TILE_VECTORS; v++)                                                              \
                *(Vector *)(sums + (r * PARTS + part) * PANEL + v * LANES) = own[r][part][v];                          \
    }
PANEL_TILE(1) PANEL_TILE(2) PANEL_TILE(3)
typedef void PanelTile(const float *, long, const float *, long, float *);
#if PANEL_ROWS == 6
PANEL_TILE(4) PANEL_TILE(5) PANEL_TILE(6)
static PanelTile *const panel_tiles[] = {0,            panel_tile_1, panel_tile_2, panel_tile_3,
                                         panel_tile_4, panel_tile_5, panel_tile_6};
#else
static PanelTile *const panel_tiles[] = {0, panel_tile_1, panel_tile_2, panel_tile_3};
#endif

/* Adds the products of rows and `count` inputs of a decoded panel to their sums. */
static void add_panel(const float *x, long x_step, long rows, const float *w, long count, float (*sums)[PARTS][PANEL]) {
    long groups = (rows + PANEL_ROWS - 1) / PANEL_ROWS;
    for (long group = 0; group < groups; group++) {
        long first = rows * group / groups, size = rows * (group + 1) / groups - first;
        for (long o = 0; o < PANEL; o += TILE_VECTORS * LANES)
            panel_tiles[size](x + first * x_step, x_step, w + o, count, &sums[first][0][o]);
    }
}

/* One panel times all rows, into sums [rows][PANEL]. */
static void decoded_panel(const Byte *panel, const Format *format, const float *x, long inputs, long rows,
                          float (*sums)[PANEL]) {
    float decoded[CHUNK_BLOCKS * BLOCK * PANEL] __attribute__((aligned(64)));
    float parts[MOST_ROWS][PARTS][PANEL] __attribute__((aligned(64)));
    memset(parts, 0, rows * sizeof *parts);
    for (long start = 0; start < inputs; start += CHUNK_BLOCKS * BLOCK) {
        long some = at_most(CHUNK_BLOCKS * BLOCK, inputs - start);
        for (long i = 0; i < some; i += BLOCK, panel += format->bytes) {
            for (long line = 0; line < format->bytes; line += 64) __builtin_prefetch(panel + FETCHED + line);
            format->decode(panel, decoded + i * PANEL);
        }
        add_panel(x + start, inputs, rows, decoded, some, parts);
    }
    for (long row = 0; row < rows; row++)
        for (long o = 0; o < PANEL; o++) sums[row][o] = parts[row][0][o] + parts[row][1][o];
}
