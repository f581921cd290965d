// The index: a hash map from ids to row numbers, with open addressing in buckets of one cache line.
//
// The home bucket of an id is given by the top bits of its hash, scaled to the number of buckets. If the home is
// full, the id goes to the next bucket with a free slot and increments a count in each bucket that it passes. So a
// search stops at the first bucket with count 0, and removal leaves no tombstones.
//
// Growth is incremental: a larger array is allocated, and each call that inserts n ids moves the ids of at least n
// more home buckets of the old array, in order. At any time an id is in exactly one array, which its home determines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "hash.hpp"
#include "memory.hpp"
#include "views.hpp"

namespace megalith {

class Index {
 public:
  // Load factor before growth, and factor of growth. 0.66 and 1.4 keep the index below 27.2 bytes per id right
  // after growth, and searches short.
  static constexpr double kMaxLoad = 0.66;
  static constexpr double kReserveLoad = 0.55;
  static constexpr double kGrowth = 1.4;
  static constexpr double kShrinkLoad = 0.4;
  static constexpr uint64_t kMostShrink = 4;

  explicit Index(bool huge_pages = true) : huge_pages_(huge_pages) { reset(); }

  int64_t size() const { return size_; }
  int64_t capacity() const { return limit(growing() ? next_count_ : count_); }
  bool growing() const { return next_count_ != 0; }

  IndexView view() const {
    return {array(now_), count_, array(next_), next_count_, cursor_};
  }

  // Bytes in use, without the memory that growth has already freed.
  size_t bytes() const {
    size_t touched = next_count_ ? std::min<size_t>(next_.bytes(), touched_next()) : 0;
    return now_.bytes() - released_ + touched;
  }

  int32_t find(int64_t id) const {
    const uint64_t hash = slot_hash(id);
    const Array a = owner(hash);
    uint64_t b = high_product(hash, a.count);
    // A count can stay above 0 after the ids that filled the bucket are gone, so every bucket may have a count:
    // the search stops after one turn.
    for (uint64_t left = a.count; left > 0; --left, b = following(b, a.count)) {
      const Bucket& bucket = a.buckets[b];
      for (uint32_t k = 0; k < (bucket.meta & kCountMask); ++k)
        if (bucket.keys[k] == id) return bucket.rows[k];
      if (bucket.meta < kPassedOne) return -1;
    }
    return -1;
  }

  MEGALITH_PREFETCHES void prefetch(int64_t id) const {
    const uint64_t hash = slot_hash(id);
    const Array a = owner(hash);
    __builtin_prefetch(a.buckets + high_product(hash, a.count), 1);
  }

  // Makes room for `more` ids. May throw bad_alloc; the contents are unchanged then.
  void prepare(int64_t more) {
    const int64_t wanted = size_ + more;
    if (growing() && wanted > limit(next_count_)) finish_growth();
    if (!growing() && wanted > limit(count_)) {
      uint64_t grown = static_cast<uint64_t>(static_cast<double>(count_) * kGrowth) + 1;
      start_growth(std::max(grown, buckets_for(wanted, kMaxLoad)));
    }
  }

  // Makes room for `total` ids at once, without incremental growth.
  void reserve(int64_t total) {
    if (growing()) finish_growth();
    const uint64_t wanted = buckets_for(total, kReserveLoad);
    if (wanted <= count_) return;
    start_growth(wanted);
    finish_growth();
  }

  // The id must be absent, and prepare() must have made room.
  void insert(int64_t id, int32_t row) {
    place(id, row);
    ++size_;
  }

  // Moves as many buckets as insertions require, and a few more. One per insertion finishes a growth before the next one
  // starts: the new array takes 1.3 times as many more ids as the old one has buckets. After a shrink the new array
  // takes at least 0.32 times as many more ids as the old one has buckets, so four per insertion are enough.
  void advance_for(int64_t inserted, uint64_t more) {
    advance(static_cast<uint64_t>(inserted) * (next_count_ < count_ ? 4 : 1) + more);
  }

  // Moves the ids of this many more home buckets. Returns how many were not needed.
  uint64_t advance(uint64_t buckets) {
    for (; buckets > 0 && growing(); --buckets) {
      move_home(cursor_);
      ++cursor_;
      if (cursor_ == count_) {
        finish_swap();
      } else if (cursor_ % kReleaseEvery == 0) {
        release_moved();
      }
    }
    return buckets;
  }

  // The id must be present.
  void move(int64_t id, int32_t row) {
    const uint64_t hash = slot_hash(id);
    const Array a = owner(hash);
    uint64_t b = high_product(hash, a.count);
    for (uint64_t left = a.count; left > 0; --left, b = following(b, a.count)) {
      Bucket& bucket = a.buckets[b];
      for (uint32_t k = 0; k < (bucket.meta & kCountMask); ++k) {
        if (bucket.keys[k] != id) continue;
        bucket.rows[k] = row;
        return;
      }
    }
  }

  // Starts to move to a smaller array if most of this one is unused. It is not much smaller at once, so that new ids
  // cannot fill it before the move is done; call it again then. Returns whether it started.
  bool shrink() {
    if (growing() || count_ <= 4 * kFirstBuckets || 4 * size_ > limit(count_)) return false;
    start_growth(std::max({kFirstBuckets, count_ / kMostShrink, buckets_for(size_, kShrinkLoad)}));
    return true;
  }

