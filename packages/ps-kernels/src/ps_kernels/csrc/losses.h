/* Rows of logits to losses and gradients, for one instruction set: the end of loops.c. The arithmetic is loss.h's.
 *
 * A row is gone through three times (its largest, the sum of powers, gradients in its own place), of which caches hide two.
 */
#include "loss.h"

typedef struct {
    void *logits;
    const long long *labels;
    float *losses;
    size_t rows, columns;
    long long ignored;
    float factor;
    int kind, gradient;
} Losses;

enum { LOSS_ROWS = 64 }; /* blocks summed as one group; as in _order.py */

/* A block, or what is left of the row, filled up with what no power is left of. */
INLINE void load_block(const void *row, int kind, size_t i, size_t n, float *to) {
    if (n - i >= BLOCK) {
        widen(at(row, i, kind), kind, BLOCK, to);
        return;
    }
    widen(at(row, i, kind), kind, (int)(n - i), to);
    for (size_t j = n - i; j < BLOCK; j++) to[j] = -__builtin_inff();
}

INLINE float largest_of(const void *row, int kind, size_t n) {
    _Alignas(64) float x[BLOCK], most[BLOCK];
    for (int j = 0; j < BLOCK; j++) most[j] = -__builtin_inff();
    for (size_t i = 0; i < n; i += BLOCK) {
        load_block(row, kind, i, n, x);
        for (int j = 0; j < BLOCK; j++) most[j] = x[j] > most[j] ? x[j] : most[j];
    }
    for (int half = BLOCK / 2; half; half /= 2)
        for (int j = 0; j < half; j++) most[j] = most[j + half] > most[j] ? most[j + half] : most[j];
    return most[0];
}

INLINE float powers_of(const void *row, int kind, size_t n, float largest) {
    _Alignas(64) float x[BLOCK], group[BLOCK], sums[BLOCK] = {0};
    for (size_t from = 0; from < n; from += BLOCK * LOSS_ROWS) {
        size_t to = n - from < BLOCK * LOSS_ROWS ? n : from + BLOCK * LOSS_ROWS;
        for (int j = 0; j < BLOCK; j++) group[j] = 0.0f;
        for (size_t i = from; i < to; i += BLOCK) {
            load_block(row, kind, i, n, x);
            for (int j = 0; j < BLOCK; j++) group[j] = group[j] + ps_exp(x[j] - largest);
        }
        for (int j = 0; j < BLOCK; j++) sums[j] = sums[j] + group[j];
    }
    halve(sums, BLOCK, 1);
    return sums[0];
}

INLINE void gradients_of(void *row, int kind, size_t n, float largest, float share, float factor) {
    _Alignas(64) float x[BLOCK];
    for (size_t i = 0; i < n; i += BLOCK) {
        void *here = (char *)row + i * width(kind);
        load_block(row, kind, i, n, x);
        for (int j = 0; j < BLOCK; j++) x[j] = ps_row_gradient(x[j], largest, share, 0.0f, factor);
        if (n - i >= BLOCK) narrow(x, kind, BLOCK, here);
        else narrow(x, kind, (int)(n - i), here);
    }
}

INLINE void loss_of_row(const Losses *a, size_t index, int kind) {
    void *row = (char *)a->logits + index * a->columns * width(kind);
    long long label = a->labels[index];
    float largest, sum, share, right;
    if (label == a->ignored) {
        a->losses[index] = 0.0f;
        if (a->gradient) memset(row, 0, a->columns * width(kind));
        return;
    }
    widen(at(row, (size_t)label, kind), kind, 1, &right);
    largest = largest_of(row, kind, a->columns);
    sum = powers_of(row, kind, a->columns, largest);
    a->losses[index] = ps_row_loss(largest, sum, right);
    if (!a->gradient) return;
    share = PS_DIV(1.0f, sum);
    gradients_of(row, kind, a->columns, largest, share, a->factor);
    right = ps_row_gradient(right, largest, share, 1.0f, a->factor);
    narrow(&right, kind, 1, (char *)row + (size_t)label * width(kind));
}

static void losses_part(const Losses *a, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) {
        if (a->kind == PS_BF16) loss_of_row(a, i, PS_BF16);
        else if (a->kind == PS_FP16) loss_of_row(a, i, PS_FP16);
        else loss_of_row(a, i, PS_FP32);
    }
}

/* The first row whose label is none of the columns, and then nothing is written; or -1. */
PUBLIC long long NAME(cross_entropy)(const Losses *a, int threads) {
    for (size_t i = 0; i < a->rows; i++)
        if (a->labels[i] != a->ignored && (a->labels[i] < 0 || (size_t)a->labels[i] >= a->columns)) return (long long)i;
    IN_PARTS(losses_part(a, a->rows * part / threads, a->rows * (part + 1) / threads))
    return -1;
}
