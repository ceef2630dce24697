/* Loops over arrays for one instruction set. Compiled once for each level, with PS_LEVEL its name and the compiler flags
 * that go with it; the arithmetic is step.h's, and the compiler makes vectors of it.
 *
 * Elements do not depend on each other, so results depend neither on threads nor on where a block begins. The sum of
 * squares has a fixed order of its own, see [Note: order of arithmetic] in _order.py.
 */
#include <stddef.h>
#include <string.h>

#include "levels.h"
#include "step.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define JOIN_(a, b, c) a##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(what) JOIN(ps_, PS_LEVEL, what)
#define INLINE static inline __attribute__((always_inline))
#define PUBLIC __attribute__((visibility("default")))

enum {
    BLOCK = 64,        /* elements worked on at a time: two cache lines of 16-bit values */
    AHEAD = 512,       /* elements between what is worked on and what is prefetched */
    SUM_BLOCK = 65536, /* BLOCK_NUMEL of _order.py */
    NONE = -1,
};

INLINE int width(int kind) { return kind == PS_FP32 ? 4 : 2; }
INLINE const char *at(const void *base, size_t index, int kind) { return (const char *)base + index * width(kind); }

/* Floating-point control is a thread's own and may flush denormals (torch can ask for that): set it to IEEE's. */
#if defined(__x86_64__)
INLINE unsigned long plain_ieee(void) {
    unsigned int before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
}
INLINE void restore_control(unsigned long before) { _mm_setcsr((unsigned int)before); }
INLINE void fence(void) { _mm_sfence(); }
#elif defined(__aarch64__)
INLINE unsigned long plain_ieee(void) {
    unsigned long before, zero = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(zero));
    return before;
}
INLINE void restore_control(unsigned long before) { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
INLINE void fence(void) {}
#else
INLINE unsigned long plain_ieee(void) { return 0; }
INLINE void restore_control(unsigned long before) { (void)before; }
INLINE void fence(void) {}
#endif

/* Store one block's 128 bytes past the caches; `to` is aligned to a line, `from` is anything. */
INLINE void stream_lines(void *to, const void *from) {
#if defined(__AVX512F__)
    for (int i = 0; i < 2; i++) _mm512_stream_si512((__m512i *)to + i, _mm512_loadu_si512((const __m512i *)from + i));
#elif defined(__AVX__)
    for (int i = 0; i < 4; i++) _mm256_stream_si256((__m256i *)to + i, _mm256_loadu_si256((const __m256i *)from + i));
#elif defined(__x86_64__)
    for (int i = 0; i < 8; i++) _mm_stream_si128((__m128i *)to + i, _mm_loadu_si128((const __m128i *)from + i));
#else
    memcpy(to, from, 128);
#endif
}

/* The hardware's conversions give the bits of step.h's, on all 2^16 and 2^32 inputs. AVX-512's bfloat16 ones do not:
 * they flush denormals. */
INLINE void widen(const void *from, int kind, int n, float *restrict to) {
    const unsigned short *halves = from;
    int i = 0;
    if (kind == PS_FP32) {
        memcpy(to, from, (size_t)n * 4);
    } else if (kind == PS_BF16) {
        for (; i < n; i++) to[i] = ps_from_bf16(halves[i]);
    } else {
#if defined(__AVX512F__)
        for (; i + 16 <= n; i += 16)
            _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves + i))));
#elif defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
#endif
        for (; i < n; i++) to[i] = ps_from_fp16(halves[i]);
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/* ps_to_bf16 of eight numbers, each in the lower half of a word. */
INLINE __m256i eight_to_bf16(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
}
#endif

INLINE void narrow(const float *restrict from, int kind, int n, void *to) {
    unsigned short *halves = to;
    int i = 0;
    if (kind == PS_FP32) {
        memcpy(to, from, (size_t)n * 4);
    } else if (kind == PS_BF16) {
#if defined(__AVX2__) && !defined(__AVX512F__)
        /* Compilers pack badly here, which would cost a quarter of a step. */
        for (; i + 16 <= n; i += 16) {
            __m256 x = _mm256_loadu_ps(from + i), y = _mm256_loadu_ps(from + i + 8);
            __m256i both = _mm256_packus_epi32(eight_to_bf16(x), eight_to_bf16(y));
            if (__builtin_expect(_mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_UNORD_Q)), 0)) break; /* a nan */
            _mm256_storeu_si256((__m256i *)(halves + i), _mm256_permute4x64_epi64(both, 0xd8));
        }
