// Calls over several tables: one native call finds and pools the rows of a forward, one updates the rows of a backward.
//
// All tables of a call are locked together, in the order of their addresses, in which fork() locks them too: two calls
// cannot wait for each other. Threads share the work across tables. A read divides the output rows of all features;
// a task finds the rows of its part of a feature and pools them while the row numbers are in the cache. An update gives
// a table to one thread, except a table with a large part of all occurrences, which all threads update together.
// Results do not depend on the number of threads or on the other tables of the call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <vector>

#include "bags.hpp"
#include "scratch.hpp"
#include "table.hpp"
#include "threads.hpp"

namespace megalith {

// The part of a read that concerns one table.
struct TableRead {
  const Table* table = nullptr;
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const int32_t* known = nullptr;  // the rows of the ids; null: find them
  int32_t* found = nullptr;        // [n] receives the rows that are found
  int64_t epoch = -1;              // in which `known` is valid; afterwards the epoch of `found`
  std::vector<BagsView> bags;      // offsets ascend within [0, n], from feature to feature; empty: only find
};

struct TableUpdate {
  Table* table = nullptr;
  Update u;
};

class TableGroup {
 public:
  static void read(std::vector<TableRead>& reads, int threads) {
    std::vector<const Table*> tables;
    for (const TableRead& r : reads) tables.push_back(r.table);
    const Locks<const Table, std::shared_lock<ForkSafeLock>> hold(tables);
    Lease lease;
    Scratch* scratch = lease->tables_for(reads.size());
    std::vector<Source> sources;
    std::vector<BagsView> bags;
    std::vector<size_t> source_of;
    std::vector<Range> unpooled;
    int64_t n = 0;
    for (size_t k = 0; k < reads.size(); ++k) {
      TableRead& r = reads[k];
      const Table& t = *r.table;
      sources.push_back({&r, t.view(), t.index_.view(), r.found});
      if (r.known)
        sources.back().rows = t.current_rows(r.known, r.epoch, r.ids, r.n, scratch[k], threads);
      else
        add_unpooled(r, k, unpooled);
      r.epoch = t.epoch_;
      n += r.n;
      for (const BagsView& b : r.bags) {
        bags.push_back(b);
        source_of.push_back(k);
      }
    }
    ThreadPool::get().run(static_cast<int64_t>(unpooled.size()), threads, [&](int64_t task, int) {
      const Range& range = unpooled[static_cast<size_t>(task)];
      const Source& s = sources[range.source];
      s.read->table->kernels_->find(s.index, s.read->ids + range.first, range.last - range.first,
                                    s.read->found + range.first);
    });
    if (bags.empty()) return;
    int dim = 0;
    for (const TableRead& r : reads) dim = std::max(dim, r.table->dim_);
    const int64_t count = Table::workers_of(threads);
    WorkerScratch* workers = lease->workers_for(count);
    for (int64_t w = 0; w < count; ++w) workers[w].sums.get(2 * dim);
    pool_features(bags, n, threads, [&](size_t k, const BagsView& b, int64_t first, int64_t last, int worker) {
      const Source& s = sources[source_of[k]];
      const TableRead& r = *s.read;
      const int64_t from = b.offsets[first];
      if (!r.known) r.table->kernels_->find(s.index, r.ids + from, b.offsets[last] - from, r.found + from);
      r.table->pool_bags(s.table, s.rows, r.ids, b, first, last, workers[worker].sums.get(2 * dim));
    });
  }

  // Gradients must be finite and offsets as for a read. If it throws TableFull or bad_alloc, no table was changed,
  // except that a table with an open snapshot is updated after the others.
  static void update(const std::vector<TableUpdate>& updates, int threads) {
    if (updates.size() == 1) return updates[0].table->update(updates[0].u, threads);
    std::vector<FoldedUpdate> folded;
    folded.reserve(updates.size());
    for (const TableUpdate& each : updates) folded.emplace_back(each.u);
    const std::vector<size_t> waiting = update_together(updates, folded, threads);
    for (size_t k : waiting) updates[k].table->update(folded[k].u, threads);
  }

