/* One instruction set's loops over fixed numbers of all kinds; prints a hash of each result, with every nan made the same
 * one. What it prints must not depend on the instruction set, nor on the kind of processor. Includes loops.c, so compile
 * it as that is compiled, with levels.c beside it. */
#include "loops.c"

#include <stdio.h>

enum { NUMEL = 3000, SUM_NUMEL = 3 * SUM_BLOCK + 1001 };

static unsigned long long state = 88172645463325252ull, hash;
static _Alignas(64) float p[NUMEL], m[NUMEL], v[NUMEL], grad[NUMEL], out[NUMEL], big[SUM_NUMEL], sums[4];

static unsigned int random_bits(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (unsigned int)(state >> 16);
}

/* Half of them any pattern at all, half of them about one. */
static float random_single(void) {
    unsigned int bits = random_bits();
    return ps_float(bits & 1 ? random_bits() : (bits & 0x81ffffffu) | 0x3e000000u);
}

static void fill(void) {
    for (int i = 0; i < NUMEL; i++) {
        p[i] = random_single(), m[i] = random_single(), v[i] = random_single(), grad[i] = random_single();
        if (v[i] < 0) v[i] = -v[i];
    }
    memset(out, 0, sizeof out);
}

static void add(unsigned int word) {
    for (int i = 0; i < 4; i++) hash = (hash ^ (word >> 8 * i & 0xff)) * 1099511628211ull;
}

static void add_singles(const float *x, size_t n) {
    for (size_t i = 0; i < n; i++) add(x[i] != x[i] ? 0x7fc00000u : ps_bits(x[i]));
}

static void add_all(const void *x, int kind, size_t n) {
    const unsigned short *halves = x;
    if (kind == NONE) return;
    for (size_t i = 0; i < n; i++) {
        float value = kind == PS_FP32 ? ((const float *)x)[i] : kind == PS_BF16 ? ps_from_bf16(halves[i])
                                                                                : ps_from_fp16(halves[i]);
        add_singles(&value, 1);
    }
}

static void say(const char *what, int one, int other) {
    printf("%s %d %d %016llx\n", what, one, other, hash);
    hash = 14695981039346656037ull;
}

static void steps(int gk, int ok, int shift, int stream) {
    static const ps_adam_scalars adams[] = {
        {1.0f, 0.0f, 1.0f, 0.1f, 0.0f, 0.999f, 0.001f, 0.0547f, 1e-8f, 1e-3f},
        {0.37f, 0.1f, 1.0f, -0.3f, 1.0f, 0.9f, 0.1f, 0.7f, 1e-3f, 0.1f},
        {1e-30f, 0.0f, 0.99f, 0.4f, 0.0f, 0.0f, 1.0f, 1.0f, 0.0f, 1e30f},
    };
    static const ps_sgd_scalars sgds[] = {{1.0f, 0.0f, 0.9f, 0.1f}, {0.3f, 0.1f, 0.5f, 1e-3f}};
    for (int k = 0; k < 5; k++) {
        fill();
        Step a = {p + shift, k == 3 ? NULL : m, v, grad, ok == NONE ? NULL : (char *)out + shift * width(ok),
                  NUMEL - shift, gk, ok, stream};
        if (k < 3) NAME(adam)(adams + k, &a, 1);
        else NAME(sgd)(sgds + k - 3, &a, 1);
        add_singles(p, NUMEL), add_singles(m, NUMEL), add_singles(v, NUMEL);
        add_all(out, ok, NUMEL);
    }
    say("steps", gk, ok);
}

/* Rows of 1,000 logits about one, and some of them with any pattern at all. */
static void losses(int kind) {
    static const long long labels[] = {0, 999, -100};
    for (int k = 0; k < 40; k++) {
        Losses a = {big, labels, out, 3, 1000, -100, 0.7f, kind, k % 5 != 4};
        for (size_t i = 0; i < NUMEL; i++) {
            unsigned int bits = random_bits(), odd = k % 2 && bits % 500 == 0;
            big[i] = ps_float(odd ? random_bits() : (bits & 0x82ff82ffu) | 0x3e003e00u);
        }
        if (NAME(cross_entropy)(&a, 1) != -1) add(1);
        add_singles(out, 3);
        add_all(big, kind, NUMEL);
    }
}

int main(void) {
    hash = 14695981039346656037ull;
    for (int gk = 0; gk < 3; gk++)
        for (int ok = NONE; ok < 3; ok++) steps(gk, ok, gk + ok + 1, ok != NONE);
    for (int kind = 0; kind < 3; kind++) {
        float result[2] = {0.5f, 0.0f};
        fill();
        NAME(accumulate)(p, grad, kind, NUMEL, 0.3f, 1);
        add_singles(p, NUMEL);
        say("accumulate", kind, 0);
        for (size_t i = 0; i < SUM_NUMEL; i++) big[i] = ps_float((random_bits() & 0x81ff81ffu) | 0x3e003e00u);
        memset(sums, 0, sizeof sums);
        NAME(sumsq)(big, kind, SUM_NUMEL, sums, 4, result, 1);
        add_singles(result, 2);
        say("sumsq", kind, 0);
        for (int to = 0; to < 3; to++) {
            const void *source = grad;
            void *target = out;
            size_t count = NUMEL;
            Copies c = {&source, &target, &count, 1, NUMEL, kind == to ? width(kind) : 0, kind, to, 0};
            fill();
            NAME(copy)(&c, 1);
            add_all(out, to, NUMEL);
            say("copy", kind, to);
        }
        losses(kind);
        say("losses", kind, 0);
    }
    return 0;
}
