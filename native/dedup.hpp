// Distinct ids, their owners, and the distinct id of each occurrence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "hash.hpp"
#include "memory.hpp"
#include "route.hpp"
#include "scratch.hpp"
#include "threads.hpp"

namespace megalith {

// A hash map from ids to numbers in order of first occurrence. Open addressing, at most half full. Its
// memory belongs to the thread, so a thread has one at a time.
class Distinct {
 public:
  static constexpr int64_t kAhead = 32;

  // Reserves memory for n ids.
  explicit Distinct(int64_t n) {
    int bits = 4;
    while ((int64_t{1} << bits) < 2 * n) ++bits;
    shift_ = 64 - bits;
    mask_ = (uint64_t{1} << bits) - 1;
    slots_ = mine().get(static_cast<int64_t>(mask_) + 1);
    std::memset(static_cast<void*>(slots_), 0xff, sizeof(Slot) * (mask_ + 1));
  }
  ~Distinct() { mine().trim(); }
  Distinct(const Distinct&) = delete;
  Distinct& operator=(const Distinct&) = delete;

  MEGALITH_PREFETCHES void prefetch(int64_t id) const { __builtin_prefetch(&slots_[home(id)]); }

  // Returns the id's number; a new id gets the number `next`.
  int32_t add(int64_t id, int32_t next) {
    for (uint64_t at = home(id);; at = (at + 1) & mask_) {
      Slot& s = slots_[at];
      if (s.number < 0) {
        s = {id, next};
        return next;
      }
      if (s.id == id) return s.number;
    }
  }

  // Returns the id's number, or -1.
  int32_t find(int64_t id) const {
    for (uint64_t at = home(id);; at = (at + 1) & mask_) {
      const Slot& s = slots_[at];
      if (s.number < 0) return -1;
      if (s.id == id) return s.number;
    }
  }

 private:
  struct Slot {
    int64_t id;
    int32_t number;  // negative: unused
  };
  static Buffer<Slot>& mine() {
    static thread_local Buffer<Slot> memory;
    return memory;
  }
  uint64_t home(int64_t id) const { return slot_hash(id) >> shift_; }

  int shift_;
  uint64_t mask_;
  Slot* slots_;
};

// The owner of each id: by a routing rule, or given per occurrence.
struct Owners {
  Route route;
  const int32_t* given;  // null: use the rule

