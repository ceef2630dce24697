/* Runs CUDA kernels on the CPU as they stand: blocks one after another, a block's threads as fibers.
 *
 * A fiber runs to its next barrier or to its end; then the next one does. A block whose threads do not all reach a
 * barrier, and an access that is not aligned to its width, are errors. The order in which fibers run can be chosen: a
 * missing barrier gives other results in another order.
 */
#include <ucontext.h>

#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define __CUDACC__
#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct Dimension {
    unsigned int x;
};
static Dimension gridDim, blockDim, blockIdx, threadIdx;

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned int x, y;
};
/* What caches are to keep is nothing to the CPU. */
template <typename T> static inline T __ldcs(const T *from) { return *from; }
template <typename T> static inline void __stcs(T *into, T value) { *into = value; }

/* Blocks run one after another, so what one wrote the next one reads. */
static inline void __threadfence() {}
static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long more) {
    unsigned long long before = *at;
    *at += more;
    return before;
}

static inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline unsigned int __float_as_uint(float x) {
    unsigned int bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned int bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

namespace emulation {

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
};

static ucontext_t scheduler;
static Fiber *running;
static int any[2];
static unsigned int barriers;
static long long misaligned;
static void (*entry)(void **);
static void **arguments;

static void run_entry() {
    entry(arguments);
    running->done = true;
}

/* The fibers' order in a round: 0 as numbered, 1 backwards, otherwise shuffled by that seed. */
static std::vector<unsigned int> ordered(unsigned int count, unsigned int order) {
    std::vector<unsigned int> places(count);
    for (unsigned int i = 0; i < count; ++i) places[i] = order == 1 ? count - 1 - i : i;
    unsigned long long state = order;
    for (unsigned int i = count; order > 1 && i > 1; --i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(places[i - 1], places[(state >> 33) % i]);
    }
    return places;
}

/* One block; whether all its threads met at every barrier. */
static bool run_block(std::vector<Fiber> &fibers, unsigned int order) {
    for (Fiber &fiber : fibers) {
        fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_entry, 0);
    }
    any[0] = any[1] = 0;
    barriers = 0;
    for (;;) {
        size_t done = 0;
        for (unsigned int place : ordered((unsigned int)fibers.size(), order)) {
            threadIdx.x = place;
            running = &fibers[place];
            swapcontext(&scheduler, &running->context);
            done += running->done;
        }
        if (done) return done == fibers.size();
        ++barriers;
        any[barriers & 1] = 0;
    }
}

template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void **values, std::index_sequence<I...>) {
    kernel(*static_cast<A *>(values[I])...);
}
template <typename... A> static void invoke(void (*kernel)(A...), void **values) {
    call(kernel, values, std::index_sequence_for<A...>());
}

}  // namespace emulation

static inline int __syncthreads_or(int predicate) {
    unsigned int mine = emulation::barriers & 1;
    emulation::any[mine] |= predicate != 0;
    swapcontext(&emulation::running->context, &emulation::scheduler);
    return emulation::any[mine];
}
static inline void __syncthreads() { __syncthreads_or(0); }

/* What code compiled with -fsanitize=alignment calls; the sanitizer's own library is not linked. */
extern "C" void __ubsan_handle_type_mismatch_v1(void *, void *) { ++emulation::misaligned; }

/* Blocks [first, first + count) of a grid; 0 if all went well, 1 after an uneven barrier, 2 after a misaligned access. */
extern "C" int emulate(void (*entry)(void **), void **arguments, unsigned int grid, unsigned int threads,
                       unsigned int first, unsigned int count, unsigned int order) {
    std::vector<emulation::Fiber> fibers(threads);
    for (emulation::Fiber &fiber : fibers) fiber.stack.resize(1 << 15);
    emulation::entry = entry;
    emulation::arguments = arguments;
    emulation::misaligned = 0;
    gridDim.x = grid;
    blockDim.x = threads;
    for (unsigned int block = first; block < first + count; ++block) {
        blockIdx.x = block;
        if (!emulation::run_block(fibers, order)) return 1;
    }
    return emulation::misaligned ? 2 : 0;
}

#define EMULATED(NAME)                                                                                                 \
    extern "C" void emulated_##NAME(void **values) { emulation::invoke(NAME, values); }
