// Table: which rows changed or were removed, for each consumer. touched.hpp has the touched rows of one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "table.hpp"

namespace megalith {

inline void Table::track(int consumer) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  rows_.track(consumer);
}

inline void Table::untrack(int consumer) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  rows_.untrack(consumer);
  removed_[consumer].clear();
  removed_[consumer].shrink_to_fit();
}

// Takes the ids of touched rows before row 64 * `end`, from the last to the first. The work of one call is bounded; `end`
// is where to continue, 0 at the end. `ids` must have room for kDrainMost more.
inline void Table::drain_some(int consumer, int64_t& end, std::vector<int64_t>& ids) {
  int32_t first[TouchedRows::kMost], rows[kDrainMost];
  uint64_t bits[TouchedRows::kMost];
  int64_t looks = kDrainLooks;
  int found = 0;
  for (int words = 0; words < kDrainWords && looks > 0 && end > 0 && found < kDrainRows;) {
    const int count = rows_.take_touched(consumer, end, TouchedRows::kMost, looks, first, bits);
    words += count;
    for (int k = 0; k < count; ++k) {
      for (uint64_t left = bits[k]; left;) {
        const int at = 63 - __builtin_clzll(left);
        left ^= uint64_t{1} << at;
        rows[found] = first[k] + at;
        MEGALITH_FETCH(&rows_.id_of(rows[found++]));
      }
    }
  }
  const size_t before = ids.size();
  ids.resize(before + static_cast<size_t>(found));
  for (int k = 0; k < found; ++k) ids[before + static_cast<size_t>(k)] = rows_.id_of(rows[k]);
}

// The lock is held for a slice at a time, so that a training call never waits long. A row that is written meanwhile is
// in the result, or stays touched for the next drain, or both. Slices go from the last row to the first and compaction
// moves rows the same way, so it cannot move a row out of sight.
inline void Table::drain(int consumer, std::vector<int64_t>& updated, std::vector<int64_t>& removed) {
  Lease lease;
  std::vector<int64_t>& touched = lease->ids;
  touched.clear();
  std::vector<int64_t> gone;
  bool moved = false;  // ids may have lost their row or got another one meanwhile
  int64_t epoch = kUnknownEpoch;
  try {
    for (int64_t end = Rows::kMaxRows; end > 0;) {
      const size_t wanted = touched.size() + kDrainMost;
      if (wanted > touched.capacity()) touched.reserve(std::max(wanted, 2 * touched.capacity()));
      std::unique_lock<ForkSafeLock> hold(lock_);
      if (!rows_.tracked(consumer)) return;
      if (epoch == kUnknownEpoch) epoch = epoch_;
      drain_some(consumer, end, touched);
      if (end > 0) continue;
      moved = epoch != epoch_;
      gone.swap(removed_[consumer]);
    }
    // The removed ids that have no row now.
    keep_distinct(gone);
    removed.reserve(gone.size());
    int32_t rows[kDrainFinds];
    for (size_t i = 0; i < gone.size(); i += kDrainFinds) {
      const size_t n = std::min(gone.size() - i, size_t{kDrainFinds});
      std::shared_lock<ForkSafeLock> hold(lock_);
      moved |= epoch != epoch_;
      kernels_->find(index_.view(), gone.data() + i, static_cast<int64_t>(n), rows);
      for (size_t k = 0; k < n; ++k)
        if (rows[k] < 0) removed.push_back(gone[i + k]);
    }
    updated.assign(touched.rbegin(), touched.rend());
  } catch (...) {  // no memory: the next drain returns what this one took
    mark(consumer, touched.data(), static_cast<int64_t>(touched.size()));
    mark(consumer, gone.data(), static_cast<int64_t>(gone.size()));
    throw;
  }
  if (!moved) return;
  keep_distinct(updated);
  const auto is_removed = [&](int64_t id) { return std::binary_search(removed.begin(), removed.end(), id); };
  updated.erase(std::remove_if(updated.begin(), updated.end(), is_removed), updated.end());
}

inline void Table::mark(int consumer, const int64_t* ids, int64_t n) {
  int32_t rows[kDrainFinds];
  for (int64_t i = 0; i < n; i += kDrainFinds) {
    const int64_t count = std::min<int64_t>(n - i, kDrainFinds);
    std::unique_lock<ForkSafeLock> hold(lock_);
    if (!rows_.tracked(consumer)) return;
    prepare_removed(count);
    kernels_->find(index_.view(), ids + i, count, rows);
    for (int64_t k = 0; k < count; ++k) {
      if (rows[k] >= 0)
        rows_.touch(consumer, rows[k]);
      else
        removed_[consumer].push_back(ids[i + k]);
    }
  }
}

// Makes room to record this many removals without an allocation. Repeated ids are dropped before a list grows, so it
// holds at most twice as many entries as removed ids.
inline void Table::prepare_removed(int64_t n) {
  for (int c = 0; c < kMaxConsumers; ++c) {
    if (!rows_.tracked(c)) continue;
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
    if (rows_.tracked(c)) removed_[c].push_back(id);
}

}  // namespace megalith
