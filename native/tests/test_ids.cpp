// The native ops on ids against naive models: routes, dedup, match, bucketize; one thread against four.

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "dedup.hpp"
#include "random_data.hpp"

using namespace megalith;

namespace {

// ---- routes

void remainders_are_exact() {
  Random random{1};
  std::vector<uint64_t> divisors;
  for (uint64_t d = 1; d <= 300; ++d) divisors.push_back(d);
  for (int k = 9; k < 63; ++k)
    for (int d = -1; d <= 1; ++d) divisors.push_back((uint64_t{1} << k) + static_cast<uint64_t>(d));
  for (int k = 0; k < 300; ++k) divisors.push_back((random.next() >> (1 + random.below(60))) + 1);
  for (uint64_t d : divisors) {
    const Divider by(d);
    std::vector<uint64_t> numbers = {0, 1, d - 1, d, d + 1, ~uint64_t{0}, uint64_t{1} << 63, ~uint64_t{0} / d * d,
                                     ~uint64_t{0} / d * d - 1, (uint64_t{1} << 63) - 1, uint64_t{1} << 32};
    for (int k = 0; k < 40; ++k) numbers.push_back(random.next() >> random.below(64));
    for (uint64_t x : numbers) CHECK(by.quotient(x) == x / d && by.remainder(x) == x % d);
  }
}

int32_t naive_owner(RouteMode mode, uint64_t owners, uint64_t block, int32_t first, int64_t id) {
  const uint64_t u = static_cast<uint64_t>(id);
  uint64_t owner = (mode == RouteMode::hash_roundrobin ? murmur_finalizer(u) : u) % owners;
  if (mode == RouteMode::continuous && u < block * owners) owner = u / block;
  return static_cast<int32_t>(owner) + first;
}

Route any_route(Random& random, uint64_t owners, int32_t first, RouteMode* mode, uint64_t* block) {
  *mode = static_cast<RouteMode>(random.below(3));
  *block = *mode == RouteMode::continuous ? static_cast<uint64_t>(random.below(40) + 1) : 0;
  return Route(*mode, owners, *block, first);
}

// ---- distinct ids

void dedup_is_a_map(int64_t lists, int64_t n, Random& random) {
  const int32_t first = static_cast<int32_t>(random.below(2));
  const int64_t owners = random.below(9) + 1, shards = owners + first;
  RouteMode mode;
  uint64_t block;
  const Route route = any_route(random, static_cast<uint64_t>(owners), first, &mode, &block);
  const Ints splits = any_splits(random, lists, n);
  Ints ids(z(splits.back())), widths(z(lists));
  n = splits.back();
  for (int64_t& id : ids) id = any_id(random);
  for (int64_t& w : widths) w = random.below(6);
  std::vector<int32_t> given(z(n));
  for (int32_t& g : given) g = static_cast<int32_t>(random.below(shards));
  const bool distinct = random.below(3) > 0, by_rule = random.below(2) > 0;

  // The model: for each bucket the distinct ids in order, and where each occurrence's is.
  std::vector<Ints> bucket(z(shards * lists));
  std::vector<std::pair<int64_t, int64_t>> where(z(n));  // bucket, place in it
  for (int64_t m = 0; m < lists; ++m) {
    std::map<int64_t, std::pair<int64_t, int64_t>> seen;
    for (int64_t i = splits[z(m)]; i < splits[z(m + 1)]; ++i) {
      const auto known = seen.find(ids[z(i)]);
      if (distinct && known != seen.end()) {
        where[z(i)] = known->second;
        continue;
      }
      const int64_t owner = by_rule ? naive_owner(mode, static_cast<uint64_t>(owners), block, first, ids[z(i)])
                                    : given[z(i)];
      Ints& b = bucket[z(owner * lists + m)];
      where[z(i)] = seen[ids[z(i)]] = {owner * lists + m, static_cast<int64_t>(b.size())};
      b.push_back(i);
    }
  }
  Ints begin, element, unique, firsts;
  int64_t elements = 0;
  for (int64_t b = 0; b < shards * lists; ++b) {
    begin.push_back(static_cast<int64_t>(unique.size()));
    element.push_back(elements);
    for (int64_t i : bucket[z(b)]) unique.push_back(ids[z(i)]), firsts.push_back(i);
    elements += static_cast<int64_t>(bucket[z(b)].size()) * widths[z(b % lists)];
  }

  for (int threads : {1, 4}) {
    Ints index(z(n)), at(z(n)), found(z(n)), counts(z(shards * lists)), offsets(z(n));
    const Deduped out{index.data(), at.data(), found.data(), counts.data(), offsets.data(), widths.data()};
    const int64_t u = dedup(ids.data(), splits.data(), lists, {route, by_rule ? nullptr : given.data()}, shards,
                            distinct, out, threads);
    CHECK(u == static_cast<int64_t>(unique.size()));
    CHECK(std::equal(unique.begin(), unique.end(), found.begin()));
    CHECK(std::equal(firsts.begin(), firsts.end(), at.begin()));
    for (int64_t b = 0; b < shards * lists; ++b) CHECK(counts[z(b)] == static_cast<int64_t>(bucket[z(b)].size()));
    for (int64_t i = 0; i < n; ++i) {
      const auto [b, k] = where[z(i)];
      CHECK(index[z(i)] == begin[z(b)] + k);
      CHECK(offsets[z(i)] == element[z(b)] + k * widths[z(b % lists)]);
    }
  }
}

void match_is_a_map(int64_t m, int64_t n, Random& random) {
  Ints keys(z(m)), queries(z(n)), out(z(n)), expected(z(n), -1);
  std::map<int64_t, int64_t> first;
  for (int64_t i = 0; i < m; ++i) first.emplace(keys[z(i)] = any_id(random), i);
  for (int64_t i = 0; i < n; ++i) {
    const auto known = first.find(queries[z(i)] = any_id(random));
    if (known != first.end()) expected[z(i)] = known->second;
  }
  for (int threads : {1, 4}) {
    match(keys.data(), m, queries.data(), n, out.data(), threads);
    CHECK(out == expected);
  }
}

void bucketize_keeps_order(int64_t rows, int64_t n, Random& random) {
  const int32_t first = static_cast<int32_t>(random.below(2));
  const int64_t owners = random.below(12) + 1, shards = owners + first;
  RouteMode mode;
  uint64_t block;
  const Route route = any_route(random, static_cast<uint64_t>(owners), first, &mode, &block);
  const Ints splits = any_splits(random, rows, n);
  n = splits.back();
  Ints ids(z(n)), lengths(z(shards * rows)), expected_lengths(lengths), expected(z(n));
  std::vector<int32_t> given(z(n));
  for (int64_t& id : ids) id = any_id(random);
  for (int64_t i = 0; i < n; ++i)
    given[z(i)] = naive_owner(mode, static_cast<uint64_t>(owners), block, first, ids[z(i)]);
  for (int64_t s = 0, next = 0; s < shards; ++s)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = splits[z(r)]; i < splits[z(r + 1)]; ++i)
        if (given[z(i)] == s) expected[z(i)] = next++, ++expected_lengths[z(s * rows + r)];
  for (int threads : {1, 4})
    for (const bool by_rule : {true, false}) {
      Ints place(z(n));
      bucketize(by_rule ? ids.data() : nullptr, splits.data(), rows, {route, by_rule ? nullptr : given.data()},
                shards, lengths.data(), place.data(), threads);
      CHECK(place == expected && lengths == expected_lengths);
    }
}

}  // namespace

int main() {
  remainders_are_exact();
  Random random{11};
  for (int round = 0; round < 300; ++round) {
    dedup_is_a_map(random.below(6), random.below(round % 10 ? 60 : 4000), random);
    match_is_a_map(random.below(50), random.below(60), random);
    bucketize_keeps_order(random.below(9), random.below(80), random);
  }
  match_is_a_map(3000, 70000, random);  // several threads' worth
  bucketize_keeps_order(500, 70000, random);
  std::puts("ids ok");
}
