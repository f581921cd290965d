// Pooling over all features of a call: divides the work among threads and repeats the rows of
// shared features.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.hpp"
#include "threads.hpp"
#include "views.hpp"

namespace megalith {

// Bags whose shared features read from and write to a buffer of their own, with one row for all.
template <class T>
class OwnRows {
 public:
  explicit OwnRows(const std::vector<BagsOf<T>>& bags) : views(bags) {
    for (BagsOf<T>& b : views) {
      if (!b.shared) continue;
      parts_.emplace_back(b.parts, b.parts + b.num_parts);
      for (PartOf<T>& p : parts_.back()) {
        const int64_t width = p.end - p.start;
        memory_.emplace_back(static_cast<size_t>(b.num_bags * width));
        p = {memory_.back().data(), p.inner * width, 0, p.start, p.end, p.inner, false, width, 1};
      }
    }
    size_t next = 0;
    for (BagsOf<T>& b : views)
      if (b.shared) b.parts = parts_[next++].data();
  }
  OwnRows(const OwnRows&) = delete;
  OwnRows& operator=(const OwnRows&) = delete;

  std::vector<BagsOf<T>> views;

 private:
  std::vector<std::vector<PartOf<T>>> parts_;
  std::vector<std::vector<T>> memory_;
};

template <class T>
inline bool any_shared(const std::vector<BagsOf<T>>& bags) {
  return std::any_of(bags.begin(), bags.end(), [](const BagsOf<T>& b) { return b.shared; });
}

// Writes rows [first, last) of the outputs of a shared feature.
template <class T>
inline void repeat_rows(const BagsOf<T>& to, const BagsOf<T>& from, int64_t first, int64_t last) {
  for (int p = 0; p < to.num_parts; ++p) {
    const PartOf<T>&o = to.parts[p], &i = from.parts[p];
    const int64_t period = to.num_bags / o.inner;
    for (int64_t r = first; r < last; ++r) {
      const T* source = i.data + r % period * i.stride;
      T* out = o.data + r * o.stride + o.column;
      for (int k = 0; k < o.inner; ++k, source += i.step, out += o.step)
        for (int64_t c = 0; c < i.step; ++c) out[c] = o.accumulate ? out[c] + source[c] : source[c];
    }
  }
}

// Sums the gradients of a shared feature over the rows that repeat it, in order.
template <class T>
inline void fold_gradients(const BagsOf<T>& from, const BagsOf<T>& to) {
  for (int p = 0; p < from.num_parts; ++p) {
    const PartOf<T>&g = from.parts[p], &sum = to.parts[p];
    const int64_t period = from.num_bags / g.inner;
    for (int64_t r = 0; r < period * g.tiles; ++r) {
      const T* source = g.data + r * g.stride + g.column;
      T* out = sum.data + r % period * sum.stride;
      for (int k = 0; k < g.inner; ++k, source += g.step, out += sum.step)
        for (int64_t c = 0; c < sum.step; ++c) out[c] = out[c] + source[c];
    }
  }
}

// Calls one(feature, bags, first_bag, last_bag, worker) until every output is filled. Every task processes its part of
// each feature's output rows, features in order, so that two threads never add to the same output row.
template <class T, class One>
inline void pool_features(const std::vector<BagsOf<T>>& bags, int64_t n, int threads, One&& one) {
  constexpr int64_t kGrain = 4096;
  const OwnRows<T> own(bags);
  for (size_t k = 0; k < bags.size(); ++k)
    if (bags[k].shared) one(k, own.views[k], 0, bags[k].num_bags, 0);
  const int64_t tasks = threads <= 1 ? 1 : std::min<int64_t>(4 * threads, 1 + n / kGrain);
  ThreadPool::get().run(tasks, threads, [&](int64_t task, int worker) {
    for (size_t k = 0; k < bags.size(); ++k) {
      const BagsOf<T>& b = bags[k];
      if (b.num_parts == 0) continue;
      const PartOf<T>& part = b.parts[0];  // the others fill the same number of rows
      const int64_t rows = b.num_bags / part.inner / part.bags_in_row * part.tiles;
      const int64_t first = rows * task / tasks * part.bags_in_row;
      const int64_t last = rows * (task + 1) / tasks * part.bags_in_row;
      if (b.shared)
        repeat_rows(b, own.views[k], first, last);
      else
        one(k, b, first * part.inner, last * part.inner, worker);
    }
  });
}

// Pools contiguous rows into outputs. Indices must be within the memory.
template <class T>
inline void pool_flat(const FlatKernels<T>& kernels, const FlatRows<T>& rows, int64_t n,
                      const std::vector<BagsOf<T>>& bags, int threads) {
  pool_features(bags, n, threads, [&](size_t, const BagsOf<T>& b, int64_t first, int64_t last, int) {
    kernels.pool(rows, b, first, last);
  });
}

// The gradient: adds to the `size` elements at rows.data. Each task owns a range of them, so that
// sums do not depend on the number of threads.
template <class T>
inline void unpool_flat(const FlatKernels<T>& kernels, const FlatRows<T>& rows, int64_t n, int64_t size,
                        int dim, const std::vector<BagsOf<T>>& bags, int threads) {
  constexpr int64_t kGrain = 8192;
  const OwnRows<T> own(bags);
  for (size_t k = 0; k < bags.size(); ++k)
    if (bags[k].shared) fold_gradients(bags[k], own.views[k]);
  const int64_t tasks = threads <= 1 ? 1 : std::min<int64_t>(threads, 1 + n / kGrain);
  ThreadPool::get().run(tasks, threads, [&](int64_t task, int) {
    std::vector<T> scratch(static_cast<size_t>(kGradientBags * dim));
    for (const BagsOf<T>& b : own.views)
      kernels.unpool(rows, b, size * task / tasks, size * (task + 1) / tasks, scratch.data());
  });
}

}  // namespace megalith
