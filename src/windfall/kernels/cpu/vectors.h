/* Vectors of float32, as wide as those of this CPU, and the functions of torch's OpenMP library. */

#pragma once

#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int Whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int Word __attribute__((aligned(1), may_alias));
typedef float Quad __attribute__((vector_size(16), aligned(4), may_alias));
typedef unsigned char Byte;

#define MOST_ROWS 64 /* whose sums are kept at a time */

static inline long at_most(long a, long b) { return a < b ? a : b; }
static inline long at_least(long a, long b) { return a > b ? a : b; }

/* Without IN_PLACE, GCC may write a sum to another register and move it back. USED says that an operand is still needed,
 * so that its register is not reused. */
#if defined(__AVX512F__)
#define IN_PLACE(x) __asm__("" : "+v"(x))
#define USED(x) __asm__ volatile("" ::"v"(x))
#elif defined(__x86_64__)
#define IN_PLACE(x) __asm__("" : "+x"(x))
#define USED(x) __asm__ volatile("" ::"x"(x))
#elif defined(__aarch64__)
#define IN_PLACE(x) __asm__("" : "+w"(x))
#define USED(x) __asm__ volatile("" ::"w"(x))
#else
#define IN_PLACE(x)
#define USED(x)
#endif

INLINE void add_product(Vector *sum, Vector a, Vector b) {
    Vector found = *sum + a * b;
    IN_PLACE(found);
    *sum = found;
}

/* Bound when the library is loaded, so that torch and it share their threads. */
static void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
static int (*thread_number)(void), (*thread_count)(void);

void bind(void *gomp_parallel, void *omp_get_thread_num, void *omp_get_num_threads) {
    parallel = gomp_parallel;
    thread_number = omp_get_thread_num;
    thread_count = omp_get_num_threads;
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int Places __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Places){__VA_ARGS__})
#endif

/* Four numbers whose sum is that of all lanes. */
INLINE Quad folded(const Vector *sums) {
    const Quad *parts = (const Quad *)sums;
    Quad sum = parts[0];
    UNROLL for (int part = 1; part < LANES / 4; part++) sum += parts[part];
    return sum;
}

/* The sums over the lanes of four vectors. */
INLINE Quad totals(const Vector *sums) {
    Quad a = folded(sums), b = folded(sums + 1), c = folded(sums + 2), d = folded(sums + 3);
    Quad ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    Quad cd = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

INLINE float total(const Vector *sums) {
    Quad four = folded(sums);
    return (four[0] + four[1]) + (four[2] + four[3]);
}
