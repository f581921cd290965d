// A table: index, rows, and the calls of the Engine contract. It does not depend on Python. Some member functions are
// in files of their own: table_create.hpp (rows for new ids), table_snapshot.hpp, table_touched.hpp, table_update.hpp,
// table_admit.hpp, table_evict.hpp, table_write.hpp.
//
// Reads share the lock and a write holds it exclusively, so a write is atomic for readers. Results do not depend on
// the number of threads: work is divided by position or by row range, and the gradient of a row is summed by one
// thread in input order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "admission.hpp"
#include "bags.hpp"
#include "id_log.hpp"
#include "index.hpp"
#include "kernels.hpp"
#include "optimizers.hpp"
#include "rows.hpp"
#include "scratch.hpp"
#include "snapshot.hpp"
#include "threads.hpp"
#include "watch.hpp"

namespace megalith {

// What a capacity ranks rows by: time of the last update, number of updates, step of the last update.
enum class Score : int32_t { lru, lfu, step, none };

struct TableOptions {
  std::string name;                   // for error messages
  std::vector<SegmentPlan> segments;  // with dim, optimizer, base, init and hyper; the table computes the rest
  std::vector<std::vector<float>> initial_state;  // of each segment; empty: zeros
  uint64_t key = 0;
  bool missing_zeros = false;
  int64_t max_rows = Rows::kMaxRows;
  std::string kernels;  // empty: the best for this CPU
  bool counted = false;  // rows store their number of updates and the step of the last one
  uint32_t min_count = 0;  // occurrences before an id gets a row; 0: not counted
  int64_t max_counted_ids = 0;
  uint32_t admission_limit = 0;  // each occurrence admits an id if 24 random bits are below; 0: not drawn
  int64_t capacity = 0;          // largest number of rows; 0: no limit
  Score score = Score::none;     // none: a full table raises
  int64_t log_ids = IdLog::kMost;  // largest number of ids of the log of evicted and of the log of refused ids
  bool huge_pages = true;          // false: not even if the process uses them
};

struct Update {
  const int32_t* rows = nullptr;  // null: find them
  int64_t epoch = -1;             // when rows were found; -1: unknown, so each row is verified
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* flat = nullptr;  // [n, dim], if bags is empty
  int64_t flat_stride = -1;     // floats from one row of `flat` to the next; -1: dim
  std::vector<BagsView> bags;
  float scale = 1.0f;
  float clip_norm = 0.0f;  // 0: no limit
  const SegmentStep* steps = nullptr;  // one per segment
  uint32_t time = 0;
  uint64_t step = 0;
  const int64_t* occurrences = nullptr;  // number that each id stands for; null: one
};

class Table {
  friend class TableGroup;  // calls over several tables; see group.hpp

 public:
  static constexpr int64_t kUnknownEpoch = -1;

  explicit Table(TableOptions options)
      : options_(lay_out(std::move(options))),
        index_(options_.huge_pages),
        kernels_(choose_kernels(options_.kernels)),
        rows_(options_.name, StoredWeights(options_.segments, kernels_), 4 * state_floats(options_.segments),
              options_.counted, options_.max_rows, options_.huge_pages),
        counts_(options_.max_counted_ids, options_.huge_pages),
        evicted_(options_.log_ids),
        refused_(options_.log_ids) {
    dim_ = rows_.stored().dim();
  }

  const std::string& name() const { return options_.name; }
  int dim() const { return dim_; }
  int num_segments() const { return static_cast<int>(options_.segments.size()); }
  // Whether the steps of a segment run outside of the table.
  bool has_custom() const {
    const int custom = optimizer_index("custom");
    return std::any_of(options_.segments.begin(), options_.segments.end(),
                       [&](const SegmentPlan& s) { return s.optimizer == custom; });
  }
  // Weights and state, each as a float32.
  int row_floats() const { return dim_ + static_cast<int>(rows_.state_bytes() / 4); }
  const char* kernels_name() const { return kernels_->name; }

