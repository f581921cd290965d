// Rows of compressed updates: indices of 12 bits and codes of 2, 4 or 8 bits, each row from a byte of its own.
//
// Two indices fill three bytes, codes fill a byte from its low bits; unused bits are zero.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>

namespace megalith {

constexpr int64_t kMaxChunk = 4096;
constexpr int kSpareBits = 1, kTooHigh = 2, kNotAscending = 4;

inline int64_t index_row_bytes(int64_t keep) { return (3 * keep + 1) / 2; }
inline int64_t code_row_bytes(int64_t keep, int bits) { return (keep * bits + 7) / 8; }

inline uint32_t first_index(const uint8_t* p) { return p[0] | (p[1] & 15u) << 8; }
inline uint32_t second_index(const uint8_t* p) { return p[1] >> 4 | static_cast<uint32_t>(p[2]) << 4; }

// What is wrong with the indices of some rows, which must ascend and be below `size`: an "or" of the constants above.
inline int check_indices(const uint8_t* packed, int64_t rows, int64_t keep, uint32_t size) {
  int found = 0;
  const int64_t width = index_row_bytes(keep);
  for (int64_t r = 0; r < rows; ++r, packed += width) {
    const uint8_t* p = packed;
    int32_t before = -1;
    bool ascends = true;
    for (int64_t k = 0; k + 1 < keep; k += 2, p += 3) {
      const int32_t a = static_cast<int32_t>(first_index(p)), b = static_cast<int32_t>(second_index(p));
      ascends &= a > before && b > a;
      before = b;
    }
    if (keep % 2) {
      const int32_t a = static_cast<int32_t>(first_index(p));
      ascends &= a > before;
      before = a;
      if (p[1] >> 4) found |= kSpareBits;
    }
    if (before >= static_cast<int32_t>(size)) found |= kTooHigh;
    if (!ascends) found |= kNotAscending;
  }
  return found;
}

// Adds how often each code occurs to counts [1 << bits]; returns whether unused bits are set.
inline bool count_codes(const uint8_t* packed, int64_t rows, int64_t keep, int bits, int64_t* counts) {
  int64_t bytes[256] = {};
  const int64_t width = code_row_bytes(keep, bits), full = keep * bits / 8;
  const int each = 8 / bits, mask = (1 << bits) - 1, used = static_cast<int>(keep * bits % 8);
  bool spare = false;
  for (int64_t r = 0; r < rows; ++r, packed += width) {
    for (int64_t b = 0; b < full; ++b) ++bytes[packed[b]];
    for (int at = 0; at < used; at += bits) ++counts[packed[full] >> at & mask];
    spare |= used && packed[full] >> used;
  }
  for (int value = 0; value < 256; ++value)
    for (int place = 0; place < each; ++place) counts[value >> place * bits & mask] += bytes[value];
  return spare;
}

// The rows of one peer; `values` holds the value of each code.
struct SentRows {
  const uint8_t *indices, *codes;
  int64_t keep;
  int bits;
  const float* values;
  int64_t num_values, size;
};

// Adds rows `begin` to `end` to total [rows, size], and 1 to count (which may be null). Returns false at an index or a
// code that is out of range.
template <class Count>
bool add_rows(const SentRows& sent, int64_t begin, int64_t end, float* total, Count* count) {
  const int64_t index_bytes = index_row_bytes(sent.keep), code_bytes = code_row_bytes(sent.keep, sent.bits);
  const int mask = (1 << sent.bits) - 1;
  for (int64_t r = begin; r < end; ++r) {
    const uint8_t *p = sent.indices + r * index_bytes, *codes = sent.codes + r * code_bytes;
    float* sums = total + r * sent.size;
    Count* counts = count ? count + r * sent.size : nullptr;
    for (int64_t k = 0; k < sent.keep; ++k) {
      const int64_t at = k * sent.bits;
      const int code = codes[at / 8] >> at % 8 & mask;
      const int64_t index = k % 2 ? second_index(p) : first_index(p);
      if (k % 2) p += 3;
      if (index >= sent.size || code >= sent.num_values) return false;
      sums[index] += sent.values[code];
      if (counts) ++counts[index];
    }
  }
  return true;
}

// Divides sums by counts above 1.
inline void divide_by_counts(float* total, const uint8_t* count, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, count + i, 8);
    if (!(eight & 0xfefefefefefefefeull)) continue;
    for (int64_t k = i; k < i + 8; ++k)
      if (count[k] > 1) total[k] /= static_cast<float>(count[k]);
  }
  for (; i < n; ++i)
    if (count[i] > 1) total[i] /= static_cast<float>(count[i]);
}
inline void divide_by_counts(float* total, const int32_t* count, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (count[i] > 1) total[i] /= static_cast<float>(count[i]);
}

// The `keep` positions of largest magnitude of a chunk [height, width], ascending, and their values; of equal ones the
// first. `lines` by `columns` of it lie in a matrix whose rows are `stride` floats apart; the rest is padding, which is
// zero.
inline void largest_of_chunk(const float* chunk, int64_t stride, int64_t lines, int64_t columns, int64_t height,
                             int64_t width, int64_t keep, int64_t* indices, float* values) {
  // The bits of a magnitude have the order of its value. Two tables of counts, so that equal neighbours do not wait for
  // each other.
  uint32_t keys[kMaxChunk], candidates[kMaxChunk], counts[2][2048] = {};
  uint32_t* key = keys;
  for (int64_t y = 0; y < height; ++y)
    for (int64_t x = 0; x < width; ++x, ++key) {
      float value = 0.0f;
      if (y < lines && x < columns) value = chunk[y * stride + x];
      std::memcpy(key, &value, 4);
      *key &= 0x7fffffffu;
      ++counts[x & 1][*key >> 20];
    }
  const int64_t size = height * width;
  int64_t above = 0;
  uint32_t bin = 2047;
  for (;; --bin) {
    const int64_t here = int64_t{counts[0][bin]} + counts[1][bin];
    if (above + here >= keep) break;
    above += here;
  }
  int64_t count = 0;
  for (int64_t i = 0; i < size; ++i)
    if (keys[i] >> 20 == bin) candidates[count++] = keys[i];
  int64_t left = keep - above;
  std::nth_element(candidates, candidates + left - 1, candidates + count, std::greater<uint32_t>());
  const uint32_t least = candidates[left - 1];
  left -= std::count_if(candidates, candidates + count, [=](uint32_t k) { return k > least; });
  for (int64_t i = 0, n = 0; n < keep; ++i) {
    if (keys[i] < least || (keys[i] == least && left-- <= 0)) continue;
    const int64_t y = i / width, x = i % width;
    indices[n] = i;
    values[n++] = y < lines && x < columns ? chunk[y * stride + x] : 0.0f;
  }
}

// Subtracts lr * gradient from the lines of a matrix that a chunk covers: `lines` by `columns` of the chunk's top left,
// whose rows have `width` floats. Each operation rounds.
inline void step_chunk(const float* chunk, int64_t width, int64_t lines, int64_t columns, float lr, float* weights,
                       int64_t stride) {
  for (int64_t y = 0; y < lines; ++y, chunk += width, weights += stride)
    for (int64_t x = 0; x < columns; ++x) {
      const float change = chunk[x] * lr;
      weights[x] = weights[x] - change;
    }
}

}  // namespace megalith
