#include "kernels.hpp"

#include <cstring>

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
#endif

const Kernels* find_kernels(const char* name) {
#if defined(MEGALITH_HAVE_AVX2)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2") && has_f16c();
  if (avx2 && (!name || std::strcmp(name, "avx2") == 0)) return &kernels_avx2;
#endif
  if (!name || std::strcmp(name, "portable") == 0) return &kernels_portable;
  return nullptr;
}

}  // namespace megalith
