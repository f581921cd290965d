// Watch: which rows changed since a scan read them.
//
// Eviction reads rows in one call, lets a policy decide without a lock, and removes rows in another call. A row that
// was written in between must stay, also if it was written in the same second. Writers note the rows that they change
// in every open watch; without one this costs them nothing.
#pragma once

#include <cstdint>
#include <vector>

namespace megalith {

class Watch {
 public:
  // Notes that a scan has just read the rows [from, to), which continue the rows of the scan before.
  void cover(int64_t from, int64_t to) {
    if (from != last_) forget(), first_ = from;
    last_ = to;
    changed_.resize(static_cast<size_t>((last_ - first_ + 63) / 64));
  }

  // Notes that rows change now. Row numbers may be -1.
  void note(const int32_t* rows, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = rows[i] - first_;
      if (at >= 0 && rows[i] < last_) changed_[static_cast<size_t>(at >> 6)] |= uint64_t{1} << (at & 63);
    }
  }

  // Whether the scan has read the row, and it did not change since.
  bool unchanged(int32_t row) const {
    const int64_t at = row - first_;
    return at >= 0 && row < last_ && !(changed_[static_cast<size_t>(at >> 6)] >> (at & 63) & 1);
  }

  // Every row counts as changed.
  void forget() {
    first_ = last_ = 0;
    changed_.clear();
  }

 private:
  int64_t first_ = 0, last_ = 0;
  std::vector<uint64_t> changed_;  // a bit for each row from first_ on
};

}  // namespace megalith
