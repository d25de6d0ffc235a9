/* Products of a few rows and panels of integers, in integers: fast where the CPU has such instructions.
 *
 * A row of activations becomes integers of 24 bits with one scale for the row, a power of two. Each of them is split
 * into three signed digits of 8 bits, because instructions multiply numbers of 8 bits. The sums of a group of inputs
 * are therefore exact, in any order. They become one float32 for a row, an output and a group, and these are added in
 * the order of the groups. So a row has the same bits in every pass, whichever of the kernels below computes it, and
 * on every CPU that computes in integers.
 */

#pragma once

#include <stdlib.h>

#include "panels.h"

#if defined(__AVX512VNNI__) && LANES == 16
#include <immintrin.h>
#define INTEGER_ROWS 4
#define INTEGER_VECTORS 2
#elif defined(__AVXVNNI__) && LANES == 8
#include <immintrin.h>
#define INTEGER_ROWS 3
#define INTEGER_VECTORS 1
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#define INTEGER_ROWS 2
#define INTEGER_VECTORS 4
#endif

#define DIGITS 3           /* of an activation, the lowest first */
#define LARGEST 0x7f7f7f   /* integer of which each digit has 8 bits */
#define MIDDLES 0x808080   /* 128 in each digit: adding it makes digits 0 to 255 */
#define FETCHED_INTEGERS 8192 /* bytes that a thread fetches in advance */
#define HALF 16            /* inputs of half a block */
#define NO_NUMBER (255 << 23) /* bits of infinity; those of all finite numbers are less */

/* Rows for a kernel: as digits, or as parts in bf16. In both, what belongs to 32 inputs lies together. */
typedef struct {
    Byte *parts;   /* [blocks][rows][DIGITS][BLOCK] digits, or bf16 numbers */
    int *offsets;  /* [groups][rows][DIGITS]: what the sums of a group start from */
    float *totals; /* [groups][rows]: the sum of the integers of a group */
    float *units;  /* [rows]: of the integers; not a number if a number of the row is not finite */
} Split;

#ifdef INTEGER_ROWS

typedef signed char Digits __attribute__((vector_size(16), aligned(1), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define SHUFFLED(x, ...) __builtin_shuffle(x, (__typeof__(x)){__VA_ARGS__})
#endif
#define EVEN_FIRST(x) SHUFFLED(x, 0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)

/* sums + the products of 4 weights and 4 digits in each word. On x86, weights are unsigned. */
INLINE Whole dot(Whole sums, Whole weights, Whole digits) {
#if LANES == 16
    return (Whole)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)digits);
#elif LANES == 8
    return (Whole)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)digits);
#else
    return (Whole)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, (int8x16_t)digits);
#endif
}

/* What must be added to signed weights for `dot`, and how: by flipping these bits. */
#ifdef __x86_64__
INLINE int added_to_weights(const Format *format) { return format->bits == 8 ? 128 : format->addend ? 0 : 8; }
#else
INLINE int added_to_weights(const Format *format) { return format->bits == 4 && !format->addend ? 8 : 0; }
#endif