 private:
  // Locks distinct tables, by address.
  template <class T, class Hold>
  class Locks {
   public:
    explicit Locks(std::vector<T*> tables) {
      std::sort(tables.begin(), tables.end(), std::less<T*>());
      if (std::adjacent_find(tables.begin(), tables.end()) != tables.end())
        throw std::invalid_argument("a table occurs twice in one call");
      for (T* t : tables) held_.emplace_back(t->lock_);
    }

   private:
    std::vector<Hold> held_;
  };

  struct Source {
    const TableRead* read;
    TableView table;
    IndexView index;
    const int32_t* rows;
  };

  struct Range {
    size_t source;
    int64_t first, last;
  };

  // Occurrences that no output reads; they are found, but not pooled.
  static void add_unpooled(const TableRead& r, size_t source, std::vector<Range>& ranges) {
    const auto add = [&](int64_t first, int64_t last) {
      for (; first < last; first += Table::kFindGrain)
        ranges.push_back({source, first, std::min(last, first + Table::kFindGrain)});
    };
    int64_t end = 0;
    for (const BagsView& b : r.bags) {
      if (b.num_parts == 0) continue;
      add(end, b.offsets[0]);
      end = b.offsets[b.num_bags];
    }
    add(end, r.n);
  }

  // Returns the updates that must be made alone: an update of a table with an open snapshot may have to wait for its
  // reader, which must not wait for other tables of this call.
  static std::vector<size_t> update_together(const std::vector<TableUpdate>& updates,
                                             const std::vector<FoldedUpdate>& folded, int threads) {
    std::vector<Table*> tables;
    for (const TableUpdate& each : updates) tables.push_back(each.table);
    const Locks<Table, std::unique_lock<ForkSafeLock>> hold(tables);
    Lease lease;
    Scratch* scratch = lease->tables_for(updates.size());
    std::vector<size_t> waiting, large, small;
    std::vector<Table::Pending> pending;
    pending.reserve(updates.size());
    int64_t total = 0;
    for (const TableUpdate& each : updates) total += each.u.n;
    for (size_t k = 0; k < updates.size(); ++k) {
      const int64_t n = folded[k].u.n;
      pending.emplace_back(folded[k].u);
      const bool shared = threads > 1 && n >= kSharedTable && n * threads * kTablesPerThread > total;
      (tables[k]->snapshot() ? waiting : shared ? large : small).push_back(k);
    }
    std::sort(small.begin(), small.end(),
              [&](size_t a, size_t b) { return folded[a].u.n != folded[b].u.n ? folded[a].u.n > folded[b].u.n : a < b; });

    for (size_t k : large) tables[k]->prepare_update(pending[k], scratch[k], threads);
    each_of(small, threads, [&](size_t k, int) { tables[k]->prepare_update(pending[k], scratch[k], 1); });
    const int64_t count = Table::workers_of(threads);
    WorkerScratch* workers = lease->workers_for(count);
    for (size_t k : large) tables[k]->reserve_workers(pending[k], workers, count, /*each=*/false);
    for (size_t k : small) tables[k]->reserve_workers(pending[k], workers, count, /*each=*/true);

    for (size_t k : large) tables[k]->finish_update(pending[k], scratch[k], workers, threads);
    each_of(small, threads,
            [&](size_t k, int worker) { tables[k]->finish_update(pending[k], scratch[k], workers + worker, 1); });
    return waiting;
  }

  template <class Work>
  static void each_of(const std::vector<size_t>& which, int threads, Work&& work) {
    ThreadPool::get().run(static_cast<int64_t>(which.size()), threads,
                          [&](int64_t task, int worker) { work(which[static_cast<size_t>(task)], worker); });
  }

  // A table is shared by all threads if it has at least this many occurrences and more than the share of a thread
  // divided by kTablesPerThread; smaller ones balance.
  static constexpr int64_t kSharedTable = 8192;
  static constexpr int64_t kTablesPerThread = 4;
};

}  // namespace megalith
