/* Products of some rows and panels by AMX, which multiplies tiles of 16 rows of 64 bytes.
 *
 * A row of activations is three rows of a tile: its digits, for panels of integers, or its three parts in bf16, for
 * panels in bf16, which together are the number itself. A panel has weights in the order in which a tile needs them.
 */

#pragma once

#include "integers.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(INTEGER_ROWS) && LANES == 16 && defined(__linux__)
#define AMX

#include <sys/syscall.h>
#include <unistd.h>

#define TILE_SIDE 16                         /* rows of a tile, and words of a row */
#define AMX_ROWS 16                          /* rows of activations that are multiplied together: three tiles */
#define AMX_PARTS (AMX_ROWS * DIGITS)        /* rows of tiles */
#define SPAN 2                               /* groups whose sums are joined together, half of the outputs at a time */
#define RING (2 * SPAN)                      /* groups whose sums are kept */
#define PERMIT 0x1023, 18                    /* arch_prctl: ask for the registers of AMX */
#define MEMORY __asm__ volatile("" ::: "memory") /* compilers do not know that tiles are loaded from memory */

static int may_use_tiles;

/* The system saves the registers of AMX only for processes that have asked for them. */
__attribute__((constructor)) static void ask_for_tiles(void) { may_use_tiles = !syscall(SYS_arch_prctl, PERMIT); }

typedef struct {
    Byte palette, start, unused[14];
    unsigned short bytes[16]; /* of a row of each tile */
    Byte rows[16];            /* of each tile */
} __attribute__((aligned(64))) TileSizes;

/* Activations are in tile 6, weights in tile 7, and those of integers in tile 5 as well; results are in all others. A row
 * of activations has `bytes`. */
static void set_tiles(long rows, long bytes) {
    TileSizes sizes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        sizes.rows[tile] = tile == 7 || (tile == 5 && bytes <= BLOCK) ? bytes / 4 : rows;
        sizes.bytes[tile] = tile == 6 ? bytes : 64;
    }
    MEMORY;
    _tile_loadconfig(&sizes);
}

/* How rows are divided: into parts of at most AMX_ROWS, and these into up to three tiles of equal size. */
typedef struct {
    long parts, rows; /* of activations in a part; the last one may have fewer */
    long tiles, side; /* rows of a tile */
} Division;

static Division divided(long rows) {
    Division all = {.parts = (rows + AMX_ROWS - 1) / AMX_ROWS};
    all.rows = (rows + all.parts - 1) / all.parts;
    all.tiles = (all.rows * DIGITS + TILE_SIDE - 1) / TILE_SIDE;
    all.side = (all.rows * DIGITS + all.tiles - 1) / all.tiles;
    return all;
}

/* Rows from which on tiles of integers are faster than the instructions of integers.h. */
static long least_tiled_rows(const Format *format) { return format->bits == 4 ? 4 : 2; }

/* A group of integers of 4 bits as signed bytes. */
INLINE void widen(const Byte *words, const Format *format, Byte *out) {
    typedef signed char Bytes __attribute__((vector_size(64), aligned(4), may_alias));
    const Byte middle = format->addend ? 0 : 8;
    for (int word = 0; word < format->group / 8; word++)
        UNROLL for (int half = 0; half < 2; half++, words += 64)
            UNROLL for (int odd = 0; odd < 2; odd++) {
                Whole bits = *(const Whole *)words >> 4 * odd & 0x0f0f0f0f;
                *(Bytes *)(out + (2 * word + odd) * 4 * PANEL + 64 * half) = ((Bytes)bits ^ middle) - middle;
            }
}

typedef int PartSums[AMX_PARTS][PANEL] __attribute__((aligned(64))); /* of a group */

/* What `add_groups` needs to know. */
typedef struct {
    PartSums *ring;             /* of the latest groups */
    const float *scales[RING];     /* and addends, of these groups */
    const float *totals;        /* [groups][rows] of the first row of these */
    long rows, count;           /* all rows; those in the tiles */
    float (*sums)[PANEL];
} GroupRows;