#endif
        for (; i < n; i++) halves[i] = ps_to_bf16(from[i]);
    } else {
#if defined(__AVX512F__)
        for (; i + 16 <= n; i += 16)
            _mm256_storeu_si256((__m256i *)(halves + i), _mm512_cvtps_ph(_mm512_loadu_ps(from + i), 0));
#elif defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128((__m128i *)(halves + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
        for (; i < n; i++) halves[i] = ps_to_fp16(from[i]);
    }
}

INLINE void store_out(const float *restrict from, int kind, int n, void *out, int stream) {
    if (kind == NONE) return;
    if (stream && kind != PS_FP32 && n == BLOCK) {
        _Alignas(64) unsigned short line[BLOCK];
        narrow(from, kind, BLOCK, line);
        stream_lines(out, line);
    } else {
        narrow(from, kind, n, out);
    }
}

typedef struct {
    float *p, *m, *v;
    const void *grad;
    void *out;
    size_t n;
    int grad_kind, out_kind;
    int stream;
} Step;

INLINE void prefetch_lines(const void *from, size_t lines) {
    for (size_t i = 0; i < lines; i++) __builtin_prefetch((const char *)from + 64 * i, 0, 3);
}

/* [Note: all loads before any store] A load waits for an earlier store if the low 20 bits of their physical addresses are
 * equal. In large pages that is so for equal places of arrays a multiple of 1 MiB apart, as the states of many matrices
 * are. So an element of each array is read before one is written. There a step is 2.5 times as fast (AVX2: 3.7 times).
 */
INLINE void adam_block(const ps_adam_scalars s, const Step *a, size_t i, int n, int gk, int ok) {
    float *restrict p = a->p + i, *restrict m = a->m + i, *restrict v = a->v + i;
    _Alignas(64) float g[BLOCK];
    widen(at(a->grad, i, gk), gk, n, g);
    for (int j = 0; j < n; j++) { /* [Note: all loads before any store] */
        float p_now = p[j], m_now = m[j], v_now = v[j];
        ps_adam(s, g[j], &p_now, &m_now, &v_now);
        p[j] = p_now, m[j] = m_now, v[j] = v_now;
    }
    store_out(p, ok, n, (void *)((size_t)a->out + i * width(ok)), a->stream);
}

INLINE void sgd_block(const ps_sgd_scalars s, const Step *a, size_t i, int n, int gk, int ok) {
    float *restrict p = a->p + i, *restrict m = a->m + i;
    _Alignas(64) float g[BLOCK];
    widen(at(a->grad, i, gk), gk, n, g);
    if (a->m == NULL)
        for (int j = 0; j < n; j++) ps_sgd(s, g[j], p + j);
    else
        for (int j = 0; j < n; j++) { /* [Note: all loads before any store] */
            float p_now = p[j], m_now = m[j];
            ps_sgd_momentum(s, g[j], &p_now, &m_now);
            p[j] = p_now, m[j] = m_now;
        }
    store_out(p, ok, n, (void *)((size_t)a->out + i * width(ok)), a->stream);
}

/* Less than a block, at either end: rare, so one function for all element types. */
static __attribute__((noinline)) void adam_block_any(const ps_adam_scalars s, const Step *a, size_t i, size_t n) {
    adam_block(s, a, i, n < BLOCK ? (int)n : BLOCK, a->grad_kind, a->out_kind);
}

static __attribute__((noinline)) void sgd_block_any(const ps_sgd_scalars s, const Step *a, size_t i, size_t n) {
    sgd_block(s, a, i, n < BLOCK ? (int)n : BLOCK, a->grad_kind, a->out_kind);
}

/* Elements before the first line of the output, where streaming may begin. */
INLINE size_t head_of(const Step *a) {
    size_t head = a->stream ? (64 - (size_t)a->out % 64) % 64 / 2 : 0;
    return head < a->n ? head : a->n;
}

