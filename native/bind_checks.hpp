// Helpers of the bind_*.cpp files of ops: threads, splits, indices within their range, kernels by float type.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "bind.hpp"
#include "kernels.hpp"
#include "threads.hpp"

namespace megalith {

// Divides 0 .. n into chunks of `grain` and calls one(begin, count) for each, on several threads.
template <class One>
void in_chunks(int64_t n, int64_t grain, int threads, One&& one) {
  ThreadPool::get().run((n + grain - 1) / grain, threads, [&](int64_t t, int) {
    one(t * grain, std::min(grain, n - t * grain));
  });
}

inline int64_t* borrow_int64(handle tensor, const char* name, int64_t n) {
  TensorView v = borrow(tensor, Kind::int64, name);
  if (v.ndim != 1 || v.shape[0] != n)
    throw std::invalid_argument(std::string(name) + ": expected length " + std::to_string(n));
  return v.as<int64_t>();
}

inline bool ascends(const int64_t* splits, int64_t rows, int64_t end) {
  bool good = splits[0] == 0 && splits[rows] == end;
  for (int64_t r = 0; r < rows; ++r) good &= splits[r] <= splits[r + 1];
  return good;
}

// Borrows splits that must ascend from 0 to n; `rule` and `what` are parts of the error message.
inline Ids borrow_splits(handle tensor, const char* name, int64_t n,
                         const char* rule = ": must ascend from 0 to ",
                         const char* what = ", the number of values") {
  TensorView v = borrow(tensor, Kind::int64, name);
  require(v.ndim == 1 && v.shape[0] >= 1, "splits: expected [rows + 1]");
  const Ids splits{v.as<int64_t>(), v.shape[0] - 1};
  if (!ascends(splits.data, splits.n, n))
    throw std::invalid_argument(std::string(name) + rule + std::to_string(n) + what);
  return splits;
}

[[noreturn]] inline void refuse_index(const std::string& name, int64_t position, int64_t value,
                                      int64_t limit) {
  throw std::invalid_argument(name + "[" + std::to_string(position) + "] = " + std::to_string(value) +
                              " is out of range: expected 0 to " + std::to_string(limit - 1));
}

// Raises unless every index from position `begin` on is in [low, high).
template <class Int>
void check_range(const Int* index, int64_t n, int64_t low, int64_t high, const std::string& name,
                 int64_t begin = 0) {
  constexpr int64_t kBlock = 4096;
  for (int64_t b = begin; b < n; b += kBlock) {
    const int64_t end = std::min(n, b + kBlock);
    Int least = std::numeric_limits<Int>::max(), most = std::numeric_limits<Int>::min();
    for (int64_t i = b; i < end; ++i) {
      least = index[i] < least ? index[i] : least;
      most = index[i] > most ? index[i] : most;
    }
    if (least >= low && most < high) continue;
    for (int64_t i = b; i < end; ++i)
      if (index[i] < low || index[i] >= high) refuse_index(name, i, index[i], high);
  }
}

// The number of legal indices: those whose `width` elements end within `size`.
inline int64_t index_limit(int64_t size, int64_t stride, int64_t width) {
  return size < width ? 0 : stride == 0 ? std::numeric_limits<int64_t>::max()
                                        : (size - width) / stride + 1;
}

// Calls use(kernels) with the kernels for the tensor's float type.
template <class Use>
void with_kernels(handle tensor, const char* name, Use&& use) {
  const Kernels* k = find_kernels(nullptr);
  if (borrow(tensor, Kind::any, name).item_bytes == 8)
    use(k->flat64);
  else
    use(k->flat32);
}

}  // namespace megalith
