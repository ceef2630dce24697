/* Optimizer steps and gradient accumulation over one contiguous run; the arithmetic is that of step.h.
 *
 * [Note: head, groups, rest]
 * `head` elements come before the first one at which every array is aligned for groups of four (16 bytes of fp32,
 * 8 bytes of a 16-bit type); then `groups` groups; what is before and after them goes one by one. Arrays that are
 * nowhere aligned together have no groups. An element's result does not depend on which way it goes.
 *
 * `out` may be `grad` itself: each element is read before it is written, by one thread. So no pointer is restricted.
 */
#include "common.h"

struct Nothing {};
PS_FN void narrow(Nothing *, float) {}

/* Where element number `rest` of those outside the groups lies. */
PS_FN ps_index outside(ps_index rest, ps_index head, ps_index groups) {
    return rest < head ? rest : rest + 4 * groups;
}

template <typename Out> struct Writer {
    static __device__ __forceinline__ void four(Out *out, ps_index group, const Pack<float, 4> &p) {
        Pack<Out, 4> o;
#pragma unroll
        for (int i = 0; i < 4; ++i) narrow(&o.at[i], p.at[i]);
        put<4>(out, group, o);
    }
    static __device__ __forceinline__ void one(Out *out, ps_index i, float p) { narrow(out + i, p); }
};
template <> struct Writer<Nothing> {
    static __device__ __forceinline__ void four(Nothing *, ps_index, const Pack<float, 4> &) {}
    static __device__ __forceinline__ void one(Nothing *, ps_index, float) {}
};

template <typename Out> PS_FN Out *from_head(Out *out, ps_index head) { return out + head; }
template <> PS_FN Nothing *from_head(Nothing *out, ps_index) { return out; }

template <typename Grad, typename Out>
PS_FN void adam(float *p, float *m, float *v, const Grad *g, Out *out, ps_index numel, ps_index head, ps_index groups,
                const ps_adam_scalars s) {
    for (ps_index group = first_index(); group < groups; group += index_stride()) {
        Pack<float, 4> p4 = take<4>(p + head, group), m4 = take<4>(m + head, group), v4 = take<4>(v + head, group);
        Pack<Grad, 4> g4 = take<4>(g + head, group);
#pragma unroll
        for (int i = 0; i < 4; ++i) ps_adam(s, widen(g4.at[i]), &p4.at[i], &m4.at[i], &v4.at[i]);
        put<4>(p + head, group, p4);
        put<4>(m + head, group, m4);
        put<4>(v + head, group, v4);
        Writer<Out>::four(from_head(out, head), group, p4);
    }
    for (ps_index rest = first_index(); rest < numel - 4 * groups; rest += index_stride()) {
        ps_index i = outside(rest, head, groups);
        float pi = p[i], mi = m[i], vi = v[i];
        ps_adam(s, widen(g[i]), &pi, &mi, &vi);
        p[i] = pi;
        m[i] = mi;
        v[i] = vi;
        Writer<Out>::one(out, i, pi);
    }
}

template <typename Grad, typename Out, bool MOMENTUM>
PS_FN void sgd(float *p, float *m, const Grad *g, Out *out, ps_index numel, ps_index head, ps_index groups,
               const ps_sgd_scalars s) {
    for (ps_index group = first_index(); group < groups; group += index_stride()) {
        Pack<float, 4> p4 = take<4>(p + head, group), m4;
        Pack<Grad, 4> g4 = take<4>(g + head, group);
        if (MOMENTUM) m4 = take<4>(m + head, group);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (MOMENTUM) ps_sgd_momentum(s, widen(g4.at[i]), &p4.at[i], &m4.at[i]);
            else ps_sgd(s, widen(g4.at[i]), &p4.at[i]);
        }
        put<4>(p + head, group, p4);
        if (MOMENTUM) put<4>(m + head, group, m4);
        Writer<Out>::four(from_head(out, head), group, p4);
    }
    for (ps_index rest = first_index(); rest < numel - 4 * groups; rest += index_stride()) {
        ps_index i = outside(rest, head, groups);
        float pi = p[i];
        if (MOMENTUM) {
            float mi = m[i];
            ps_sgd_momentum(s, widen(g[i]), &pi, &mi);
            m[i] = mi;
        } else {
            ps_sgd(s, widen(g[i]), &pi);
        }
        p[i] = pi;
        Writer<Out>::one(out, i, pi);
    }
}

template <typename Grad>
PS_FN void add(float *sum, const Grad *g, ps_index numel, ps_index head, ps_index groups, float scale) {
    for (ps_index group = first_index(); group < groups; group += index_stride()) {
        Pack<float, 4> sum4 = take<4>(sum + head, group);
        Pack<Grad, 4> g4 = take<4>(g + head, group);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum4.at[i] = ps_accumulate(sum4.at[i], widen(g4.at[i]), scale);
        put<4>(sum + head, group, sum4);
    }
    for (ps_index rest = first_index(); rest < numel - 4 * groups; rest += index_stride()) {
        ps_index i = outside(rest, head, groups);
        sum[i] = ps_accumulate(sum[i], widen(g[i]), scale);
    }
}

#define PS_STEPS(GRAD_NAME, GRAD, OUT_NAME, OUT)                                                                       \
    extern "C" __global__ void __launch_bounds__(256) adam_##GRAD_NAME##_##OUT_NAME(                                   \
        float *p, float *m, float *v, const GRAD *g, OUT *out, ps_index numel, ps_index head, ps_index groups,         \
        float grad_scale, float coupled_decay, float decay_factor, float lerp, float lerp_from_grad, float beta2,      \
        float one_minus_beta2, float sqrt_bc2, float eps, float step_size) {                                           \
        ps_adam_scalars s = {grad_scale,      coupled_decay, decay_factor, lerp,     lerp_from_grad, beta2,            \
                             one_minus_beta2, sqrt_bc2,      eps,          step_size};                                 \
        adam(p, m, v, g, out, numel, head, groups, s);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) sgd_##GRAD_NAME##_##OUT_NAME(                                    \
        float *p, float *m, const GRAD *g, OUT *out, ps_index numel, ps_index head, ps_index groups, float grad_scale, \
        float weight_decay, float momentum_decay, float lr) {                                                          \
        ps_sgd_scalars s = {grad_scale, weight_decay, momentum_decay, lr};                                             \
        if (m) sgd<GRAD, OUT, true>(p, m, g, out, numel, head, groups, s);                                             \
        else sgd<GRAD, OUT, false>(p, m, g, out, numel, head, groups, s);                                              \
    }

#define PS_ALL(GRAD_NAME, GRAD)                                                                                        \
    PS_STEPS(GRAD_NAME, GRAD, none, Nothing)                                                                           \
    PS_STEPS(GRAD_NAME, GRAD, bfloat16, Bf16)                                                                          \
    PS_STEPS(GRAD_NAME, GRAD, float16, Fp16)                                                                           \
    extern "C" __global__ void __launch_bounds__(256) accumulate_##GRAD_NAME(                                          \
        float *sum, const GRAD *g, ps_index numel, ps_index head, ps_index groups, float scale) {                      \
        add(sum, g, numel, head, groups, scale);                                                                       \
    }

PS_ALL(float32, float)
PS_ALL(bfloat16, Bf16)
PS_ALL(float16, Fp16)
