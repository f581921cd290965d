// Table: snapshots, and the copies that writers make for an open one. snapshot.hpp has the snapshot itself.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "table.hpp"

namespace megalith {

inline int64_t Table::begin_snapshot(int consumer, bool touched_only, int64_t room, std::vector<int64_t>& removed,
                                     OccurrenceCounts::Copy* pending, double reader_seconds) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  if (snapshot())
    throw std::invalid_argument("table '" + options_.name + "' already has an open snapshot: close it first");
  std::vector<int64_t> gone;
  if (consumer >= 0) {
    if (!rows_.tracked(consumer)) throw std::invalid_argument("consumer: not tracked");
    keep_distinct(removed_[consumer]);
    for (int64_t id : removed_[consumer])
      if (index_.find(id) < 0) gone.push_back(id);
  }
  removed = gone;
  if (pending) *pending = counts_.copy();
  snapshot_ = std::make_shared<Snapshot>(rows_, consumer, touched_only, std::move(gone), room);
  snapshot_consumer_ = consumer;
  reader_seconds_ = reader_seconds;
  if (consumer >= 0) removed_[consumer].clear();
  return snapshot_->size();
}

inline int64_t Table::read_snapshot(int64_t limit, const RowColumns& out) {
  std::shared_lock<ForkSafeLock> hold(lock_);
  if (!snapshot_) throw std::invalid_argument("table '" + options_.name + "' has no open snapshot");
  return snapshot_->read(rows_, limit, out);
}

inline int64_t Table::snapshot_live() const {
  std::shared_lock<ForkSafeLock> hold(lock_);
  return snapshot_ ? snapshot_->live() : 0;
}

inline double Table::snapshot_pressure() const {
  std::shared_lock<ForkSafeLock> hold(lock_);
  return snapshot_ ? snapshot_->pressure() : 0.0;
}

inline double Table::end_snapshot(bool give_back) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  if (!snapshot()) return 0;
  const std::shared_ptr<Snapshot> ended = std::move(snapshot_);
  const int c = snapshot_consumer_;
  ended->wake();
  if (give_back && c >= 0 && rows_.tracked(c)) {
    ended->give_back(rows_);
    removed_[c].insert(removed_[c].end(), ended->removed().begin(), ended->removed().end());
  }
  return ended->waited();
}

// The open snapshot, if its reader is in this process.
inline Snapshot* Table::snapshot() {
  // Leaked on purpose: a thread that this process does not have may hold its mutex.
  if (snapshot_ && snapshot_->abandoned()) new std::shared_ptr<Snapshot>(std::move(snapshot_));
  return snapshot_.get();
}

inline void Table::wait_for_reader(std::unique_lock<ForkSafeLock>& hold) {
  const std::shared_ptr<Snapshot> waiting = snapshot_;
  if (!waiting->wait(hold, reader_seconds_))
    throw SnapshotStalled("table '" + options_.name + "': no row of its open snapshot was read for " +
                          std::to_string(static_cast<int64_t>(reader_seconds_)) +
                          " s, and there is no memory for more copies of changed rows: read the snapshot or close it");
}

// Saves rows for the snapshot before they change, and notes the change in open watches. False: the snapshot has no room;
// the caller must wait for its reader, and row numbers may have changed then.
inline bool Table::save_rows(const int32_t* rows, int64_t n) {
  note_changed(rows, n);
  return n == 0 || !snapshot() || snapshot_->save(rows_, rows, n);
}

// Saves the rows of these ids for the snapshot before they change.
inline void Table::save_for_snapshot(const int64_t* ids, int64_t n, Scratch& scratch, int threads,
                                     std::unique_lock<ForkSafeLock>& hold) {
  while (snapshot()) {
    int32_t* rows = scratch.rows.get(n);
    find_rows(ids, n, rows, threads);
    if (snapshot_->save(rows_, rows, n)) return;
    wait_for_reader(hold);
  }
}

}  // namespace megalith
