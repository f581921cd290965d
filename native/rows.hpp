// Row storage: chunks that never move, so a row number stays valid for the life of the row.
//
// Rows are not padded. Weights are stored in the precision of their segment, without gaps except before a segment of
// float32, which begins at a multiple of four bytes; state and everything else is 32 bits wide. The optimizer state of a row is followed by the time of its last update, so that an update
// writes one place; in a counted table the number of updates and the step of the last one follow. There are two layouts
// of a chunk:
//
//   weights fill cache lines evenly   all weights | all states and times | ids | in-use bits
//   otherwise                         per row: weights, state, time      | ids | in-use bits
//
// In the first layout a read touches weights only, and they stay aligned for any size of the state. Touched rows are
// kept apart, for each consumer that tracks changes (touched.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"
#include "narrow.hpp"
#include "touched.hpp"
#include "views.hpp"

namespace megalith {

// The layout of the weights of a row.
class StoredWeights {
 public:
  StoredWeights(const std::vector<SegmentPlan>& segments, const Kernels* kernels) : kernels_(kernels) {
    for (const SegmentPlan& s : segments) {
      const int32_t width = bytes_of(s.precision);
      const int32_t byte = (bytes_ + width - 1) / width * width;
      const bool stochastic = s.stochastic && width == 2;
      WeightRun* last = runs_.empty() ? nullptr : &runs_.back();
      if (last && last->precision == s.precision && last->stochastic == stochastic)
        last->count += s.dim;
      else
        runs_.push_back({dim_, s.dim, byte, s.precision, stochastic});
      one_precision_ &= s.precision == segments[0].precision;
      dim_ += s.dim;
      bytes_ = byte + s.dim * width;
    }
    bytes_ = (bytes_ + 3) / 4 * 4;
  }

  int32_t dim() const { return dim_; }
  uint32_t bytes() const { return static_cast<uint32_t>(bytes_); }
  const WeightRun* runs() const { return runs_.data(); }
  int32_t num_runs() const { return static_cast<int32_t>(runs_.size()); }
  bool one_precision() const { return one_precision_; }
  bool wide() const { return one_precision_ && runs_[0].precision == Precision::float32; }

  void widen(const char* stored, float* weights) const {
    if (wide())
      std::memcpy(weights, stored, static_cast<size_t>(dim_) * 4);
    else
      kernels_->widen(runs(), num_runs(), stored, weights);
  }
  void narrow(const float* weights, char* stored) const {
    if (wide())
      std::memcpy(stored, weights, static_cast<size_t>(dim_) * 4);
    else
      kernels_->narrow(runs(), num_runs(), weights, stored);
  }

 private:
  std::vector<WeightRun> runs_;
  const Kernels* kernels_;
  int32_t dim_ = 0, bytes_ = 0;
  bool one_precision_ = true;
};

// A column of rows: a contiguous matrix [n, width] that holds floats `first` .. `first + width` of each row. The
// weights are the first column; the others are within the state.
struct Column {
  float* data;
  int32_t first;
  int32_t width;
};

// The time of the last update of a row; in a counted table also the number of updates and the step of the last one.
struct Marks {
  uint32_t time, count, step;
};

// Complete rows in contiguous columns. Without `counts` and `steps` these are left out.
struct RowColumns {
  int64_t* ids;
  std::vector<Column> columns;
  int64_t* times;
  int64_t* counts;
  int64_t* steps;

  void put(const Marks& marks, int64_t at) const {
    times[at] = marks.time;
    if (counts) counts[at] = marks.count;
    if (steps) steps[at] = marks.step;
  }
  Marks get(int64_t at) const {
    return {static_cast<uint32_t>(times[at]), static_cast<uint32_t>(counts ? counts[at] : 0),
            static_cast<uint32_t>(steps ? steps[at] : 0)};
  }
};

struct TableFull : std::length_error {
  using std::length_error::length_error;
};

class Rows {
 public:
  static constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;
  // Large, so that ids fill huge pages too; only written pages use memory.
  static constexpr size_t kChunkBytes = size_t{64} << 20;
  static constexpr size_t kSmallTable = size_t{4} << 20;

  static constexpr int64_t kMinCompact = 4096;

  Rows(std::string table, StoredWeights stored, uint32_t state_bytes, bool counted, int64_t max_rows,
       bool huge_pages = true)
      : table_(std::move(table)),
        stored_(std::move(stored)),
        weight_bytes_(stored_.bytes()),
        state_bytes_(state_bytes),
        counted_(counted),
        max_rows_(max_rows),
        huge_pages_(huge_pages) {
    shift_ = 8;
    while (shift_ < 22 && (size_t{row_size()} << (shift_ + 1)) <= kChunkBytes) ++shift_;
    together_ = weight_bytes_ % 64 != 0 && 64 % weight_bytes_ != 0;
  }

