// Which rows of a table were touched for one consumer: a bit per row, in words of 64 rows, and a bit per word.
//
// Invariant: if a word has bits, its own bit is set. The reverse does not hold: rows decide, the bits of words only
// locate them. So a row may lose its bit without a look at its neighbours, and the touched rows of a large table are
// found without a walk over all rows. views.hpp has the layout of a chunk and `touch_row`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "memory.hpp"
#include "views.hpp"

namespace megalith {

class TouchedRows {
 public:
  static Block new_chunk(uint32_t shift) { return Block(touched_words(shift) * sizeof(uint64_t)); }
  void reserve(size_t chunks) { blocks_.reserve(chunks), chunks_.reserve(chunks); }
  void push_chunk(Block block) {
    blocks_.push_back(std::move(block));
    chunks_.push_back(reinterpret_cast<uint64_t*>(blocks_.back().data()));
  }
  void pop_chunk() { blocks_.pop_back(), chunks_.pop_back(); }

  uint64_t* const* chunks() const { return chunks_.data(); }
  void touch(uint32_t shift, int32_t row) const { touch_row(chunks_.data(), shift, row); }
  void forget(uint32_t shift, int32_t row) const { word_of(shift, row) &= ~(uint64_t{1} << (row & 63)); }
  bool touched(uint32_t shift, int32_t row) const { return word_of(shift, row) >> (row & 63) & 1; }
  uint64_t& word_of(uint32_t shift, int32_t row) const {
    return chunks_[static_cast<size_t>(row >> shift)][(row & ((1 << shift) - 1)) >> 6];
  }

  // Takes the touched rows before row 64 * `end`, word by word from the last to the first: writes the first row of each
  // word to `first` and its bits to `bits`, and clears them. Stops after `most` words, or after a look at `looks` words
  // of the bits of words, which it counts down. Returns the number of words; `end` is where to continue, 0 at the end.
  int take(uint32_t shift, int64_t& end, int most, int64_t& looks, int32_t* first, uint64_t* bits) const {
    const uint32_t chunk_shift = shift - 6;
    const int64_t chunk_words = int64_t{1} << chunk_shift, step = std::min<int64_t>(64, chunk_words);
    uint64_t* found[kMost];
    int count = 0;
    most = std::min(most, kMost);
    while (end > 0 && count < most && looks-- > 0) {
      const int64_t start = (end - 1) & -step;  // the words that share a word of bits
      uint64_t* chunk = chunks_[static_cast<size_t>(start >> chunk_shift)];
      uint64_t* words = chunk + (start & (chunk_words - 1));
      uint64_t& above = chunk[chunk_words + (start & (chunk_words - 1)) / 64];
      uint64_t left = above;
      if (end - start < 64) left &= (uint64_t{1} << (end - start)) - 1;
      end = start;
      uint64_t rest = left;
      for (; rest && count < most; ++count) {
        const int at = 63 - __builtin_clzll(rest);
        rest ^= uint64_t{1} << at;
        MEGALITH_FETCH(words + at);
        first[count] = static_cast<int32_t>((start + at) * 64);
        found[count] = words + at;
      }
      above &= ~left | rest;
      if (rest) end = start + 64 - __builtin_clzll(rest);
    }
    for (int k = 0; k < count; ++k) {
      bits[k] = *found[k];
      *found[k] = 0;
    }
    return count;
  }

  static constexpr int kMost = 256;  // words that `take` returns at once

 private:
  std::vector<Block> blocks_;
  std::vector<uint64_t*> chunks_;
};

}  // namespace megalith