#define SWEEP(block, gk, ok)                                             \
    do {                                                                 \
        size_t i = head_of(a);                                           \
        if (i) block##_any(s, a, 0, i);                                  \
        for (; i + BLOCK <= a->n; i += BLOCK) {                          \
            prefetch_lines(at(a->grad, i + AHEAD, gk), width(gk));       \
            prefetch_lines(a->p + i + AHEAD, 4);                         \
            if (a->m) prefetch_lines(a->m + i + AHEAD, 4);               \
            if (a->v) prefetch_lines(a->v + i + AHEAD, 4);               \
            block(s, a, i, BLOCK, gk, ok);                               \
        }                                                                \
        if (i < a->n) block##_any(s, a, i, a->n - i);                    \
    } while (0)

#define SWEEP_OUT(block, gk)                                             \
    switch (a->out_kind) {                                               \
        case PS_FP32: SWEEP(block, gk, PS_FP32); break;                  \
        case PS_BF16: SWEEP(block, gk, PS_BF16); break;                  \
        case PS_FP16: SWEEP(block, gk, PS_FP16); break;                  \
        default: SWEEP(block, gk, NONE);                                 \
    }

#define SWEEP_GRAD(block)                                                \
    switch (a->grad_kind) {                                              \
        case PS_BF16: SWEEP_OUT(block, PS_BF16) break;                   \
        case PS_FP16: SWEEP_OUT(block, PS_FP16) break;                   \
        default: SWEEP_OUT(block, PS_FP32)                               \
    }

static void adam_part(const ps_adam_scalars s, const Step *a) { SWEEP_GRAD(adam_block) }
static void sgd_part(const ps_sgd_scalars s, const Step *a) { SWEEP_GRAD(sgd_block) }

/* Where the part-th of `parts` begins: a multiple of a block, or the end. */
INLINE size_t cut(size_t n, int part, int parts) {
    size_t blocks = (n + BLOCK - 1) / BLOCK, at_block = blocks / parts * part + blocks % parts * part / parts;
    return part == parts || at_block * BLOCK > n ? n : at_block * BLOCK;
}

static Step part_of(const Step *a, int part, int parts) {
    size_t from = cut(a->n, part, parts), to = cut(a->n, part + 1, parts);
    Step b = *a;
    b.n = to - from;
    b.p += from;
    if (b.m) b.m += from;
    if (b.v) b.v += from;
    b.grad = at(b.grad, from, b.grad_kind);
    if (b.out) b.out = (char *)b.out + from * width(b.out_kind);
    /* An odd address is on no line ever. */
    b.stream = b.stream && b.out && b.out_kind != PS_FP32 && (size_t)b.out % 2 == 0;
    return b;
}

#define IN_PARTS(body)                                                   \
    _Pragma("omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)") \
    for (int part = 0; part < threads; part++) {                         \
        unsigned long control;                                           \
        ps_enter();                                                      \
        control = plain_ieee();                                          \
        body;                                                            \
        fence();                                                         \
        restore_control(control);                                        \
        ps_leave();                                                      \
    }

PUBLIC void NAME(adam)(const ps_adam_scalars *s, const Step *a, int threads) {
    IN_PARTS(Step b = part_of(a, part, threads); adam_part(*s, &b))
}

PUBLIC void NAME(sgd)(const ps_sgd_scalars *s, const Step *a, int threads) {
    IN_PARTS(Step b = part_of(a, part, threads); sgd_part(*s, &b))
}

INLINE void accumulate_run(float *restrict sum, const void *grad, int kind, size_t n, float scale) {
    _Alignas(64) float g[BLOCK];
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t count = n - i < BLOCK ? n - i : BLOCK;
        prefetch_lines(sum + i + AHEAD, 4);
        prefetch_lines(at(grad, i + AHEAD, kind), width(kind));
        if (count == BLOCK) {
            widen(at(grad, i, kind), kind, BLOCK, g);
            for (size_t j = 0; j < BLOCK; j++) sum[i + j] = ps_accumulate(sum[i + j], g[j], scale);
        } else {
            widen(at(grad, i, kind), kind, count, g);
            for (size_t j = 0; j < count; j++) sum[i + j] = ps_accumulate(sum[i + j], g[j], scale);
        }
    }
}

static void accumulate_part(float *sum, const void *grad, int kind, size_t n, float scale) {
    if (kind == PS_BF16) accumulate_run(sum, grad, PS_BF16, n, scale);
    else if (kind == PS_FP16) accumulate_run(sum, grad, PS_FP16, n, scale);
    else accumulate_run(sum, grad, PS_FP32, n, scale);
}

