/* The arithmetic of a step for one element: the only place where it is written for compiled code.
 *
 * The order is that of [Note: order of arithmetic] in _order.py. Each operation is one IEEE single-precision
 * operation rounded to nearest even, so compile without contraction (-ffp-contract=off, -fmad=false) and without
 * flushing denormals: what is fused says so, PS_FMA. Constants are rounded on the host. The 16-bit conversions are
 * integer arithmetic, so they are the same bits everywhere; a nan stays one and becomes quiet.
 *
 * A subset of C that gcc and clang (as C and as C++), nvcc and NVRTC take as it stands; it includes nothing.
 */
#ifndef PS_STEP_H
#define PS_STEP_H

#if defined(__CUDACC__)
#define PS_FN __device__ __forceinline__
#define PS_SQRT(x) __fsqrt_rn(x)
#define PS_DIV(x, y) __fdiv_rn((x), (y))
#define PS_FMA(a, b, c) __fmaf_rn((a), (b), (c))
#define PS_BITS(x) __float_as_uint(x)
#define PS_FLOAT(bits) __uint_as_float(bits)
#else
#define PS_FN static inline __attribute__((always_inline, unused))
#define PS_SQRT(x) __builtin_sqrtf(x)
#define PS_DIV(x, y) ((x) / (y))
PS_FN unsigned int ps_bits(float x) {
    unsigned int bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}
PS_FN float ps_float(unsigned int bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}
#define PS_BITS(x) ps_bits(x)
#define PS_FLOAT(bits) ps_float(bits)
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
#define PS_FMA(a, b, c) __builtin_fmaf((a), (b), (c))
#else
/* [Note: fused in double] A product of singles is exact in double. Rounding the sum to double and then to single is wrong
 * only if the double lies halfway between two singles and the exact sum does not. So there, where the last 28 bits are
 * zeros, the sum's exact error is found, and moves it by one bit. */
PS_FN float ps_fma(float a, float b, float c) {
    double product = (double)a * (double)b, sum = product + (double)c;
    unsigned long long bits;
    __builtin_memcpy(&bits, &sum, sizeof bits);
    if (__builtin_expect((bits & 0xfffffffu) == 0, 0)) {
        double back = sum - product, error = (product - (sum - back)) + ((double)c - back);
        if (error > 0.0 || error < 0.0) bits += (error > 0.0) == (sum > 0.0) ? 1u : -1ull;
        __builtin_memcpy(&sum, &bits, sizeof sum);
    }
    return (float)sum;
}
#define PS_FMA(a, b, c) ps_fma((a), (b), (c))
#endif
#endif

/* Element types, as the host names them. */
#define PS_FP32 0
#define PS_BF16 1
#define PS_FP16 2

/* Field by field AdamScalars and SgdScalars of _order.py. */
typedef struct {
    float grad_scale, coupled_decay, decay_factor, lerp, lerp_from_grad, beta2, one_minus_beta2, sqrt_bc2, eps, step_size;
} ps_adam_scalars;

typedef struct {
    float grad_scale, weight_decay, momentum_decay, lr;
} ps_sgd_scalars;

PS_FN float ps_from_bf16(unsigned short half) { return PS_FLOAT((unsigned int)half << 16); }

PS_FN unsigned short ps_to_bf16(float x) {
    unsigned int bits = PS_BITS(x);
    unsigned int quiet = (bits >> 16) | 0x40u;
    unsigned int rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (unsigned short)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

PS_FN float ps_from_fp16(unsigned short half) {
    unsigned int sign = ((unsigned int)half & 0x8000u) << 16, magnitude = (unsigned int)half & 0x7fffu;
    if (magnitude > 0x7c00u) return PS_FLOAT(sign | 0x7fc00000u | (magnitude << 13));
    if (magnitude == 0x7c00u) return PS_FLOAT(sign | 0x7f800000u);
    if (magnitude >= 0x0400u) return PS_FLOAT(sign | ((magnitude << 13) + 0x38000000u));
    return PS_FLOAT(sign | PS_BITS((float)(int)magnitude * 5.9604644775390625e-8f)); /* units of 2^-24: exact */
}

PS_FN unsigned short ps_to_fp16(float x) {
    unsigned int bits = PS_BITS(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    unsigned int shift, mantissa, rest, tie, kept;
    if (magnitude > 0x7f800000u) return (unsigned short)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u); /* from 65520 on the nearest is infinite */
    if (magnitude >= 0x38800000u)
        return (unsigned short)(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
    if (magnitude < 0x33000000u) return (unsigned short)sign; /* below half of the smallest */
    shift = 126u - (magnitude >> 23);
    mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    kept = mantissa >> shift;
    rest = mantissa & ((1u << shift) - 1u);
    tie = 1u << (shift - 1u);
    return (unsigned short)(sign | (kept + (rest > tie || (rest == tie && (kept & 1u)) ? 1u : 0u)));
}

/* Multiplying by a decay factor of one changes nothing; adding a product with zero might, so that is left out. */
PS_FN void ps_adam(const ps_adam_scalars s, float g, float *p, float *m, float *v) {
    float denominator;
    g = g * s.grad_scale;
    if (s.coupled_decay != 0.0f) g = PS_FMA(s.coupled_decay, *p, g);
    *p = *p * s.decay_factor;
    *m = PS_FMA(s.lerp, g - *m, s.lerp_from_grad != 0.0f ? g : *m);
    *v = PS_FMA(s.one_minus_beta2 * g, g, s.beta2 * *v);
    denominator = PS_DIV(PS_SQRT(*v), s.sqrt_bc2) + s.eps;
    *p = *p - PS_DIV(s.step_size * *m, denominator);
}

PS_FN void ps_sgd(const ps_sgd_scalars s, float g, float *p) {
    g = g * s.grad_scale;
    if (s.weight_decay != 0.0f) g = PS_FMA(s.weight_decay, *p, g);
    *p = PS_FMA(-s.lr, g, *p);
}

PS_FN void ps_sgd_momentum(const ps_sgd_scalars s, float g, float *p, float *m) {
    g = g * s.grad_scale;
    if (s.weight_decay != 0.0f) g = PS_FMA(s.weight_decay, *p, g);
    *m = s.momentum_decay * *m + g;
    *p = PS_FMA(-s.lr, *m, *p);
}

PS_FN float ps_accumulate(float sum, float g, float scale) { return sum + g * scale; }

/* Whether a number is infinite or not a number. */
PS_FN int ps_not_finite(float x) { return (PS_BITS(x) & 0x7f800000u) == 0x7f800000u; }

#endif
