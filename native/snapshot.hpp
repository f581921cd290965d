// A table as it was at one moment, read in pieces while training continues.
//
// Before a row changes, a copy of it is saved, unless the reader has read it already. The number of saved rows is
// bounded: when there is no room, the writer waits until the reader has taken some. The lock of the table guards a
// snapshot: writers hold it exclusively, the one reader shares it with lookups.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bitset>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "rows.hpp"

namespace megalith {

// The reader of a snapshot took no row for a long time while a writer waited for it.
struct SnapshotStalled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Snapshot {
 public:
  // Takes a snapshot of all rows in use, or only of those touched for a consumer (-1: none). They are no longer touched
  // then.
  Snapshot(const Rows& rows, int consumer, bool touched_only, std::vector<int64_t> removed, int64_t room)
      : consumer_(consumer),
        room_(room),
        high_(rows.high()),
        live_(rows.used()),
        owner_(getpid()),
        removed_(std::move(removed)) {
    const size_t words = static_cast<size_t>((high_ + 63) / 64);
    done_.resize(words);
    if (consumer >= 0) touched_.resize(words);
    for (size_t w = 0; w < words; ++w) {
      if (consumer >= 0) touched_[w] = rows.touched_of(consumer, w);
      const uint64_t members = touched_only ? touched_[w] : rows.live_of(w);
      done_[w] = ~members;
      size_ += static_cast<int64_t>(std::bitset<64>(members).count());
    }
    // Allocates all memory now, because a writer would wait for it later. A page uses memory once it is written.
    const size_t most = static_cast<size_t>(std::min(room_, size_));
    ids_.reserve(most), marks_.reserve(most), raw_.reserve(most * rows.row_size());
    for (size_t w = 0; w < touched_.size(); ++w)
      if (touched_[w]) rows.touched_of(consumer, w) = 0;
  }

  int64_t size() const { return size_; }
  int64_t live() const { return live_; }  // number of rows of the table when the snapshot was taken
  const std::vector<int64_t>& removed() const { return removed_; }
  bool finished() const { return cursor_ >= high_ && ids_.empty(); }
  // A child of fork() has the rows but not the reader thread.
  bool abandoned() const { return owner_ != getpid(); }
  double waited() const { return waited_; }
  // Used part of the room for saved rows, 0 to 1.
  double pressure() const { return static_cast<double>(ids_.size()) / static_cast<double>(room_); }
  size_t bytes() const {
    return (done_.capacity() + touched_.capacity() + ids_.capacity() + removed_.capacity()) * 8 +
           marks_.capacity() * sizeof(Marks) + raw_.capacity();
  }

  // Saves rows before they change. False: no room; the caller waits, finds the rows again, and repeats.
  bool save(const Rows& rows, const int32_t* which, int64_t n) {
    if (cursor_ >= high_) return true;
    const size_t bytes = rows.row_size();
    for (int64_t i = 0; i < n; ++i) {
      const int32_t row = which[i];
      if (row < cursor_ || row >= high_ || (done_[word(row)] & mask(row))) continue;
      if (static_cast<int64_t>(ids_.size()) >= room_) return false;
      const size_t at = ids_.size();
      raw_.resize((at + 1) * bytes);
      marks_.push_back(rows.marks_of(row));
      ids_.push_back(rows.id_of(row));
      rows.copy_out(row, raw_.data() + at * bytes);
      done_[word(row)] |= mask(row);
    }
    return true;
  }

  // Releases the lock until the reader has read or the snapshot is closed. False: neither happened in that time.
  template <class Lock>
  bool wait(Lock& hold, double seconds) {
    const auto start = std::chrono::steady_clock::now();
    const uint64_t before = turns_;
    const bool woken = changed_.wait_for(hold, std::chrono::duration<double>(seconds), [&] { return turns_ != before; });
    waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return woken;
  }
  void wake() {
    ++turns_;
    changed_.notify_all();
  }

  // Reads the next rows, at most `limit`; returns their number, 0 at the end. Saved rows come first.
  int64_t read(const Rows& rows, int64_t limit, const RowColumns& out) {
    std::lock_guard<std::mutex> turn(reading_);
    int64_t count = take_aside(rows, limit, out);
    for (; cursor_ < high_ && count < limit; ++cursor_) {
      const int32_t row = static_cast<int32_t>(cursor_);
      if (done_[word(row)] & mask(row)) continue;
      rows.copy_out(row, out, count++);
    }
    wake();
    return count;
  }

  // Marks the rows that were touched when the snapshot was taken and are still in use.
  void give_back(const Rows& rows) const {
    for (size_t w = 0; w < touched_.size(); ++w) {
      for (uint64_t left = touched_[w]; left; left &= left - 1) {
        const int32_t row = static_cast<int32_t>(w * 64) + __builtin_ctzll(left);
        if (rows.live(row)) rows.touch(consumer_, row);
      }
    }
  }

 private:
  static size_t word(int32_t row) { return static_cast<size_t>(row) >> 6; }
  static uint64_t mask(int32_t row) { return uint64_t{1} << (row & 63); }

  int64_t take_aside(const Rows& rows, int64_t limit, const RowColumns& out) {
    const size_t bytes = rows.row_size();
    int64_t count = 0;
    while (!ids_.empty() && count < limit) {
      const char* raw = raw_.data() + (ids_.size() - 1) * bytes;
      out.ids[count] = ids_.back();
      out.put(marks_.back(), count);
      rows.copy_floats(raw, raw + rows.weight_bytes(), out.columns, count);
      ids_.pop_back();
      marks_.pop_back();
      raw_.resize(ids_.size() * bytes);
      ++count;
    }
    return count;
  }

  const int consumer_;
  const int64_t room_, high_, live_;
  const pid_t owner_;
  int64_t cursor_ = 0, size_ = 0;
  std::vector<uint64_t> done_;     // read, saved, or not part of the snapshot
  std::vector<uint64_t> touched_;  // when the snapshot was taken
  std::vector<int64_t> removed_;
  std::vector<int64_t> ids_;  // the saved rows
  std::vector<Marks> marks_;
  std::vector<char> raw_;  // weights as they are stored, and state
  std::mutex reading_;
  std::condition_variable_any changed_;
  std::atomic<uint64_t> turns_{0};  // of the reader
  double waited_ = 0;
};

}  // namespace megalith
