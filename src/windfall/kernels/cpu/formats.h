/* The formats in which weights are stored, and how their blocks become float32.
 *
 * Formats have the numbers and layouts of GGUF files. A decoder gets one block and writes its weights. The products of
 * scales and integers are exact in float32, so each weight is rounded once, as the gguf package rounds it.
 */

#include "vectors.h"

typedef unsigned char Byte;
typedef struct {
    long weights, bytes; /* of a block; 0: the format is not known */
    void (*decode)(const Byte *blocks, float *out, long count, long ahead);
} Format;

INLINE float from_bits(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE float half(const Byte *p) {
#ifdef __FLT16_MANT_DIG__
    _Float16 value;
    memcpy(&value, p, 2);
    return (float)value;
#else
    unsigned bits = p[0] | (unsigned)p[1] << 8;
    float size = from_bits((bits & 0x7fff) << 13) * 0x1p112f;
    return bits & 0x8000 ? -size : size;
#endif
}

INLINE void f16(const Byte *restrict p, float *restrict out) {
    for (int i = 0; i < 32; i++) out[i] = half(p + 2 * i);
}

INLINE void bf16(const Byte *restrict p, float *restrict out) {
    for (int i = 0; i < 32; i++) {
        unsigned short top;
        memcpy(&top, p + 2 * i, 2);
        out[i] = from_bits((unsigned)top << 16);
    }
}

INLINE void q8_0(const Byte *restrict p, float *restrict out) {
    float scale = half(p);
    for (int i = 0; i < 32; i++) out[i] = scale * (signed char)p[2 + i];
}

INLINE void q4_0(const Byte *restrict p, float *restrict out) {
    float scale = half(p);
    for (int i = 0; i < 16; i++) out[i] = scale * ((p[2 + i] & 15) - 8);
    for (int i = 0; i < 16; i++) out[16 + i] = scale * ((p[2 + i] >> 4) - 8);
}

INLINE void q4_1(const Byte *restrict p, float *restrict out) {
    float scale = half(p), least = half(p + 2);
    for (int i = 0; i < 16; i++) out[i] = scale * (p[4 + i] & 15) + least;
    for (int i = 0; i < 16; i++) out[16 + i] = scale * (p[4 + i] >> 4) + least;
}

/* Four low bits in p, and the fifth of weight i in bit i of `high`. */
INLINE void five_bits(const Byte *restrict p, unsigned high, int zero, float scale, float least, float *restrict out) {
    int fifth[32];
    for (int i = 0; i < 32; i++) fifth[i] = (int)(high >> i & 1) * 16 - zero;
    for (int i = 0; i < 16; i++) out[i] = scale * ((p[i] & 15) + fifth[i]) + least;
    for (int i = 0; i < 16; i++) out[16 + i] = scale * ((p[i] >> 4) + fifth[16 + i]) + least;
}

INLINE unsigned word(const Byte *p) {
    unsigned value;
    memcpy(&value, p, 4);
    return value;
}

INLINE void q5_0(const Byte *restrict p, float *restrict out) {
    five_bits(p + 6, word(p + 2), 16, half(p), -0.0f, out); /* -0 keeps the signs of zeros */
}

INLINE void q5_1(const Byte *restrict p, float *restrict out) {
    five_bits(p + 8, word(p + 4), 0, half(p), half(p + 2), out);
}

/* The scale and the minimum of part `part` of a block, of six bits each. */
INLINE void six_bits(const Byte *p, int part, int *scale, int *least) {
    if (part < 4) {
        *scale = p[part] & 63;
        *least = p[part + 4] & 63;
    } else {
        *scale = (p[part + 4] & 15) | (p[part - 4] >> 6) << 4;
        *least = p[part + 4] >> 4 | (p[part] >> 6) << 4;
    }
}

/* Bytes and numbers that are computed together. */
typedef Byte Bytes __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
INLINE Bytes load(const void *from) {
    Bytes found;
    memcpy(&found, from, 32);
    return found;
}
INLINE void store(void *to, Bytes bytes) { memcpy(to, &bytes, 32); }

/* The integers of a block of 256 as numbers. Scales are applied afterwards, because compilers do badly at both at once. */
INLINE void converted(const signed char *restrict from, float *restrict out) {
    for (int i = 0; i < 256; i++) out[i] = from[i];
}

INLINE void scaled(float *out, int count, float scale, float least) {
    for (int i = 0; i < count; i += 16) *(Floats *)(out + i) = scale * *(Floats *)(out + i) - least;
}

/* A block of 8 parts with 12 bytes of scales and minima, from its integers. */
INLINE void eight_parts(const Byte *restrict p, const signed char *restrict from, float *restrict out) {
    converted(from, out);
    for (int part = 0; part < 8; part++) {
        int scale, least;
        six_bits(p + 4, part, &scale, &least);
        scaled(out + 32 * part, 32, half(p) * scale, half(p + 2) * least);
    }
}

INLINE void q4_k(const Byte *restrict p, float *restrict out) {
    signed char whole[256];
    UNROLL for (int pair = 0; pair < 4; pair++) {
        Bytes low = load(p + 16 + 32 * pair);
        store(whole + 64 * pair, low & 15);
        store(whole + 64 * pair + 32, low >> 4);
    }
    eight_parts(p, whole, out);
}

INLINE void q5_k(const Byte *restrict p, float *restrict out) {
    signed char whole[256];
    Bytes high = load(p + 16);
    UNROLL for (int pair = 0; pair < 4; pair++) {
        Bytes low = load(p + 48 + 32 * pair);
        store(whole + 64 * pair, (low & 15) | (high >> 2 * pair & 1) << 4);
        store(whole + 64 * pair + 32, low >> 4 | (high >> (2 * pair + 1) & 1) << 4);
    }
    eight_parts(p, whole, out);
}

INLINE void q6_k(const Byte *restrict p, float *restrict out) {
    signed char whole[256];
    UNROLL for (int eighth = 0; eighth < 8; eighth++) {
        Bytes low = load(p + eighth / 4 * 64 + eighth % 2 * 32), high = load(p + 128 + eighth / 4 * 32);
        store(whole + 32 * eighth, ((low >> eighth % 4 / 2 * 4 & 15) | (high >> eighth % 4 * 2 & 3) << 4) - 32);
    }
    converted(whole, out);
    for (int part = 0; part < 16; part++)
        scaled(out + 16 * part, 16, half(p + 208) * (signed char)p[192 + part], 0);
}

INLINE void q2_k(const Byte *restrict p, float *restrict out) {
    signed char whole[256];
    UNROLL for (int eighth = 0; eighth < 8; eighth++)
        store(whole + 32 * eighth, load(p + 16 + eighth / 4 * 32) >> eighth % 4 * 2 & 3);
    converted(whole, out);
    for (int part = 0; part < 16; part++) {
        float scale = half(p + 80) * (p[part] & 15), least = half(p + 82) * (p[part] >> 4);
        scaled(out + 16 * part, 16, scale, least);
    }
}

INLINE void q3_k(const Byte *restrict p, float *restrict out) {
    signed char whole[256];
    Bytes high = load(p);
    UNROLL for (int eighth = 0; eighth < 8; eighth++) {
        Bytes low = load(p + 32 + eighth / 4 * 32) >> eighth % 4 * 2 & 3;
        store(whole + 32 * eighth, low + (high >> eighth & 1) * 4 - 4);
    }
    converted(whole, out);
    for (int part = 0; part < 16; part++) {
        const Byte *scales = p + 96;
        int own = (scales[part % 8] >> part / 8 * 4 & 15) | (scales[8 + part % 4] >> part / 4 * 2 & 3) << 4;
        scaled(out + 16 * part, 16, half(p + 108) * (own - 32), 0);
    }
}

/* The decoder of `count` weights in a row. It fetches the blocks that lie `ahead` bytes further. */
#define ALL_BLOCKS(NAME, WEIGHTS, BYTES)                                                                               \
    static void all_##NAME(const Byte *restrict p, float *restrict out, long count, long ahead) {                      \
        for (long i = 0; i < count; i += WEIGHTS, p += BYTES) {                                                        \
            for (long line = 0; line < BYTES; line += 64) __builtin_prefetch(p + ahead + line);                        \
            NAME(p, out + i);                                                                                          \
        }                                                                                                              \
    }
