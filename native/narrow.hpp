// Weights in 16 bits: float16 (IEEE binary16) and bfloat16 (the upper half of a float32).
//
// Rounding is to the nearest value, ties to even. Numbers beyond the largest finite value become that value; NaN
// becomes one fixed NaN. Stochastic rounding takes one of the two neighbours: the upper one in magnitude with a
// probability equal to the distance from the lower one. `rounding.py` is the torch reference.
//
// Everything is `static inline`: see hash.hpp.
#pragma once

#include <cstdint>

#include "hash.hpp"
#include "views.hpp"

namespace megalith {

static constexpr float kLargestHalf = 65504.0f;
static constexpr float kLargestBf16 = 3.38953139e38f;

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
static inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

static inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x400u) return float_of(sign | ((rest << 13) + (112u << 23)));
  const float small = static_cast<float>(rest) * 5.9604645e-08f;  // a multiple of 2^-24
  return sign ? -small : small;
}

static inline float bf16_to_float(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

static inline float clamp_to(float x, float largest) { return x > largest ? largest : x < -largest ? -largest : x; }

static inline uint16_t float_to_half(float x) {
  if (x != x) return 0x7e00u;
  x = clamp_to(x, kLargestHalf);
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u, rest = bits_of(x) & 0x7fffffffu;
  if (rest >= 113u << 23)
    return static_cast<uint16_t>(sign | (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13);
  // The addition rounds to a multiple of 2^-24: the last bit of a float32 in [0.5, 1).
  return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
}

static inline uint16_t float_to_bf16(float x) {
  if (x != x) return 0x7fc0u;
  const uint32_t bits = bits_of(clamp_to(x, kLargestBf16));
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// `draw`: 24 random bits. A larger draw never gives a smaller magnitude.
static inline uint16_t float_to_half(float x, uint32_t draw) {
  if (x != x) return 0x7e00u;
  x = clamp_to(x, kLargestHalf);
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u, rest = bits_of(x) & 0x7fffffffu;
  if (rest >= 113u << 23) return static_cast<uint16_t>(sign | (rest - (112u << 23) + (draw >> 11)) >> 13);
  const float scaled = float_of(rest) * 16777216.0f;  // below 1024; the product is exact
  const uint32_t lower = static_cast<uint32_t>(scaled);
  const float distance = (scaled - static_cast<float>(lower)) * 16777216.0f;
  return static_cast<uint16_t>(sign | (lower + (static_cast<float>(draw) >= 16777216.0f - distance ? 1u : 0u)));
}

static inline uint16_t float_to_bf16(float x, uint32_t draw) {
  if (x != x) return 0x7fc0u;
  return static_cast<uint16_t>((bits_of(clamp_to(x, kLargestBf16)) + (draw >> 8)) >> 16);
}

// The key of the draws of one row in one step; column c takes draw24(key, c). Admission and initial rows have other
// keys.
static inline uint64_t rounding_key(uint64_t table_key, int64_t id, uint64_t step) {
  return mix64(row_key(table_key, id) + (step + 1) * 0x8cb92ba72f3d8dd7ull);
}

// Bytes of one weight.
static inline int32_t bytes_of(Precision precision) { return precision == Precision::float32 ? 4 : 2; }

}  // namespace megalith
