/* Sum of squares and finite flag in one pass over the data, in the order of [Note: order of arithmetic].
 *
 * A block of 65,536 elements is one thread block's, whatever the grid, so the bits depend on the data alone. A group is
 * one warp's: each thread adds the rows of its lanes in registers, and what is left is halved in shared memory. Zeros
 * beyond the end change nothing, since no square is a negative zero.
 */
#include "common.h"

#define PS_WARP 32
#define PS_ROWS 16
#define PS_LANES 256
#define PS_KEPT 16
#define PS_GROUP (PS_ROWS * PS_LANES)
#define PS_GROUPS 16
#define PS_BLOCK (PS_GROUPS * PS_GROUP)
#define PS_THREADS (PS_GROUPS * PS_WARP)

/* Accesses of a thread before the first is waited for. Converting fp16 takes registers, and two thread blocks are to fit
 * on a multiprocessor. */
template <typename T> struct Flight {
    static const int COUNT = 4;
};
template <> struct Flight<Fp16> {
    static const int COUNT = 2;
};

/* A thread has PACKS packs of a row, PS_WARP packs apart, so that a warp reads without gaps. */
template <typename T> struct Shape {
    static const int WIDE = 16 / sizeof(T), PACKS = PS_LANES / (PS_WARP * WIDE), FLIGHT = Flight<T>::COUNT;
};

template <typename T> struct Group {
    const T *x;       /* the warp's first element */
    ps_index numel;   /* from there on: fewer than PS_GROUP at the end, and none or less beyond it */
};

PS_FN int thread_of_warp() { return (int)threadIdx.x % PS_WARP; }

/* The pack's number within the group. */
template <typename T> PS_FN int pack_at(int row, int pack) {
    return (row * Shape<T>::PACKS + pack) * PS_WARP + thread_of_warp();
}

/* FAST: all elements are there, and x is 16-byte aligned. */
template <typename T, bool FAST> PS_FN Pack<T, Shape<T>::WIDE> read(const Group<T> &group, int pack) {
    const int wide = Shape<T>::WIDE;
    if (FAST) return take<Shape<T>::WIDE>(group.x, pack);
    Pack<T, Shape<T>::WIDE> values = {};
#pragma unroll
    for (int c = 0; c < wide; ++c)
        if (pack * wide + c < group.numel) values.at[c] = group.x[pack * wide + c];
    return values;
}

/* The squares of the thread's lanes, added one row after another. */
template <typename T, bool FAST> PS_FN void add_rows(const Group<T> &group, float sums[][Shape<T>::WIDE]) {
    const int packs = Shape<T>::PACKS, wide = Shape<T>::WIDE, flight = Shape<T>::FLIGHT;
#pragma unroll 1
    for (int row = 0; row < PS_ROWS; row += flight / packs) {
        Pack<T, Shape<T>::WIDE> values[flight];
#pragma unroll
        for (int i = 0; i < flight; ++i) values[i] = read<T, FAST>(group, pack_at<T>(row + i / packs, i % packs));
#pragma unroll
        for (int i = 0; i < flight; ++i)
#pragma unroll
            for (int c = 0; c < wide; ++c) {
                float value = widen(values[i].at[c]);
                sums[i % packs][c] = sums[i % packs][c] + value * value;
            }
    }
}

/* Whether any of the thread's elements is not finite. */
template <typename T> PS_FN int any_not_finite(const Group<T> &group) {
    int bad = 0;
#pragma unroll 1
    for (int row = 0; row < PS_ROWS; ++row)
#pragma unroll 1
        for (int pack = 0; pack < Shape<T>::PACKS; ++pack) {
            Pack<T, Shape<T>::WIDE> values = read<T, false>(group, pack_at<T>(row, pack));
#pragma unroll
            for (int c = 0; c < Shape<T>::WIDE; ++c) bad |= ps_not_finite(widen(values.at[c]));
        }
    return bad;
}

/* In each group the upper half of the lanes is added to the lower, until PS_KEPT are left; then so are the groups, and
 * then the lanes of the first. */
PS_FN void halve(float *shared) {
#pragma unroll
    for (int half = PS_LANES / 2; half >= PS_KEPT; half /= 2) {
        for (int i = (int)threadIdx.x; i < PS_GROUPS * half; i += PS_THREADS) {
            int at = i / half * PS_LANES + i % half;
            shared[at] = shared[at] + shared[at + half];
        }
        __syncthreads();
    }
    for (int half = PS_GROUPS / 2; half >= 1; half /= 2) {
        int i = (int)threadIdx.x, at = i / PS_KEPT * PS_LANES + i % PS_KEPT;
        if (i < half * PS_KEPT) shared[at] = shared[at] + shared[at + half * PS_LANES];
        __syncthreads();
    }
    for (int half = PS_KEPT / 2; half >= 1; half /= 2) {
        if ((int)threadIdx.x < half) shared[threadIdx.x] = shared[threadIdx.x] + shared[threadIdx.x + half];
        __syncthreads();
    }
}

