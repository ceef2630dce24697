/* Many copies in one launch: a chunk's gather and scatter, with or without a cast.
 *
 * The table holds, for `count` pieces, five columns: source address, target address, length, sort, first tile. A
 * piece of one type is copied as bytes, and its length counts bytes; one that is cast counts elements. A piece is
 * PS_TILE long tiles; thread blocks take tiles in turn. No target overlaps a source or another target.
 */
#include "common.h"

#define PS_THREADS 256
#define PS_TILE 16384
#define PS_FLIGHT 4 /* accesses of a thread before the first is waited for */

/* From the first aligned target on in words of W, what is left byte by byte. */
template <typename W> PS_FN void copy_words(char *__restrict__ into, const char *__restrict__ from, int numel) {
    int head = (int)((sizeof(W) - (unsigned long long)into % sizeof(W)) % sizeof(W));
    if (head > numel) head = numel;
    int words = (numel - head) / (int)sizeof(W), tail = head + words * (int)sizeof(W);
    const W *source = reinterpret_cast<const W *>(from + head);
    W *target = reinterpret_cast<W *>(into + head);
    for (int start = (int)threadIdx.x; start < words; start += PS_THREADS * PS_FLIGHT) {
        W values[PS_FLIGHT];
#pragma unroll
        for (int i = 0; i < PS_FLIGHT; ++i)
            if (start + i * PS_THREADS < words) values[i] = source[start + i * PS_THREADS];
#pragma unroll
        for (int i = 0; i < PS_FLIGHT; ++i)
            if (start + i * PS_THREADS < words) target[start + i * PS_THREADS] = values[i];
    }
    for (int i = (int)threadIdx.x; i < head + numel - tail; i += PS_THREADS) {
        int at = i < head ? i : i - head + tail;
        into[at] = from[at];
    }
}

/* The widest word at which both sides are aligned together. */
PS_FN void copy_bytes(char *into, const char *from, int numel) {
    unsigned long long apart = (unsigned long long)into ^ (unsigned long long)from;
    if (apart % 16 == 0) copy_words<Pack<unsigned int, 4> >(into, from, numel);
    else if (apart % 8 == 0) copy_words<Pack<unsigned int, 2> >(into, from, numel);
    else if (apart % 4 == 0) copy_words<unsigned int>(into, from, numel);
    else if (apart % 2 == 0) copy_words<unsigned short>(into, from, numel);
    else copy_words<char>(into, from, numel);
}

/* Four at a time if both sides are aligned for that together, else one by one. */
template <typename From, typename To>
PS_FN void cast(To *__restrict__ into, const From *__restrict__ from, int numel) {
    int head = (int)((4 * sizeof(To) - (unsigned long long)into % (4 * sizeof(To))) % (4 * sizeof(To)) / sizeof(To));
    int groups = 0;
    if (head < numel && (unsigned long long)(from + head) % (4 * sizeof(From)) == 0) groups = (numel - head) / 4;
    if (groups == 0) head = 0;
    for (int group = (int)threadIdx.x; group < groups; group += PS_THREADS) {
        Pack<From, 4> values = take<4>(from + head, group);
        Pack<To, 4> casts;
#pragma unroll
        for (int i = 0; i < 4; ++i) narrow(&casts.at[i], widen(values.at[i]));
        put<4>(into + head, group, casts);
    }
    for (int i = (int)threadIdx.x; i < numel - 4 * groups; i += PS_THREADS) {
        int at = i < head ? i : i + 4 * groups;
        narrow(into + at, widen(from[at]));
    }
}

#define PS_SORT(from, to) (3 * (from) + (to))

template <typename From, typename To> PS_FN void cast_tile(ps_index target, ps_index source, ps_index start, int numel) {
    cast(reinterpret_cast<To *>(target) + start, reinterpret_cast<const From *>(source) + start, numel);
}

extern "C" __global__ void __launch_bounds__(PS_THREADS)
    copy_pieces(const ps_index *table, ps_index count, ps_index tiles) {
    const ps_index *sources = table, *targets = table + count, *lengths = table + 2 * count;
    const ps_index *sorts = table + 3 * count, *first_tiles = table + 4 * count;
    for (ps_index tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        ps_index piece = 0, beyond = count;
        while (beyond - piece > 1) {
            ps_index middle = (piece + beyond) / 2;
            if (first_tiles[middle] <= tile) piece = middle;
            else beyond = middle;
        }
        ps_index start = (tile - first_tiles[piece]) * PS_TILE, left = lengths[piece] - start;
        int numel = left < PS_TILE ? (int)left : PS_TILE;
        ps_index source = sources[piece], target = targets[piece];
        switch (sorts[piece]) {
        case PS_SORT(PS_FP32, PS_BF16): cast_tile<float, Bf16>(target, source, start, numel); break;
        case PS_SORT(PS_FP32, PS_FP16): cast_tile<float, Fp16>(target, source, start, numel); break;
        case PS_SORT(PS_BF16, PS_FP32): cast_tile<Bf16, float>(target, source, start, numel); break;
        case PS_SORT(PS_BF16, PS_FP16): cast_tile<Bf16, Fp16>(target, source, start, numel); break;
        case PS_SORT(PS_FP16, PS_FP32): cast_tile<Fp16, float>(target, source, start, numel); break;
        case PS_SORT(PS_FP16, PS_BF16): cast_tile<Fp16, Bf16>(target, source, start, numel); break;
        default: copy_bytes(reinterpret_cast<char *>(target) + start, reinterpret_cast<const char *>(source) + start, numel);
        }
    }
}
