// Table::update: finds and creates rows, divides occurrences into parts by row range (stably, so input order is kept
// within a part); then one thread per part sums the gradients and applies them. group.hpp updates several tables.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "table.hpp"

namespace megalith {

// An update whose shared features have one gradient for all rows of the batch that repeat them.
class FoldedUpdate {
 public:
  explicit FoldedUpdate(const Update& update) : u(update) {
    if (!any_shared(u.bags)) return;
    own_ = std::make_unique<OwnRows<float>>(u.bags);
    for (size_t k = 0; k < u.bags.size(); ++k)
      if (u.bags[k].shared) fold_gradients(u.bags[k], own_->views[k]);
    u.bags = own_->views;
    for (BagsView& b : u.bags) b.shared = false;
  }

  Update u;

 private:
  std::unique_ptr<OwnRows<float>> own_;
};

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
// entries of a slice begin in each part, so input order is kept. The memory belongs to a worker.
struct Table::Parts {
  uint32_t shift;
  int64_t count, slices;
  int64_t distinct;  // upper bound of the number of distinct rows of a part
  int64_t* starts;
  int64_t* begin;  // first entry of each part, count + 1 long
  int64_t most = 0;  // number of entries of the largest part
  Entry* entries;
  float* weights;
};

// An update between its two halves.
struct Table::Pending {
  const Update& u;
  const Reached reached{u};
  const int32_t* rows = nullptr;
  int64_t missing = 0, created = 0;
  Parts parts{};

  explicit Pending(const Update& update) : u(update) {}
};

// `high`: all row numbers will be below it.
inline Table::Parts Table::divide(const Reached& reached, int64_t high, int threads) const {
  Parts parts{};
  // A part has few enough occurrences for its sums to stay in cache, and enough for the gradients that it reads to
  // share pages. It has at most 2^16 rows, and there are at most 4096 parts.
  const double wanted = 262144.0 / dim_ + 1.0;
  const double rows_per_part = static_cast<double>(high) * wanted / static_cast<double>(reached.n + 1);
  parts.shift = 6;  // touched rows are marked in words of 64
  while (parts.shift < 16 && static_cast<double>(int64_t{1} << (parts.shift + 1)) <= rows_per_part)
    ++parts.shift;
  while ((high >> parts.shift) >= 4096) ++parts.shift;
  parts.count = (high >> parts.shift) + 1;
  parts.slices = std::max<int64_t>(1, std::min<int64_t>(threads, reached.n / 4096));
  parts.distinct = std::min(reached.n, int64_t{1} << parts.shift);
  return parts;
}

// Allocates everything that the second half of an update writes to. The first worker holds the entries.
inline void Table::reserve_workers(const Pending& p, WorkerScratch* workers, int64_t count, bool each) const {
  const Parts& parts = p.parts;
  for (int64_t w = 0; w < count; ++w) {
    WorkerScratch& mine = workers[w];
    if (mine.slots.size() < (size_t{1} << parts.shift)) mine.slots.assign(size_t{1} << parts.shift, 0);
    mine.unique.get(parts.distinct);
    mine.sums.get((parts.distinct + 2) * dim_);
    if (w > 0 && !each) continue;
    mine.starts.get(parts.slices * parts.count);
    mine.begin.get(parts.count + 1);
    mine.entries.get(p.reached.n);
    if (p.reached.weighted) mine.weights.get(p.reached.n);
  }
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

// The first half of an update: finds rows, decides which are created and removed. May throw; the contents are
// unchanged then. False: the snapshot's reader must make room first; nothing is changed.
inline bool Table::prepare_update(Pending& p, Scratch& scratch, int threads) {
  const Update& u = p.u;
  p.rows = current_rows(u.rows, u.epoch, u.ids, u.n, scratch, threads);
  if (!save_rows(p.rows, u.n)) return false;
  p.missing = 0;
  if (p.rows != u.rows) {  // rows of the caller all exist; these may have gaps
    int32_t* where = scratch.missing.get(u.n);
    for (const Reached::Range& r : p.reached.ranges)
      for (int64_t i = r.first; i < r.last; ++i)
        if (p.rows[i] < 0) where[p.missing++] = static_cast<int32_t>(i);
  }
  p.created = prepare_missing(u.ids, u.n, scratch.rows.get(0), p.missing, scratch, &u, threads);
  if (!save_rows(victims_.data(), static_cast<int64_t>(victims_.size()))) return false;
  p.parts = divide(p.reached, rows_.high() + p.created, threads);
  return true;
}

// The half that cannot fail. `workers`: one per thread, reserved.
inline void Table::finish_update(Pending& p, Scratch& scratch, WorkerScratch* workers, int threads) {
  const Update& u = p.u;
  Parts& parts = p.parts;
  evict_victims();
  latest_step_ = std::max(latest_step_, saturated(u.step));
  create_missing(scratch.rows.get(0), p.missing, p.created, scratch, threads);
  parts.starts = workers[0].starts.get(parts.slices * parts.count);
  parts.begin = workers[0].begin.get(parts.count + 1);
  parts.entries = workers[0].entries.get(p.reached.n);
  parts.weights = p.reached.weighted ? workers[0].weights.get(p.reached.n) : nullptr;
  place(u, p.reached, p.rows, parts, threads);

  ApplyView apply;
  apply.table = view();
  apply.gradient = {u.flat, u.flat_stride < 0 ? dim_ : u.flat_stride, u.bags.empty() ? nullptr : u.bags.data(),
                    static_cast<int32_t>(u.bags.size()), p.reached.bag_base.data(), u.scale,
                    u.clip_norm};
  apply.steps = u.steps;
  apply.time = u.time;
  apply.step = saturated(u.step);
  apply.rounding_step = u.step;
  apply.num_touched = rows_.touched_chunks(apply.touched);
  apply.rows_per_part_shift = parts.shift;
  const int64_t distinct = std::min(parts.most, int64_t{1} << parts.shift);
  ThreadPool::get().run(parts.count, threads, [&](int64_t part, int worker) {
    const int64_t first = parts.begin[part], count = parts.begin[part + 1] - first;
    if (count == 0) return;
    WorkerScratch& mine = workers[worker];
    float* sums = mine.sums.get((distinct + 2) * dim_);
    ApplyScratch own{mine.slots.data(), mine.unique.get(distinct), sums, sums + distinct * dim_,
                     sums + (distinct + 1) * dim_};
    kernels_->apply(apply, parts.entries + first, parts.weights ? parts.weights + first : nullptr,
                    count, own);
  });
}

inline void Table::update(const Update& update, int threads) {
  const FoldedUpdate folded(update);
  std::unique_lock<ForkSafeLock> hold(lock_);
  Lease lease;
  Pending p(folded.u);
  while (!prepare_update(p, *lease, threads)) wait_for_reader(hold);
  WorkerScratch* workers = lease->workers_for(workers_of(threads));
  reserve_workers(p, workers, workers_of(threads), /*each=*/false);
  finish_update(p, *lease, workers, threads);
}

}  // namespace megalith