ALL_BLOCKS(f16, 32, 64)
ALL_BLOCKS(bf16, 32, 64)
ALL_BLOCKS(q4_0, 32, 18)
ALL_BLOCKS(q4_1, 32, 20)
ALL_BLOCKS(q5_0, 32, 22)
ALL_BLOCKS(q5_1, 32, 24)
ALL_BLOCKS(q8_0, 32, 34)
ALL_BLOCKS(q2_k, 256, 84)
ALL_BLOCKS(q3_k, 256, 110)
ALL_BLOCKS(q4_k, 256, 144)
ALL_BLOCKS(q5_k, 256, 176)
ALL_BLOCKS(q6_k, 256, 210)

static const Format formats[] = {
    [0] = {1, 4, 0}, /* float32, which is not decoded */
    [1] = {32, 64, all_f16},    [30] = {32, 64, all_bf16},  [2] = {32, 18, all_q4_0},   [3] = {32, 20, all_q4_1},
    [6] = {32, 22, all_q5_0},   [7] = {32, 24, all_q5_1},   [8] = {32, 34, all_q8_0},   [10] = {256, 84, all_q2_k},
    [11] = {256, 110, all_q3_k}, [12] = {256, 144, all_q4_k}, [13] = {256, 176, all_q5_k}, [14] = {256, 210, all_q6_k},
};
