// Admission: which new ids of an update get a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "hash.hpp"
#include "index.hpp"
#include "memory.hpp"

namespace megalith {

// The occurrences of ids that have no row yet, in the order in which the ids first occurred. Holds at most `max_ids`
// ids: beyond that the oldest one is dropped. Entries form a doubly linked list in one array, and free entries are
// reused.
class OccurrenceCounts {
  static constexpr int32_t kNone = -1;

  struct Entry {
    int64_t id;
    uint32_t count;
    int32_t older, newer;
  };

 public:
  explicit OccurrenceCounts(int64_t max_ids, bool huge_pages = true) : max_ids_(max_ids), index_(huge_pages) {}

  int64_t size() const { return index_.size(); }
  int64_t dropped() const { return dropped_; }  // number of ids that were dropped before they got a row
  size_t bytes() const {
    return index_.bytes() + entries_.capacity() * sizeof(Entry) + free_.capacity() * sizeof(int32_t);
  }

  uint32_t count(int64_t id) const { return count_at(index_.find(id)); }
  MEGALITH_PREFETCHES void prefetch(int64_t id) const { index_.prefetch(id); }

  // The number of the entry of an id, or -1, for `count_at`; requests its cache line.
  int32_t locate(int64_t id) const {
    const int32_t at = index_.find(id);
    if (at >= 0) __builtin_prefetch(&entries_[static_cast<size_t>(at)], 1);
    return at;
  }
  uint32_t count_at(int32_t at) const { return at < 0 ? 0 : entries_[static_cast<size_t>(at)].count; }

  // Makes room for `more` ids, so that `add` cannot fail. May throw; the contents are unchanged then.
  void prepare(int64_t more) {
    more = std::min(more, max_ids_ - size());
    if (more <= 0) return;
    index_.prepare(more);
    index_.advance_for(more, 64);
    const size_t wanted = static_cast<size_t>(size() + more);
    const size_t most = static_cast<size_t>(max_ids_);
    if (wanted > entries_.capacity()) entries_.reserve(std::min(most, std::max(wanted, 2 * entries_.capacity())));
    if (wanted > free_.capacity()) free_.reserve(std::min(most, std::max(wanted, 2 * free_.capacity())));
  }

  void add(int64_t id, uint32_t occurrences) {
    const int32_t at = index_.find(id);
    if (at >= 0) {
      uint32_t& count = entries_[static_cast<size_t>(at)].count;
      count = saturating_sum(count, occurrences);
      return;
    }
    if (size() >= max_ids_) {
      erase(entries_[static_cast<size_t>(oldest_)].id);
      ++dropped_;
    }
    int32_t fresh;
    if (free_.empty()) {
      fresh = static_cast<int32_t>(entries_.size());
      entries_.push_back({});
    } else {
      fresh = free_.back();
      free_.pop_back();
    }
    entries_[static_cast<size_t>(fresh)] = {id, occurrences, newest_, kNone};
    (newest_ == kNone ? oldest_ : entries_[static_cast<size_t>(newest_)].newer) = fresh;
    newest_ = fresh;
    index_.insert(id, fresh);
  }

  void erase(int64_t id) {
    const int32_t at = index_.erase(id);
    if (at < 0) return;
    const Entry gone = entries_[static_cast<size_t>(at)];
    (gone.older == kNone ? oldest_ : entries_[static_cast<size_t>(gone.older)].newer) = gone.newer;
    (gone.newer == kNone ? newest_ : entries_[static_cast<size_t>(gone.newer)].older) = gone.older;
    free_.push_back(at);
  }

  // The counts at one moment. Copying is quick; the order is established later, without the lock of the table.
  class Copy {
   public:
    // Appends the ids, from the one that was counted first, and their counts.
    void list(std::vector<int64_t>& ids, std::vector<int64_t>& counts) const {
      for (int32_t at = oldest_; at != kNone; at = entries_[static_cast<size_t>(at)].newer) {
        ids.push_back(entries_[static_cast<size_t>(at)].id);
        counts.push_back(entries_[static_cast<size_t>(at)].count);
      }
    }

   private:
    friend class OccurrenceCounts;
    std::vector<Entry> entries_;
    int32_t oldest_ = kNone;
  };
  Copy copy() const {
    Copy copy;
    copy.entries_ = entries_;
    copy.oldest_ = oldest_;
    return copy;
  }

  void clear() {
    index_.reset();
    entries_ = {};
    free_ = {};
    oldest_ = newest_ = kNone;
  }

  static uint32_t saturating_sum(uint32_t a, uint64_t b) {
    return static_cast<uint32_t>(std::min<uint64_t>(a + b, std::numeric_limits<uint32_t>::max()));
  }

 private:
  int64_t max_ids_;
  int64_t dropped_ = 0;
  Index index_;
  std::vector<Entry> entries_;
  std::vector<int32_t> free_;
  int32_t oldest_ = kNone, newest_ = kNone;
};

// Probability: each occurrence draws 24 bits that depend on the table's key, the id, the step and the number of the
// occurrence, and creates the row if they are below the limit.
static inline bool draw_admits(uint64_t table_key, int64_t id, uint64_t step, uint32_t limit, uint64_t occurrences) {
  const uint64_t key = mix64(row_key(table_key, id) + (step + 1) * 0xd1b54a32d192ed03ull);
  for (uint64_t k = 0; k < occurrences; ++k)
    if (draw24(key, static_cast<uint32_t>(k)) < limit) return true;
  return false;
}

}  // namespace megalith
