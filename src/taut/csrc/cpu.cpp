// Which build of the kernels this CPU can run: the one library that is compiled for any CPU asks.
#include <cstdint>

// 0: the generic build, 3: x86-64-v3, 4: x86-64-v4 with AVX512-BF16.
extern "C" __attribute__((visibility("default"))) int32_t taut_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512cd");
  if (v3 && v4 && __builtin_cpu_supports("avx512bf16")) return 4;
  if (v3) return 3;  // every CPU with AVX2 has F16C
#endif
  return 0;
}
