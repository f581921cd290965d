// Weights in 16 bits: every value survives a round trip, rounding finds the nearest value, and vectors have the bits
// of single conversions in each set of kernels.

#include <cmath>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "kernels.hpp"
#include "narrow.hpp"

using namespace megalith;

namespace {

float widen_one(Precision precision, uint16_t bits) {
  return precision == Precision::float16 ? half_to_float(bits) : bf16_to_float(bits);
}
uint16_t narrow_one(Precision precision, float x) {
  return precision == Precision::float16 ? float_to_half(x) : float_to_bf16(x);
}
uint16_t narrow_one(Precision precision, float x, uint32_t draw) {
  return precision == Precision::float16 ? float_to_half(x, draw) : float_to_bf16(x, draw);
}

// The positive finite values are those of the bits below `end`, in order.
uint16_t end_of(Precision precision) { return precision == Precision::float16 ? 0x7c00 : 0x7f80; }

void round_trips(Precision precision) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t b = static_cast<uint16_t>(bits);
    const float x = widen_one(precision, b);
    if ((b & 0x7fff) >= end_of(precision)) continue;
    CHECK(narrow_one(precision, x) == b);
    for (uint32_t draw : {0u, 0x800000u, 0xffffffu}) CHECK(narrow_one(precision, x, draw) == b);
  }
}

void rounds_to_nearest(Precision precision) {
  for (uint16_t b = 0; b + 1 < end_of(precision); ++b) {
    const float low = widen_one(precision, b), high = widen_one(precision, static_cast<uint16_t>(b + 1));
    const float half = static_cast<float>((static_cast<double>(low) + static_cast<double>(high)) / 2);
    const uint16_t even = static_cast<uint16_t>(b & 1 ? b + 1 : b);
    CHECK(half <= low || half >= high || narrow_one(precision, half) == even);
    CHECK(narrow_one(precision, -half) == (narrow_one(precision, half) | 0x8000));
    const float under = std::nextafter(half, low), over = std::nextafter(half, high);
    if (under > low) CHECK(narrow_one(precision, under) == b);
    if (over < high) CHECK(narrow_one(precision, over) == b + 1);
    // Stochastic: the lower half of the draws keeps the lower value, the upper half takes the upper one.
    if (half > low && half < high) {
      CHECK(narrow_one(precision, half, 0) == b && narrow_one(precision, half, 0x7fffff) == b);
      CHECK(narrow_one(precision, half, 0x800000) == b + 1 && narrow_one(precision, half, 0xffffff) == b + 1);
    }
  }
}

void extremes(Precision precision) {
  const uint16_t last = static_cast<uint16_t>(end_of(precision) - 1);
  for (float x : {3.4e38f, INFINITY, widen_one(precision, last)}) {
    CHECK(narrow_one(precision, x) == last);
    CHECK(narrow_one(precision, -x) == (last | 0x8000));
    CHECK(narrow_one(precision, x, 0xffffff) == last);
  }
  CHECK(std::isnan(widen_one(precision, narrow_one(precision, NAN))));
  CHECK(narrow_one(precision, -0.0f) == 0x8000);
}

void vectors_agree(const Kernels* kernels, Precision precision) {
  Random random{3};
  const int n = 1 << 12;
  std::vector<float> x(n), wide(n);
  std::vector<uint16_t> stored(n);
  for (int round = 0; round < 64; ++round) {
    for (float& v : x) v = float_of(static_cast<uint32_t>(random.next()));
    for (int i = 0; i < 64; ++i) x[static_cast<size_t>(i)] = widen_one(precision, static_cast<uint16_t>(random.next()));
    const WeightRun run{0, n - round % 9, 0, precision, false};
    kernels->narrow(&run, 1, x.data(), reinterpret_cast<char*>(stored.data()));
    kernels->widen(&run, 1, reinterpret_cast<const char*>(stored.data()), wide.data());
    for (int i = 0; i < run.count; ++i) {
      const size_t k = static_cast<size_t>(i);
      CHECK(stored[k] == narrow_one(precision, x[k]));
      CHECK(bits_of(wide[k]) == bits_of(widen_one(precision, stored[k])));
    }
  }
}

}  // namespace

int main() {
  for (Precision precision : {Precision::float16, Precision::bfloat16}) {
    round_trips(precision);
    rounds_to_nearest(precision);
    extremes(precision);
    for (const char* name : kKernelNames)
      if (const Kernels* kernels = find_kernels(name)) vectors_agree(kernels, precision);
  }
  std::puts("narrow ok");
}
