// Decompression of raw Snappy: the reference of snappy.py. The input is untrusted: nothing outside `in` and `out` is read
// or written, whatever it contains.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace megalith {

namespace snappy {

enum class Result { good, no_length, cut_off, too_long, bad_copy, too_short };

// Reads the length of the decompressed bytes, a varint of at most 32 bits; `at` becomes the start of the elements.
inline Result read_length(const uint8_t* in, size_t n, uint64_t& length, size_t& begin) {
  length = 0;
  for (size_t k = 0; k < 5 && k < n; ++k) {
    length |= static_cast<uint64_t>(in[k] & 0x7f) << 7 * k;
    if (in[k] < 0x80) {
      begin = k + 1;
      return length >> 32 ? Result::no_length : Result::good;
    }
  }
  return Result::no_length;
}

inline uint64_t little_endian(const uint8_t* in, size_t n) {
  uint64_t value = 0;
  for (size_t k = 0; k < n; ++k) value |= static_cast<uint64_t>(in[k]) << 8 * k;
  return value;
}

// Copies bytes that may overlap: the copy repeats the last `offset` bytes as often as necessary.
inline void repeat(uint8_t* to, uint64_t offset, uint64_t size) {
  if (offset >= size) {
    std::memcpy(to, to - offset, size);
    return;
  }
  for (uint64_t k = 0; k < size; ++k) to[k] = to[k - offset];
}

// Decodes elements from in[at] on, which must fill exactly `length` bytes of out. On an error `at` is its position.
inline Result unpack(const uint8_t* in, size_t n, size_t& at, uint8_t* out, uint64_t length) {
  uint64_t done = 0;
  while (at < n) {
    const uint8_t tag = in[at];
    uint64_t size = (tag >> 2) + 1u;
    if ((tag & 3) == 0) {
      const size_t extra = size > 60 ? size - 60 : 0;
      if (extra > n - at - 1) return Result::cut_off;
      if (extra) size = little_endian(in + at + 1, extra) + 1;
      if (size > n - at - 1 - extra) return Result::cut_off;
      if (size > length - done) return Result::too_long;
      std::memcpy(out + done, in + at + 1 + extra, size);
      at += 1 + extra + size;
    } else {
      const size_t extra = (tag & 3) == 3 ? 4 : tag & 3;
      if (extra > n - at - 1) return Result::cut_off;
      uint64_t offset = little_endian(in + at + 1, extra);
      if ((tag & 3) == 1) {
        size = (tag >> 2 & 7) + 4u;
        offset |= static_cast<uint64_t>(tag >> 5) << 8;
      }
      if (offset == 0 || offset > done) return Result::bad_copy;
      if (size > length - done) return Result::too_long;
      repeat(out + done, offset, size);
      at += 1 + extra;
    }
    done += size;
  }
  return done == length ? Result::good : Result::too_short;
}

}  // namespace snappy

}  // namespace megalith
