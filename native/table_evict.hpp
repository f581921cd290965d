// Table: room for new rows under a capacity, removal of expired rows, and the return of memory.
//
// A capacity removes rows with low scores. Finding the lowest ones exactly would need a pass over the table. Instead a
// cursor moves around the rows and takes those whose score is at most a threshold. The threshold is the score of the
// lowest eighth of a sample of rows; it is estimated again after each round. So a removed row is among the lowest
// eighth, unless a call needs more, and each removed row costs the cursor about 8 steps.
//
// If low scores are far from the cursor, it stops after 64 places per needed row, and the call takes the lowest
// eighth of samples, each of 2048 rows spread over the whole table. The cursor continues next to the lowest of them:
// rows with low scores are often neighbours. So a call visits at most about 64 + 8 places per row, whatever the size of
// the table.
//
// The result depends only on the sequence of calls, not on threads or clocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "table.hpp"

namespace megalith {

inline uint64_t Table::score(int32_t row) const {
  switch (options_.score) {
    case Score::lru: return rows_.time_of(row);
    case Score::lfu: return uint64_t{rows_.count_of(row)} << 32 | rows_.time_of(row);
    default: return rows_.step_of(row);
  }
}

// Notes the n rows of the current call, which must stay.
inline void Table::protect(const int32_t* call, int64_t n) {
  const size_t words = static_cast<size_t>((rows_.high() + 63) / 64);
  // All words are cleared, unless they are many: then only those of the call before.
  if (list_taken_)
    for (int32_t row : taken_rows_) taken_[static_cast<size_t>(row) >> 6] = 0;
  else
    taken_.clear();
  taken_.resize(words);
  taken_rows_.clear();
  list_taken_ = words > static_cast<size_t>(4 * n);
  protected_ = 0;
  if (list_taken_) {
    for (int64_t i = 0; i < n; ++i)
      if (call[i] >= 0) protected_ += take_once(call[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {  // most rows are new here, but not all: no branch on it
    if (call[i] < 0) continue;
    uint64_t& word = taken_[static_cast<size_t>(call[i]) >> 6];
    const uint64_t before = word;
    word = before | uint64_t{1} << (call[i] & 63);
    protected_ += word != before;
  }
}

// Chooses the rows that must go before `created` rows are added. Throws TableFull if that is impossible. Changes
// nothing but the position of the search.
inline void Table::choose_victims(int64_t created) {
  const int64_t need = index_.size() + created - options_.capacity;
  if (need <= 0 || created == 0) return;
  if (options_.score == Score::none || index_.size() - protected_ < need)
    throw TableFull("table '" + options_.name + "' holds " + std::to_string(index_.size()) + " rows and needs " +
                    std::to_string(created) + " more, but its Capacity is " + std::to_string(options_.capacity) +
                    " rows" + (options_.score == Score::none ? "; raise it, or pass a score so that old rows make room"
                                                             : " and the other rows belong to the same call; raise it"));
  victims_.reserve(static_cast<size_t>(need));
  search_.high = rows_.high();
  const auto left = [&] { return need - static_cast<int64_t>(victims_.size()); };
  for (int64_t places = kWalk * need + kSample; left() > 0; --places) {
    if (search_.left == 0) estimate_threshold(left());
    if (places <= 0) {
      while (left() > 0 && take_sampled(left())) {}
      if (left() == 0) break;
    }
    if (search_.cursor >= search_.high) search_.cursor = 0;
    const int32_t row = static_cast<int32_t>(search_.cursor++);
    if (rows_.live(row) && score(row) <= search_.threshold && take_once(row)) {
      victims_.push_back(row);
      ++search_.found;
    }
    --search_.left;
  }
}

// Marks a row as taken; false if it was already.
inline bool Table::take_once(int32_t row) {
  uint64_t& word = taken_[static_cast<size_t>(row) >> 6];
  const uint64_t bit = uint64_t{1} << (row & 63);
  if (word & bit) return false;
  word |= bit;
  if (list_taken_) taken_rows_.push_back(row);
  return true;
}

// Reads the scores of rows that may go, at places spread over the table. Returns how many of them are low: an eighth, or
// as many as the sample has of the needed rows.
inline int64_t Table::sample_rows(int64_t need) {
  std::vector<VictimSearch::Sampled>& sample = search_.sample;
  sample.clear();
  const int64_t count = std::min(search_.high, kSample);
  const auto place = [&](int64_t k) {
    return static_cast<int32_t>((search_.cursor + k * search_.high / count) % search_.high);
  };
  constexpr int64_t kAhead = 16;
  for (int64_t k = 0; k < count; ++k) {
    if (k + kAhead < count) __builtin_prefetch(&rows_.time_of(place(k + kAhead)));
    const int32_t row = place(k);
    const bool taken = taken_[static_cast<size_t>(row) >> 6] >> (row & 63) & 1;
    if (rows_.live(row) && !taken) sample.push_back({score(row), static_cast<int32_t>(k), row});
  }
  const int64_t m = static_cast<int64_t>(sample.size());
  const int64_t candidates = std::max<int64_t>(index_.size() - protected_, 1);
  return std::max(m / kLowPart, (need * m + candidates - 1) / candidates);
}

inline void Table::estimate_threshold(int64_t need) {
  // If a round found no row, the sample had none of the lowest ones: take any.
  const bool any = search_.found == 0;
  search_.left = search_.high;
  search_.found = 0;
  const int64_t low = sample_rows(need);
  std::vector<VictimSearch::Sampled>& sample = search_.sample;
  if (any || low < 1 || low > static_cast<int64_t>(sample.size())) {
    search_.threshold = UINT64_MAX;
    return;
  }
  std::nth_element(sample.begin(), sample.begin() + (low - 1), sample.end());
  search_.threshold = sample[static_cast<size_t>(low - 1)].score;
}

// Takes the lowest rows of a sample. False if it has none.
inline bool Table::take_sampled(int64_t need) {
  const int64_t wanted = sample_rows(need);
  std::vector<VictimSearch::Sampled>& sample = search_.sample;
  const int64_t low = std::min(wanted, static_cast<int64_t>(sample.size()));
  search_.left = search_.high;
  search_.found = 1;
  search_.threshold = UINT64_MAX;
  if (low < 1) return false;
  std::partial_sort(sample.begin(), sample.begin() + low, sample.end());
  search_.threshold = sample[static_cast<size_t>(low - 1)].score;
  for (int64_t k = 0; k < std::min(low, need); ++k) {
    take_once(sample[static_cast<size_t>(k)].row);
    victims_.push_back(sample[static_cast<size_t>(k)].row);
  }
  search_.cursor = sample[0].row + 1;
  return true;
}

// Makes room to record removals, so that they cannot fail.
inline void Table::prepare_evictions(int64_t n) {
  if (n == 0) return;
  rows_.prepare_give_back(n);
  prepare_removed(n);
  evicted_.prepare(n);
}

inline void Table::evict_victims() {
  if (victims_.empty()) return;
  ++epoch_;
  constexpr size_t kAhead = 12;
  for (size_t k = 0; k < victims_.size(); ++k) {
    if (k + 2 * kAhead < victims_.size()) __builtin_prefetch(&rows_.id_of(victims_[k + 2 * kAhead]));
    if (k + kAhead < victims_.size()) index_.prefetch(rows_.id_of(victims_[k + kAhead]));
    evict_row(rows_.id_of(victims_[k]));
  }
  victims_.clear();
}

inline void Table::evict_row(int64_t id) {
  rows_.give_back(index_.erase(id));
  note_removed(id);
  evicted_.add(id);
  ++counters_.evicted;
}

inline int Table::open_watch() {
  std::unique_lock<ForkSafeLock> hold(lock_);
  const int number = watches_.empty() ? 0 : watches_.rbegin()->first + 1;
  watches_[number];
  return number;
}

inline void Table::close_watch(int watch) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  watches_.erase(watch);
}

// Removes rows that a scan with this watch has read and that did not change since. Returns the removed ids.
inline std::vector<int64_t> Table::evict(const int64_t* ids, int64_t n, int watch) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  std::vector<int64_t> gone;
  gone.reserve(static_cast<size_t>(n));
  {
    Lease lease;
    save_for_snapshot(ids, n, *lease, 1, hold);
  }
  const Watch& seen = watches_.at(watch);
  prepare_evictions(std::min(n, index_.size()));
  for (int64_t i = 0; i < n; ++i) {
    if (!seen.unchanged(index_.find(ids[i]))) continue;
    evict_row(ids[i]);
    gone.push_back(ids[i]);
  }
  if (!gone.empty()) ++epoch_;
  return gone;
}

// Moves rows from the end into free places and returns the memory behind the last row. Does nothing unless less than
// half of the places are in use, or while a snapshot is open. Moves at most `limit` rows; false: there is more to do.
inline bool Table::compact(int64_t limit) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  bool done = true;
  if (!snapshot() && (rows_.compacting() || rows_.sparse())) {
    ++epoch_;
    for (auto& watch : watches_) watch.second.forget();
    done = rows_.compact(limit, [this](int64_t id, int32_t row) { index_.move(id, row); });
    shrinking_ |= done;
  }
  uint64_t buckets = index_.advance(2 * static_cast<uint64_t>(limit));
  while (shrinking_ && !index_.growing()) {
    shrinking_ = index_.shrink();
    buckets = index_.advance(buckets);
  }
  return done && !shrinking_ && !index_.growing();
}

inline std::vector<int64_t> Table::drain_evicted() {
  std::unique_lock<ForkSafeLock> hold(lock_);
  return evicted_.take();
}

}  // namespace megalith
