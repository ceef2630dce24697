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

/* [Note: tuning]
 * Chosen where this is compiled, by Tuning of _cuda_source.py; no choice changes a bit. PS_PACKS: groups that a thread has
 * on their way at once. PS_PAST: groups are read and written once, so caches need not keep them; 1 tells them when reading,
 * 2 when writing, 3 both. PS_STEP_THREADS: threads of a block.
 */
#ifndef PS_PACKS
#define PS_PACKS 1
#endif
#ifndef PS_PAST
#define PS_PAST 0
#endif
#ifndef PS_STEP_THREADS
#define PS_STEP_THREADS 256
#endif

/* What a group is read and written as where caches are told not to keep it. */
template <int BYTES> struct Word;
template <> struct Word<16> {
    typedef uint4 Type;
};
template <> struct Word<8> {
    typedef uint2 Type;
};
template <typename T> union Both {
    Pack<T, 4> values;
    typename Word<4 * sizeof(T)>::Type word;
};

template <typename T> PS_FN Pack<T, 4> read(const T *from, ps_index group) {
    if (!(PS_PAST & 1)) return take<4>(from, group);
    Both<T> both;
    both.word = __ldcs(reinterpret_cast<const typename Word<4 * sizeof(T)>::Type *>(from) + group);
    return both.values;
}
template <typename T> PS_FN void write(T *into, ps_index group, const Pack<T, 4> &values) {
    if (!(PS_PAST & 2)) {
        put<4>(into, group, values);
        return;
    }
    Both<T> both;
    both.values = values;
    __stcs(reinterpret_cast<typename Word<4 * sizeof(T)>::Type *>(into) + group, both.word);
}

/* A thread's packs are a block's threads apart, so that a warp reads without gaps. */
PS_FN ps_index first_group() { return (ps_index)blockIdx.x * blockDim.x * PS_PACKS + threadIdx.x; }
PS_FN ps_index group_stride() { return index_stride() * PS_PACKS; }
PS_FN ps_index pack_at(ps_index first, int pack) { return first + (ps_index)pack * blockDim.x; }

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
        write(out, group, o);
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
    for (ps_index first = first_group(); first < groups; first += group_stride()) {
        Pack<float, 4> p4[PS_PACKS], m4[PS_PACKS], v4[PS_PACKS];
        Pack<Grad, 4> g4[PS_PACKS];
#pragma unroll
        for (int k = 0; k < PS_PACKS; ++k) {
            ps_index group = pack_at(first, k);
            if (group >= groups) break;
            p4[k] = read(p + head, group), m4[k] = read(m + head, group), v4[k] = read(v + head, group);
            g4[k] = read(g + head, group);
        }
#pragma unroll
        for (int k = 0; k < PS_PACKS; ++k) {
            ps_index group = pack_at(first, k);
            if (group >= groups) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) ps_adam(s, widen(g4[k].at[i]), &p4[k].at[i], &m4[k].at[i], &v4[k].at[i]);
            write(p + head, group, p4[k]);
            write(m + head, group, m4[k]);
            write(v + head, group, v4[k]);
            Writer<Out>::four(from_head(out, head), group, p4[k]);
        }
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
    for (ps_index first = first_group(); first < groups; first += group_stride()) {
        Pack<float, 4> p4[PS_PACKS], m4[PS_PACKS];
        Pack<Grad, 4> g4[PS_PACKS];
#pragma unroll
        for (int k = 0; k < PS_PACKS; ++k) {
            ps_index group = pack_at(first, k);
            if (group >= groups) break;
            p4[k] = read(p + head, group), g4[k] = read(g + head, group);
            if (MOMENTUM) m4[k] = read(m + head, group);
        }
#pragma unroll
        for (int k = 0; k < PS_PACKS; ++k) {
            ps_index group = pack_at(first, k);
            if (group >= groups) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (MOMENTUM) ps_sgd_momentum(s, widen(g4[k].at[i]), &p4[k].at[i], &m4[k].at[i]);
                else ps_sgd(s, widen(g4[k].at[i]), &p4[k].at[i]);
            }
            write(p + head, group, p4[k]);
            if (MOMENTUM) write(m + head, group, m4[k]);
            Writer<Out>::four(from_head(out, head), group, p4[k]);
        }
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
    for (ps_index first = first_group(); first < groups; first += group_stride()) {
        Pack<float, 4> sum4[PS_PACKS];
        Pack<Grad, 4> g4[PS_PACKS];
#pragma unroll
        for (int k = 0; k < PS_PACKS; ++k) {
            ps_index group = pack_at(first, k);
            if (group >= groups) break;
            sum4[k] = read(sum + head, group), g4[k] = read(g + head, group);
        }
#pragma unroll
        for (int k = 0; k < PS_PACKS; ++k) {
            ps_index group = pack_at(first, k);
            if (group >= groups) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) sum4[k].at[i] = ps_accumulate(sum4[k].at[i], widen(g4[k].at[i]), scale);
            write(sum + head, group, sum4[k]);
        }
    }
    for (ps_index rest = first_index(); rest < numel - 4 * groups; rest += index_stride()) {
        ps_index i = outside(rest, head, groups);
        sum[i] = ps_accumulate(sum[i], widen(g[i]), scale);
    }
}

#define PS_STEPS(GRAD_NAME, GRAD, OUT_NAME, OUT)                                                                       \
    extern "C" __global__ void __launch_bounds__(PS_STEP_THREADS) adam_##GRAD_NAME##_##OUT_NAME(                                   \
        float *p, float *m, float *v, const GRAD *g, OUT *out, ps_index numel, ps_index head, ps_index groups,         \
        float grad_scale, float coupled_decay, float decay_factor, float lerp, float lerp_from_grad, float beta2,      \
        float one_minus_beta2, float sqrt_bc2, float eps, float step_size) {                                           \
        ps_adam_scalars s = {grad_scale,      coupled_decay, decay_factor, lerp,     lerp_from_grad, beta2,            \
                             one_minus_beta2, sqrt_bc2,      eps,          step_size};                                 \
        adam(p, m, v, g, out, numel, head, groups, s);                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(PS_STEP_THREADS) sgd_##GRAD_NAME##_##OUT_NAME(                                    \
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
    extern "C" __global__ void __launch_bounds__(PS_STEP_THREADS) accumulate_##GRAD_NAME(                                          \
        float *sum, const GRAD *g, ps_index numel, ps_index head, ps_index groups, float scale) {                      \
        add(sum, g, numel, head, groups, scale);                                                                       \
    }

PS_ALL(float32, float)
PS_ALL(bfloat16, Bf16)
PS_ALL(float16, Fp16)