  uint32_t row_size() const { return weight_bytes_ + state_bytes_; }
  int64_t used() const { return used_; }
  int64_t high() const { return high_; }  // all row numbers in use are below

  RowsView view() const {
    return {weights_.data(), states_.data(), shift_, stride(), state_stride(), state_bytes_, ids_.data(), weight_bytes_,
            counted_};
  }

  // Makes room for `more` rows. May throw; the contents are unchanged then.
  void prepare(int64_t more) {
    const int64_t fresh = more - static_cast<int64_t>(free_.size());
    if (fresh <= 0) return;
    if (high_ + fresh > max_rows_)
      throw TableFull("table '" + table_ + "' holds " + std::to_string(used()) + " rows and cannot take " +
                      std::to_string(more) + " more: a shard holds at most " +
                      std::to_string(max_rows_) + " rows; spread the table over more shards");
    const size_t chunks = static_cast<size_t>((high_ + fresh + mask()) >> shift_);
    while (chunks_.size() < chunks) add_chunk();
    // A small table stays on small pages.
    if (huge_pages_ && static_cast<size_t>(high_ + fresh) * row_size() > kSmallTable) {
      for (; huge_ < chunks_.size(); ++huge_) chunks_[huge_].prefer_huge_pages();
    }
  }

  // prepare() must have made room.
  int32_t take(int64_t id) {
    int32_t row;
    if (free_.empty()) {
      row = static_cast<int32_t>(high_++);
    } else {
      row = free_.back();
      free_.pop_back();
    }
    ++used_;
    id_of(row) = id;
    live_word(row) |= live_bit(row);
    if (counted_) count_of(row) = step_of(row) = 0;
    return row;
  }

  // Makes room to free this many rows without an allocation.
  void prepare_give_back(int64_t n) {
    const size_t wanted = free_.size() + static_cast<size_t>(n);
    const size_t most = std::max(wanted, static_cast<size_t>(high_));
    if (wanted > free_.capacity()) free_.reserve(std::min(most, std::max(wanted, 2 * free_.capacity())));
  }

  void give_back(int32_t row) {
    --used_;
    if (boundary_ == 0 || row < boundary_) free_.push_back(row);  // compaction removes the places after it
    live_word(row) &= ~live_bit(row);
    for_consumers([&](const TouchedRows& t) { t.forget(shift_, row); });
  }

  bool live(int32_t row) const {
    return row >= 0 && row < high_ && (live_[row >> shift_][(row & mask()) >> 6] & live_bit(row));
  }

  const StoredWeights& stored() const { return stored_; }
  char* weights(int32_t row) const { return weights_[row >> shift_] + int64_t{row & mask()} * stride(); }
  void read_weights(int32_t row, float* out) const { stored_.widen(weights(row), out); }
  void write_weights(int32_t row, const float* values) const { stored_.narrow(values, weights(row)); }
  float* state(int32_t row) const {
    return reinterpret_cast<float*>(states_[row >> shift_] + int64_t{row & mask()} * state_stride());
  }
  // Copies weights, as they are stored, and state: row_size() bytes.
  void copy_out(int32_t row, char* raw) const {
    std::memcpy(raw, weights(row), weight_bytes_);
    std::memcpy(raw + weight_bytes_, state(row), state_bytes_);
  }
  // Copies a row from and to position `at` of columns. The time is read by the caller.
  void copy_out(int32_t row, const RowColumns& out, int64_t at) const {
    out.ids[at] = id_of(row);
    out.put(marks_of(row), at);
    copy_floats(row, out.columns, at);
  }
  void copy_floats(int32_t row, const std::vector<Column>& columns, int64_t at) const {
    copy_floats(weights(row), state(row), columns, at);
  }
  void copy_floats(const char* weights, const void* state, const std::vector<Column>& columns, int64_t at) const {
    for (const Column& c : columns) {
      if (c.first < stored_.dim())
        stored_.widen(weights, c.data + at * c.width);
      else
        std::memcpy(c.data + at * c.width, static_cast<const char*>(state) + state_byte(c), column_bytes(c));
    }
  }
  void copy_in(int32_t row, const RowColumns& in, int64_t at) {
    const Marks marks = in.get(at);
    if (counted_ && in.counts) count_of(row) = marks.count, step_of(row) = marks.step;
    for (const Column& c : in.columns) {
      if (c.first < stored_.dim())
        write_weights(row, c.data + at * c.width);
      else
        std::memcpy(reinterpret_cast<char*>(state(row)) + state_byte(c), c.data + at * c.width, column_bytes(c));
    }
  }
  Marks marks_of(int32_t row) const {
    return {time_of(row), counted_ ? count_of(row) : 0, counted_ ? step_of(row) : 0};
  }
  int64_t& id_of(int32_t row) const { return ids_[row >> shift_][row & mask()]; }
  uint32_t& time_of(int32_t row) const {
    return *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(state(row)) + state_bytes_);
  }
  // Only in a counted table.
  bool counted() const { return counted_; }
  uint32_t& count_of(int32_t row) const { return (&time_of(row))[1]; }
  uint32_t& step_of(int32_t row) const { return (&time_of(row))[2]; }

