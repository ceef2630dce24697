/* The arithmetic of a cross entropy: exponential and logarithm from operations that are the same bits everywhere.
 *
 * As in step.h each operation is one IEEE operation rounded to nearest even, nothing is fused, and what is written here
 * is all there is: no library's exp or log. The order of sums is in [Note: order of arithmetic] in _order.py.
 */
#ifndef PS_LOSS_H
#define PS_LOSS_H

#include "step.h"

/* e to the power of x, for x of at most 0: within 1.1 units in the last place down to PS_EXP_LEAST, 0 below it; a nan
 * stays one. The power of two next to x comes out of an addition that leaves whole numbers in the last bits; the rest,
 * at most half of log 2, goes into a polynomial (Cephes' coefficients). */
#define PS_EXP_LEAST -87.0f
PS_FN float ps_exp(float x) {
    float shifted = x * 1.44269504089f + 12582912.0f, whole = shifted - 12582912.0f, r, y;
    r = x - whole * 0.693359375f; /* exact: nine bits times seven */
    r = r - whole * -2.12194440e-4f;
    y = 1.9875691500e-4f * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = (y * (r * r) + r) + 1.0f;
    y = y * PS_FLOAT((PS_BITS(shifted) << 23) + 0x3f800000u);
    return x < PS_EXP_LEAST ? 0.0f : y;
}

/* The logarithm of x, at least 1, in double; a nan stays one. */
PS_FN double ps_log(float x) {
    unsigned int bits = PS_BITS(x), more;
    int exponent = (int)(bits >> 23) - 127;
    double m = PS_FLOAT((bits & 0x7fffffu) | 0x3f800000u), t, z, y;
    if (x != x) return x;
    more = m > 1.4142135623730951;
    m = more ? m * 0.5 : m;
    t = (m - 1.0) / (m + 1.0);
    z = t * t;
    y = 1.0 / 19.0;
    y = y * z + 1.0 / 17.0;
    y = y * z + 1.0 / 15.0;
    y = y * z + 1.0 / 13.0;
    y = y * z + 1.0 / 11.0;
    y = y * z + 1.0 / 9.0;
    y = y * z + 1.0 / 7.0;
    y = y * z + 1.0 / 5.0;
    y = y * z + 1.0 / 3.0;
    y = y * z + 1.0;
    return (exponent + (int)more) * 0.6931471805599453 + 2.0 * t * y;
}

/* A row's loss: of its largest logit, the sum of the others' powers less that, and the right one. */
PS_FN float ps_row_loss(float largest, float sum, float right) {
    return (float)(ps_log(sum) + ((double)largest - (double)right));
}

/* The gradient of one logit; `share` is one over the sum, `target` one for the right logit and zero for others. */
PS_FN float ps_row_gradient(float logit, float largest, float share, float target, float factor) {
    return (ps_exp(logit - largest) * share - target) * factor;
}

#endif
