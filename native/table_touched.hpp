// Table: which rows changed or were removed, for each consumer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "table.hpp"

namespace megalith {

inline void Table::track(int consumer) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  rows_.start_tracking();
  tracked_ = static_cast<uint8_t>(tracked_ | (1u << consumer));
}

inline void Table::untrack(int consumer) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  const uint8_t bit = static_cast<uint8_t>(1u << consumer);
  tracked_ = static_cast<uint8_t>(tracked_ & ~bit);
  removed_[consumer].clear();
  removed_[consumer].shrink_to_fit();
  if (!tracked_) return rows_.stop_tracking();
  for (int64_t r = 0; r < rows_.high(); ++r)
    rows_.flag(static_cast<int32_t>(r)) &= static_cast<uint8_t>(~bit);
}

inline void Table::drain(int consumer, std::vector<int64_t>& updated, std::vector<int64_t>& removed) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  const uint8_t bit = static_cast<uint8_t>(1u << consumer);
  if (!(tracked_ & bit)) return;
  for (int64_t r = 0; r < rows_.high(); ++r) {
    const int32_t row = static_cast<int32_t>(r);
    if (rows_.flag(row) & bit) updated.push_back(rows_.id_of(row));
  }
  keep_distinct(removed_[consumer]);
  for (int64_t id : removed_[consumer])
    if (index_.find(id) < 0) removed.push_back(id);
  // Nothing can fail from here on: clear what the caller now has.
  for (int64_t r = 0; r < rows_.high(); ++r)
    rows_.flag(static_cast<int32_t>(r)) &= static_cast<uint8_t>(~bit);
  removed_[consumer].clear();
}

inline void Table::mark(int consumer, const int64_t* ids, int64_t n) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  if (!(tracked_ & (1u << consumer))) return;
  prepare_removed(n);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t row = index_.find(ids[i]);
    if (row >= 0)
      rows_.flag(row) |= static_cast<uint8_t>(1u << consumer);
    else
      removed_[consumer].push_back(ids[i]);
  }
}

// Makes room to record this many removals without an allocation. Repeated ids are dropped before a list grows, so it
// holds at most twice as many entries as removed ids.
inline void Table::prepare_removed(int64_t n) {
  for (int c = 0; c < kMaxConsumers; ++c) {
    if (!(tracked_ & (1u << c))) continue;
    std::vector<int64_t>& list = removed_[c];
    if (list.size() + static_cast<size_t>(n) <= list.capacity()) continue;
    keep_distinct(list);
    list.reserve(2 * list.size() + static_cast<size_t>(n));
  }
}

inline void Table::keep_distinct(std::vector<int64_t>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

inline void Table::note_removed(int64_t id) {
  for (int c = 0; c < kMaxConsumers; ++c)
    if (tracked_ & (1u << c)) removed_[c].push_back(id);
}

}  // namespace megalith
