#include "kernels.hpp"

#include <cstring>

namespace megalith {

const Kernels* find_kernels(const char* name) {
#if defined(MEGALITH_HAVE_AVX2)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
  if (avx2 && (!name || std::strcmp(name, "avx2") == 0)) return &kernels_avx2;
#endif
  if (!name || std::strcmp(name, "portable") == 0) return &kernels_portable;
  return nullptr;
}

}  // namespace megalith
