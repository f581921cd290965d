// Which shard owns an id; the reference of routing.py.
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

// Remainders for a divisor that is the same for many numbers: a multiplication instead of a
// division, exact for every 64-bit number (Granlund and Montgomery's method for n = 64).
class Divider {
 public:
  explicit Divider(uint64_t d) : divisor_(d) {
    while (shift_ < 63 && (uint64_t{1} << shift_) < d) ++shift_;  // ceil(log2 d)
    const unsigned __int128 two64 = static_cast<unsigned __int128>(1) << 64;
    const unsigned __int128 power = static_cast<unsigned __int128>(1) << shift_;
    magic_ = static_cast<uint64_t>(two64 * (power - d) / d + 1);
  }
  uint64_t quotient(uint64_t x) const {
    if (shift_ == 0) return x;
    const uint64_t t = static_cast<uint64_t>((static_cast<unsigned __int128>(magic_) * x) >> 64);
    return (t + ((x - t) >> 1)) >> (shift_ - 1);
  }
  uint64_t remainder(uint64_t x) const { return x - quotient(x) * divisor_; }

 private:
  uint64_t divisor_, magic_;
  int shift_ = 0;
};

// Owners are 0 .. owners - 1, plus `first`. Only continuous uses `block`.
struct Route {
  RouteMode mode;
  Divider owners, block;
  uint64_t covered;  // ids below this belong to a block
  int32_t first;

  Route(RouteMode mode, uint64_t owners, uint64_t block, int32_t first)
      : mode(mode), owners(owners), block(block ? block : 1),
        covered(mode == RouteMode::continuous ? block * owners : 0), first(first) {}

  int32_t owner(int64_t id) const {
    const uint64_t u = static_cast<uint64_t>(id);
    const uint64_t o = u < covered ? block.quotient(u)
                                   : owners.remainder(mode == RouteMode::hash_roundrobin
                                                          ? murmur_finalizer(u) : u);
    return static_cast<int32_t>(o) + first;
  }
};

inline void route(const int64_t* ids, int64_t n, const Route& rule, int32_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = rule.owner(ids[i]);
}

}  // namespace megalith
