// Table::update: divides occurrences into parts by row range (stably, so input order is kept within a part); then one
// thread per part sums the gradients and applies them.
#pragma once

#include <algorithm>

#include "table.hpp"

namespace megalith {

// The occurrences that reach an output: a range per feature, and the number of its first bag among the bags of all
// features.
struct Table::Reached {
  struct Range {
    int64_t first, last;
  };
  std::vector<Range> ranges;
  std::vector<int64_t> bag_base{0};
  int64_t n;
  bool weighted = false;

  explicit Reached(const Update& u) : n(u.n) {
    for (const BagsView& b : u.bags) {
      ranges.push_back({b.offsets[0], b.offsets[b.num_bags]});
      bag_base.push_back(bag_base.back() + b.num_bags);
      weighted |= b.weights != nullptr;
    }
    if (u.bags.empty()) ranges.push_back({0, u.n});
  }
};

// Parts of 1 << shift rows. Slices are ranges of positions, one per thread; `starts` (slice-major) holds where the
// entries of a slice begin in each part, so input order is kept.
struct Table::Parts {
  uint32_t shift;
  int64_t count, slices;
  int64_t* starts;
  int64_t* begin;  // first entry of each part, count + 1 long
  int64_t most = 0;  // number of entries of the largest part
  Entry* entries;
  float* weights;
};

// Allocates everything that an update writes to, so that nothing can fail after rows are created.
// `high`: all row numbers will be below it.
inline Table::Parts Table::divide(const Reached& reached, int64_t high, int threads,
                                  Scratch& scratch) const {
  Parts parts{};
  // A part has few enough occurrences for its sums to stay in cache, and enough for the gradients that it reads to
  // share pages. It has at most 2^16 rows, and there are at most 4096 parts.
  const double wanted = 262144.0 / dim_ + 1.0;
  const double rows_per_part = static_cast<double>(high) * wanted / static_cast<double>(reached.n + 1);
  parts.shift = 6;
  while (parts.shift < 16 && static_cast<double>(int64_t{1} << (parts.shift + 1)) <= rows_per_part)
    ++parts.shift;
  while ((high >> parts.shift) >= 4096) ++parts.shift;
  parts.count = (high >> parts.shift) + 1;
  parts.slices = std::max<int64_t>(1, std::min<int64_t>(threads, reached.n / 4096));
  parts.starts = scratch.starts.get(parts.slices * parts.count);
  parts.begin = scratch.begin.get(parts.count + 1);
  parts.entries = scratch.entries.get(reached.n);
  parts.weights = reached.weighted ? scratch.weights.get(reached.n) : nullptr;

  const int64_t distinct = std::min(reached.n, int64_t{1} << parts.shift);
  const size_t count = static_cast<size_t>(workers(threads));
  if (scratch.workers.size() < count) scratch.workers.resize(count);
  for (size_t w = 0; w < count; ++w) {
    WorkerScratch& mine = scratch.workers[w];
    if (mine.slots.size() < (size_t{1} << parts.shift)) mine.slots.assign(size_t{1} << parts.shift, 0);
    mine.unique.get(distinct);
    mine.sums.get((distinct + 2) * dim_);
  }
  return parts;
}

// Counts the occurrences of each part, then places them.
inline void Table::place(const Update& u, const Reached& reached, const int32_t* rows, Parts& parts,
                         int threads) const {
  std::fill(parts.starts, parts.starts + parts.slices * parts.count, 0);
  ThreadPool::get().run(parts.slices, threads, [&](int64_t slice, int) {
    int64_t* count = parts.starts + slice * parts.count;
    const int64_t from = u.n * slice / parts.slices, to = u.n * (slice + 1) / parts.slices;
    for (const Reached::Range& r : reached.ranges)
      for (int64_t i = std::max(from, r.first); i < std::min(to, r.last); ++i)
        if (rows[i] >= 0) ++count[rows[i] >> parts.shift];  // a refused id has no row
  });
  int64_t total = 0;
  for (int64_t p = 0; p < parts.count; ++p) {
    parts.begin[p] = total;
    for (int64_t s = 0; s < parts.slices; ++s) {
      int64_t& c = parts.starts[s * parts.count + p];
      const int64_t here = c;
      c = total;
      total += here;
    }
    parts.most = std::max(parts.most, total - parts.begin[p]);
  }
  parts.begin[parts.count] = total;

  ThreadPool::get().run(parts.slices, threads, [&](int64_t slice, int) {
    int64_t* at = parts.starts + slice * parts.count;
    const int64_t from = u.n * slice / parts.slices, to = u.n * (slice + 1) / parts.slices;
    if (u.bags.empty()) {
      for (int64_t i = from; i < to; ++i)
        if (rows[i] >= 0) parts.entries[at[rows[i] >> parts.shift]++] = {rows[i], static_cast<uint32_t>(i)};
      return;
    }
    for (size_t v = 0; v < u.bags.size(); ++v) {
      const BagsView& b = u.bags[v];
      int64_t i = std::max(from, reached.ranges[v].first);
      const int64_t last = std::min(to, reached.ranges[v].last);
      if (i >= last) continue;
      int64_t bag = std::upper_bound(b.offsets, b.offsets + b.num_bags + 1, i) - b.offsets - 1;
      for (; i < last; ++bag) {
        const uint32_t source = static_cast<uint32_t>(reached.bag_base[v] + bag);
        for (const int64_t stop = std::min(last, b.offsets[bag + 1]); i < stop; ++i) {
          if (rows[i] < 0) continue;
          const int64_t k = at[rows[i] >> parts.shift]++;
          parts.entries[k] = {rows[i], source};
          if (parts.weights) parts.weights[k] = b.weights ? b.weights[i] : 1.0f;
        }
      }
    }
  });
}

inline void Table::update(const Update& u, int threads) {
  if (any_shared(u.bags)) {
    const OwnRows<float> own(u.bags);
    for (size_t k = 0; k < u.bags.size(); ++k)
      if (u.bags[k].shared) fold_gradients(u.bags[k], own.views[k]);
    Update folded = u;
    folded.bags = own.views;
    for (BagsView& b : folded.bags) b.shared = false;
    return update(folded, threads);
  }
  std::unique_lock<ForkSafeLock> hold(lock_);
  Lease lease;
  Scratch& scratch = *lease;
  const Reached reached(u);
  const int32_t* rows;
  int64_t missing, created;
  for (;;) {
    rows = current_rows(u.rows, u.epoch, u.ids, u.n, scratch, threads);
    if (!save_rows(rows, u.n, hold)) continue;
    missing = 0;
    if (rows != u.rows) {  // rows of the caller all exist; these may have gaps
      const int32_t* mine = rows;
      int32_t* where = scratch.missing.get(u.n);
      for (const Reached::Range& r : reached.ranges)
        for (int64_t i = r.first; i < r.last; ++i)
          if (mine[i] < 0) where[missing++] = static_cast<int32_t>(i);
    }
    created = prepare_missing(u.ids, u.n, scratch.rows.get(0), missing, scratch, &u, threads);
    if (save_rows(victims_.data(), static_cast<int64_t>(victims_.size()), hold)) break;
  }
  Parts parts = divide(reached, rows_.high() + created, threads, scratch);
  record_refused();
  evict_victims();
  create_missing(scratch.rows.get(0), missing, created, scratch, threads);
  place(u, reached, rows, parts, threads);

  ApplyView apply;
  apply.table = view();
  apply.gradient = {u.flat, u.bags.empty() ? nullptr : u.bags.data(),
                    static_cast<int32_t>(u.bags.size()), reached.bag_base.data(), u.scale,
                    u.clip_norm};
  apply.steps = u.steps;
  apply.time = u.time;
  apply.step = static_cast<uint32_t>(std::min<uint64_t>(u.step, UINT32_MAX));
  apply.rounding_step = u.step;
  apply.touch = tracked_;
  apply.rows_per_part_shift = parts.shift;
  const int64_t distinct = std::min(parts.most, int64_t{1} << parts.shift);
  ThreadPool::get().run(parts.count, threads, [&](int64_t p, int worker) {
    const int64_t first = parts.begin[p], count = parts.begin[p + 1] - first;
    if (count == 0) return;
    WorkerScratch& mine = scratch.workers[static_cast<size_t>(worker)];
    float* sums = mine.sums.get((distinct + 2) * dim_);
    ApplyScratch own{mine.slots.data(), mine.unique.get(distinct), sums, sums + distinct * dim_,
                     sums + (distinct + 1) * dim_};
    kernels_->apply(apply, parts.entries + first, parts.weights ? parts.weights + first : nullptr,
                    count, own);
  });
}

}  // namespace megalith