PUBLIC void NAME(accumulate)(float *sum, const void *grad, int kind, size_t n, float scale, int threads) {
    IN_PARTS(size_t from = cut(n, part, threads);
             accumulate_part(sum + from, at(grad, from, kind), kind, cut(n, part + 1, threads) - from, scale))
}

/* Sums of several arrays: added in their order in single precision, and rounded once. */
typedef struct {
    const void *const *parts;
    size_t length; /* of the list */
    void *out;     /* which may be one of the parts */
    size_t n;
    int kind, out_kind;
} Parts;

INLINE void parts_block(const Parts *a, int kind, int out_kind, size_t i, size_t n) {
    _Alignas(64) float sum[BLOCK], x[BLOCK];
    widen(at(a->parts[0], i, kind), kind, n, sum);
    for (size_t k = 1; k < a->length; k++) {
        prefetch_lines(at(a->parts[k], i + AHEAD, kind), width(kind));
        widen(at(a->parts[k], i, kind), kind, n, x);
        for (size_t j = 0; j < n; j++) sum[j] = sum[j] + x[j];
    }
    narrow(sum, out_kind, n, (char *)a->out + i * width(out_kind));
}

INLINE void parts_run(const Parts *a, int kind, int out_kind) {
    size_t i = 0;
    for (; i + BLOCK <= a->n; i += BLOCK) parts_block(a, kind, out_kind, i, BLOCK);
    if (i < a->n) parts_block(a, kind, out_kind, i, a->n - i);
}

static void parts_sum(const Parts *a) {
#define CASE(from, to) \
    if (a->kind == from && a->out_kind == to) parts_run(a, from, to)
    CASE(PS_FP32, PS_FP32);
    CASE(PS_FP32, PS_BF16);
    CASE(PS_FP32, PS_FP16);
    CASE(PS_BF16, PS_FP32);
    CASE(PS_BF16, PS_BF16);
    CASE(PS_BF16, PS_FP16);
    CASE(PS_FP16, PS_FP32);
    CASE(PS_FP16, PS_BF16);
    CASE(PS_FP16, PS_FP16);
#undef CASE
}

/* On the calling thread, see `sum_in_order`. */
PUBLIC void NAME(sum_in_order)(const Parts *a) {
    const int threads = 1;
    IN_PARTS(parts_sum(a))
}

/* The sum of squares, [Note: order of arithmetic]: a block is GROUPS groups of ROWS rows of LANES elements. A group lies
 * in one piece, so memory is read straight on. Vectors take COLUMN of its lanes at a time, as many as registers hold;
 * where that is not all of them, what is prefetched is the next group, in order. */
#if defined(__AVX512F__)
enum { VECTOR = 64, COLUMN = 256, SUM_AHEAD = 2048 };
#elif defined(__AVX2__)
enum { VECTOR = 32, COLUMN = 64, SUM_AHEAD = 4096 };
#else
enum { VECTOR = 16, COLUMN = 32, SUM_AHEAD = 4096 };
#endif
enum {
    ROWS = 16,
    LANES = 256,
    KEPT = 16,
    GROUP = ROWS * LANES,
    GROUPS = SUM_BLOCK / GROUP,
    EACH = VECTOR / 4,
    VECTORS = COLUMN / EACH,
};
typedef float Vector __attribute__((vector_size(VECTOR)));
typedef unsigned int Words __attribute__((vector_size(VECTOR)));

/* Two vectors of elements, in order; but of bfloat16 those with even and those with odd numbers, which takes one
 * operation for each where putting them in order takes several. */
INLINE void load_two(const void *x, int kind, Vector *one, Vector *other) {
    if (kind == PS_BF16) {
        Words pairs;
        memcpy(&pairs, x, VECTOR);
        *one = (Vector)(pairs << 16);
        *other = (Vector)(pairs & 0xffff0000u);
    } else {
        float values[2 * EACH];
        const void *singles = kind == PS_FP32 ? x : values;
        if (kind == PS_FP16) widen(x, kind, 2 * EACH, values);
        memcpy(one, singles, VECTOR);
        memcpy(other, (const char *)singles + VECTOR, VECTOR);
    }
}