  // Returns the row that the id had, or -1.
  int32_t erase(int64_t id) {
    const uint64_t hash = slot_hash(id);
    const Array a = owner(hash);
    const uint64_t home = high_product(hash, a.count);
    uint64_t b = home;
    for (uint64_t left = a.count; left > 0; --left, b = following(b, a.count)) {
      Bucket& bucket = a.buckets[b];
      for (uint32_t k = 0; k < (bucket.meta & kCountMask); ++k) {
        if (bucket.keys[k] != id) continue;
        const int32_t row = bucket.rows[k];
        take_out(a, home, b, k);
        --size_;
        return row;
      }
      if (bucket.meta < kPassedOne) return -1;
    }
    return -1;
  }

  void reset() {
    Block first(kFirstBuckets * sizeof(Bucket));
    now_ = std::move(first);
    next_ = Block();
    count_ = kFirstBuckets;
    next_count_ = cursor_ = 0;
    size_ = 0;
    released_ = 0;
  }

 private:
  static constexpr uint64_t kFirstBuckets = 16;
  static constexpr uint64_t kReleaseEvery = kHugePage / sizeof(Bucket);

  struct Array {
    Bucket* buckets;
    uint64_t count;
  };

  static Bucket* array(const Block& block) { return reinterpret_cast<Bucket*>(block.data()); }
  static uint64_t following(uint64_t b, uint64_t count) { return b + 1 == count ? 0 : b + 1; }
  static int64_t limit(uint64_t count) {
    return static_cast<int64_t>(static_cast<double>(count) * kBucketSlots * kMaxLoad);
  }
  static uint64_t buckets_for(int64_t ids, double load) {
    return static_cast<uint64_t>(static_cast<double>(ids) / (kBucketSlots * load)) + 1;
  }

  Array owner(uint64_t hash) const {
    if (high_product(hash, count_) >= cursor_) return {array(now_), count_};
    return {array(next_), next_count_};
  }

  void place(int64_t id, int32_t row) {
    const uint64_t hash = slot_hash(id);
    const Array a = owner(hash);
    uint64_t b = high_product(hash, a.count);
    const uint64_t home = b;
    b = put(a, b, id, row);
    if (b < home && growing() && a.count == count_) keep_through(b);
  }

  // Inserts the id into the first bucket from b on that has a free slot; returns that bucket.
  static uint64_t put(const Array& a, uint64_t b, int64_t id, int32_t row) {
    while ((a.buckets[b].meta & kCountMask) == kBucketSlots) {
      a.buckets[b].meta += kPassedOne;
      b = following(b, a.count);
    }
    Bucket& bucket = a.buckets[b];
    const uint32_t k = bucket.meta & kCountMask;
    bucket.keys[k] = id;
    bucket.rows[k] = row;
    ++bucket.meta;
    return b;
  }

  // Removes slot k of bucket b: the last slot moves into the gap, and the counts of the passed buckets decrease.
  void take_out(const Array& a, uint64_t home, uint64_t b, uint32_t k) {
    Bucket& bucket = a.buckets[b];
    const uint32_t last = (bucket.meta & kCountMask) - 1;
    bucket.keys[k] = bucket.keys[last];
    bucket.rows[k] = bucket.rows[last];
    --bucket.meta;
    for (uint64_t p = home; p != b; p = following(p, a.count)) a.buckets[p].meta -= kPassedOne;
  }

  void start_growth(uint64_t buckets) {
    next_ = Block(buckets * sizeof(Bucket));
    if (huge_pages_) next_.prefer_huge_pages();
    next_count_ = buckets;
    cursor_ = 0;
    released_ = 0;
    released_to_ = 0;
    uint64_t last = 0;
    if (array(now_)[count_ - 1].meta >= kPassedOne)
      while (last + 1 < count_ && array(now_)[last].meta >= kPassedOne) ++last;
    keep_through(last);
  }

  // Ids that wrapped around the end are in the first buckets, up to this one; their memory is kept until the old
  // array is freed.
  void keep_through(uint64_t bucket) {
    released_to_ = std::max(released_to_, static_cast<size_t>((bucket + 1) * sizeof(Bucket)));
  }

  // Moves the ids whose home in the old array is bucket `home`.
  void move_home(uint64_t home) {
    const Array a{array(now_), count_};
    uint64_t b = home;
    for (uint64_t left = count_; left > 0; --left, b = following(b, count_)) {
      Bucket& bucket = a.buckets[b];
      const bool more = bucket.meta >= kPassedOne;
      for (uint32_t k = 0; k < (bucket.meta & kCountMask);) {
        const int64_t id = bucket.keys[k];
        const uint64_t hash = slot_hash(id);
        if (high_product(hash, count_) != home) {
          ++k;
          continue;
        }
        const int32_t row = bucket.rows[k];
        take_out(a, home, b, k);
        put({array(next_), next_count_}, high_product(hash, next_count_), id, row);
      }
      if (!more) return;
    }
  }

  void finish_growth() { advance(count_ - cursor_); }

  void finish_swap() {
    now_ = std::move(next_);
    next_ = Block();
    count_ = next_count_;
    next_count_ = cursor_ = 0;
    released_ = 0;
  }

  // The moved buckets are empty: their memory is freed and reads as zeros.
  void release_moved() {
    const size_t to = cursor_ * sizeof(Bucket);
    if (to <= released_to_) return;
    const size_t from = (released_to_ + kHugePage - 1) / kHugePage * kHugePage;
    const size_t end = now_.release(released_to_, to);
    if (end > from) {
      released_ += end - from;
      released_to_ = end;
    }
  }

  size_t touched_next() const {
    return static_cast<size_t>(static_cast<double>(cursor_) / static_cast<double>(count_) *
                               static_cast<double>(next_.bytes()));
  }

  bool huge_pages_;
  Block now_, next_;
  uint64_t count_ = 0, next_count_ = 0;
  uint64_t cursor_ = 0;  // homes below this one are moved
  int64_t size_ = 0;
  size_t released_ = 0, released_to_ = 0;
};

}  // namespace megalith
