// Table: the admission policy of updates, and the counts of ids that have no row yet.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "table.hpp"

namespace megalith {

// Whether an id without a row gets one. `counted`: its occurrences in earlier calls.
inline bool Table::admits(int64_t id, uint32_t counted, uint64_t occurrences, uint64_t step) const {
  if (options_.min_count) return OccurrenceCounts::saturating_sum(counted, occurrences) >= options_.min_count;
  return admits_all() || draw_admits(key_, id, step, options_.admission_limit, occurrences);
}

inline void Table::admits(const int64_t* ids, int64_t n, const int64_t* occurrences, uint64_t step,
                          int64_t* out) const {
  std::shared_lock<ForkSafeLock> hold(lock_);
  for (int64_t i = 0; i < n; ++i)
    out[i] = index_.find(ids[i]) >= 0 ||
             admits(ids[i], options_.min_count ? counts_.count(ids[i]) : 0, static_cast<uint64_t>(occurrences[i]), step);
}

// Decides which of the numbered new ids get a row. Numbers the admitted ones again from 0, in `rows` and in
// scratch.fresh_ids, and writes -1 for the others. Returns the number of admitted ids. May throw; nothing is changed
// then.
inline int64_t Table::admit(const Update& u, int32_t* rows, int64_t missing, int64_t distinct, Scratch& scratch) {
  const int32_t* where = scratch.missing.get(missing);
  int64_t* ids = scratch.fresh_ids.get(missing);
  int64_t* seen = scratch.begin.get(distinct);
  std::fill(seen, seen + distinct, 0);
  for (int64_t m = 0; m < missing; ++m) seen[rows[where[m]]] += u.occurrences ? u.occurrences[where[m]] : 1;
  int32_t* numbers = scratch.fresh.get(distinct);
  if (options_.min_count) {  // `numbers` holds the entries of the counts first
    constexpr int64_t kAhead = 12;
    for (int64_t k = 0; k < distinct; ++k) {
      if (k + kAhead < distinct) counts_.prefetch(ids[k + kAhead]);
      numbers[k] = counts_.locate(ids[k]);
    }
  }
  int64_t admitted = 0;
  for (int64_t k = 0; k < distinct; ++k) {
    const int64_t id = ids[k];
    const uint64_t n = static_cast<uint64_t>(seen[k]);
    const bool in = admits(id, options_.min_count ? counts_.count_at(numbers[k]) : 0, n, u.step);
    numbers[k] = in ? static_cast<int32_t>(admitted) : -1;
    if (in)
      ids[admitted++] = id;
    else
      refused_now_.push_back({id, OccurrenceCounts::saturating_sum(0, n)});
  }
  for (int64_t m = 0; m < missing; ++m) rows[where[m]] = numbers[rows[where[m]]];
  if (options_.min_count) counts_.prepare(static_cast<int64_t>(refused_now_.size()));
  refused_.prepare(static_cast<int64_t>(refused_now_.size()));
  return admitted;
}

// Ids that are counted already come first: which ones a new id displaces does not depend on their order in the call.
inline void Table::record_refused() {
  if (options_.min_count)
    for (Refused& r : refused_now_)
      if (counts_.count(r.id)) {
        counts_.add(r.id, r.occurrences);
        r.occurrences = 0;
      }
  for (const Refused& r : refused_now_) {
    if (options_.min_count && r.occurrences) counts_.add(r.id, r.occurrences);
    refused_.add(r.id);
  }
  counters_.refused += static_cast<int64_t>(refused_now_.size());
  refused_now_.clear();
}

inline std::vector<int64_t> Table::drain_refused() {
  std::unique_lock<ForkSafeLock> hold(lock_);
  return refused_.take();
}

inline OccurrenceCounts::Copy Table::pending() const {
  std::shared_lock<ForkSafeLock> hold(lock_);
  return counts_.copy();
}

inline void Table::restore_pending(const int64_t* ids, int64_t n, const int64_t* counts) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  if (!options_.min_count) return;
  counts_.prepare(n);
  for (int64_t i = 0; i < n; ++i)
    if (index_.find(ids[i]) < 0) counts_.add(ids[i], OccurrenceCounts::saturating_sum(0, static_cast<uint64_t>(counts[i])));
}

}  // namespace megalith
