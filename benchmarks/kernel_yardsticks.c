/* The least work there is with so many bytes: reading them once, and copying them once. */
#include <stddef.h>
#include <string.h>

typedef unsigned long long Words __attribute__((vector_size(64), aligned(1), may_alias));

static size_t cut(size_t bytes, int part, int parts) { return bytes / parts * part / 64 * 64; }

unsigned long long read_all(const char *from, size_t bytes, int threads) {
    unsigned long long found = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(| : found)
    for (int part = 0; part < threads; part++) {
        size_t end = part + 1 == threads ? bytes : cut(bytes, part + 1, threads);
        Words any[4] = {0};
        for (size_t i = cut(bytes, part, threads); i + 256 <= end; i += 256)
            for (int k = 0; k < 4; k++) any[k] |= *(const Words *)(from + i + 64 * k);
        any[0] |= any[1] | any[2] | any[3];
        for (int k = 0; k < 8; k++) found |= any[0][k];
    }
    return found;
}

void copy_all(char *to, const char *from, size_t bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) {
        size_t start = cut(bytes, part, threads), end = part + 1 == threads ? bytes : cut(bytes, part + 1, threads);
        memcpy(to + start, from + start, end - start);
    }
}