/* COLUMN lanes of a group: their rows' squares, added one row after another. */
INLINE void sum_column(const void *x, int kind, const void *ahead, float *to) {
    Vector sums[VECTORS] = {0};
    for (int row = 0; row < ROWS; row++) {
        const void *from = at(x, (size_t)row * LANES, kind);
        if (kind != PS_FP32 || (int)COLUMN < (int)LANES) /* singles read straight on need no help: it costs a twentieth */
            prefetch_lines(at(ahead, (size_t)row * COLUMN, kind), COLUMN * width(kind) / 64);
#pragma GCC unroll 16
        for (int k = 0; k < VECTORS; k += 2) {
            Vector one, other;
            load_two(at(from, (size_t)k * EACH, kind), kind, &one, &other);
            sums[k] += one * one;
            sums[k + 1] += other * other;
        }
    }
    for (int k = 0; k < VECTORS; k += 2)
        for (int i = 0; i < EACH; i++) {
            to[k * EACH + (kind == PS_BF16 ? 2 * i : i)] = sums[k][i];
            to[k * EACH + (kind == PS_BF16 ? 2 * i + 1 : i + EACH)] = sums[k + 1][i];
        }
}

/* The upper half added to the lower, until `left` are left. */
INLINE void halve(float *sums, int count, int left) {
    for (int half = count / 2; half >= left; half /= 2)
        for (int i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
}

/* A group's KEPT sums. Halving here, and not all of a block at its end, is done while memory brings the next group. */
INLINE void sum_group(const void *x, int kind, float *to) {
    _Alignas(64) float sums[LANES];
#if !defined(__F16C__)
    float singles[GROUP]; /* without instructions for it, compilers make vectors only of a conversion of many */
    if (kind == PS_FP16) {
        widen(x, kind, GROUP, singles);
        x = singles;
        kind = PS_FP32;
    }
#endif
    for (int lane = 0; lane < LANES; lane += COLUMN)
        sum_column(at(x, lane, kind), kind, at(x, SUM_AHEAD + (size_t)lane * ROWS, kind), sums + lane);
    halve(sums, LANES, KEPT);
    memcpy(to, sums, KEPT * sizeof *to);
}

/* The sum of one block's squares. What is beyond its end counts as zeros, and adding those changes nothing. */
INLINE float sum_block(const void *x, int kind, size_t n) {
    _Alignas(64) float sums[GROUPS * KEPT] = {0};
    size_t whole = n / GROUP;
    for (size_t group = 0; group < whole; group++) sum_group(at(x, group * GROUP, kind), kind, sums + group * KEPT);
    if (whole * GROUP < n) {
        _Alignas(64) unsigned short rest[2 * GROUP] = {0};
        memcpy(rest, at(x, whole * GROUP, kind), (n - whole * GROUP) * width(kind));
        sum_group(rest, kind, sums + whole * KEPT);
    }
    halve(sums, GROUPS * KEPT, 1);
    return sums[0];
}

static int any_not_finite(const void *x, int kind, size_t n) {
    float g[BLOCK];
    int found = 0;
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t count = n - i < BLOCK ? n - i : BLOCK;
        widen(at(x, i, kind), kind, count, g);
        for (size_t j = 0; j < count; j++) found |= ps_not_finite(g[j]);
    }
    return found;
}

static float sum_any(const void *x, int kind, size_t n, int *bad) {
    float sum = kind == PS_BF16   ? sum_block(x, PS_BF16, n)
                : kind == PS_FP16 ? sum_block(x, PS_FP16, n)
                                  : sum_block(x, PS_FP32, n);
    /* Squares do not cancel: a finite sum has finite terms, so only an infinite one is looked into. */
    if (ps_not_finite(sum)) *bad |= any_not_finite(x, kind, n);
    return sum;
}

