#include "kernels.hpp"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(MEGALITH_HAVE_AVX2)
#include <cpuid.h>
#endif

namespace megalith {

#if defined(MEGALITH_HAVE_AVX2)
// Conversion between float32 and float16. Older compilers do not know it by name.
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         has_f16c();
}

static bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
}
#endif

static const Kernels* named(const char* name) {
#if defined(MEGALITH_HAVE_AVX2)
  if (!std::strcmp(name, "avx512") && has_avx512()) return &kernels_avx512;
  if (!std::strcmp(name, "avx2") && has_avx2()) return &kernels_avx2;
#endif
  return std::strcmp(name, "portable") ? nullptr : &kernels_portable;
}

static const Kernels* best() {
  if (const char* wanted = std::getenv(kKernelsVariable)) {
    if (const Kernels* found = named(wanted)) return found;
    throw std::invalid_argument(std::string(kKernelsVariable) + "=" + wanted +
                                ": not available on this CPU or in this build; use portable, or unset it");
  }
  for (const char* name : kKernelNames)
    if (const Kernels* found = named(name)) return found;
  return &kernels_portable;
}

const Kernels* find_kernels(const char* name) {
  if (name) return named(name);
  static const Kernels* const chosen = best();  // once: a virtual machine takes microseconds to say what the CPU has
  return chosen;
}

}  // namespace megalith