  // A word of 64 rows: one bit for each row in use. Rows never used have none.
  uint64_t live_of(size_t word) const {
    const int32_t row = static_cast<int32_t>(word * 64);
    return live_[row >> shift_][(row & mask()) >> 6];
  }

  // ---- touched rows of numbered consumers; see touched.hpp

  bool tracked(int consumer) const { return tracked_ >> consumer & 1; }
  bool tracked() const { return tracked_ != 0; }

  void track(int consumer) {
    if (tracked(consumer)) return;
    TouchedRows touched;
    for (size_t c = 0; c < chunks_.size(); ++c) touched.push_chunk(TouchedRows::new_chunk(shift_));
    touched_[consumer] = std::move(touched);
    tracked_ = static_cast<uint8_t>(tracked_ | 1u << consumer);
  }
  void untrack(int consumer) {
    tracked_ = static_cast<uint8_t>(tracked_ & ~(1u << consumer));
    touched_[consumer] = TouchedRows();
  }
  void touch(int32_t row) const {
    for_consumers([&](const TouchedRows& t) { t.touch(shift_, row); });
  }
  void touch(int consumer, int32_t row) const { touched_[consumer].touch(shift_, row); }
  // The touched rows of a word of 64 rows; zero: none of them is touched any longer.
  uint64_t& touched_of(int consumer, size_t word) const {
    return touched_[consumer].word_of(shift_, static_cast<int32_t>(word * 64));
  }
  // See TouchedRows::take.
  int take_touched(int consumer, int64_t& end, int most, int64_t& looks, int32_t* first, uint64_t* bits) const {
    end = std::min(end, (high_ + 63) / 64);
    return touched_[consumer].take(shift_, end, most, looks, first, bits);
  }
  // The chunks of each consumer, for kernels. Returns the number of consumers.
  int32_t touched_chunks(uint64_t* const** chunks) const {
    int32_t count = 0;
    for_consumers([&](const TouchedRows& t) { chunks[count++] = t.chunks(); });
    return count;
  }

  // Moving rows into free places is worth the time.
  bool sparse() const { return high_ > kMinCompact && 2 * used() < high_; }

  // Moves rows from the end into free places, and returns memory after the last row. Visits at most `limit` places;
  // returns whether it finished. `moved(id, row)` is called for each moved row.
  template <class Moved>
  bool compact(int64_t limit, Moved&& moved) {
    if (boundary_ == 0) {
      boundary_ = std::max<int64_t>(1, used());
      keep_free_below(boundary_);
    }
    while (limit > 0 && high_ > boundary_) {
      const int32_t last = static_cast<int32_t>(high_ - 1);
      if (live(last)) {
        if (free_.empty()) break;
        move(last, free_.back());
        moved(id_of(last), free_.back());
        free_.pop_back();
      }
      --high_;
      --limit;
    }
    if (limit == 0) return false;
    // If new rows took all free places before the boundary, the places after it stay.
    free_.reserve(static_cast<size_t>(high_ - used()));
    for (int64_t row = high_ - 1; row >= boundary_; --row)
      if (!live(static_cast<int32_t>(row))) free_.push_back(static_cast<int32_t>(row));
    free_.shrink_to_fit();
    boundary_ = 0;
    drop_chunks();
    return true;
  }
  bool compacting() const { return boundary_ != 0; }

  // Bytes of one row apart from weights and state.
  size_t side_bytes() const {
    return sizeof(int64_t) + sizeof(uint32_t) * (counted_ ? 3 : 1);
  }
  size_t weight_bytes() const { return weight_bytes_; }
  size_t state_bytes() const { return state_bytes_; }
  // Bytes of all rows together: a bit for each row in use, free places, and the touched rows of consumers.
  size_t shared_bytes() const {
    const size_t rows = static_cast<size_t>(high_), words = (rows + 63) / 64;
    size_t touched = 0;
    for_consumers([&](const TouchedRows&) { touched += (words + (words + 63) / 64) * sizeof(uint64_t); });
    return (rows + 7) / 8 + touched + free_.capacity() * sizeof(int32_t);
  }

