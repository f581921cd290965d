// Row storage: chunks that never move, so a row number stays valid for the life of the row.
//
// Rows are not padded. The optimizer state of a row is followed by the time of its last update, so that an update
// writes one place. There are two layouts of a chunk:
//
//   weights fill cache lines evenly   all weights | all states and times | ids | in-use bits
//   otherwise                         per row: weights, state, time      | ids | in-use bits
//
// In the first layout a read touches weights only, and they stay aligned for any size of the state. While a consumer
// tracks changes, a separate block holds one byte of touched flags per row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "views.hpp"

namespace megalith {

// A column of stored rows: a contiguous matrix [n, width] that holds floats `first` .. `first + width` of each row.
struct Column {
  float* data;
  int32_t first;
  int32_t width;
};

struct TableFull : std::length_error {
  using std::length_error::length_error;
};

class Rows {
 public:
  static constexpr int64_t kMaxRows = (int64_t{1} << 31) - 1;
  // Large, so that ids and flags fill huge pages too; only written pages use memory.
  static constexpr size_t kChunkBytes = size_t{64} << 20;
  static constexpr size_t kSmallTable = size_t{4} << 20;

  Rows(std::string table, uint32_t weight_bytes, uint32_t state_bytes, int64_t max_rows)
      : table_(std::move(table)),
        weight_bytes_(weight_bytes),
        state_bytes_(state_bytes),
        max_rows_(max_rows) {
    shift_ = 8;
    while (shift_ < 22 && (size_t{row_size()} << (shift_ + 1)) <= kChunkBytes) ++shift_;
    together_ = weight_bytes % 64 != 0 && 64 % weight_bytes != 0;
  }

  uint32_t row_size() const { return weight_bytes_ + state_bytes_; }
  int64_t used() const { return high_ - static_cast<int64_t>(free_.size()); }
  int64_t high() const { return high_; }  // all row numbers in use are below
  bool tracked() const { return tracking_; }

  RowsView view() const {
    return {weights_.data(), states_.data(), flags_.empty() ? nullptr : flags_.data(),
            shift_,          stride(),       state_stride(), state_bytes_};
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
    if (static_cast<size_t>(high_ + fresh) * row_size() > kSmallTable) {
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
    id_of(row) = id;
    live_word(row) |= live_bit(row);
    return row;
  }

  // Makes room to free this many rows without an allocation.
  void prepare_give_back(int64_t n) {
    const size_t wanted = free_.size() + static_cast<size_t>(n);
    if (wanted > free_.capacity()) free_.reserve(std::max(wanted, 2 * free_.capacity()));
  }

  void give_back(int32_t row) {
    free_.push_back(row);
    live_word(row) &= ~live_bit(row);
    if (tracked()) flag(row) = 0;
  }

  bool live(int32_t row) const {
    return row >= 0 && row < high_ && (live_[row >> shift_][(row & mask()) >> 6] & live_bit(row));
  }

  float* weights(int32_t row) const {
    return reinterpret_cast<float*>(weights_[row >> shift_] + int64_t{row & mask()} * stride());
  }
  float* state(int32_t row) const {
    return reinterpret_cast<float*>(states_[row >> shift_] + int64_t{row & mask()} * state_stride());
  }
  void copy_out(int32_t row, float* raw) const {
    std::memcpy(raw, weights(row), weight_bytes_);
    std::memcpy(raw + weight_bytes_ / 4, state(row), state_bytes_);
  }
  // Copies the floats of a row from and to position `at` of columns. A column is within weights or within state.
  void copy_out(int32_t row, const std::vector<Column>& columns, int64_t at) const {
    for (const Column& c : columns)
      std::memcpy(c.data + at * c.width, floats_from(row, c.first), static_cast<size_t>(c.width) * 4);
  }
  void copy_in(int32_t row, const std::vector<Column>& columns, int64_t at) {
    for (const Column& c : columns)
      std::memcpy(floats_from(row, c.first), c.data + at * c.width, static_cast<size_t>(c.width) * 4);
  }
  int64_t& id_of(int32_t row) const { return ids_[row >> shift_][row & mask()]; }
  uint32_t& time_of(int32_t row) const {
    return *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(state(row)) + state_bytes_);
  }
  uint8_t& flag(int32_t row) const { return flags_[row >> shift_][row & mask()]; }