/* One block's sum into *sum, and the flag into *flag. Every thread block that writes the flag writes the same. */
template <typename T>
PS_FN void norm_block(const T *x, ps_index numel, ps_index block, int aligned, float *sum, float *flag, float *shared) {
    const int packs = Shape<T>::PACKS, wide = Shape<T>::WIDE, warp = (int)threadIdx.x / PS_WARP;
    ps_index start = block * PS_BLOCK + (ps_index)warp * PS_GROUP;
    Group<T> group = {x + start, numel - start};
    float mine[Shape<T>::PACKS][Shape<T>::WIDE] = {};
    int bad = 0;
    if (aligned && group.numel >= PS_GROUP) add_rows<T, true>(group, mine);
    else add_rows<T, false>(group, mine);
#pragma unroll
    for (int pack = 0; pack < packs; ++pack)
#pragma unroll
        for (int c = 0; c < wide; ++c) {
            bad |= ps_not_finite(mine[pack][c]);
            shared[warp * PS_LANES + pack_at<T>(0, pack) * wide + c] = mine[pack][c];
        }
    /* Squares do not cancel: a finite sum has finite terms, so only one that is not is looked into. */
    if (bad) bad = any_not_finite(group);
    bad = __syncthreads_or(bad);
    halve(shared);
    if (threadIdx.x == 0) {
        *sum = shared[0];
        if (bad) *flag = 1.0f;
    }
    __syncthreads();
}

/* The blocks' sums by halving, in place, by one thread block, and the total added to *out. */
PS_FN void add_total(float *sums, ps_index count, float *out) {
    ps_index half = 1;
    while (2 * half < count) half *= 2;
    for (; half >= 1; half /= 2) {
        for (ps_index i = threadIdx.x; i < half && i + half < count; i += PS_THREADS) sums[i] = sums[i] + sums[i + half];
        count = count < half ? count : half;
        __syncthreads();
    }
    if (threadIdx.x == 0) *out = *out + (count > 0 ? sums[0] : 0.0f);
}

template <typename T> PS_FN void norm(const T *x, ps_index numel, int aligned, float *sums, float *out, float *shared) {
    ps_index blocks = (numel + PS_BLOCK - 1) / PS_BLOCK;
    for (ps_index block = blockIdx.x; block < blocks; block += gridDim.x)
        norm_block(x, numel, block, aligned, sums + block, out + 1, shared);
}

/* [Note: the table of spans]
 * Rows of `count` numbers: each span's first element, its length, and the blocks of the spans before it. `done` starts
 * as zeros, and counts each span's finished blocks. The thread block that finishes a span's last block adds up the sums
 * of all of them, always in the same order. So the bits do not depend on which block is the last. */
template <typename T>
PS_FN void norm_spans(const T *x, const ps_index *table, ps_index count, ps_index blocks, ps_index *done, float *sums,
                      float *out, float *shared) {
    __shared__ int last;
    const ps_index *starts = table, *numels = table + count, *firsts = table + 2 * count;
    for (ps_index at = blockIdx.x; at < blocks; at += gridDim.x) {
        ps_index span = 0, beyond = count; /* of spans with one first block only the last is not empty */
        while (beyond - span > 1) {
            ps_index middle = (span + beyond) / 2;
            if (firsts[middle] <= at) span = middle;
            else beyond = middle;
        }
        const T *mine = x + starts[span];
        ps_index numel = numels[span], first = firsts[span], of_span = (numel + PS_BLOCK - 1) / PS_BLOCK;
        int aligned = (unsigned long long)mine % 16 == 0;
        norm_block(mine, numel, at - first, aligned, sums + at, out + 2 * span + 1, shared);
        if (threadIdx.x == 0) {
            __threadfence(); /* the sum is there before it is counted */
            last = (ps_index)atomicAdd((unsigned long long *)(done + span), 1ull) == of_span - 1;
        }
        __syncthreads();
        if (last) {
            __threadfence(); /* and nobody reads the others' sums before they are counted */
            add_total(sums + first, of_span, out + 2 * span);
        }
        __syncthreads();
    }
}

#define PS_NORM(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(PS_THREADS, 2) norm_##NAME(const T *x, ps_index numel, ps_index aligned, \
                                                                         float *sums, float *out) {                    \
        __shared__ float shared[PS_GROUPS * PS_LANES];                                                                 \
        norm(x, numel, (int)aligned, sums, out, shared);                                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(PS_THREADS, 2) norm_spans_##NAME(                                      \
        const T *x, const ps_index *table, ps_index count, ps_index blocks, ps_index *done, float *sums, float *out) { \
        __shared__ float shared[PS_GROUPS * PS_LANES];                                                                 \
        norm_spans(x, table, count, blocks, done, sums, out, shared);                                                  \
    }

PS_NORM(float32, float)
PS_NORM(bfloat16, Bf16)
PS_NORM(float16, Fp16)

/* One thread block. */
extern "C" __global__ void __launch_bounds__(PS_THREADS) norm_total(float *sums, ps_index count, float *out) {
    add_total(sums, count, out);
}
