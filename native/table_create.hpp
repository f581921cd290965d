// Table: rows for ids that have none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "table.hpp"

namespace megalith {

// `note` sees the rows before missing ones are created. The admission policy is not asked.
template <class Note>
inline const int32_t* Table::find_or_create(const int64_t* ids, int64_t n, Scratch& scratch, int threads,
                                            std::unique_lock<ForkSafeLock>& hold, Initial initial, Note&& note) {
  for (;; wait_for_reader(hold)) {
    int32_t* rows = scratch.rows.get(n);
    find_rows(ids, n, rows, threads);
    if (!save_rows(rows, n)) continue;
    note(rows);
    int32_t* missing = scratch.missing.get(n);
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i)
      if (rows[i] < 0) missing[count++] = static_cast<int32_t>(i);
    const int64_t created = prepare_missing(ids, n, rows, count, scratch, nullptr, threads);
    if (!save_rows(victims_.data(), static_cast<int64_t>(victims_.size()))) continue;
    evict_victims();
    create_missing(rows, count, created, scratch, threads, initial);
    return rows;
  }
}

// Creating rows for the positions in scratch.missing has two halves. This half may throw, and then the contents are
// unchanged: it numbers the distinct ids by first occurrence (`rows` holds the numbers until the second half), asks the
// admission policy of an update, chooses rows to remove under a capacity, and makes room.
inline int64_t Table::prepare_missing(const int64_t* ids, int64_t n, int32_t* rows, int64_t count, Scratch& scratch,
                                      const Update* update, int threads) {
  victims_.clear();
  refused_now_.clear();
  if (count == 0) return 0;
  const bool tight = options_.capacity && index_.size() + count > options_.capacity;
  if (tight) protect(rows, n);
  const int32_t* missing = scratch.missing.get(count);
  int64_t* fresh_ids = scratch.fresh_ids.get(count);
  int64_t created = number_distinct(ids, rows, missing, count, fresh_ids, scratch);
  scratch.fresh.get(created);
  scratch.initial.get(workers_of(threads) * dim_);
  if (update && !admits_all()) created = admit(*update, rows, count, created, scratch);
  if (tight) choose_victims(created);
  const int64_t more = created - static_cast<int64_t>(victims_.size());
  rows_.prepare(more);
  index_.prepare(more);
  prepare_evictions(static_cast<int64_t>(victims_.size()));
  return created;
}

// The half that cannot fail: inserts the ids and initializes their rows.
inline void Table::create_missing(int32_t* rows, int64_t count, int64_t created, Scratch& scratch, int threads,
                                  Initial initial) {
  if (count == 0) return;
  const int32_t* missing = scratch.missing.get(count);
  const int64_t* ids = scratch.fresh_ids.get(count);
  int32_t* fresh = scratch.fresh.get(created);
  index_.advance_for(created, kAdvanceEachCall);
  constexpr int64_t kAhead = 12;
  for (int64_t k = 0; k < created; ++k) {
    if (k + kAhead < created) index_.prefetch(ids[k + kAhead]);
    fresh[k] = rows_.take(ids[k]);
    index_.insert(ids[k], fresh[k]);
  }
  counters_.created += created;
  if (counts_.size() > 0)
    for (int64_t k = 0; k < created; ++k) counts_.erase(ids[k]);
  record_refused();  // after the counts of the created ids made room
  note_changed(fresh, created);
  for (int64_t m = 0; m < count; ++m) {
    int32_t& row = rows[missing[m]];
    row = row < 0 ? -1 : fresh[row];  // refused ids stay without a row
  }
  if (initial == Initial::state && rows_.state_bytes() > 0)
    for (int64_t k = 0; k < created; ++k)
      for (const SegmentPlan& s : options_.segments)
        std::copy_n(s.initial_state, s.state_size, rows_.state(fresh[k]) + s.state_offset);
  if (initial != Initial::row) return;
  const TableView table = view();
  float* wide = scratch.initial.get(workers_of(threads) * dim_);  // a row for each worker
  constexpr int64_t kGrain = 1024;
  ThreadPool::get().run((created + kGrain - 1) / kGrain, threads, [&](int64_t task, int worker) {
    const int64_t first = task * kGrain, last = std::min(created, first + kGrain);
    kernels_->initialize(table, fresh + first, ids + first, last - first, wide + worker * dim_);
  });
}

// Numbers the distinct ids at the missing positions by first occurrence: writes the numbers to rows and the ids to
// distinct. Returns the number of distinct ids.
inline int64_t Table::number_distinct(const int64_t* ids, int32_t* rows, const int32_t* missing,
                                      int64_t count, int64_t* distinct, Scratch& scratch) {
  int bits = 4;
  while ((int64_t{1} << bits) < 2 * count) ++bits;
  const uint64_t mask = (uint64_t{1} << bits) - 1;
  int32_t* slots = scratch.slots.get(int64_t{1} << bits);
  std::fill(slots, slots + mask + 1, -1);
  int64_t found = 0;
  for (int64_t m = 0; m < count; ++m) {
    const int64_t id = ids[missing[m]];
    uint64_t at = slot_hash(id) & mask;
    while (slots[at] >= 0 && distinct[slots[at]] != id) at = (at + 1) & mask;
    if (slots[at] < 0) {
      slots[at] = static_cast<int32_t>(found);
      distinct[found++] = id;
    }
    rows[missing[m]] = slots[at];
  }
  return found;
}

}  // namespace megalith
