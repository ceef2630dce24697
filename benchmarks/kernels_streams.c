/* The bytes of an Adam step without its arithmetic: the same loop, prefetches, threads and stores as csrc/loops.c, which
 * this includes. `flip` is xored to each number; it is zero, but the compiler does not know. */
#define PS_LEVEL streams
#include "loops.c"

INLINE void flip_run(unsigned int *restrict x, int n, unsigned int flip) {
    for (int j = 0; j < n; j++) x[j] ^= flip;
}

INLINE void stream_block(const unsigned int flip, const Step *a, size_t i, int n, int gk, int ok) {
    const void *from = at(a->grad, i, gk);
    char *to = (char *)a->out + i * width(ok);
    flip_run((unsigned int *)a->p + i, n, flip);
    flip_run((unsigned int *)a->m + i, n, flip);
    flip_run((unsigned int *)a->v + i, n, flip);
    if (a->stream && n == BLOCK) stream_lines(to, from);
    else memcpy(to, from, (size_t)n * 2);
}

static __attribute__((noinline)) void stream_block_any(const unsigned int s, const Step *a, size_t i, size_t n) {
    stream_block(s, a, i, n < BLOCK ? (int)n : BLOCK, PS_BF16, PS_BF16);
}

static void stream_part(const unsigned int s, const Step *a) { SWEEP(stream_block, PS_BF16, PS_BF16); }

PUBLIC void stream_step(const unsigned int *flip, const Step *a, int threads) {
    IN_PARTS(Step b = part_of(a, part, threads); stream_part(*flip, &b))
}