/* The products of a group, whose weights are in tiles 5 and 7, and the digits of some rows. */
#define GROUP_TILE(NUMBER, FIRST, SECOND)                                                                              \
    _tile_loadd(6, digits + NUMBER * side * BLOCK, BLOCK);                                                             \
    _tile_zero(FIRST);                                                                                                 \
    _tile_dpbssd(FIRST, 6, 5);                                                                                         \
    _tile_zero(SECOND);                                                                                                \
    _tile_dpbssd(SECOND, 6, 7);                                                                                        \
    _tile_stored(FIRST, (*sums)[NUMBER * side], 4 * PANEL);                                                            \
    _tile_stored(SECOND, (*sums)[NUMBER * side] + TILE_SIDE, 4 * PANEL);
INLINE void multiply_group(const Byte *words, const Byte *digits, long side, long tiles, PartSums *sums) {
    MEMORY;
    _tile_loadd(5, words, 4 * PANEL);
    _tile_loadd(7, words + 4 * TILE_SIDE, 4 * PANEL);
    GROUP_TILE(0, 0, 1)
    if (tiles > 1) { GROUP_TILE(1, 2, 3) }
    if (tiles > 2) { GROUP_TILE(2, 4, 0) }
    MEMORY;
}

/* Adds `count` groups, from `first` on, to the sums of 16 outputs. */
INLINE void add_groups(const GroupRows *own, long first, const int count, const int addend, int half) {
    Vector scales[SPAN], addends[SPAN];
    UNROLL for (int i = 0; i < count; i++) {
        scales[i] = ((const Vector *)own->scales[(first + i) % RING])[half];
        addends[i] = ((const Vector *)own->scales[(first + i) % RING])[addend ? 2 + half : half];
    }
    for (long row = 0; row < own->count; row++) {
        Vector *sum = (Vector *)own->sums[row] + half, found = *sum;
        UNROLL for (int i = 0; i < count; i++) {
            const Whole *digits = (const Whole *)own->ring[(first + i) % RING][DIGITS * row] + half;
            found = with_group(found, joined(digits[0], digits[2], digits[4]), scales[i]);
            if (addend) found = with_group(found, own->totals[(first + i) * own->rows + row] - (Vector){0}, addends[i]);
        }
        *sum = found;
    }
}

/* Some rows times a panel of integers. After the tiles of a group, sums of groups before it are joined: the core does
 * both at a time. */
static void tile_integers(const Byte *panel, const Format *format, const Split *split, long inputs, long rows, long row,
                          long count, Division all, float (*sums)[PANEL]) {
    PartSums ring[RING];
    Byte widened[2][BLOCK * PANEL] __attribute__((aligned(64)));
    GroupRows own = {.ring = ring, .totals = split->totals + row, .rows = rows, .count = count, .sums = sums};
    const long groups = inputs / format->group, within = BLOCK / format->group, header = (1 + format->addend) * GROUP_BYTES;
    const long bytes = format->group * PANEL * format->bits / 8, share = format->bytes / within;
    const Byte *digits = split->parts + row * DIGITS * BLOCK;
    for (long at = 0; at < (groups + 2 * SPAN - 1) / SPAN * SPAN; at++) {
        if (at < groups) {
            const Byte *block = panel + at / within * format->bytes, *words = block + within * header + at % within * bytes;
            if (!row) fetch(panel + at * share, share);
            if (format->bits == 4) {
                if (!at) widen(words, format, widened[0]);
                long next = at_most(at + 1, groups - 1);
                words = panel + next / within * format->bytes + within * header + next % within * bytes;
                widen(words, format, widened[next % 2]);
                words = widened[at % 2];
            }
            multiply_group(words, digits + at / within * rows * DIGITS * BLOCK + at % within * format->group, all.side,
                           all.tiles, ring + at % RING);
            own.scales[at % RING] = (const float *)(block + at % within * header);
        }
        long first = at / SPAN * SPAN - SPAN;
        if (first >= 0 && groups - first >= SPAN) {
            if (format->addend) add_groups(&own, first, SPAN, 1, at % SPAN);
            else add_groups(&own, first, SPAN, 0, at % SPAN);
        } else if (first >= 0)
            add_groups(&own, first, 1, format->addend, at % SPAN);
    }
}

