/* Rows of logits to losses and gradients; the arithmetic is loss.h's, the order of sums [Note: order of arithmetic]'s.
 *
 * A row is one thread block's, which goes through it three times: its largest, the sum of powers, gradients in its own
 * place. A group of the sum is one warp's, a thread has two lanes of it. So the first time is read from the device's
 * memory, the others mostly from caches.
 */
#include "../csrc/loss.h"
#include "common.h"

#define PS_WARP 32
#define PS_WARPS 16
#define PS_THREADS (PS_WARPS * PS_WARP)
#define PS_LANES 64
#define PS_ROWS 64
#define PS_GROUP (PS_ROWS * PS_LANES)

/* Pairs of logits that a thread loads before it needs the first: more where the device's memory is read, fewer where
 * caches are, and powers or converted fp16 take registers. Two thread blocks are to fit on a multiprocessor. */
template <typename T> struct Flight {
    static const int MEMORY = 8, CACHES = 8;
};
template <> struct Flight<Bf16> {
    static const int MEMORY = 16, CACHES = 4;
};
template <> struct Flight<Fp16> {
    static const int MEMORY = 8, CACHES = 4;
};

PS_FN float infinite() { return PS_FLOAT(0x7f800000u); }
PS_FN float not_a_number() { return PS_FLOAT(0x7fc00000u); }

/* A row of logits. WIDE: it is aligned, and its length even, so that two logits are one access. CHECK: some are beyond
 * the end, and are read as what no power is left of. */
template <typename T, bool WIDE> struct Row {
    static const int MEMORY = Flight<T>::MEMORY, CACHES = Flight<T>::CACHES;
    T *x;
    ps_index columns;

    template <bool CHECK> PS_FN void load(ps_index at, float to[2]) const {
        if (WIDE && !CHECK) {
            Pack<T, 2> pair = take<2>(x, at / 2);
            to[0] = widen(pair.at[0]);
            to[1] = widen(pair.at[1]);
        } else {
            to[0] = !CHECK || at < columns ? widen(x[at]) : -infinite();
            to[1] = !CHECK || at + 1 < columns ? widen(x[at + 1]) : -infinite();
        }
    }

    template <bool CHECK> PS_FN void store(ps_index at, const float from[2]) const {
        if (WIDE && !CHECK) {
            Pack<T, 2> pair;
            narrow(&pair.at[0], from[0]);
            narrow(&pair.at[1], from[1]);
            put<2>(x, at / 2, pair);
        } else {
            if (!CHECK || at < columns) narrow(x + at, from[0]);
            if (!CHECK || at + 1 < columns) narrow(x + at + 1, from[1]);
        }
    }

    /* Call `use` with the thread's pairs of the warp's group in place, row after row; write back what it makes of them. */
    template <bool CHECK, bool WRITE, int FLIGHT, typename Use> PS_FN void each_pair(ps_index first, Use use) const {
        ps_index lane = first + 2 * (threadIdx.x % PS_WARP);
#pragma unroll 1
        for (int row = 0; row < PS_ROWS; row += FLIGHT) {
            float pairs[FLIGHT][2];
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) load<CHECK>(lane + (row + i) * PS_LANES, pairs[i]);
#pragma unroll
            for (int i = 0; i < FLIGHT; ++i) {
                use(lane + (row + i) * PS_LANES, pairs[i]);
                if (WRITE) store<CHECK>(lane + (row + i) * PS_LANES, pairs[i]);
            }
        }
    }

    template <bool WRITE, int FLIGHT, typename Use> PS_FN void of_group(ps_index first, Use use) const {
        if (first + PS_GROUP <= columns) each_pair<false, WRITE, FLIGHT>(first, use);
        else if (first < columns) each_pair<true, WRITE, FLIGHT>(first, use);
    }

    template <bool WRITE, int FLIGHT, typename Use> PS_FN void of_row(Use use) const {
        for (ps_index first = first_group(); first < columns; first += PS_WARPS * PS_GROUP)
            of_group<WRITE, FLIGHT>(first, use);
    }

    PS_FN ps_index first_group() const { return (ps_index)(threadIdx.x / PS_WARP) * PS_GROUP; }

    /* The largest; a nan is passed over. Every thread gets it. */
    PS_FN float largest(float *shared) const {
        float most = -infinite();
        of_row<false, MEMORY>([&](ps_index, const float *pair) {
            most = pair[0] > most ? pair[0] : most;
            most = pair[1] > most ? pair[1] : most;
        });
        shared[threadIdx.x] = most;
        __syncthreads();
        for (int half = PS_THREADS / 2; half >= 1; half /= 2) {
            if ((int)threadIdx.x < half && shared[threadIdx.x + half] > shared[threadIdx.x])
                shared[threadIdx.x] = shared[threadIdx.x + half];
            __syncthreads();
        }
        most = shared[0];
        __syncthreads();
        return most;
    }

    /* The sum of powers. Every thread gets it. */
    PS_FN float powers(float most, float *shared) const {
        float total = 0.0f; /* of the lane that has this thread's number */
        for (ps_index turn = 0; turn < columns; turn += PS_WARPS * PS_GROUP) {
            float sums[2] = {0.0f, 0.0f};
            of_group<false, CACHES>(turn + first_group(), [&](ps_index, const float *pair) {
                sums[0] = sums[0] + ps_exp(pair[0] - most);
                sums[1] = sums[1] + ps_exp(pair[1] - most);
            });
            shared[2 * threadIdx.x] = sums[0];
            shared[2 * threadIdx.x + 1] = sums[1];
            __syncthreads();
            if ((int)threadIdx.x < PS_LANES)
                for (int group = 0; group < PS_WARPS; ++group) total = total + shared[group * PS_LANES + threadIdx.x];
            __syncthreads();
        }
        if ((int)threadIdx.x < PS_LANES) shared[threadIdx.x] = total;
        __syncthreads();
        for (int half = PS_LANES / 2; half >= 1; half /= 2) {
            if ((int)threadIdx.x < half) shared[threadIdx.x] = shared[threadIdx.x] + shared[threadIdx.x + half];
            __syncthreads();
        }
        total = shared[0];
        __syncthreads();
        return total;
    }

    PS_FN void write_gradients(float most, float share, ps_index label, float factor) const {
        of_row<true, CACHES>([=](ps_index at, float *pair) {
            pair[0] = ps_row_gradient(pair[0], most, share, at == label ? 1.0f : 0.0f, factor);
            pair[1] = ps_row_gradient(pair[1], most, share, at + 1 == label ? 1.0f : 0.0f, factor);
        });
    }

    PS_FN void fill(float value) const {
        of_row<true, CACHES>([=](ps_index, float *pair) { pair[0] = pair[1] = value; });
    }
};