/* `sums` are zeros, a power of two of them and one for each block at least; `out` is the running sum and flag. */
PUBLIC void NAME(sumsq)(const void *x, int kind, size_t n, float *sums, size_t size, float *out, int threads) {
    size_t blocks = (n + SUM_BLOCK - 1) / SUM_BLOCK;
    int bad = 0;
    _Pragma("omp parallel num_threads(threads) if (threads > 1) reduction(| : bad)") {
        unsigned long control;
        ps_enter();
        control = plain_ieee();
        _Pragma("omp for schedule(static)")
        for (long long b = 0; b < (long long)blocks; b++) {
            size_t from = (size_t)b * SUM_BLOCK, count = n - from < SUM_BLOCK ? n - from : SUM_BLOCK;
            sums[b] = sum_any(at(x, from, kind), kind, count, &bad);
        }
        restore_control(control);
        ps_leave();
    }
    unsigned long control = plain_ieee();
    for (size_t half = size / 2; half; half /= 2)
        for (size_t i = 0; i < half; i++) sums[i] = sums[i] + sums[i + half];
    out[0] = out[0] + sums[0];
    if (bad) out[1] = 1.0f;
    restore_control(control);
}

/* The same of each of `count` spans, a first element of `x` and the one after its last, into its row of `out`. `sums` has
 * room for the longest; a span of fewer than `each` elements is one thread's. */
PUBLIC void NAME(sumsq_spans)(const void *x, int kind, const unsigned long long *spans, size_t count, float *sums,
                              float *out, int threads, size_t each) {
    for (size_t i = 0; i < count; i++) {
        size_t start = (size_t)spans[2 * i], n = (size_t)spans[2 * i + 1] - start, size = 1;
        while (size * SUM_BLOCK < n) size *= 2;
        memset(sums, 0, size * sizeof *sums);
        size_t most = n / each + 1 < (size_t)threads ? n / each + 1 : (size_t)threads;
        NAME(sumsq)(at(x, start, kind), kind, n, sums, size, out + 2 * i, (int)most);
    }
}

/* Bytes, past the caches if there are enough of them. */
static void copy_bytes(char *to, const char *from, size_t bytes, int stream) {
    size_t head = (64 - (size_t)to % 64) % 64;
    if (!stream || bytes < head + 512) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 128; to += 128, from += 128, bytes -= 128) stream_lines(to, from);
    memcpy(to, from, bytes);
}

INLINE void cast_run(const void *from, int fk, void *to, int tk, size_t n) {
    _Alignas(64) float x[BLOCK];
    for (size_t i = 0; i < n; i += BLOCK) {
        size_t count = n - i < BLOCK ? n - i : BLOCK;
        if (count == BLOCK) {
            widen(at(from, i, fk), fk, BLOCK, x);
            narrow(x, tk, BLOCK, (char *)to + i * width(tk));
        } else {
            widen(at(from, i, fk), fk, count, x);
            narrow(x, tk, count, (char *)to + i * width(tk));
        }
    }
}

static void cast_some(const void *from, int fk, void *to, int tk, size_t n) {
#define CASE(f, t) \
    if (fk == f && tk == t) cast_run(from, f, to, t, n)
    CASE(PS_FP32, PS_BF16);
    CASE(PS_FP32, PS_FP16);
    CASE(PS_BF16, PS_FP32);
    CASE(PS_BF16, PS_FP16);
    CASE(PS_FP16, PS_FP32);
    CASE(PS_FP16, PS_BF16);
#undef CASE
}

typedef struct {
    const void *const *from;
    void *const *to;
    const size_t *counts; /* elements of each */
    size_t length;        /* of the lists */
    size_t total;         /* elements of all */
    int element_bytes;    /* for plain copies, of any type; 0: cast */
    int from_kind, to_kind;
    int stream;
} Copies;

static void copy_part(const Copies *c, size_t first, size_t last) {
    size_t start = 0;
    for (size_t k = 0; k < c->length && start < last; start += c->counts[k], k++) {
        size_t lo = start < first ? first - start : 0;
        size_t hi = last - start < c->counts[k] ? last - start : c->counts[k];
        if (lo >= hi) continue;
        if (c->element_bytes)
            copy_bytes((char *)c->to[k] + lo * c->element_bytes, (const char *)c->from[k] + lo * c->element_bytes,
                       (hi - lo) * c->element_bytes, c->stream);
        else
            cast_some(at(c->from[k], lo, c->from_kind), c->from_kind, (char *)c->to[k] + lo * width(c->to_kind),
                      c->to_kind, hi - lo);
    }
}

PUBLIC void NAME(copy)(const Copies *c, int threads) {
    IN_PARTS(copy_part(c, cut(c->total, part, threads), cut(c->total, part + 1, threads)))
}

#include "losses.h"
