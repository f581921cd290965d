// Strings to ids: xxHash64, the reference of ops/ids.py.
//
// Words are read in native byte order, so the hash is the published one on little-endian machines
// only; torch supports no others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace megalith {

namespace xxh {

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87ull;
constexpr uint64_t kPrime2 = 0xc2b2ae3d27d4eb4full;
constexpr uint64_t kPrime3 = 0x165667b19e3779f9ull;
constexpr uint64_t kPrime4 = 0x85ebca77c2b2ae63ull;
constexpr uint64_t kPrime5 = 0x27d4eb2f165667c5ull;

inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

template <class Word>
inline uint64_t load(const unsigned char* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

inline uint64_t absorb(uint64_t lane, uint64_t word) {
  return rotate(lane + word * kPrime2, 31) * kPrime1;
}

}  // namespace xxh

inline uint64_t xxhash64(const void* data, size_t n, uint64_t seed) {
  using namespace xxh;
  const unsigned char* p = static_cast<const unsigned char*>(data);
  size_t left = n;
  uint64_t hash = seed + kPrime5;
  if (left >= 32) {
    uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; left >= 32; left -= 32)
      for (uint64_t& lane : lanes) {
        lane = absorb(lane, load<uint64_t>(p));
        p += 8;
      }
    hash = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
    for (uint64_t lane : lanes) hash = (hash ^ absorb(0, lane)) * kPrime1 + kPrime4;
  }
  hash += n;
  for (; left >= 8; left -= 8, p += 8)
    hash = rotate(hash ^ absorb(0, load<uint64_t>(p)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    hash = rotate(hash ^ load<uint32_t>(p) * kPrime1, 23) * kPrime2 + kPrime3;
    left -= 4;
    p += 4;
  }
  for (; left > 0; --left, ++p) hash = rotate(hash ^ *p * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

// String i is bytes[offsets[i]] .. bytes[offsets[i + 1]]; the caller has checked the offsets.
inline void hash_strings(const char* bytes, const int64_t* offsets, int64_t n, uint64_t seed,
                         int64_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    const size_t length = static_cast<size_t>(offsets[i + 1] - offsets[i]);
    out[i] = static_cast<int64_t>(xxhash64(bytes + offsets[i], length, seed));
  }
}

}  // namespace megalith
