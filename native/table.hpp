// A table: index, rows, and the calls of the Engine contract. It does not depend on Python.
//
// Reads share the lock and a write holds it exclusively, so a write is atomic for readers. Results do not depend on
// the number of threads: work is divided by position or by row range, and the gradient of a row is summed by one
// thread in input order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include "bags.hpp"
#include "index.hpp"
#include "kernels.hpp"
#include "optimizers.hpp"
#include "rows.hpp"
#include "scratch.hpp"
#include "snapshot.hpp"
#include "threads.hpp"

namespace megalith {

struct TableOptions {
  std::string name;                   // for error messages
  std::vector<SegmentPlan> segments;  // with dim, optimizer, init and hyper; the table computes offsets
  uint64_t key = 0;
  bool missing_zeros = false;
  int64_t max_rows = Rows::kMaxRows;
  std::string kernels;  // empty: the best for this CPU
};

struct Update {
  const int32_t* rows = nullptr;  // null: find them
  int64_t epoch = -1;             // when rows were found; -1: unknown, so each row is verified
  const int64_t* ids = nullptr;
  int64_t n = 0;
  const float* flat = nullptr;  // [n, dim], if bags is empty
  std::vector<BagsView> bags;
  float scale = 1.0f;
  float clip_norm = 0.0f;  // 0: no limit
  const float* learning_rates = nullptr;
  uint32_t time = 0;
};

class Table {
 public:
  static constexpr int kMaxConsumers = 8;
  static constexpr int64_t kUnknownEpoch = -1;

  explicit Table(TableOptions options)
      : options_(lay_out(std::move(options))),
        rows_(options_.name, 4 * weight_floats(options_.segments), 4 * state_floats(options_.segments),
              options_.max_rows),
        kernels_(find_kernels(options_.kernels.empty() ? nullptr : options_.kernels.c_str())) {
    if (!kernels_) throw std::invalid_argument("kernels: not available on this CPU or in this build");
    dim_ = static_cast<int>(weight_floats(options_.segments));
  }

  int dim() const { return dim_; }
  int num_segments() const { return static_cast<int>(options_.segments.size()); }
  int row_floats() const { return static_cast<int>(rows_.row_size() / 4); }
  const char* kernels_name() const { return kernels_->name; }

