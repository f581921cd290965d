// Random ids, splits and numbers of the tests of the ops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "check.hpp"

using Ints = std::vector<int64_t>;
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

inline size_t z(int64_t n) { return static_cast<size_t>(n); }

inline int64_t any_id(Random& random) {
  const int64_t extremes[] = {0, -1, 1, kLowest, kLowest + 1, kHighest, kHighest - 1, int64_t{1} << 32};
  switch (random.below(4)) {
    case 0: return extremes[random.below(8)];
    case 1: return static_cast<int64_t>(random.next());
    default: return random.below(60) - 20;
  }
}

// rows + 1 cuts from 0 to n.
inline Ints any_splits(Random& random, int64_t rows, int64_t n) {
  Ints splits(z(rows + 1), 0);
  for (int64_t r = 1; r < rows; ++r) splits[z(r)] = random.below(n + 1);
  if (rows) splits[z(rows)] = n;
  std::sort(splits.begin(), splits.end());
  return splits;
}

template <class T>
std::vector<T> any_numbers(Random& random, int64_t n) {
  std::vector<T> out(z(n));
  for (T& x : out) x = static_cast<T>(random.below(2000001) - 1000000) / T(999983);
  return out;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)));
}