  int32_t of(int64_t id, int64_t position) const { return given ? given[position] : route.owner(id); }
};

struct Deduped {
  int64_t* index;    // [n] the number of each occurrence's distinct id
  int64_t* first;    // [n] first occurrence of each distinct id; the rest is unused
  int64_t* unique;   // [n] the distinct ids; the rest is unused
  int64_t* counts;   // [shards * lists] number of distinct ids
  // [n] where each occurrence's row begins in the concatenated rows of the distinct ids, which have
  // `widths[m]` elements in list m. Null: not computed.
  int64_t* offsets;
  const int64_t* widths;
};

// Distinct ids of each list (ids[splits[m] .. splits[m + 1]) is list m), ordered by shard, then list,
// then first occurrence. Without `distinct` every occurrence counts as an id of its own.
// Owners must be below `shards`. Returns the number of distinct ids.
inline int64_t dedup(const int64_t* ids, const int64_t* splits, int64_t lists, const Owners& owners,
                     int64_t shards, bool distinct, const Deduped& out, int threads) {
  const int64_t n = splits[lists];
  Lease lease;
  int32_t* first = lease->rows.get(n);
  int32_t* owner = lease->slots.get(n);
  std::vector<int64_t> found(static_cast<size_t>(lists));
  std::fill(out.counts, out.counts + shards * lists, 0);
  ThreadPool::get().run(lists, threads, [&](int64_t m, int) {
    const int64_t begin = splits[m], end = splits[m + 1];
    int32_t number = 0;
    if (distinct) {
      Distinct seen(end - begin);
      for (int64_t i = begin; i < end; ++i) {
        if (i + Distinct::kAhead < end) seen.prefetch(ids[i + Distinct::kAhead]);
        const int32_t k = seen.add(ids[i], number);
        out.index[i] = k;
        if (k == number) first[begin + number++] = static_cast<int32_t>(i);
      }
    } else {
      for (int64_t i = begin; i < end; ++i, ++number) {
        out.index[i] = number;
        first[i] = static_cast<int32_t>(i);
      }
    }
    found[static_cast<size_t>(m)] = number;
    for (int64_t k = begin; k < begin + number; ++k) {
      owner[k] = owners.of(ids[first[k]], first[k]);
      ++out.counts[owner[k] * lists + m];
    }
  });

  struct Place {
    int64_t row, element;
  };
  std::vector<Place> cursor(static_cast<size_t>(shards * lists));
  Place next{0, 0};
  for (int64_t b = 0; b < shards * lists; ++b) {
    cursor[static_cast<size_t>(b)] = next;
    next.row += out.counts[b];
    if (out.offsets) next.element += out.counts[b] * out.widths[b % lists];
  }
  int64_t* element = out.offsets ? lease->fresh_ids.get(n) : nullptr;
  ThreadPool::get().run(lists, threads, [&](int64_t m, int) {
    const int64_t begin = splits[m], end = splits[m + 1];
    const int64_t width = out.offsets ? out.widths[m] : 0;
    // From here on first[k] is the position of the list's k-th distinct id in the output.
    for (int64_t k = begin; k < begin + found[static_cast<size_t>(m)]; ++k) {
      Place& at = cursor[static_cast<size_t>(owner[k] * lists + m)];
      out.first[at.row] = first[k];
      out.unique[at.row] = ids[first[k]];
      first[k] = static_cast<int32_t>(at.row++);
      if (!element) continue;
      element[k] = at.element;
      at.element += width;
    }
    if (element)
      for (int64_t i = begin; i < end; ++i) out.offsets[i] = element[begin + out.index[i]];
    for (int64_t i = begin; i < end; ++i) out.index[i] = first[begin + out.index[i]];
  });
  return next.row;
}

// Finds the position of the first key that equals each query, -1 if there is none.
inline void match(const int64_t* keys, int64_t m, const int64_t* queries, int64_t n, int64_t* out,
                  int threads) {
  Distinct known(m);
  for (int64_t i = 0; i < m; ++i) {
    if (i + Distinct::kAhead < m) known.prefetch(keys[i + Distinct::kAhead]);
    known.add(keys[i], static_cast<int32_t>(i));
  }
  constexpr int64_t kGrain = 1 << 14;
  ThreadPool::get().run((n + kGrain - 1) / kGrain, threads, [&](int64_t task, int) {
    const int64_t end = std::min(n, (task + 1) * kGrain);
    for (int64_t i = task * kGrain; i < end; ++i) {
      if (i + Distinct::kAhead < end) known.prefetch(queries[i + Distinct::kAhead]);
      out[i] = known.find(queries[i]);
    }
  });
}

// Groups values by owner, in input order within a shard.
// lengths [shards * rows]: number of values of each row in each shard. place [n]: the new position.
// Rows are divided into slices: each slice counts its values, then places them from its own offset on.
inline void bucketize(const int64_t* ids, const int64_t* splits, int64_t rows, const Owners& owners,
                      int64_t shards, int64_t* lengths, int64_t* place, int threads) {
  constexpr int64_t kGrain = 1 << 14;
  const int64_t n = splits[rows];
  const int64_t slices = std::max<int64_t>(1, std::min<int64_t>({threads, n / kGrain, rows}));
  std::vector<int64_t> cursor(static_cast<size_t>(slices * shards), 0);
  std::fill(lengths, lengths + shards * rows, 0);
  ThreadPool::get().run(slices, threads, [&](int64_t slice, int) {
    int64_t* count = cursor.data() + slice * shards;
    for (int64_t r = rows * slice / slices; r < rows * (slice + 1) / slices; ++r)
      for (int64_t i = splits[r]; i < splits[r + 1]; ++i) {
        const int64_t owner = owners.of(ids ? ids[i] : 0, i);
        place[i] = owner;
        ++count[owner];
        ++lengths[owner * rows + r];
      }
  });
  int64_t total = 0;
  for (int64_t s = 0; s < shards; ++s)
    for (int64_t slice = 0; slice < slices; ++slice) {
      int64_t& c = cursor[static_cast<size_t>(slice * shards + s)];
      const int64_t here = c;
      c = total;
      total += here;
    }
  ThreadPool::get().run(slices, threads, [&](int64_t slice, int) {
    int64_t* at = cursor.data() + slice * shards;
    const int64_t begin = splits[rows * slice / slices], end = splits[rows * (slice + 1) / slices];
    for (int64_t i = begin; i < end; ++i) place[i] = at[place[i]]++;
  });
}

}  // namespace megalith
