// Monolith's encoding of a batch, converted to bags: packed offsets become rows, features become bags.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moves.hpp"
#include "scratch.hpp"
#include "threads.hpp"
#include "views.hpp"

namespace megalith {

// One feature of a batch.
struct LayoutFeature {
  int64_t first_row, rows;  // range in the offsets of rows
  int64_t width;            // number of elements of an embedding
  int64_t keep;             // keep the first n occurrences of a row, concatenated; 0: pool all
  bool mean, shared;
};

// The bags of all features, without their parts. Occurrences refer to elements, counted from the same origin as the
// `begins` of the lists. Its memory belongs to the thread.
template <class T>
class LayoutBags {
 public:
  LayoutBags(const int64_t* packed, const int64_t* row_offsets, const std::vector<LayoutFeature>& features,
             const int64_t* begins, const int64_t* ends, int64_t lists, int threads) {
    int64_t n = 0, bags = 0, means = 0;
    std::vector<int64_t> kept, offset, divisor;  // where the values of a feature begin
    for (const LayoutFeature& f : features) {
      n = row_offsets[f.first_row + f.rows];
      offset.push_back(bags), divisor.push_back(means), kept.push_back(0);
      bags += f.keep ? f.rows * f.keep + 1 : 0;
      means += f.mean ? f.rows : 0;
    }
    occurrences = n;
    for (size_t k = 0; k < features.size(); ++k) {
      kept[k] = occurrences;
      occurrences += features[k].rows * features[k].keep;
    }
    int64_t* at = lease_->fresh_ids.get(occurrences);
    int64_t* own_offsets = lease_->begin.get(bags);
    index = at;
    divisors_.reset(new T[static_cast<size_t>(means)]);
    views.resize(features.size());
    std::vector<int64_t> bad(features.size());
    ThreadPool::get().run(static_cast<int64_t>(features.size()), threads, [&](int64_t task, int) {
      const size_t k = static_cast<size_t>(task);
      const LayoutFeature& f = features[k];
      const int64_t* offsets = row_offsets + f.first_row;
      BagsOf<T>& view = views[k];
      view = {offsets, f.rows, nullptr, nullptr, nullptr, 0, f.shared};
      bad[k] = locate_range(packed, offsets[0], offsets[f.rows], begins, ends, lists, f.width, at);
      if (f.keep && bad[k] < 0) {
        int64_t* own = own_offsets + offset[k];
        keep_first(at, offsets, f.rows, f.keep, at + kept[k]);
        for (int64_t b = 0; b <= f.rows * f.keep; ++b) own[b] = kept[k] + b;
        view.offsets = own, view.num_bags = f.rows * f.keep;
      }
      if (!f.mean) return;
      T* own = divisors_.get() + divisor[k];
      for (int64_t r = 0; r < f.rows; ++r) {
        const int64_t count = offsets[r + 1] - offsets[r];
        own[r] = static_cast<T>(count > 1 ? count : 1);
      }
      view.divisor = own;
    });
    for (int64_t b : bad)
      if (b >= 0 && (first_bad < 0 || b < first_bad)) first_bad = b;
  }

  std::vector<BagsOf<T>> views;
  const int64_t* index;
  int64_t occurrences;
  int64_t first_bad = -1;  // the first occurrence that is outside its list

 private:
  // The first occurrences of each row; -1 where a row has fewer.
  static void keep_first(const int64_t* at, const int64_t* offsets, int64_t rows, int64_t keep,
                         int64_t* out) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t k = 0; k < keep; ++k)
        *out++ = offsets[r] + k < offsets[r + 1] ? at[offsets[r] + k] : -1;
  }

  Lease lease_;
  std::unique_ptr<T[]> divisors_;
};

}  // namespace megalith
