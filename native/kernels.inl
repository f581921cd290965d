// The kernels of one instruction set. The including file defines its name (MEGALITH_ISA) and the name of the table
// of functions (MEGALITH_KERNELS).
//
// Only C-like code is allowed here: the linker might keep this file's copy of an inline function of the standard
// library for the whole program.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "hash.hpp"
#include "kernels.hpp"
#include "narrow.hpp"
#include "optimizers.hpp"
#include "views.hpp"

namespace megalith {
namespace MEGALITH_ISA {
namespace {

#include "simd.inl"

#include "narrow.inl"

#include "optimizers/all.inl"

#include "initialize.inl"
#include "find.inl"
#include "pool.inl"
#include "unpool.inl"
#include "gather.inl"
#include "apply.inl"

bool all_finite(const float* values, int64_t rows, int64_t columns, int64_t stride) {
  // A finite float times zero is zero; an infinity or NaN times zero is NaN, which the sum keeps.
  Vec8 sums[4] = {};
  float rest = 0.0f;
  for (int64_t r = 0; r < rows; ++r, values += stride) {
    int64_t i = 0;
    for (; i + 32 <= columns; i += 32)
      for (int k = 0; k < 4; ++k) sums[k] = sums[k] + load8(values + i + 8 * k) * 0.0f;
    if (i + 16 <= columns) {
      for (int k = 0; k < 2; ++k) sums[k] = sums[k] + load8(values + i + 8 * k) * 0.0f;
      i += 16;
    }
    if (i + 8 <= columns) {
      sums[2] = sums[2] + load8(values + i) * 0.0f;
      i += 8;
    }
    for (; i < columns; ++i) rest = rest + values[i] * 0.0f;
  }
  Vec8 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int lane = 0; lane < 8; ++lane) rest = rest + all[lane];
  return rest == 0.0f;
}

}  // namespace
}  // namespace MEGALITH_ISA

const Kernels MEGALITH_KERNELS = {
#define MEGALITH_TEXT2(x) #x
#define MEGALITH_TEXT(x) MEGALITH_TEXT2(x)
    MEGALITH_TEXT(MEGALITH_ISA), MEGALITH_ISA::state_size, MEGALITH_ISA::find,
    MEGALITH_ISA::initialize,    MEGALITH_ISA::read,       MEGALITH_ISA::pool,
    MEGALITH_ISA::apply,         MEGALITH_ISA::widen,      MEGALITH_ISA::narrow,
    MEGALITH_ISA::all_finite,    MEGALITH_ISA::gather,
    {MEGALITH_ISA::pool_flat<float>, MEGALITH_ISA::unpool_flat<float>, MEGALITH_ISA::scatter<float>},
    {MEGALITH_ISA::pool_flat<double>, MEGALITH_ISA::unpool_flat<double>, MEGALITH_ISA::scatter<double>},
};

}  // namespace megalith
