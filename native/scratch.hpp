// Scratch memory that calls reuse: one set per calling thread, borrowed for one call.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory.hpp"
#include "views.hpp"

namespace megalith {

// Grows without initialising its memory; keeps at most 64 MiB between calls.
template <class T>
class Buffer {
 public:
  T* get(int64_t n) {
    if (n > capacity_) {
      data_.reset();
      capacity_ = 0;
      const int64_t wanted = n + n / 4;
      data_.reset(new T[static_cast<size_t>(wanted)]);
      prefer_huge_pages(data_.get(), static_cast<size_t>(wanted) * sizeof(T));
      capacity_ = wanted;
    }
    return data_.get();
  }
  void trim() {
    if (capacity_ * static_cast<int64_t>(sizeof(T)) <= int64_t{64} << 20) return;
    data_.reset();
    capacity_ = 0;
  }

 private:
  std::unique_ptr<T[]> data_;
  int64_t capacity_ = 0;
};

struct WorkerScratch {
  std::vector<uint32_t> slots;  // zero between calls
  Buffer<int32_t> unique;
  Buffer<float> sums, weights;
  Buffer<int64_t> starts, begin;
  Buffer<Entry> entries;

  void trim() { unique.trim(), sums.trim(), weights.trim(), starts.trim(), begin.trim(), entries.trim(); }
};

struct Scratch {
  Buffer<int32_t> rows, missing, fresh, slots;
  Buffer<int64_t> fresh_ids, begin;
  Buffer<float> initial;
  std::vector<int64_t> ids;
  std::vector<WorkerScratch> workers;
  std::vector<Scratch> tables;  // of a call over several tables

  WorkerScratch* workers_for(int64_t count) {
    if (static_cast<int64_t>(workers.size()) < count) workers.resize(static_cast<size_t>(count));
    return workers.data();
  }
  Scratch* tables_for(size_t count) {
    if (tables.size() < count) tables.resize(count);
    return tables.data();
  }
  void trim() {
    rows.trim(), missing.trim(), fresh.trim(), slots.trim(), fresh_ids.trim(), begin.trim(), initial.trim();
    for (WorkerScratch& w : workers) w.trim();
    for (Scratch& t : tables) t.trim();
    if (ids.capacity() > (size_t{64} << 20) / sizeof(int64_t)) std::vector<int64_t>().swap(ids);
  }
};

// Borrows the scratch memory of the thread for one call.
class Lease {
 public:
  Lease() : scratch_(mine()) {}
  ~Lease() { scratch_.trim(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Scratch& operator*() { return scratch_; }
  Scratch* operator->() { return &scratch_; }

 private:
  static Scratch& mine() {
    static thread_local Scratch scratch;
    return scratch;
  }
  Scratch& scratch_;
};

}  // namespace megalith