  // A word of 64 rows: one bit for each row in use, or for each row flagged with `bit`. Rows never used have none.
  uint64_t live_of(size_t word) const {
    const int32_t row = static_cast<int32_t>(word * 64);
    return live_[row >> shift_][(row & mask()) >> 6];
  }
  uint64_t flagged_of(size_t word, uint8_t bit) const {
    const uint8_t* flags = &flag(static_cast<int32_t>(word * 64));
    uint64_t bits = 0;
    for (int i = 0; i < 64; ++i) bits |= uint64_t{(flags[i] & bit) != 0} << i;
    return bits;
  }
  void clear_flags(size_t word, uint8_t bit) const {
    uint8_t* flags = &flag(static_cast<int32_t>(word * 64));
    for (int i = 0; i < 64; ++i) flags[i] &= static_cast<uint8_t>(~bit);
  }

  void start_tracking() {
    if (tracking_) return;
    std::vector<Block> blocks;
    std::vector<uint8_t*> flags;
    for (size_t c = 0; c < chunks_.size(); ++c) {
      blocks.emplace_back(size_t{1} << shift_);
      flags.push_back(reinterpret_cast<uint8_t*>(blocks.back().data()));
    }
    flag_blocks_ = std::move(blocks);
    flags_ = std::move(flags);
    tracking_ = true;
  }

  void stop_tracking() {
    flags_.clear();
    flag_blocks_.clear();
    tracking_ = false;
  }

  // Bytes in use: weights and state, and everything else.
  size_t row_bytes() const { return static_cast<size_t>(high_) * row_size(); }
  size_t side_bytes() const {
    size_t per_row = sizeof(int64_t) + sizeof(uint32_t) + (tracking_ ? 1 : 0);
    return static_cast<size_t>(high_) * per_row + static_cast<size_t>(high_ + 7) / 8 +
           free_.capacity() * sizeof(int32_t);
  }

  void clear() {
    const bool tracking = tracking_;
    *this = Rows(std::move(table_), weight_bytes_, state_bytes_, max_rows_);
    tracking_ = tracking;
  }

 private:
  float* floats_from(int32_t row, int32_t first) const {
    const int32_t weights_floats = static_cast<int32_t>(weight_bytes_ / 4);
    return first < weights_floats ? weights(row) + first : state(row) + (first - weights_floats);
  }
  uint32_t timed_state() const { return state_bytes_ + static_cast<uint32_t>(sizeof(uint32_t)); }
  uint32_t stride() const { return together_ ? weight_bytes_ + timed_state() : weight_bytes_; }
  uint32_t state_stride() const { return together_ ? weight_bytes_ + timed_state() : timed_state(); }
  int32_t mask() const { return static_cast<int32_t>((1u << shift_) - 1); }
  uint64_t& live_word(int32_t row) { return live_[row >> shift_][(row & mask()) >> 6]; }
  static uint64_t live_bit(int32_t row) { return uint64_t{1} << (row & 63); }

  void add_chunk() {
    const size_t n = size_t{1} << shift_;
    const size_t rows = (n * (weight_bytes_ + timed_state()) + 63) / 64 * 64;
    Block block(rows + n * sizeof(int64_t) + n / 8);
    Block flags(tracking_ ? n : 0);
    const size_t wanted = chunks_.size() + 1;
    weights_.reserve(wanted), states_.reserve(wanted), ids_.reserve(wanted), live_.reserve(wanted);
    flags_.reserve(wanted), chunks_.reserve(wanted), flag_blocks_.reserve(wanted);
    char* p = block.data();
    weights_.push_back(p);
    states_.push_back(p + (together_ ? weight_bytes_ : n * weight_bytes_));
    ids_.push_back(reinterpret_cast<int64_t*>(p + rows));
    live_.push_back(reinterpret_cast<uint64_t*>(p + rows + n * sizeof(int64_t)));
    chunks_.push_back(std::move(block));
    if (tracking_) {
      flags_.push_back(reinterpret_cast<uint8_t*>(flags.data()));
      flag_blocks_.push_back(std::move(flags));
    }
  }

  std::string table_;
  uint32_t weight_bytes_, state_bytes_;
  int64_t max_rows_;
  uint32_t shift_;
  bool together_;
  int64_t high_ = 0;
  bool tracking_ = false;
  size_t huge_ = 0;  // number of chunks that requested huge pages
  std::vector<int32_t> free_;
  std::vector<Block> chunks_, flag_blocks_;
  std::vector<char*> weights_, states_;
  std::vector<int64_t*> ids_;
  std::vector<uint64_t*> live_;
  std::vector<uint8_t*> flags_;
};

}  // namespace megalith
