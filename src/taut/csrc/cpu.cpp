// Which build of the kernels this CPU can run: the one library that is compiled for any CPU asks.
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Tiles of AMX: the CPU has them, and the kernel lets this process use them.
static bool has_amx() {
  constexpr uint32_t BF16 = 1u << 22, TILE = 1u << 24;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
  uint32_t a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (BF16 | TILE)) != (BF16 | TILE)) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#else
static bool has_amx() { return false; }
#endif

// 0: the generic build, 3: x86-64-v3, 4: x86-64-v4 with AVX512-BF16, 5: that with AMX.
extern "C" __attribute__((visibility("default"))) int32_t taut_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512cd");
  if (v3 && v4 && __builtin_cpu_supports("avx512bf16")) return has_amx() ? 5 : 4;
  if (v3) return 3;  // every CPU with AVX2 has F16C
#endif
  return 0;
}