template <typename T, bool WIDE>
PS_FN void loss_of_row(const Row<T, WIDE> row, ps_index label, ps_index ignored, float *loss, int gradient, float factor,
                       float *shared) {
    bool counts = label != ignored;
    if (!counts || label < 0 || label >= row.columns) { /* the host does not wait to hear of a wrong label: a nan tells */
        float value = counts ? not_a_number() : 0.0f;
        if (threadIdx.x == 0) *loss = value;
        if (gradient) row.fill(value);
        return;
    }
    float most = row.largest(shared), sum = row.powers(most, shared);
    if (threadIdx.x == 0) *loss = ps_row_loss(most, sum, widen(row.x[label]));
    __syncthreads(); /* the right logit is read before it is written */
    if (gradient) row.write_gradients(most, PS_DIV(1.0f, sum), label, factor);
}

template <typename T, bool WIDE>
PS_FN void losses_of_rows(T *logits, const ps_index *labels, float *losses, ps_index rows, ps_index columns,
                          ps_index ignored, int gradient, float factor, float *shared) {
    for (ps_index i = blockIdx.x; i < rows; i += gridDim.x) {
        Row<T, WIDE> row = {logits + i * columns, columns};
        loss_of_row(row, labels[i], ignored, losses + i, gradient, factor, shared);
    }
}

#define PS_LOSS(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(PS_THREADS, 2)                                                        \
        cross_entropy_##NAME(T *logits, const ps_index *labels, float *losses, ps_index rows, ps_index columns,        \
                             ps_index wide, ps_index ignored, ps_index gradient, float factor) {                       \
        __shared__ float shared[PS_WARPS * PS_LANES];                                                                  \
        if (wide) losses_of_rows<T, true>(logits, labels, losses, rows, columns, ignored, gradient, factor, shared);   \
        else losses_of_rows<T, false>(logits, labels, losses, rows, columns, ignored, gradient, factor, shared);       \
    }

PS_LOSS(float32, float)
PS_LOSS(bfloat16, Bf16)
PS_LOSS(float16, Fp16)