/* The unit of the integers of a row. The largest number becomes one of 23 bits, and a sign. */
static float unit_of(const float *x, long inputs) {
    Whole most = {0};
    for (long i = 0; i < inputs; i += LANES) {
        Whole bits = *(const Whole *)(x + i) & 0x7fffffff, more = bits > most;
        most = (bits & more) | (most & ~more);
    }
    int largest = 0;
    for (int lane = 0; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    if (largest >= NO_NUMBER) return 0.0f / 0.0f;
    int exponent = (int)at_least((largest >> 23) - 22, 1);
    union {
        int bits;
        float number;
    } unit = {exponent << 23}, number = {largest};
    return number.number / unit.number > LARGEST - 0.5f ? 2 * unit.number : unit.number;
}

INLINE int sum_of(Integers numbers) {
    numbers += SHUFFLED(numbers, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    numbers += SHUFFLED(numbers, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    return (numbers[0] + numbers[1]) + (numbers[2] + numbers[3]);
}

/* What the sums of a group start from, and its total. The digits + 128 of its inputs are summed in pairs of 16 bits. */
static void finish_group(const Split *split, long place, int inputs, int added, Integers even, Integers odd) {
    int pair = sum_of(even), sums[DIGITS] = {pair & 0xffff, sum_of(odd), pair >> 16}, total = 0;
    for (int digit = DIGITS - 1; digit >= 0; digit--) {
        int sum = sums[digit] - 128 * inputs;
        split->offsets[place * DIGITS + digit] = -added * sum;
        total = total * 256 + sum;
    }
    split->totals[place] = total;
}

/* One row, as digits. In weights of 4 bits, each byte of a word has two successive inputs, so of 8 inputs those with even
 * numbers come first. */
static void split_row(const float *x, long inputs, const Format *format, long rows, long row, const Split *split) {
    float unit = split->units[row] = unit_of(x, inputs), by = unit == unit ? 1 / unit : 0;
    Integers even = {0}, odd = {0};
    for (long i = 0; i < inputs; i += HALF) {
        Floats scaled = *(const Floats *)(x + i) * by;
        Floats half = (Floats)(((Integers)scaled & (int)0x80000000) | 0x3f000000); /* 0.5 with the sign of the number */
        Integers number = __builtin_convertvector(scaled + half, Integers) + MIDDLES;
        Byte *place = split->parts + ((i / BLOCK * rows + row) * DIGITS) * BLOCK + i % BLOCK;
        if (format->bits == 4) number = EVEN_FIRST(number);
        even += number & 0xff00ff, odd += number >> 8 & 0xff;
        for (int digit = 0; digit < DIGITS; digit++) {
            Digits own = __builtin_convertvector((number ^ MIDDLES) >> 8 * digit, Digits);
            *(Digits *)(place + digit * BLOCK) = own;
        }
        if ((i + HALF) % format->group) continue;
        finish_group(split, i / format->group * rows + row, format->group, added_to_weights(format), even, odd);
        even = odd = (Integers){0};
    }
}

/* Fetches what will be multiplied a little later. Into the L2 cache, because a core waits for few lines of the L1 cache at
 * a time. */
INLINE void fetch(const Byte *place, long bytes) {
    for (long line = 0; line < bytes; line += 64) __builtin_prefetch(place + FETCHED_INTEGERS + line, 0, 2);
}

/* The sum of a group from those of its digits. */
INLINE Vector joined(Whole low, Whole middle, Whole high) {
    Vector sum = __builtin_convertvector(high, Vector) * 256.0f + __builtin_convertvector(middle, Vector);
    return sum * 256.0f + __builtin_convertvector(low, Vector);
}

/* sums + what a group adds to them. */
INLINE Vector with_group(Vector sums, Vector joined, Vector scale) { return sums + joined * scale; }

/* Adds the products of R rows and a panel to sums [R][PANEL]. */
INLINE void add_integers(const Byte *panel, const Format *format, const Split *split, long inputs, long rows, long row,
                         float (*sums)[PANEL], const int R, const int BITS, const int GROUP) {
    const int flipped = added_to_weights(format) * 0x01010101;
    const Byte *digits = split->parts + row * DIGITS * BLOCK;
    const int *offsets = split->offsets + row * DIGITS;
    const float *totals = split->totals + row;
    for (long start = 0; start < inputs; start += BLOCK, digits += rows * DIGITS * BLOCK, panel += format->bytes) {
        const float *scales = (const float *)panel;
        const Byte *words = panel + format->bytes - BLOCK * PANEL * BITS / 8;
        fetch(panel, format->bytes);
        for (int group = 0; group < BLOCK / GROUP; group++) {
            UNROLL for (int first = 0; first < PANEL; first += INTEGER_VECTORS * LANES) {
                Whole own[R][DIGITS][INTEGER_VECTORS];
                UNROLL for (int i = 0; i < R * DIGITS; i++) UNROLL for (int v = 0; v < INTEGER_VECTORS; v++)
                    own[i / DIGITS][i % DIGITS][v] = (Whole){0} + offsets[i];
                UNROLL for (int word = 0; word < GROUP / 4; word++) {
                    const Byte *place = words + (BITS == 8 ? word : word / 2) * 4 * PANEL + 4 * first;
                    Whole weights[INTEGER_VECTORS];
                    UNROLL for (int v = 0; v < INTEGER_VECTORS; v++) {
                        Whole bits = ((const Whole *)place)[v];
                        if (BITS == 4) bits = (word % 2 ? bits >> 4 : bits) & 0x0f0f0f0f;
                        weights[v] = bits ^ flipped;
                    }
                    UNROLL for (int i = 0; i < R * DIGITS; i++) {
                        Whole four = (Whole){0} + *(const Word *)(digits + i * BLOCK + group * GROUP + 4 * word);
                        UNROLL for (int v = 0; v < INTEGER_VECTORS; v++)
                            own[i / DIGITS][i % DIGITS][v] = dot(own[i / DIGITS][i % DIGITS][v], weights[v], four);
                    }
                }
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < INTEGER_VECTORS; v++) {
                    Vector *sum = (Vector *)(sums[r] + first) + v;
                    const Vector *scale = (const Vector *)(scales + first) + v;
                    *sum = with_group(*sum, joined(own[r][0][v], own[r][1][v], own[r][2][v]), *scale);
                    if (format->addend) *sum = with_group(*sum, totals[r] - (Vector){0}, scale[PANEL / LANES]);
                }
            }
            offsets += rows * DIGITS, totals += rows;
            scales += (1 + format->addend) * PANEL, words += GROUP * PANEL * BITS / 8;
        }
    }
}

typedef void IntegerRows(const Byte *, const Format *, const Split *, long, long, long, float (*)[PANEL]);
#define INTEGER_TILE(R, BITS, GROUP)                                                                                   \
    static void integer_tile_##R##_##BITS##_##GROUP(const Byte *panel, const Format *format, const Split *split,       \
                                                    long inputs, long rows, long row, float (*sums)[PANEL]) {          \
        add_integers(panel, format, split, inputs, rows, row, sums, R, BITS, GROUP);                                   \
    }
#define INTEGER_TILES(R) INTEGER_TILE(R, 8, 32) INTEGER_TILE(R, 8, 16) INTEGER_TILE(R, 4, 32) INTEGER_TILE(R, 4, 16)
#define INTEGER_TILE_ROW(R)                                                                                            \
    {{integer_tile_##R##_8_32, integer_tile_##R##_8_16}, {integer_tile_##R##_4_32, integer_tile_##R##_4_16}}
INTEGER_TILES(1) INTEGER_TILES(2)
#if INTEGER_ROWS == 2
static IntegerRows *const integer_tiles[][2][2] = {INTEGER_TILE_ROW(1), INTEGER_TILE_ROW(2)};
#elif INTEGER_ROWS == 3
INTEGER_TILES(3)
static IntegerRows *const integer_tiles[][2][2] = {INTEGER_TILE_ROW(1), INTEGER_TILE_ROW(2), INTEGER_TILE_ROW(3)};
#else
INTEGER_TILES(3) INTEGER_TILES(4)
static IntegerRows *const integer_tiles[][2][2] = {INTEGER_TILE_ROW(1), INTEGER_TILE_ROW(2), INTEGER_TILE_ROW(3),
                                                   INTEGER_TILE_ROW(4)};
#endif

/* One panel times all rows, into sums [rows][PANEL]. */
static void integer_panel(const Byte *panel, const Format *format, const Split *split, long inputs, long rows,
                          float (*sums)[PANEL]) {
    long parts = (rows + INTEGER_ROWS - 1) / INTEGER_ROWS;
    for (long part = 0; part < parts; part++) {
        long first = rows * part / parts, size = rows * (part + 1) / parts - first;
        integer_tiles[size - 1][format->bits == 4][format->group == 16](panel, format, split, inputs, rows, first,
                                                                        sums + first);
    }
}

#endif
