/* Which instruction sets this processor and its system have, of those compiled in; and which cores threads run on. */
#define _GNU_SOURCE
#include "levels.h"

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

#define PUBLIC __attribute__((visibility("default")))

PUBLIC int ps_has_avx512(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

PUBLIC int ps_has_avx2(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return 0;
#endif
}

PUBLIC int ps_has_neon(void) {
#if defined(__aarch64__)
    return 1;
#else
    return 0;
#endif
}

PUBLIC int ps_has_scalar(void) { return 1; }

PUBLIC int ps_has_threads(void) {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

/* [Note: cores] One setting for the process: thread number k of a call runs on cores[k]. Each thread sees to itself when
 * it begins its part, because a pool's threads come and go; it asks the system only if it is not there yet. The caller's
 * own thread gets its cores back at the end of the call; the others do nothing else, so they keep theirs until a call
 * without a setting. */
enum { MOST_CORES = 1024 };

#if defined(__linux__)
static int cores[MOST_CORES], cores_length;
static __thread int bound = -1; /* the core this thread is bound to */
static __thread cpu_set_t before;

static int thread_number(void) {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static void bind_to(int core) {
    cpu_set_t one;
    if (core == bound) return;
    if (bound < 0 && sched_getaffinity(0, sizeof before, &before)) return;
    CPU_ZERO(&one);
    if (core >= 0) CPU_SET((unsigned)core, &one);
    if (!sched_setaffinity(0, sizeof one, core >= 0 ? &one : &before)) bound = core;
}

void ps_enter(void) { bind_to(cores_length ? cores[thread_number() % cores_length] : -1); }

void ps_leave(void) {
    if (bound >= 0 && thread_number() == 0) bind_to(-1);
}

/* Not while another thread is in a call. Whether that can be done here. */
PUBLIC int ps_set_cores(const int *wanted, int length) {
    if (length > MOST_CORES) return 0;
    for (int k = 0; k < length; k++) cores[k] = wanted[k];
    cores_length = length;
    return 1;
}
#else
void ps_enter(void) {}
void ps_leave(void) {}
PUBLIC int ps_set_cores(const int *wanted, int length) { return (void)wanted, length == 0; }
#endif