  int64_t size() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    return index_.size();
  }
  int64_t epoch() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    return epoch_;
  }

  // Changes the key of initial rows and of admission draws. Rows that exist stay as they are.
  void set_key(uint64_t key) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    key_ = key;
  }

  // ---- reads

  // Fills rows and returns the epoch in which they are valid.
  int64_t find(const int64_t* ids, int64_t n, int32_t* rows, int threads) const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    find_rows(ids, n, rows, threads);
    return epoch_;
  }

  void read(const int32_t* rows, int64_t epoch, const int64_t* ids, int64_t n, float* out,
            int threads) const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    rows = current_rows(rows, epoch, ids, n, *lease, threads);
    const TableView table = view();
    for_ranges(n, kReadGrain, threads, [&](int64_t first, int64_t last) {
      std::vector<float> scratch(static_cast<size_t>(dim_));
      kernels_->read(table, rows + first, ids + first, last - first, out + first * dim_, scratch.data());
    });
  }

  // Calls use(i, weights) for each id that has a row, in order. `weights`: memory for a row, which it receives.
  template <class Use>
  void for_rows(const int64_t* ids, int64_t n, float* weights, Use&& use) const {
    constexpr int64_t kBlock = 64;
    int32_t rows[kBlock];
    std::shared_lock<ForkSafeLock> hold(lock_);
    for (int64_t first = 0; index_.size() && first < n; first += kBlock) {
      const int64_t count = std::min(kBlock, n - first);
      kernels_->find(index_.view(), ids + first, count, rows);
      for (int64_t i = 0; i < count; ++i) {
        if (rows[i] < 0) continue;
        rows_.read_weights(rows[i], weights);
        use(first + i, static_cast<const float*>(weights));
      }
    }
  }

  // Reads rows as `read` does. Returns false, after some of them, if one is not finite.
  bool read_finite(const int32_t* rows, int64_t epoch, const int64_t* ids, int64_t n, float* out, int threads) const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    rows = current_rows(rows, epoch, ids, n, *lease, threads);
    const TableView table = view();
    std::atomic<bool> finite{true};
    for_ranges(n, kReadGrain, threads, [&](int64_t first, int64_t last) {
      constexpr int64_t kBlock = 128;  // rows that are still in the cache when they are checked
      std::vector<float> scratch(static_cast<size_t>(dim_));
      for (int64_t i = first; i < last && finite; i += kBlock) {
        const int64_t count = std::min(kBlock, last - i);
        kernels_->read(table, rows + i, ids + i, count, out + i * dim_, scratch.data());
        if (!kernels_->all_finite(out + i * dim_, 1, count * dim_, count * dim_)) finite = false;
      }
    });
    return finite;
  }

  // Reads complete rows with optimizer state; an id without a row reads as the row that would be created.
  void read_complete(const int64_t* ids, int64_t n, const std::vector<Column>& columns, int threads) const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    int32_t* rows = lease->rows.get(n);
    find_rows(ids, n, rows, threads);
    TableView table = view();
    table.missing_zeros = false;
    std::vector<float> raw(static_cast<size_t>(row_floats())), scratch(static_cast<size_t>(dim_));
    for (int64_t i = 0; i < n; ++i) {
      if (rows[i] >= 0) {
        rows_.copy_floats(rows[i], columns, i);
        continue;
      }
      kernels_->read(table, rows + i, ids + i, 1, raw.data(), scratch.data());
      for (const SegmentPlan& s : options_.segments)
        std::copy_n(s.initial_state, s.state_size, raw.data() + dim_ + s.state_offset);
      for (const Column& c : columns)
        std::copy_n(raw.data() + c.first, c.width, c.data + i * c.width);
    }
  }

  // ---- training

  // Gradients must be finite and bags' offsets ascend within [0, n]. In table_update.hpp.
  void update(const Update& u, int threads);

  // ---- writes

  // `values`: [n, width]; columns from `width` on become `fill`.
  void assign(const int64_t* ids, int64_t n, const float* values, bool add, uint32_t time, int threads, int width,
              float fill) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    std::vector<float> whole(static_cast<size_t>(dim_), fill);
    const int32_t* rows = find_or_create(ids, n, *lease, threads, hold, add ? Initial::row : Initial::state);
    constexpr int64_t kAhead = 16;
    for (int64_t i = 0; i < n; ++i) {
      if (i + kAhead < n) {
        const char* later = rows_.weights(rows[i + kAhead]);
        for (size_t b = 0; b < rows_.weight_bytes(); b += 64) MEGALITH_FETCH(later + b);
        MEGALITH_FETCH(&rows_.time_of(rows[i + kAhead]));
      }
      const float* v = values + i * width;
      if (add) {
        rows_.read_weights(rows[i], whole.data());
        for (int c = 0; c < width; ++c) whole[static_cast<size_t>(c)] += v[c];
      } else if (width < dim_) {
        std::memcpy(whole.data(), v, sizeof(float) * static_cast<size_t>(width));
      }
      rows_.write_weights(rows[i], add || width < dim_ ? whole.data() : v);
      assigned(rows[i], time);
    }
  }
  void assign(const int64_t* ids, int64_t n, const float* values, bool add, uint32_t time, int threads) {
    assign(ids, n, values, add, time, threads, dim_, 0.0f);
  }

  // status: 0 created, 1 existed.
  void reinitialize(const int64_t* ids, int64_t n, uint32_t time, int32_t* status, int threads) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    std::unordered_set<int64_t> created;
    std::vector<float> scratch(static_cast<size_t>(dim_));
    const auto note = [&](const int32_t* found) {
      created.clear();
      for (int64_t i = 0; i < n; ++i) status[i] = found[i] >= 0 ? 1 : !created.insert(ids[i]).second;
    };
    const int32_t* rows = find_or_create(ids, n, *lease, threads, hold, Initial::row, note);
    kernels_->initialize(view(), rows, ids, n, scratch.data());
    for (int64_t i = 0; i < n; ++i) assigned(rows[i], time);
  }

  // Rows that an optimizer outside of the table has computed; in table_write.hpp.
  void write_rows(const Update& u, int64_t reached, const RowColumns& from, int64_t rows_given, int threads);

  int64_t remove(const int64_t* ids, int64_t n) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    {
      Lease lease;
      save_for_snapshot(ids, n, *lease, 1, hold);
    }
    rows_.prepare_give_back(std::min(n, index_.size()));
    prepare_removed(std::min(n, index_.size()));
    ++epoch_;
    int64_t removed = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t row = index_.erase(ids[i]);
      if (row < 0) continue;
      rows_.give_back(row);
      note_removed(ids[i]);
      ++removed;
    }
    counters_.removed += removed;
    return removed;
  }

  // Writes complete rows with optimizer state, as scan() returned them.
  void restore(const RowColumns& from, int64_t n, int threads) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    const int64_t before = counters_.created;
    const int32_t* rows = find_or_create(from.ids, n, *lease, threads, hold, Initial::nothing);
    // If every id created a row, the ids are distinct, and the order of writes does not matter.
    const int64_t grain = counters_.created - before == n ? kReadGrain : std::max<int64_t>(n, 1);
    for_ranges(n, grain, threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        rows_.copy_in(rows[i], from, i);
        rows_.time_of(rows[i]) = static_cast<uint32_t>(from.times[i]);
      }
    });
    for (int64_t i = 0; rows_.tracked() && i < n; ++i) rows_.touch(rows[i]);
    if (rows_.counted() && from.steps)
      for (int64_t i = 0; i < n; ++i)
        latest_step_ = std::max(latest_step_, saturated(static_cast<uint64_t>(from.steps[i])));
    ++epoch_;
  }

  void clear() {
    std::unique_lock<ForkSafeLock> hold(lock_);
    while (snapshot() && !snapshot_->finished()) wait_for_reader(hold);
    prepare_removed(index_.size());
    if (rows_.tracked())
      for (int64_t r = 0; r < rows_.high(); ++r)
        if (rows_.live(static_cast<int32_t>(r))) note_removed(rows_.id_of(static_cast<int32_t>(r)));
    counters_.removed += index_.size();
    counts_.clear();
    index_.reset();
    rows_.clear();
    search_ = {};
    taken_rows_.clear(), taken_.clear(), list_taken_ = false;
    for (auto& watch : watches_) watch.second.forget();
    ++epoch_;
  }

  void reserve(int64_t n) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    if (n <= index_.size()) return;
    rows_.prepare(n - index_.size());
    index_.reserve(n);
  }

  // ---- scan in row order

  struct ScanResult {
    int64_t count;
    int64_t next;  // where to continue; -1 at the end
  };
  // `watch`: an open one, which then covers the rows that were read; -1: none. `stop`: the scan ends before this row.
  ScanResult scan(int64_t start, int64_t limit, const RowColumns& out, int watch = -1, int64_t stop = INT64_MAX) {
    std::shared_lock<ForkSafeLock> hold(lock_);
    int64_t count = 0, r = start;
    for (const int64_t end = std::min(rows_.high(), stop); r < end && count < limit; ++r) {
      const int32_t row = static_cast<int32_t>(r);
      if (rows_.live(row)) rows_.copy_out(row, out, count++);
    }
    // Only the thread of the scan changes its watch under the shared lock.
    if (watch >= 0) watches_.at(watch).cover(start, r);
    return {count, r < rows_.high() ? r : -1};
  }

  // ---- snapshots; see snapshot.hpp and table_snapshot.hpp

  // Starts a snapshot of all rows, or of the rows touched for a consumer. It drains the touched rows of the consumer
  // (-1: none). `room`: number of rows that may be saved before writers wait. Returns the number of rows.
  // `pending`: not null to receive the counts of ids without a row at the same moment.
  // `reader_seconds`: a writer throws SnapshotStalled if the reader takes no row for that long.
  int64_t begin_snapshot(int consumer, bool touched_only, int64_t room, std::vector<int64_t>& removed,
                         OccurrenceCounts::Copy* pending = nullptr, double reader_seconds = 600);
  int64_t read_snapshot(int64_t limit, const RowColumns& out);
  int64_t snapshot_live() const;
  double snapshot_pressure() const;
  // Ends the snapshot. `give_back`: marks its touched rows again. Returns the seconds that writers waited.
  double end_snapshot(bool give_back);

  // ---- touched rows of numbered consumers; see table_touched.hpp

  void track(int consumer);
  void untrack(int consumer);
  void drain(int consumer, std::vector<int64_t>& updated, std::vector<int64_t>& removed);
  void mark(int consumer, const int64_t* ids, int64_t n);

  // ---- policies; see table_evict.hpp and table_admit.hpp

  int open_watch();
  void close_watch(int watch);
  std::vector<int64_t> evict(const int64_t* ids, int64_t n, int watch);
  bool compact(int64_t limit);
  std::vector<int64_t> drain_evicted();
  std::vector<int64_t> drain_refused();
  OccurrenceCounts::Copy pending() const;
  void restore_pending(const int64_t* ids, int64_t n, const int64_t* counts);
  // Writes 1 for each id that has a row or that an update at this step would create, otherwise 0.
  void admits(const int64_t* ids, int64_t n, const int64_t* occurrences, uint64_t step, int64_t* out) const;

  struct Counters {
    int64_t created = 0, removed = 0, evicted = 0, refused = 0, pending = 0, pending_dropped = 0, log_lost = 0;
  };
  Counters counters() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    Counters now = counters_;
    now.pending = counts_.size();
    now.pending_dropped = counts_.dropped();
    now.log_lost = evicted_.lost() + refused_.lost();
    return now;
  }

  // ---- state

  struct Memory {
    size_t index, rows, state, side, counters, slack;
  };
  Memory memory() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    const size_t used = static_cast<size_t>(rows_.used());
    const size_t unused = static_cast<size_t>(rows_.high()) - used;
    size_t side = used * rows_.side_bytes() + rows_.shared_bytes();
    for (const auto& r : removed_) side += r.capacity() * sizeof(int64_t);
    if (snapshot_) side += snapshot_->bytes();
    return {index_.bytes(),
            used * rows_.weight_bytes(),
            used * rows_.state_bytes(),
            side,
            counts_.bytes() + evicted_.bytes() + refused_.bytes(),
            unused * (rows_.row_size() + rows_.side_bytes())};
  }

  struct Shape {
    int64_t rows, capacity, epoch;
    bool growing;
  };
  Shape shape() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    return {index_.size(), index_.capacity(), epoch_, index_.growing()};
  }

 private:
  static constexpr int64_t kFindGrain = 8192;
  static constexpr int64_t kReadGrain = 4096;

  static TableOptions lay_out(TableOptions options) {
    int dim = 0;
    for (SegmentPlan& s : options.segments) {
      s.offset = dim;
      dim += s.dim;
    }
    int at = 0;
    options.initial_state.resize(options.segments.size());
    for (size_t k = 0; k < options.segments.size(); ++k) {
      SegmentPlan& s = options.segments[k];
      std::vector<float>& state = options.initial_state[k];
      const int needed = kernels_portable.state_size(s);
      if (state.empty() && needed > 0) state.resize(static_cast<size_t>(needed));
      if (needed >= 0 && needed != static_cast<int>(state.size()))
        throw std::invalid_argument("segments: the optimizer needs another number of states");
      s.state_offset = at;
      s.state_size = static_cast<int32_t>(state.size());
      s.initial_state = state.data();
      at += s.state_size;
    }
    return options;
  }
  static const Kernels* choose_kernels(const std::string& name) {
    const Kernels* kernels = find_kernels(name.empty() ? nullptr : name.c_str());
    if (!kernels) throw std::invalid_argument("kernels: not available on this CPU or in this build");
    return kernels;
  }
  static uint32_t state_floats(const std::vector<SegmentPlan>& segments) {
    int total = 0;
    for (const SegmentPlan& s : segments) total += s.state_size;
    return static_cast<uint32_t>(total);
  }

  TableView view() const {
    const StoredWeights& weights = rows_.stored();
    return {rows_.view(), options_.segments.data(), static_cast<int32_t>(options_.segments.size()),
            weights.runs(), weights.num_runs(),     weights.one_precision(),
            dim_, key_, options_.missing_zeros};
  }

  // Pools the bags [first, last). `scratch`: two rows.
  void pool_bags(const TableView& table, const int32_t* rows, const int64_t* ids, const BagsView& bags, int64_t first,
                 int64_t last, float* scratch) const {
    if (table.one_precision)
      kernels_->pool(table, rows, ids, bags, first, last, scratch);
    else
      pool_mixed(table, rows, ids, bags, first, last);
  }

  // Pools the bags [first, last) of rows with several precisions: some bags at a time, through rows of float32.
  void pool_mixed(const TableView& table, const int32_t* rows, const int64_t* ids, const BagsView& bags,
                  int64_t first, int64_t last) const {
    constexpr int64_t kBags = 64;
    std::vector<float> wide, scratch(static_cast<size_t>(dim_));
    for (; first < last; first += kBags) {
      const int64_t stop = std::min(last, first + kBags);
      const int64_t from = bags.offsets[first], n = bags.offsets[stop] - from;
      wide.resize(static_cast<size_t>(n * dim_));
      kernels_->read(table, rows + from, ids + from, n, wide.data(), scratch.data());
      // Occurrence `from` is the first row.
      const FlatRows<float> flat{wide.data() - from * dim_, nullptr, dim_};
      kernels_->flat32.pool(flat, bags, first, stop);
    }
  }

  static int64_t workers_of(int threads) { return std::max(1, std::min(threads, ThreadPool::kMaxThreads)); }

  template <class Work>
  static void for_ranges(int64_t n, int64_t grain, int threads, Work&& work) {
    const int64_t tasks = (n + grain - 1) / grain;
    ThreadPool::get().run(tasks, threads, [&](int64_t task, int) {
      work(task * grain, std::min(n, (task + 1) * grain));
    });
  }

  void find_rows(const int64_t* ids, int64_t n, int32_t* rows, int threads) const {
    const IndexView index = index_.view();
    for_ranges(n, kFindGrain, threads, [&](int64_t first, int64_t last) {
      kernels_->find(index, ids + first, last - first, rows + first);
    });
  }

  // Returns the rows to use: those of the caller if they are of this epoch, otherwise found again.
  const int32_t* current_rows(const int32_t* rows, int64_t epoch, const int64_t* ids, int64_t n,
                              Scratch& scratch, int threads) const {
    const bool current = epoch == epoch_, unknown = epoch == kUnknownEpoch;
    if (rows && current && all_in_range(rows, n)) return rows;
    int32_t* found = scratch.rows.get(n);
    if (!rows || !(current || unknown)) {
      find_rows(ids, n, found, threads);
      return found;
    }
    // An absent id may have been created since; a row of unknown epoch is verified. The others are found together.
    const int64_t high = rows_.high();
    int32_t* where = scratch.missing.get(n);
    int64_t* wanted = scratch.fresh_ids.get(n);
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t row = rows[i];
      const bool good = current ? row >= 0 && row < high : rows_.live(row) && rows_.id_of(row) == ids[i];
      found[i] = row;
      where[count] = static_cast<int32_t>(i);
      wanted[count] = ids[i];
      count += !good;
    }
    int32_t* again = scratch.fresh.get(count);
    find_rows(wanted, count, again, threads);
    for (int64_t m = 0; m < count; ++m) found[where[m]] = again[m];
    return found;
  }

  bool all_in_range(const int32_t* rows, int64_t n) const {
    int32_t lowest = 0, highest = -1;
    for (int64_t i = 0; i < n; ++i) {
      lowest = rows[i] < lowest ? rows[i] : lowest;
      highest = rows[i] > highest ? rows[i] : highest;
    }
    return lowest >= 0 && highest < rows_.high();
  }

  // Rows for ids that have none; see table_create.hpp. What they hold: an initial row, the initial state next to weights
  // that the caller writes, or nothing, if the caller writes complete rows.
  enum class Initial { row, state, nothing };
  struct Ignore {
    void operator()(const int32_t*) const {}
  };
  template <class Note = Ignore>
  const int32_t* find_or_create(const int64_t* ids, int64_t n, Scratch& scratch, int threads,
                                std::unique_lock<ForkSafeLock>& hold, Initial initial, Note&& note = {});
  int64_t prepare_missing(const int64_t* ids, int64_t n, int32_t* rows, int64_t count, Scratch& scratch,
                          const Update* update, int threads);
  void create_missing(int32_t* rows, int64_t count, int64_t created, Scratch& scratch, int threads,
                      Initial initial = Initial::row);
  static int64_t number_distinct(const int64_t* ids, int32_t* rows, const int32_t* missing, int64_t count,
                                 int64_t* distinct, Scratch& scratch);

  // Admission; see table_admit.hpp.
  bool admits(int64_t id, uint32_t counted, uint64_t occurrences, uint64_t step) const;
  bool admits_all() const { return options_.min_count <= 1 && options_.admission_limit == 0; }
  int64_t admit(const Update& u, int32_t* rows, int64_t missing, int64_t distinct, Scratch& scratch);
  void record_refused();

  // Capacity; see table_evict.hpp.
  struct VictimSearch {
    int64_t cursor = 0, left = 0, found = 1, high = 0;
    uint64_t threshold = 0;
    struct Sampled {
      uint64_t score;
      int32_t number, row;
      bool operator<(const Sampled& other) const {
        return score != other.score ? score < other.score : number < other.number;
      }
    };
    std::vector<Sampled> sample;
  };
  static constexpr int64_t kSample = 2048;
  static constexpr int64_t kWalk = 64;
  static constexpr int64_t kLowPart = 8;
  uint64_t score(int32_t row) const;
  void protect(const int32_t* call, int64_t n);
  void choose_victims(int64_t created);
  bool take_once(int32_t row);
  int64_t sample_rows(int64_t need);
  void estimate_threshold(int64_t need);
  bool take_sampled(int64_t need);
  void prepare_evictions(int64_t n);
  void evict_victims();
  void evict_row(int64_t id);
  void note_changed(const int32_t* rows, int64_t n) {
    for (auto& watch : watches_) watch.second.note(rows, n);
  }

  // Snapshots; see table_snapshot.hpp.
  Snapshot* snapshot();
  void wait_for_reader(std::unique_lock<ForkSafeLock>& hold);
  bool save_rows(const int32_t* rows, int64_t n);
  void save_for_snapshot(const int64_t* ids, int64_t n, Scratch& scratch, int threads,
                         std::unique_lock<ForkSafeLock>& hold);

  // Touched rows and removed ids of the consumers; see table_touched.hpp. The limits are of one hold of the lock: about
  // 50 microseconds.
  static constexpr int64_t kDrainLooks = 8192;
  static constexpr int kDrainWords = 1024, kDrainRows = 4096, kDrainFinds = 1024;
  static constexpr int kDrainMost = kDrainRows + 64 * TouchedRows::kMost;  // if rows of the last words are neighbours
  void drain_some(int consumer, int64_t& end, std::vector<int64_t>& ids);
  void prepare_removed(int64_t n);
  static void keep_distinct(std::vector<int64_t>& ids);
  void note_removed(int64_t id);

  void written(int32_t row, uint32_t time) {
    rows_.time_of(row) = time;
    rows_.touch(row);
  }

  // Notes that a row was written by other means than an update, now and at the latest step. A new row then counts as
  // written once, so that it is not the first one to go.
  void assigned(int32_t row, uint32_t time) {
    if (rows_.counted()) {
      rows_.count_of(row) = std::max(rows_.count_of(row), 1u);
      rows_.step_of(row) = latest_step_;
    }
    written(row, time);
  }
  static uint32_t saturated(uint64_t step) { return static_cast<uint32_t>(std::min<uint64_t>(step, UINT32_MAX)); }

  // The stages of an update; see table_update.hpp.
  struct Reached;
  struct Parts;
  struct Pending;
  bool prepare_update(Pending& p, Scratch& scratch, int threads);
  void finish_update(Pending& p, Scratch& scratch, WorkerScratch* workers, int threads);
  void reserve_workers(const Pending& p, WorkerScratch* workers, int64_t count, bool each) const;
  Parts divide(const Reached& reached, int64_t high, int threads) const;
  void place(const Update& u, const Reached& reached, const int32_t* rows, Parts& parts,
             int threads) const;

  static constexpr uint64_t kAdvanceEachCall = 256;

  mutable ForkSafeLock lock_;
  const TableOptions options_;
  uint64_t key_ = options_.key;  // changed by set_key
  Index index_;
  const Kernels* const kernels_;
  Rows rows_;
  int dim_ = 0;
  int64_t epoch_ = 0;
  std::vector<int64_t> removed_[kMaxConsumers];
  std::shared_ptr<Snapshot> snapshot_;
  int snapshot_consumer_ = -1;
  double reader_seconds_ = 0;
  OccurrenceCounts counts_;
  IdLog evicted_, refused_;
  Counters counters_;
  VictimSearch search_;
  std::vector<int32_t> victims_;   // rows that the current call removes
  std::vector<uint64_t> taken_;    // a bit for each row that the current call must not remove (again)
  std::vector<int32_t> taken_rows_;  // the rows with a bit, if list_taken_
  bool list_taken_ = false;
  int64_t protected_ = 0;          // number of rows of the current call
  uint32_t latest_step_ = 0;       // the largest step of an update or of a restored row
  bool shrinking_ = false;         // the index may still be much larger than needed
  std::map<int, Watch> watches_;
  struct Refused {
    int64_t id;
    uint32_t occurrences;
  };
  std::vector<Refused> refused_now_;  // ids that the current call refuses
};

}  // namespace megalith

#include "table_admit.hpp"
#include "table_create.hpp"
#include "table_evict.hpp"
#include "table_snapshot.hpp"
#include "table_touched.hpp"
#include "table_update.hpp"
#include "table_write.hpp"