  void clear() {
    const uint8_t tracked = tracked_;
    *this = Rows(std::move(table_), std::move(stored_), state_bytes_, counted_, max_rows_, huge_pages_);
    tracked_ = tracked;
  }

 private:
  template <class Work>
  void for_consumers(Work&& work) const {
    for (unsigned left = tracked_; left; left &= left - 1) work(touched_[__builtin_ctz(left)]);
  }
  size_t state_byte(const Column& c) const { return static_cast<size_t>(c.first - stored_.dim()) * 4; }
  static size_t column_bytes(const Column& c) { return static_cast<size_t>(c.width) * 4; }
  uint32_t timed_state() const {
    return state_bytes_ + static_cast<uint32_t>(sizeof(uint32_t)) * (counted_ ? 3 : 1);
  }
  uint32_t stride() const { return together_ ? weight_bytes_ + timed_state() : weight_bytes_; }
  uint32_t state_stride() const { return together_ ? weight_bytes_ + timed_state() : timed_state(); }
  int32_t mask() const { return static_cast<int32_t>((1u << shift_) - 1); }
  uint64_t& live_word(int32_t row) { return live_[row >> shift_][(row & mask()) >> 6]; }
  static uint64_t live_bit(int32_t row) { return uint64_t{1} << (row & 63); }

  void keep_free_below(int64_t row) {
    free_.erase(std::remove_if(free_.begin(), free_.end(), [row](int32_t f) { return f >= row; }), free_.end());
  }

  void move(int32_t from, int32_t to) {
    std::memcpy(weights(to), weights(from), weight_bytes_);
    std::memcpy(state(to), state(from), timed_state());
    id_of(to) = id_of(from);
    live_word(to) |= live_bit(to);
    live_word(from) &= ~live_bit(from);
    for_consumers([&](const TouchedRows& t) {
      if (t.touched(shift_, from)) t.touch(shift_, to);
      t.forget(shift_, from);
    });
  }

  // Returns the memory of chunks without rows.
  void drop_chunks() {
    const size_t chunks = static_cast<size_t>((high_ + mask()) >> shift_);
    while (chunks_.size() > chunks) {
      chunks_.pop_back();
      weights_.pop_back(), states_.pop_back(), ids_.pop_back(), live_.pop_back();
      for (int c = 0; c < kMaxConsumers; ++c)
        if (tracked(c)) touched_[c].pop_chunk();
    }
    huge_ = std::min(huge_, chunks_.size());
  }

  void add_chunk() {
    const size_t n = size_t{1} << shift_;
    const size_t rows = (n * (weight_bytes_ + timed_state()) + 63) / 64 * 64;
    Block block(rows + n * sizeof(int64_t) + n / 8);
    Block touched[kMaxConsumers];
    const size_t wanted = chunks_.size() + 1;
    weights_.reserve(wanted), states_.reserve(wanted), ids_.reserve(wanted), live_.reserve(wanted);
    chunks_.reserve(wanted);
    for (int c = 0; c < kMaxConsumers; ++c) {
      if (!tracked(c)) continue;
      touched[c] = TouchedRows::new_chunk(shift_);
      touched_[c].reserve(wanted);
    }
    char* p = block.data();
    weights_.push_back(p);
    states_.push_back(p + (together_ ? weight_bytes_ : n * weight_bytes_));
    ids_.push_back(reinterpret_cast<int64_t*>(p + rows));
    live_.push_back(reinterpret_cast<uint64_t*>(p + rows + n * sizeof(int64_t)));
    chunks_.push_back(std::move(block));
    for (int c = 0; c < kMaxConsumers; ++c)
      if (tracked(c)) touched_[c].push_chunk(std::move(touched[c]));
  }

  std::string table_;
  StoredWeights stored_;
  uint32_t weight_bytes_, state_bytes_;
  bool counted_;
  int64_t max_rows_;
  bool huge_pages_;
  uint32_t shift_;
  bool together_;
  int64_t high_ = 0, used_ = 0;
  int64_t boundary_ = 0;  // rows from here on are being moved; 0: no compaction in progress
  uint8_t tracked_ = 0;  // a bit for each consumer
  size_t huge_ = 0;  // number of chunks that requested huge pages
  std::vector<int32_t> free_;
  std::vector<Block> chunks_;
  std::vector<char*> weights_, states_;
  std::vector<int64_t*> ids_;
  std::vector<uint64_t*> live_;
  TouchedRows touched_[kMaxConsumers];
};

}  // namespace megalith
