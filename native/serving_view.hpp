// What lookups return instead of stored weights, for segments with a serving precision: the same formulas, and the same
// bits, as src/megalith/table/serving_precision.py and one_bit.py. Loops over columns have no calls, so that compilers
// vectorize them; each operation rounds once (nothing is contracted).
#pragma once

#include <cstdint>

namespace megalith {

enum class View : int {
  fixed_point,  // a: the size of a step
  sign,         // a: the amplitude
  tanh,         // a: the scale, b: the amplitude
};
constexpr int kViews = 3;

// Columns begin:end of a row.
struct ViewPart {
  View view;
  int64_t begin, end;
  float a, b;
};

// One choice after the other: compilers do not vectorize a choice inside another. NaN stays NaN.
inline float bounded(float x, float low, float high) {
  const float raised = x < low ? low : x;
  return raised > high ? high : raised;
}

inline float fixed_point_of(float x, float step) {
  const float half = x < 0.0f ? -step / 2.0f : step / 2.0f;
  const float steps = bounded((x + half) / step, -128.0f, 127.0f);
  const float number = steps == steps ? steps : 0.0f;  // NaN becomes 0
  // Not through an integer: GCC computes that as a truncation, which keeps the sign of zero. The sum drops it.
  return (__builtin_truncf(number) + 0.0f) * step;
}

// The rational approximation of Eigen.
inline float tanh_of(float x) {
  constexpr float kLimit = 7.90531110763549805f, kLinear = 0.0004f;
  const float v = bounded(x, -kLimit, kLimit);
  const float s = v * v;
  float p = -2.76076847742355e-16f;
  p = p * s + 2.00018790482477e-13f;
  p = p * s + -8.60467152213735e-11f;
  p = p * s + 5.12229709037114e-08f;
  p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f;
  p = p * s + 4.89352455891786e-03f;
  float q = 1.19825839466702e-06f;
  q = q * s + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f;
  q = q * s + 4.89352518554385e-03f;
  const float ratio = bounded(p * v / q, -1.0f, 1.0f);
  const float magnitude = x < 0.0f ? -x : x;
  return magnitude < kLinear ? x : ratio;
}

inline void view_row(const ViewPart& part, float* row) {
  const float a = part.a, b = part.b;
  float* w = row + part.begin;
  const int64_t n = part.end - part.begin;
  if (part.view == View::fixed_point) {
    for (int64_t c = 0; c < n; ++c) w[c] = fixed_point_of(w[c], a);
  } else if (part.view == View::sign) {
    for (int64_t c = 0; c < n; ++c) w[c] = w[c] > 0.0f ? a : -a;
  } else {
    for (int64_t c = 0; c < n; ++c) w[c] = tanh_of(w[c] * a) * b;
  }
}

// Multiplies gradients of a view by its slope at the stored weights; only View::tanh has one other than 1. `factor` is
// the product of scale and amplitude.
inline void slope_row(const ViewPart& part, float factor, const float* row, float* gradient) {
  if (part.view != View::tanh) return;
  for (int64_t c = part.begin; c < part.end; ++c) {
    const float t = tanh_of(row[c] * part.a);
    gradient[c] = gradient[c] * ((1.0f - t * t) * factor);
  }
}

}  // namespace megalith
