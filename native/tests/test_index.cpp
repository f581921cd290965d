// The index against std::unordered_map: growth in every stage, removal, awkward ids.

#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "check.hpp"
#include "index.hpp"
#include "kernels.hpp"

using namespace megalith;

namespace {

// The inverse of mix64, to make ids that share a home bucket.
uint64_t unmix64(uint64_t x) {
  x ^= (x >> 31) ^ (x >> 62);
  x *= 0x319642b2d24d8ec3ull;
  x ^= (x >> 27) ^ (x >> 54);
  x *= 0x96de1b173f119089ull;
  x ^= (x >> 30) ^ (x >> 60);
  return x;
}

int64_t id_with_hash(uint64_t hash) { return static_cast<int64_t>(unmix64(hash) - kGolden); }

void compare(const Index& index, const std::unordered_map<int64_t, int32_t>& expected,
             const std::vector<int64_t>& absent) {
  CHECK(index.size() == static_cast<int64_t>(expected.size()));
  std::vector<int64_t> ids;
  for (const auto& [id, row] : expected) {
    CHECK(index.find(id) == row);
    ids.push_back(id);
  }
  for (int64_t id : absent) CHECK(index.find(id) == -1);
  for (const char* name : kKernelNames) {
    const Kernels* k = find_kernels(name);
    if (!k) continue;
    std::vector<int32_t> rows(ids.size());
    k->find(index.view(), ids.data(), static_cast<int64_t>(ids.size()), rows.data());
    for (size_t i = 0; i < ids.size(); ++i) CHECK(rows[i] == expected.at(ids[i]));
    rows.resize(absent.size());
    k->find(index.view(), absent.data(), static_cast<int64_t>(absent.size()), rows.data());
    for (int32_t row : rows) CHECK(row == -1);
  }
}

void random_program(uint64_t seed, int64_t steps, int64_t distinct) {
  Random random{seed};
  Index index;
  std::unordered_map<int64_t, int32_t> expected;
  bool seen_growing = false;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t id = (random.below(distinct) - distinct / 2) * 0x100000001ll;
    const int64_t action = random.below(8);
    if (action < 6) {
      if (expected.count(id)) continue;
      index.prepare(1);
      index.advance(1);
      index.insert(id, static_cast<int32_t>(step));
      expected[id] = static_cast<int32_t>(step);
    } else {
      const auto it = expected.find(id);
      CHECK(index.erase(id) == (it == expected.end() ? -1 : it->second));
      if (it != expected.end()) expected.erase(it);
    }
    seen_growing |= index.growing();
    if (step % (steps / 16) == 0) compare(index, expected, {distinct * 0x100000001ll + 7});
  }
  CHECK(seen_growing);
  compare(index, expected, {});
}

void hash_is_inverted() {
  for (int64_t id : {int64_t{0}, int64_t{-1}, std::numeric_limits<int64_t>::min()})
    CHECK(id_with_hash(slot_hash(id)) == id);
}

// Hundreds of ids that all want the last bucket: they run past the end and over the start, while
// the index grows around them.
void crowded_end() {
  Index index;
  std::unordered_map<int64_t, int32_t> expected;
  Random random{3};
  for (int32_t row = 0; row < 400; ++row) {
    const int64_t id = row % 2 ? id_with_hash(~uint64_t{0} - static_cast<uint64_t>(row))
                               : static_cast<int64_t>(random.next());
    index.prepare(1);
    index.advance(1);
    index.insert(id, row);
    expected[id] = row;
    if (row % 7 == 3) {
      CHECK(index.erase(id) == row);
      expected.erase(id);
    }
    compare(index, expected, {id_with_hash(~uint64_t{0} - 100000)});
  }
}

// Fill each bucket, push one id past it, take the fillers out: in the end few ids are left and yet
// every bucket has been passed. A search must still end.
void every_bucket_passed() {
  Index index;
  std::unordered_map<int64_t, int32_t> expected;
  int32_t row = 0;
  uint64_t salt = 1;
  const uint64_t buckets = 16;
  for (uint64_t home = 0; home < buckets; ++home) {
    std::vector<int64_t> fillers;
    const IndexView view = index.view();
    for (uint32_t k = view.buckets[home].meta & kCountMask; k < kBucketSlots; ++k)
      fillers.push_back(id_with_hash((home << 60) + salt++));
    const int64_t displaced = id_with_hash((home << 60) + salt++);
    index.prepare(static_cast<int64_t>(fillers.size()) + 1);
    CHECK(!index.growing());
    for (int64_t id : fillers) index.insert(id, row++);
    index.insert(displaced, row);
    expected[displaced] = row++;
    for (int64_t id : fillers) CHECK(index.erase(id) >= 0);
  }
  bool all_passed = true;
  for (uint64_t b = 0; b < buckets; ++b) all_passed &= index.view().buckets[b].meta >= kPassedOne;
  CHECK(all_passed);
  const int64_t absent = id_with_hash((uint64_t{3} << 60) + 999999);
  CHECK(index.erase(absent) == -1);
  compare(index, expected, {absent});
  index.prepare(1000);
  index.advance(1000);
  compare(index, expected, {absent});
}

// Large enough for memory to be given back on the way.
void growth_gives_memory_back() {
  Index index;
  const int64_t n = 400000;
  for (int64_t id = 0; id < n; ++id) {
    index.prepare(1);
    index.advance(1);
    index.insert(id << 20, static_cast<int32_t>(id));
    CHECK(index.bytes() < static_cast<size_t>(400 * 64 + id * 80));
  }
  for (int64_t id = 0; id < n; ++id) CHECK(index.find(id << 20) == id);
  index.reserve(2 * n);
  CHECK(!index.growing());
  for (int64_t id = 0; id < n; ++id) CHECK(index.erase(id << 20) == id);
  CHECK(index.size() == 0);
}

// New ids after a shrink: the move to the smaller array and the growth after it stay incremental.
void growth_after_a_shrink_is_incremental() {
  for (const int64_t left : {10, 7000, 20000}) {
    Index index;
    const int64_t n = 100000, batch = 100;
    index.reserve(n);
    for (int64_t id = 0; id < n; ++id) index.insert(id, static_cast<int32_t>(id));
    for (int64_t id = left; id < n; ++id) CHECK(index.erase(id) == id);
    CHECK(index.shrink());
    int64_t size = left;
    int ended = 0;
    while (size < n) {
      const IndexView before = index.view();
      index.prepare(batch);
      index.advance_for(batch, 0);
      for (int64_t k = 0; k < batch; ++k, ++size) index.insert(size, static_cast<int32_t>(size));
      if (!before.next_count || index.view().buckets == before.buckets) continue;
      CHECK(before.count - before.cursor <= 4 * batch);  // the move ended because little was left
      ++ended;
    }
    CHECK(ended > 1);
    for (int64_t id = 0; id < n; ++id) CHECK(index.find(id) == id);
  }
}

}  // namespace

int main() {
  hash_is_inverted();
  for (uint64_t seed = 1; seed <= 4; ++seed) random_program(seed, 40000, 6000 * static_cast<int64_t>(seed));
  crowded_end();
  every_bucket_passed();
  growth_gives_memory_back();
  growth_after_a_shrink_is_incremental();
  std::puts("index ok");
}
