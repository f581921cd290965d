// Touched rows against a plain set, and a consumer that follows a table while threads train,
// remove, compact and take snapshots. Run under TSan.

#include <atomic>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"
#include "table.hpp"

using namespace megalith;

namespace {

TableOptions options(int dim) {
  TableOptions o;
  o.name = "t";
  SegmentPlan s{};
  s.dim = dim;
  s.optimizer = optimizer_index("sgd");
  o.segments = {s};
  return o;
}

// Rows are so large that a chunk has 256 of them, or so small that it has millions. Their weights are never written.
void every_touched_row_is_found(int dim, int64_t count) {
  const TableOptions o = options(dim);
  Rows rows("t", StoredWeights(o.segments, find_kernels(nullptr)), 0, false, Rows::kMaxRows);
  rows.track(1);
  rows.prepare(count / 2);
  rows.track(4);  // chunks from before and after
  rows.prepare(count);
  for (int64_t i = 0; i < count; ++i) rows.take(i);
  Random random{5};
  for (int round = 0; round < 30; ++round) {
    std::set<int32_t> expected, found;
    for (int64_t n = random.below(200); n > 0; --n) {
      const int32_t row = static_cast<int32_t>(random.below(round % 3 ? count : 300));
      rows.touch(4, row);
      expected.insert(row);
      rows.touch(1, static_cast<int32_t>(random.below(count)));
    }
    int32_t first[TouchedRows::kMost], before = static_cast<int32_t>(count);
    uint64_t bits[TouchedRows::kMost];
    for (int64_t end = Rows::kMaxRows; end > 0;) {
      int64_t looks = 1 + random.below(5);
      const int n = rows.take_touched(4, end, 1 + static_cast<int>(random.below(99)), looks, first, bits);
      for (int k = 0; k < n; ++k) {
        CHECK(first[k] < before && first[k] % 64 == 0);
        before = first[k];
        for (; bits[k]; bits[k] &= bits[k] - 1) found.insert(first[k] + __builtin_ctzll(bits[k]));
      }
      CHECK(end * 64 <= before + 63);
    }
    CHECK(found == expected);
  }
}

using Ids = std::vector<int64_t>;

void put(Table& table, const Ids& ids, float value) {
  const std::vector<float> values(ids.size(), value);
  table.assign(ids.data(), static_cast<int64_t>(ids.size()), values.data(), false, 7, 2);
}

void train(Table& table, const Ids& ids) {
  const std::vector<float> gradient(ids.size(), 1.0f);
  const SegmentStep at{0.5f, 1.0f, 0};
  Update u;
  u.ids = ids.data();
  u.n = static_cast<int64_t>(ids.size());
  u.flat = gradient.data();
  u.steps = &at;
  u.time = 7;
  table.update(u, 2);
}

std::map<int64_t, float> contents(Table& table) {
  std::map<int64_t, float> rows;
  const size_t n = 4096;
  Ids ids(n), times(n);
  std::vector<float> weights(n);
  const RowColumns out{ids.data(), {{weights.data(), 0, 1}}, times.data(), nullptr, nullptr};
  for (int64_t start = 0; start >= 0;) {
    const Table::ScanResult part = table.scan(start, static_cast<int64_t>(n), out);
    for (size_t i = 0; i < static_cast<size_t>(part.count); ++i) rows[ids[i]] = weights[i];
    start = part.next;
  }
  return rows;
}

// A consumer's copy of a table, which it updates with what it drains.
struct Copy {
  int consumer;
  std::map<int64_t, float> rows;