  int64_t size() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    return index_.size();
  }
  int64_t epoch() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    return epoch_;
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
      kernels_->read(table, rows + first, ids + first, last - first, out + first * dim_);
    });
  }

  // Offsets must ascend within [0, n].
  void pool(const int32_t* rows, int64_t epoch, const int64_t* ids, int64_t n,
            const std::vector<BagsView>& bags, int threads) const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    rows = current_rows(rows, epoch, ids, n, *lease, threads);
    const TableView table = view();
    pool_features(bags, n, threads, [&](const BagsView& b, int64_t first, int64_t last) {
      std::vector<float> scratch(static_cast<size_t>(dim_));
      kernels_->pool(table, rows, ids, b, first, last, scratch.data());
    });
  }

  // ---- training

  // Gradients must be finite and bags' offsets ascend within [0, n]. In update.hpp.
  void update(const Update& u, int threads);

  // ---- writes

  void assign(const int64_t* ids, int64_t n, const float* values, bool add, uint32_t time,
              int threads) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    save_for_snapshot(ids, n, *lease, threads, hold);
    const int32_t* rows = find_or_create(ids, n, *lease, threads);
    for (int64_t i = 0; i < n; ++i) {
      float* w = rows_.weights(rows[i]);
      const float* v = values + i * dim_;
      for (int c = 0; c < dim_; ++c) w[c] = add ? w[c] + v[c] : v[c];
      written(rows[i], time);
    }
  }

  // status: 0 created, 1 existed.
  void reinitialize(const int64_t* ids, int64_t n, uint32_t time, int32_t* status, int threads) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    save_for_snapshot(ids, n, *lease, threads, hold);
    int32_t* before = lease->rows.get(n);
    find_rows(ids, n, before, threads);
    std::unordered_set<int64_t> created;
    for (int64_t i = 0; i < n; ++i)
      status[i] = before[i] >= 0 ? 1 : !created.insert(ids[i]).second;
    const int32_t* rows = find_or_create(ids, n, *lease, threads);
    kernels_->initialize(view(), rows, ids, n);
    for (int64_t i = 0; i < n; ++i) written(rows[i], time);
  }

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
    return removed;
  }

  // Writes complete rows with optimizer state, as scan() returned them.
  void restore(const int64_t* ids, int64_t n, const std::vector<Column>& columns, const int64_t* times,
               int threads) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    Lease lease;
    save_for_snapshot(ids, n, *lease, threads, hold);
    const int64_t before = index_.size();
    const int32_t* rows = find_or_create(ids, n, *lease, threads, /*initialize=*/false);
    // If every id created a row, the ids are distinct, and the order of writes does not matter.
    const int64_t grain = index_.size() - before == n ? kReadGrain : std::max<int64_t>(n, 1);
    for_ranges(n, grain, threads, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        rows_.copy_in(rows[i], columns, i);
        written(rows[i], static_cast<uint32_t>(times[i]));
      }
    });
    ++epoch_;
  }

  void clear() {
    std::unique_lock<ForkSafeLock> hold(lock_);
    while (snapshot() && !snapshot_->finished()) wait_for_reader(hold);
    prepare_removed(index_.size());
    if (tracked_)
      for (int64_t r = 0; r < rows_.high(); ++r)
        if (rows_.live(static_cast<int32_t>(r))) note_removed(rows_.id_of(static_cast<int32_t>(r)));
    index_.reset();
    rows_.clear();
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
  ScanResult scan(int64_t start, int64_t limit, int64_t* ids, const std::vector<Column>& columns,
                  int64_t* times) const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    int64_t count = 0, r = start;
    for (; r < rows_.high() && count < limit; ++r) {
      const int32_t row = static_cast<int32_t>(r);
      if (!rows_.live(row)) continue;
      ids[count] = rows_.id_of(row);
      times[count] = rows_.time_of(row);
      rows_.copy_out(row, columns, count);
      ++count;
    }
    return {count, r < rows_.high() ? r : -1};
  }

  // ---- snapshots; see snapshot.hpp

  // Starts a snapshot of all rows, or of the rows touched for a consumer. It drains the touched rows of the consumer
  // (-1: none). `room`: number of rows that may be saved before writers wait. Returns the number of rows.
  int64_t begin_snapshot(int consumer, bool touched_only, int64_t room, std::vector<int64_t>& removed) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    if (snapshot())
      throw std::invalid_argument("table '" + options_.name + "' already has an open snapshot: close it first");
    uint8_t bit = 0;
    std::vector<int64_t> gone;
    if (consumer >= 0) {
      bit = static_cast<uint8_t>(1u << consumer);
      if (!(tracked_ & bit)) throw std::invalid_argument("consumer: not tracked");
      keep_distinct(removed_[consumer]);
      for (int64_t id : removed_[consumer])
        if (index_.find(id) < 0) gone.push_back(id);
    }
    removed = gone;
    snapshot_ = std::make_shared<Snapshot>(rows_, bit, touched_only, std::move(gone), room);
    snapshot_consumer_ = consumer;
    if (consumer >= 0) removed_[consumer].clear();
    return snapshot_->size();
  }

  int64_t read_snapshot(int64_t limit, int64_t* ids, const std::vector<Column>& columns, int64_t* times) {
    std::shared_lock<ForkSafeLock> hold(lock_);
    if (!snapshot_) throw std::invalid_argument("table '" + options_.name + "' has no open snapshot");
    return snapshot_->read(rows_, limit, ids, columns, times);
  }

  int64_t snapshot_live() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    return snapshot_ ? snapshot_->live() : 0;
  }

  double snapshot_pressure() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    return snapshot_ ? snapshot_->pressure() : 0.0;
  }

  // Ends the snapshot. `give_back`: marks its touched rows again. Returns the seconds that writers waited.
  double end_snapshot(bool give_back) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    if (!snapshot()) return 0;
    const std::shared_ptr<Snapshot> ended = std::move(snapshot_);
    const int c = snapshot_consumer_;
    ended->wake();
    if (give_back && c >= 0 && (tracked_ & (1u << c))) {
      ended->give_back(rows_);
      removed_[c].insert(removed_[c].end(), ended->removed().begin(), ended->removed().end());
    }
    return ended->waited();
  }

  // ---- touched rows

  void track(int consumer) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    rows_.start_tracking();
    tracked_ = static_cast<uint8_t>(tracked_ | (1u << consumer));
  }

  void untrack(int consumer) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    const uint8_t bit = static_cast<uint8_t>(1u << consumer);
    tracked_ = static_cast<uint8_t>(tracked_ & ~bit);
    removed_[consumer].clear();
    removed_[consumer].shrink_to_fit();
    if (!tracked_) return rows_.stop_tracking();
    for (int64_t r = 0; r < rows_.high(); ++r)
      rows_.flag(static_cast<int32_t>(r)) &= static_cast<uint8_t>(~bit);
  }

  void drain(int consumer, std::vector<int64_t>& updated, std::vector<int64_t>& removed) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    const uint8_t bit = static_cast<uint8_t>(1u << consumer);
    if (!(tracked_ & bit)) return;
    for (int64_t r = 0; r < rows_.high(); ++r) {
      const int32_t row = static_cast<int32_t>(r);
      if (rows_.flag(row) & bit) updated.push_back(rows_.id_of(row));
    }
    keep_distinct(removed_[consumer]);
    for (int64_t id : removed_[consumer])
      if (index_.find(id) < 0) removed.push_back(id);
    // Nothing can fail from here on: clear what the caller now has.
    for (int64_t r = 0; r < rows_.high(); ++r)
      rows_.flag(static_cast<int32_t>(r)) &= static_cast<uint8_t>(~bit);
    removed_[consumer].clear();
  }

  void mark(int consumer, const int64_t* ids, int64_t n) {
    std::unique_lock<ForkSafeLock> hold(lock_);
    if (!(tracked_ & (1u << consumer))) return;
    prepare_removed(n);
    for (int64_t i = 0; i < n; ++i) {
      const int32_t row = index_.find(ids[i]);
      if (row >= 0)
        rows_.flag(row) |= static_cast<uint8_t>(1u << consumer);
      else
        removed_[consumer].push_back(ids[i]);
    }
  }

  // ---- state

  struct Memory {
    size_t index, rows, side;
  };
  Memory memory() const {
    std::shared_lock<ForkSafeLock> hold(lock_);
    size_t side = rows_.side_bytes();
    for (const auto& r : removed_) side += r.capacity() * sizeof(int64_t);
    if (snapshot_) side += snapshot_->bytes();
    return {index_.bytes(), rows_.row_bytes(), side};
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
    for (SegmentPlan& s : options.segments) {
      s.state_offset = at;
      s.state_size = kernels_portable.state_size(s.optimizer, s.dim);
      at += s.state_size;
    }
    return options;
  }
  static uint32_t weight_floats(const std::vector<SegmentPlan>& segments) {
    int total = 0;
    for (const SegmentPlan& s : segments) total += s.dim;
    return static_cast<uint32_t>(total);
  }
  static uint32_t state_floats(const std::vector<SegmentPlan>& segments) {
    int total = 0;
    for (const SegmentPlan& s : segments) total += s.state_size;
    return static_cast<uint32_t>(total);
  }

  TableView view() const {
    return {rows_.view(), options_.segments.data(), static_cast<int32_t>(options_.segments.size()),
            dim_, options_.key, options_.missing_zeros};
  }

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
    // An absent id may have been created since; a row of unknown epoch is verified.
    const int64_t high = rows_.high();
    for (int64_t i = 0; i < n; ++i) {
      const int32_t row = rows[i];
      const bool good = current ? row >= 0 && row < high : rows_.live(row) && rows_.id_of(row) == ids[i];
      found[i] = good ? row : index_.find(ids[i]);
    }
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

  const int32_t* find_or_create(const int64_t* ids, int64_t n, Scratch& scratch, int threads,
                                bool initialize = true) {
    int32_t* rows = scratch.rows.get(n);
    find_rows(ids, n, rows, threads);
    int32_t* missing = scratch.missing.get(n);
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i)
      if (rows[i] < 0) missing[count++] = static_cast<int32_t>(i);
    const int64_t created = prepare_missing(ids, rows, count, scratch);
    create_missing(rows, count, created, scratch, threads, initialize);
    return rows;
  }

  // Creating rows for the positions in scratch.missing has two halves. This half may throw, and then the contents are
  // unchanged: it numbers the distinct ids by first occurrence (`rows` holds the numbers until the second half) and
  // makes room for all of them.
  int64_t prepare_missing(const int64_t* ids, int32_t* rows, int64_t count, Scratch& scratch) {
    if (count == 0) return 0;
    const int32_t* missing = scratch.missing.get(count);
    int64_t* fresh_ids = scratch.fresh_ids.get(count);
    const int64_t created = number_distinct(ids, rows, missing, count, fresh_ids, scratch);
    scratch.fresh.get(created);
    rows_.prepare(created);
    index_.prepare(created);
    return created;
  }

  // The half that cannot fail: inserts the ids and initializes their rows, unless the caller writes complete rows.
  void create_missing(int32_t* rows, int64_t count, int64_t created, Scratch& scratch, int threads,
                      bool initialize = true) {
    if (count == 0) return;
    const int32_t* missing = scratch.missing.get(count);
    const int64_t* ids = scratch.fresh_ids.get(count);
    int32_t* fresh = scratch.fresh.get(created);
    index_.advance(static_cast<uint64_t>(created) + kAdvanceEachCall);
    constexpr int64_t kAhead = 12;
    for (int64_t k = 0; k < created; ++k) {
      if (k + kAhead < created) index_.prefetch(ids[k + kAhead]);
      fresh[k] = rows_.take(ids[k]);
      index_.insert(ids[k], fresh[k]);
    }
    for (int64_t m = 0; m < count; ++m) rows[missing[m]] = fresh[rows[missing[m]]];
    if (!initialize) return;
    const TableView table = view();
    for_ranges(created, 1024, threads, [&](int64_t first, int64_t last) {
      kernels_->initialize(table, fresh + first, ids + first, last - first);
    });
  }

  // Numbers the distinct ids at the missing positions by first occurrence: writes the numbers to rows and the ids to
  // distinct. Returns the number of distinct ids.
  static int64_t number_distinct(const int64_t* ids, int32_t* rows, const int32_t* missing,
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

  // The open snapshot, if its reader is in this process.
  Snapshot* snapshot() {
    // Leaked on purpose: a thread that this process does not have may hold its mutex.
    if (snapshot_ && snapshot_->abandoned()) new std::shared_ptr<Snapshot>(std::move(snapshot_));
    return snapshot_.get();
  }

  void wait_for_reader(std::unique_lock<ForkSafeLock>& hold) {
    const std::shared_ptr<Snapshot> waiting = snapshot_;
    waiting->wait(hold);
  }

  // Saves the rows of these ids for the snapshot before they change.
  void save_for_snapshot(const int64_t* ids, int64_t n, Scratch& scratch, int threads,
                         std::unique_lock<ForkSafeLock>& hold) {
    while (snapshot()) {
      int32_t* rows = scratch.rows.get(n);
      find_rows(ids, n, rows, threads);
      if (snapshot_->save(rows_, rows, n)) return;
      wait_for_reader(hold);
    }
  }

  void written(int32_t row, uint32_t time) {
    rows_.time_of(row) = time;
    if (tracked_) rows_.flag(row) |= tracked_;
  }

  // Makes room to record this many removals without an allocation. Repeated ids are dropped before a list grows, so it
  // holds at most twice as many entries as removed ids.
  void prepare_removed(int64_t n) {
    for (int c = 0; c < kMaxConsumers; ++c) {
      if (!(tracked_ & (1u << c))) continue;
      std::vector<int64_t>& list = removed_[c];
      if (list.size() + static_cast<size_t>(n) <= list.capacity()) continue;
      keep_distinct(list);
      list.reserve(2 * list.size() + static_cast<size_t>(n));
    }
  }
  static void keep_distinct(std::vector<int64_t>& ids) {
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  }

  void note_removed(int64_t id) {
    for (int c = 0; c < kMaxConsumers; ++c)
      if (tracked_ & (1u << c)) removed_[c].push_back(id);
  }

  // The stages of an update; see update.hpp.
  struct Reached;
  struct Parts;
  Parts divide(const Reached& reached, int64_t high, int threads, Scratch& scratch) const;
  void place(const Update& u, const Reached& reached, const int32_t* rows, Parts& parts,
             int threads) const;

  static constexpr uint64_t kAdvanceEachCall = 256;

  mutable ForkSafeLock lock_;
  const TableOptions options_;
  Index index_;
  Rows rows_;
  const Kernels* kernels_;
  int dim_ = 0;
  int64_t epoch_ = 0;
  uint8_t tracked_ = 0;
  std::vector<int64_t> removed_[kMaxConsumers];
  std::shared_ptr<Snapshot> snapshot_;
  int snapshot_consumer_ = -1;
};

}  // namespace megalith

#include "update.hpp"
