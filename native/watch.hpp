// Watch: which rows changed since a scan read them.
//
// Eviction reads rows in one call, lets a policy decide without a lock, and removes rows in another call. A row that
// was written in between must stay, also if it was written in the same second. Writers note the rows that they change
// in every open watch; without one this costs them nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace megalith {

class Watch {
 public:
  // Notes that a scan has just read the rows [from, to).
  void cover(int64_t from, int64_t to) {
    if (from >= to) return;
    if (unchanged_.empty()) base_ = from / 64 * 64;
    if (from < base_) {  // rows before those of earlier scans
      const int64_t base = from / 64 * 64;
      unchanged_.insert(unchanged_.begin(), static_cast<size_t>((base_ - base) / 64), 0);
      base_ = base;
    }
    const size_t words = static_cast<size_t>((to - base_ + 63) / 64);
    if (words > unchanged_.size()) unchanged_.resize(words);
    for (int64_t row = from; row < to;) {
      const int64_t at = row - base_, count = std::min<int64_t>(64 - at % 64, to - row);
      const uint64_t bits = count == 64 ? ~uint64_t{0} : ((uint64_t{1} << count) - 1) << (at % 64);
      unchanged_[static_cast<size_t>(at / 64)] |= bits;
      row += count;
    }
  }

  // Notes that rows change now. Row numbers may be -1.
  void note(const int32_t* rows, int64_t n) {
    const uint64_t end = 64 * unchanged_.size();
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t at = static_cast<uint64_t>(rows[i] - base_);
      if (at < end) unchanged_[at / 64] &= ~(uint64_t{1} << (at % 64));
    }
  }

  // Whether a scan has read the row, and it did not change since.
  bool unchanged(int32_t row) const {
    const uint64_t at = static_cast<uint64_t>(row - base_);
    return row >= 0 && at < 64 * unchanged_.size() && (unchanged_[at / 64] >> (at % 64) & 1);
  }

  // Every row counts as changed.
  void forget() { unchanged_.clear(); }

 private:
  int64_t base_ = 0;                 // row of the first bit, a multiple of 64
  std::vector<uint64_t> unchanged_;  // a bit for each row
};

}  // namespace megalith