  // Returns the number of ids.
  size_t follow(Table& table) {
    Ids updated, removed;
    table.drain(consumer, updated, removed);
    const std::set<int64_t> distinct(updated.begin(), updated.end());
    CHECK(distinct.size() == updated.size());
    for (int64_t id : removed) {
      CHECK(!distinct.count(id));
      rows.erase(id);
    }
    std::vector<float> values(updated.size());
    std::vector<int32_t> found(updated.size());
    const int64_t n = static_cast<int64_t>(updated.size());
    const int64_t epoch = table.find(updated.data(), n, found.data(), 1);
    table.read(found.data(), epoch, updated.data(), n, values.data(), 1);
    for (size_t i = 0; i < updated.size(); ++i) {
      if (found[i] >= 0) rows[updated[i]] = values[i];  // otherwise the next drain says that it was removed
    }
    return updated.size() + removed.size();
  }
};

Ids some(Random& random, int64_t n, int64_t below) {
  Ids ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(random.below(below) * 977);
  return ids;
}

void consumers_follow_a_table_in_one_thread() {
  Table table(options(1));
  Copy all{0, {}}, rare{5, {}};
  table.track(0);
  table.track(5);
  Random random{1};
  for (int round = 0; round < 300; ++round) {
    const Ids ids = some(random, random.below(400), 20000);
    const int64_t n = static_cast<int64_t>(ids.size());
    switch (random.below(8)) {
      case 0: put(table, ids, static_cast<float>(round)); break;
      case 1: table.remove(ids.data(), n); break;
      case 2: table.compact(500); break;
      case 3: table.mark(0, ids.data(), n); break;
      case 4: {
        Ids removed;
        table.begin_snapshot(0, random.below(2), 100, removed);
        table.end_snapshot(true);
        break;
      }
      case 5:
        if (random.below(20) == 0) table.clear();
        break;
      default: train(table, ids);
    }
    if (random.below(3) == 0) all.follow(table);
    if (round % 70 == 69) rare.follow(table);
  }
  for (Copy* copy : {&all, &rare}) {
    copy->follow(table);
    CHECK(copy->rows == contents(table));
    CHECK(copy->follow(table) == 0);
  }
}

// Large enough for a drain of several slices.
void consumers_follow_a_table_that_threads_change() {
  Table table(options(1));
  Copy first{2, {}}, second{7, {}};
  table.track(2);
  table.track(7);
  Ids ids;
  for (int64_t i = 0; i < 20000; ++i) ids.push_back(i * 977);
  put(table, ids, 1.0f);
  std::atomic<int> running{2};
  const auto change = [&](uint64_t seed) {
    Random random{seed};
    for (int round = 0; round < 30; ++round) {
      const Ids some_ids = some(random, 1000, 40000);
      if (round % 8 == 5) {
        table.remove(ids.data() + random.below(20), 19000);
        table.compact(3000);
      } else if (round % 8 == 6) {
        put(table, ids, static_cast<float>(round));
      } else {
        train(table, some_ids);
      }
    }
    --running;
  };
  std::thread one(change, 11), other(change, 12);
  std::thread follower([&] {
    while (running > 0) second.follow(table);
  });
  while (running > 0) first.follow(table);
  one.join();
  other.join();
  follower.join();
  const std::map<int64_t, float> expected = contents(table);
  for (Copy* copy : {&first, &second}) {
    copy->follow(table);
    CHECK(copy->rows == expected);
    CHECK(copy->follow(table) == 0);
  }
}

// A writer that locks again and again, as a drain does, lets others in.
void the_lock_is_fair() {
  ReadWriteLock lock;
  std::atomic<bool> stop{false};
  std::thread greedy([&] {
    while (!stop) {
      lock.lock();
      lock.unlock();
    }
  });
  int64_t writes = 0;
  std::thread writer([&] {
    for (int i = 0; i < 500; ++i) {
      lock.lock();
      ++writes;
      lock.unlock();
    }
  });
  int64_t seen = 0;
  for (int i = 0; i < 500; ++i) {
    lock.lock_shared();
    CHECK(writes >= seen);
    seen = writes;
    lock.unlock_shared();
  }
  writer.join();
  stop = true;
  greedy.join();
  CHECK(writes == 500);
}

}  // namespace

int main() {
  every_touched_row_is_found(1, 70000);
  every_touched_row_is_found(1 << 16, 1100);
  consumers_follow_a_table_in_one_thread();
  consumers_follow_a_table_that_threads_change();
  the_lock_is_fair();
  return 0;
}
