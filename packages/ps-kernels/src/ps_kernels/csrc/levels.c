/* Which instruction sets this processor and its system have, of those compiled in. */
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