/* One panel of integers times all rows, into sums [rows][PANEL]. */
static void integer_tiles_panel(const Byte *panel, const Format *format, const Split *split, long inputs, long rows,
                                Division all, float (*sums)[PANEL]) {
    for (long row = 0; row < rows; row += all.rows)
        tile_integers(panel, format, split, inputs, rows, row, at_most(all.rows, rows - row), all, sums + row);
}

/* One row as parts in bf16, whose sum is the number. */
static void split_bf16(const float *x, long inputs, Byte *parts, long step) {
    typedef unsigned short Shorts __attribute__((vector_size(32), aligned(2), may_alias));
    for (long i = 0; i < inputs; i += LANES) {
        Vector rest = *(const Vector *)(x + i);
        for (int part = 0; part < DIGITS; part++) {
            Whole upper = (Whole)rest & (int)0xffff0000;
            *(Shorts *)(parts + i / BLOCK * step + (part * BLOCK + i % BLOCK) * 2) =
                __builtin_convertvector((Words)upper >> 16, Shorts);
            rest -= (Vector)upper;
        }
    }
}

#define BF16_TILE(T)                                                                                                   \
    _tile_loadd(6, parts + (T / 2) * side * 2 * BLOCK, 2 * BLOCK);                                                     \
    _tile_dpbf16ps(T, 6, 7);
#define STORE_TILE(T) _tile_stored(T, sums[(T / 2) * side] + T % 2 * TILE_SIDE, 4 * PANEL);

/* Some rows times a panel in bf16: the sums of all parts. */
static void tile_bf16(const Byte *panel, const Byte *parts, long inputs, long step, long side, long tiles, int first,
                      float (*sums)[PANEL]) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
    MEMORY;
    for (long i = 0; i < inputs; i += BLOCK, parts += step, panel += 2 * BLOCK * PANEL) {
        if (first) fetch(panel, 2 * BLOCK * PANEL);
        _tile_loadd(7, panel, 4 * PANEL);
        BF16_TILE(0)
        if (tiles > 1) { BF16_TILE(2) }
        if (tiles > 2) { BF16_TILE(4) }
        _tile_loadd(7, panel + 64, 4 * PANEL);
        BF16_TILE(1)
        if (tiles > 1) { BF16_TILE(3) }
        if (tiles > 2) { BF16_TILE(5) }
    }
    STORE_TILE(0) STORE_TILE(1)
    if (tiles > 1) { STORE_TILE(2) STORE_TILE(3) }
    if (tiles > 2) { STORE_TILE(4) STORE_TILE(5) }
    MEMORY;
}

/* One panel in bf16 times all rows, into sums [rows][PANEL]. */
static void bf16_tiles_panel(const Byte *panel, const Split *split, long inputs, long rows, Division all,
                             float (*sums)[PANEL]) {
    float found[AMX_PARTS][PANEL] __attribute__((aligned(64)));
    for (long row = 0; row < rows; row += all.rows) {
        tile_bf16(panel, split->parts + row * DIGITS * 2 * BLOCK, inputs, rows * DIGITS * 2 * BLOCK, all.side, all.tiles,
                  !row, found);
        for (long i = 0; i < at_most(all.rows, rows - row); i++)
            UNROLL for (int half = 0; half < 2; half++) {
                const Vector *part = (const Vector *)found[DIGITS * i] + half;
                ((Vector *)sums[row + i])[half] = part[0] + (part[2] + part[4]);
            }
    }
}

#endif
