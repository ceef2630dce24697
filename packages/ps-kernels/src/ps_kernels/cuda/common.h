/* What every kernel needs: element types, groups of four for wide accesses, 64-bit indices.
 *
 * The host hands addresses, lengths and plain numbers; it has checked them. Nothing here includes a CUDA header.
 */
#ifndef PS_COMMON_H
#define PS_COMMON_H

#include "../csrc/step.h"

typedef long long ps_index;

struct Bf16 {
    unsigned short bits;
};
struct Fp16 {
    unsigned short bits;
};

PS_FN float widen(float x) { return x; }
PS_FN float widen(Bf16 x) { return ps_from_bf16(x.bits); }
PS_FN float widen(Fp16 x) { return ps_from_fp16(x.bits); }
PS_FN void narrow(float *into, float x) { *into = x; }
PS_FN void narrow(Bf16 *into, float x) { into->bits = ps_to_bf16(x); }
PS_FN void narrow(Fp16 *into, float x) { into->bits = ps_to_fp16(x); }

/* So aligned that it is read and written by one instruction. */
template <typename T, int N> struct alignas(N * sizeof(T)) Pack {
    T at[N];
};

template <int N, typename T> PS_FN Pack<T, N> take(const T *from, ps_index group) {
    return reinterpret_cast<const Pack<T, N> *>(from)[group];
}
template <int N, typename T> PS_FN void put(T *into, ps_index group, const Pack<T, N> &values) {
    reinterpret_cast<Pack<T, N> *>(into)[group] = values;
}

PS_FN ps_index first_index() { return (ps_index)blockIdx.x * blockDim.x + threadIdx.x; }
PS_FN ps_index index_stride() { return (ps_index)gridDim.x * blockDim.x; }

#endif
