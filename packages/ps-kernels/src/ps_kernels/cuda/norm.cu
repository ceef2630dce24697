/* Sum of squares and finite flag in one pass over the data, in the order of [Note: order of arithmetic].
 *
 * A block of 65,536 elements is one thread block's, whatever the grid, so the bits depend on the data alone. Adding
 * the upper half to the lower until one number is left is a tree over the bits of an element's index, highest bits
 * first. Thread t holds elements (512 * k + t) * WIDE + c: the bits of k are the highest, so each thread adds over k
 * in registers (the sum over even k plus that over odd k, and so on down: [Tree]); t and c follow in shared memory.
 * Zeros beyond the end change nothing, since no square is a negative zero.
 */
#include "common.h"

#define PS_THREADS 512
#define PS_BLOCK 65536

template <typename T> struct Shape {
    static const int WIDE = 16 / sizeof(T), EACH = PS_BLOCK / (PS_THREADS * WIDE);
};

template <typename T> struct Source {
    const T *x;       /* the thread block's first element */
    ps_index numel;   /* of the thread block: fewer than PS_BLOCK at the end */
};

/* Squares of the thread's elements of one k. FAST: all are there, and x is 16-byte aligned. */
template <typename T, bool FAST> PS_FN int squares(const Source<T> &source, int k, float *into) {
    const int wide = Shape<T>::WIDE;
    int bad = 0;
    ps_index group = (ps_index)k * PS_THREADS + threadIdx.x;
    Pack<T, Shape<T>::WIDE> values;
    if (FAST) values = take<Shape<T>::WIDE>(source.x, group);
#pragma unroll
    for (int c = 0; c < wide; ++c) {
        float value = 0.0f;
        if (FAST) value = widen(values.at[c]);
        else if (group * wide + c < source.numel) value = widen(source.x[group * wide + c]);
        bad |= ps_not_finite(value);
        into[c] = value * value;
    }
    return bad;
}

/* [Tree]: the sum over every k = first + a multiple of STRIDE. Four leaves are written out, so that four loads are in
 * flight; above them the two halves are a loop, or the compiler would move all loads to the front and spill. */
template <typename T, bool FAST, int STRIDE, int LEAVES> struct Tree {
    static __device__ __forceinline__ int sum(const Source<T> &source, int first, float *into) {
        int bad = 0;
        if (LEAVES <= 4) {
            bad |= Half::sum(source, first, into);
            bad |= add(source, first + STRIDE, into);
        } else {
#pragma unroll
            for (int c = 0; c < Shape<T>::WIDE; ++c) into[c] = 0.0f; /* adding to a positive zero changes no square */
#pragma unroll 1
            for (int half = 0; half < 2; ++half) bad |= add(source, first + half * STRIDE, into);
        }
        return bad;
    }

  private:
    typedef Tree<T, FAST, 2 * STRIDE, LEAVES / 2> Half;

    static __device__ __forceinline__ int add(const Source<T> &source, int first, float *into) {
        float other[Shape<T>::WIDE];
        int bad = Half::sum(source, first, other);
#pragma unroll
        for (int c = 0; c < Shape<T>::WIDE; ++c) into[c] = into[c] + other[c];
        return bad;
    }
};
template <typename T, bool FAST, int STRIDE> struct Tree<T, FAST, STRIDE, 1> {
    static __device__ __forceinline__ int sum(const Source<T> &source, int first, float *into) {
        return squares<T, FAST>(source, first, into);
    }
};

template <typename T> PS_FN void norm(const T *x, ps_index numel, int aligned, float *sums, float *out, float *shared) {
    const int wide = Shape<T>::WIDE, thread = threadIdx.x;
    ps_index blocks = (numel + PS_BLOCK - 1) / PS_BLOCK;
    for (ps_index block = blockIdx.x; block < blocks; block += gridDim.x) {
        ps_index start = block * PS_BLOCK;
        Source<T> source = {x + start, numel - start};
        float mine[Shape<T>::WIDE];
        int bad;
        if (aligned && source.numel >= PS_BLOCK) bad = Tree<T, true, 1, Shape<T>::EACH>::sum(source, 0, mine);
        else bad = Tree<T, false, 1, Shape<T>::EACH>::sum(source, 0, mine);
#pragma unroll
        for (int c = 0; c < wide; ++c) shared[thread * wide + c] = mine[c];
        bad = __syncthreads_or(bad);
        for (int half = PS_THREADS * wide / 2; half >= 1; half /= 2) {
            for (int i = thread; i < half; i += PS_THREADS) shared[i] = shared[i] + shared[i + half];
            __syncthreads();
        }
        if (thread == 0) {
            sums[block] = shared[0];
            if (bad) out[1] = 1.0f; /* every thread block that writes it writes the same */
        }
        __syncthreads();
    }
}

#define PS_NORM(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(PS_THREADS) norm_##NAME(const T *x, ps_index numel, ps_index aligned, \
                                                                         float *sums, float *out) {                    \
        __shared__ float shared[PS_THREADS * Shape<T>::WIDE];                                                          \
        norm(x, numel, (int)aligned, sums, out, shared);                                                               \
    }

PS_NORM(float32, float)
PS_NORM(bfloat16, Bf16)
PS_NORM(float16, Fp16)

/* One thread block: the blocks' sums by halving, in place, and the total added to out[0]. */
extern "C" __global__ void __launch_bounds__(PS_THREADS) norm_total(float *sums, ps_index count, float *out) {
    ps_index half = 1;
    while (2 * half < count) half *= 2;
    for (; half >= 1; half /= 2) {
        for (ps_index i = threadIdx.x; i < half && i + half < count; i += PS_THREADS) sums[i] = sums[i] + sums[i + half];
        count = count < half ? count : half;
        __syncthreads();
    }
    if (threadIdx.x == 0) out[0] = out[0] + (count > 0 ? sums[0] : 0.0f);
}
