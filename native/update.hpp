// Table::update: occurrences are parted by row range (stably, so input order is kept
// inside a part), then each part is summed and applied by one thread.
#pragma once

#include <algorithm>

#include "table.hpp"

namespace megalith {

namespace detail {

// How many rows make a part: few enough occurrences for the sums to stay in cache, a map of
// at most 2^16 rows, and at most 4096 parts.
inline uint32_t part_shift(int64_t rows, int64_t occurrences, int dim) {
  const double wanted = 262144.0 / dim + 1.0;
  const double rows_per_part =
      static_cast<double>(rows) * wanted / static_cast<double>(occurrences + 1);
  uint32_t shift = 6;
  while (shift < 16 && static_cast<double>(int64_t{1} << (shift + 1)) <= rows_per_part) ++shift;
  while ((rows >> shift) >= 4096) ++shift;
  return shift;
}

}  // namespace detail

inline void Table::update(const Update& u, int threads) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  Lease lease;
  Scratch& scratch = *lease;

  // The occurrences that reach an output, as ranges, and the first bag of each feature when all
  // are counted through.
  struct Range {
    int64_t first, last;
  };
  std::vector<Range> ranges;
  std::vector<int64_t> bag_base(1, 0);
  bool weighted = false;
  for (const BagsView& b : u.bags) {
    ranges.push_back({b.offsets[0], b.offsets[b.num_bags]});
    bag_base.push_back(bag_base.back() + b.num_bags);
    weighted |= b.weights != nullptr;
  }
  if (u.bags.empty()) ranges.push_back({0, u.n});

  const int32_t* rows = current_rows(u.rows, u.epoch, u.ids, u.n, scratch, threads);
  int32_t lowest = 0;
  for (int64_t i = 0; i < u.n; ++i) lowest = rows[i] < lowest ? rows[i] : lowest;
  if (lowest < 0) {
    int32_t* mine = scratch.rows.get(u.n);  // rows that are not the caller's lie here already
    int32_t* missing = scratch.missing.get(u.n);
    int64_t count = 0;
    for (const Range& r : ranges)
      for (int64_t i = r.first; i < r.last; ++i)
        if (mine[i] < 0) missing[count++] = static_cast<int32_t>(i);
    create(u.ids, mine, missing, count, scratch, threads);
    rows = mine;
  }

  const uint32_t shift = detail::part_shift(rows_.high(), u.n, dim_);
  const int64_t parts = (rows_.high() >> shift) + 1;

  // Count, place, apply. Slices are ranges of positions, one per thread; each knows where its
  // entries of each part begin, so the order of the input is kept.
  const int64_t slices = std::max<int64_t>(1, std::min<int64_t>(threads, u.n / 4096));
  std::vector<int64_t>& starts = scratch.starts;
  starts.assign(static_cast<size_t>(slices * parts), 0);
  ThreadPool::get().run(slices, threads, [&](int64_t slice, int) {
    int64_t* count = starts.data() + slice * parts;
    const int64_t from = u.n * slice / slices, to = u.n * (slice + 1) / slices;
    for (const Range& r : ranges)
      for (int64_t i = std::max(from, r.first); i < std::min(to, r.last); ++i)
        ++count[rows[i] >> shift];
  });
  std::vector<int64_t> begin(static_cast<size_t>(parts) + 1);
  int64_t total = 0, most = 0;
  for (int64_t p = 0; p < parts; ++p) {
    begin[static_cast<size_t>(p)] = total;
    for (int64_t s = 0; s < slices; ++s) {
      int64_t& c = starts[static_cast<size_t>(s * parts + p)];
      const int64_t here = c;
      c = total;
      total += here;
    }
    most = std::max(most, total - begin[static_cast<size_t>(p)]);
  }
  begin[static_cast<size_t>(parts)] = total;

  Entry* entries = scratch.entries.get(total);
  float* weights = weighted ? scratch.weights.get(total) : nullptr;
  ThreadPool::get().run(slices, threads, [&](int64_t slice, int) {
    int64_t* at = starts.data() + slice * parts;
    const int64_t from = u.n * slice / slices, to = u.n * (slice + 1) / slices;
    if (u.bags.empty()) {
      for (int64_t i = from; i < to; ++i)
        entries[at[rows[i] >> shift]++] = {rows[i], static_cast<uint32_t>(i)};
      return;
    }
    for (size_t v = 0; v < u.bags.size(); ++v) {
      const BagsView& b = u.bags[v];
      int64_t i = std::max(from, ranges[v].first);
      const int64_t last = std::min(to, ranges[v].last);
      if (i >= last) continue;
      int64_t bag = std::upper_bound(b.offsets, b.offsets + b.num_bags + 1, i) - b.offsets - 1;
      for (; i < last; ++bag) {
        const uint32_t source = static_cast<uint32_t>(bag_base[v] + bag);
        for (const int64_t stop = std::min(last, b.offsets[bag + 1]); i < stop; ++i) {
          const int64_t k = at[rows[i] >> shift]++;
          entries[k] = {rows[i], source};
          if (weighted) weights[k] = b.weights ? b.weights[i] : 1.0f;
        }
      }
    }
  });

  ApplyView apply;
  apply.table = view();
  apply.gradient = {u.flat, u.bags.empty() ? nullptr : u.bags.data(),
                    static_cast<int32_t>(u.bags.size()), bag_base.data(), u.scale};
  apply.learning_rates = u.learning_rates;
  apply.time = u.time;
  apply.touch = tracked_;
  apply.rows_per_part_shift = shift;

  const int64_t distinct = std::min(most, int64_t{1} << shift);
  const size_t workers = static_cast<size_t>(std::max(1, std::min(threads, ThreadPool::kMaxThreads)));
  if (scratch.workers.size() < workers) scratch.workers.resize(workers);
  for (size_t w = 0; w < workers; ++w) {
    WorkerScratch& mine = scratch.workers[w];
    if (mine.slots.size() < (size_t{1} << shift)) mine.slots.assign(size_t{1} << shift, 0);
    mine.unique.get(distinct);
    mine.sums.get((distinct + 1) * dim_);
  }
  ThreadPool::get().run(parts, threads, [&](int64_t p, int worker) {
    const int64_t first = begin[static_cast<size_t>(p)];
    const int64_t count = begin[static_cast<size_t>(p) + 1] - first;
    if (count == 0) return;
    WorkerScratch& mine = scratch.workers[static_cast<size_t>(worker)];
    float* sums = mine.sums.get((distinct + 1) * dim_);
    ApplyScratch own{mine.slots.data(), mine.unique.get(distinct), sums, sums + distinct * dim_};
    kernels_->apply(apply, entries + first, weights ? weights + first : nullptr, count, own);
  });
}

}  // namespace megalith
