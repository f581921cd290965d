// crc32c, the checksum of TFRecord files: the reference of records.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#endif

namespace megalith {

#if defined(__SSE4_2__)

inline uint32_t crc32c(const void* data, size_t n) {
  const unsigned char* p = static_cast<const unsigned char*>(data);
  uint64_t crc = 0xffffffffu;
  for (; n >= 8; n -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, sizeof word);
    crc = _mm_crc32_u64(crc, word);
  }
  uint32_t rest = static_cast<uint32_t>(crc);
  for (; n > 0; --n, ++p) rest = _mm_crc32_u8(rest, *p);
  return rest ^ 0xffffffffu;
}

#else

struct Crc32cTable {
  uint32_t of[256];
  Crc32cTable() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
      of[byte] = crc;
    }
  }
};

inline uint32_t crc32c(const void* data, size_t n) {
  static const Crc32cTable table;
  const unsigned char* p = static_cast<const unsigned char*>(data);
  uint32_t crc = 0xffffffffu;
  for (; n > 0; --n, ++p) crc = crc >> 8 ^ table.of[(crc ^ *p) & 0xff];
  return crc ^ 0xffffffffu;
}

#endif

// The masked form that TFRecord files store, so that a checksum of data with checksums stays useful.
inline uint32_t masked_crc32c(const void* data, size_t n) {
  const uint32_t crc = crc32c(data, n);
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

}  // namespace megalith
