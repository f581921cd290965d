// Which shard owns an id; the twin of routing.py.
#pragma once

#include <cstdint>

namespace megalith {

enum class RouteMode : int { continuous, roundrobin, hash_roundrobin };

inline uint64_t murmur_finalizer(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return x;
}

// Owners are 0 .. owners - 1, moved up by `first`. `block` is used by continuous alone.
inline void route(const int64_t* ids, int64_t n, RouteMode mode, uint64_t owners, uint64_t block,
                  int32_t first, int32_t* out) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t u = static_cast<uint64_t>(ids[i]);
    uint64_t owner;
    if (mode == RouteMode::hash_roundrobin)
      owner = murmur_finalizer(u) % owners;
    else if (mode == RouteMode::continuous && u < block * owners)
      owner = u / block;
    else
      owner = u % owners;
    out[i] = static_cast<int32_t>(owner) + first;
  }
}

}  // namespace megalith
