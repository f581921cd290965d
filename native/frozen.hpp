// Read-only rows of a file: ids sorted by hash, and their rows.
//
// `buckets` divides the ids by the leading bits of the hash; a bucket holds a few ids, which are compared in turn.
// Everything may be in a mapped file: a lookup reads only the pages that it needs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hash.hpp"
#include "narrow.hpp"

namespace megalith {

enum class Stored : int { float32, float16, int8, bit };
constexpr int kStoredKinds = 4;

// Some columns of a row that are stored in one way. The parts of a row are concatenated without padding.
struct StoredPart {
  Stored stored;
  int64_t dim;

  int64_t bytes() const {
    switch (stored) {
      case Stored::float32: return 4 * dim;
      case Stored::float16: return 2 * dim;
      case Stored::int8: return dim;
      default: return (dim + 7) / 8;  // column c is bit c % 8 of byte c / 8
    }
  }

  // steps: per column, the value of 1 for int8; for bits the value of a set bit, whose negative is that of another.
  void decode(const char* from, const float* steps, float* out) const {
    if (stored == Stored::float32) {
      std::memcpy(out, from, static_cast<size_t>(dim) * 4);
    } else if (stored == Stored::float16) {
      for (int64_t c = 0; c < dim; ++c) {
        uint16_t half;
        std::memcpy(&half, from + 2 * c, 2);
        out[c] = half_to_float(half);
      }
    } else if (stored == Stored::int8) {
      for (int64_t c = 0; c < dim; ++c) out[c] = static_cast<float>(static_cast<int8_t>(from[c])) * steps[c];
    } else {
      for (int64_t c = 0; c < dim; ++c)
        out[c] = (static_cast<uint8_t>(from[c / 8]) >> (c % 8)) & 1 ? steps[c] : -steps[c];
    }
  }
};

// Decodes the parts of a row, which begin at `from`.
inline void decode_parts(const StoredPart* parts, int64_t num_parts, const float* steps, const char* from, float* out) {
  for (int64_t p = 0; p < num_parts; ++p) {
    parts[p].decode(from, steps, out);
    from += parts[p].bytes();
    steps += parts[p].dim;
    out += parts[p].dim;
  }
}

struct FrozenRows {
  const int64_t* ids;
  int64_t num_ids;
  const int64_t* buckets;  // [2^bits + 1]
  const void* rows;
  const StoredPart* parts;
  int64_t num_parts;
  const float* steps;  // per column, see StoredPart
  int64_t dim;         // columns of all parts
  int64_t row_bytes;   // bytes of all parts
  int bits;

  uint64_t bucket(int64_t id) const { return bits ? slot_hash(id) >> (64 - bits) : 0; }

  // Requests the first ids of a bucket. Its bound may be anything by now, so it is not added to a pointer.
  void prefetch_ids(uint64_t bucket) const {
    const uintptr_t first = reinterpret_cast<uintptr_t>(ids) + 8 * static_cast<uint64_t>(buckets[bucket]);
    __builtin_prefetch(reinterpret_cast<const void*>(first));
  }

  // The file may have been overwritten since its buckets were checked, so their bounds are checked again.
  int64_t find_in(uint64_t bucket, int64_t id) const {
    const int64_t end = std::min(buckets[bucket + 1], num_ids);
    for (int64_t at = std::max<int64_t>(buckets[bucket], 0); at < end; ++at)
      if (ids[at] == id) return at;
    return -1;
  }

  void decode(int64_t at, float* out) const {
    decode_parts(parts, num_parts, steps, static_cast<const char*>(rows) + at * row_bytes, out);
  }

  // Fills out[i] with the row of queries[i], or zeros if it has none; leaves out[i] unchanged if skip[i] is not 0.
  // Returns how many queries had no row. Three passes over a block let its cache misses overlap.
  int64_t read(const int64_t* queries, int64_t n, const uint8_t* skip, float* out) const {
    constexpr int64_t kBlock = 32;
    uint64_t in[kBlock];
    int64_t found[kBlock], missing = 0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t size = std::min(kBlock, n - begin);
      for (int64_t i = 0; i < size; ++i) {
        in[i] = bucket(queries[begin + i]);
        __builtin_prefetch(buckets + in[i]);
      }
      for (int64_t i = 0; i < size; ++i) prefetch_ids(in[i]);
      for (int64_t i = 0; i < size; ++i) {
        found[i] = find_in(in[i], queries[begin + i]);
        if (found[i] >= 0) __builtin_prefetch(static_cast<const char*>(rows) + found[i] * row_bytes);
      }
      for (int64_t i = 0; i < size; ++i) {
        if (skip && skip[begin + i]) continue;
        float* to = out + (begin + i) * dim;
        if (found[i] >= 0) {
          decode(found[i], to);
        } else {
          std::fill(to, to + dim, 0.0f);
          ++missing;
        }
      }
    }
    return missing;
  }
};

// Returns whether the buckets ascend within 0 .. n, so that no lookup reads outside the ids.
inline bool buckets_fit(const int64_t* buckets, int64_t count, int64_t n) {
  if (buckets[0] != 0 || buckets[count - 1] != n) return false;
  for (int64_t i = 1; i < count; ++i)
    if (buckets[i] < buckets[i - 1]) return false;
  return true;
}

}  // namespace megalith
