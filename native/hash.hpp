// Integer mixing: the position of an id in the index, and the counter-based generator of initial rows.
//
// Everything here is `static inline` on purpose: this header is compiled once per instruction set (see kernels.hpp),
// and internal linkage keeps the linker from using an AVX2 function in code that must run on older CPUs.
#pragma once

#include <cstdint>

namespace megalith {

// A bijection of 64 bits (the constants are those of the "variant 13" finalizer). Routing between shards uses
// another mixer, so that the ids of one shard are not concentrated in a part of its table.
static constexpr uint64_t kMix1 = 0xbf58476d1ce4e5b9ull, kMix2 = 0x94d049bb133111ebull;
static inline uint64_t mix64(uint64_t x) {
  x ^= x >> 30;
  x *= kMix1;
  x ^= x >> 27;
  x *= kMix2;
  x ^= x >> 31;
  return x;
}

static inline uint64_t high_product(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;

// The hash that places an id in the index. The constant keeps id 0 from hashing to 0.
static inline uint64_t slot_hash(int64_t id) {
  return mix64(static_cast<uint64_t>(id) + kGolden);
}

// The key of the random numbers of one row: a pure function of (seed, table, id).
static inline uint64_t row_key(uint64_t table_key, int64_t id) {
  return mix64(static_cast<uint64_t>(id) ^ table_key);
}

// 24 random bits for each of the two columns that share one 64-bit number.
struct DrawPair {
  uint32_t even, odd;
};
static inline DrawPair draw_pair(uint64_t key, uint32_t column) {
  const uint64_t x = mix64(key + (static_cast<uint64_t>(column >> 1) + 1) * kGolden);
  return {static_cast<uint32_t>(x) >> 8, static_cast<uint32_t>(x >> 32) >> 8};
}

// Returns 24 random bits for a column.
static inline uint32_t draw24(uint64_t key, uint32_t column) {
  const DrawPair pair = draw_pair(key, column);
  return column & 1 ? pair.odd : pair.even;
}

}  // namespace megalith
