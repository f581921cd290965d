// Capacity, admission, eviction and compaction: limits hold, and no row is lost or counted twice.

#include <algorithm>
#include <set>
#include <vector>

#include "check.hpp"
#include "table.hpp"

using namespace megalith;

namespace {

TableOptions options() {
  TableOptions o;
  o.name = "t";
  SegmentPlan s{};
  s.dim = 4;
  s.optimizer = optimizer_index("sgd");
  o.segments = {s};
  o.key = 7;
  return o;
}

void train(Table& table, const std::vector<int64_t>& ids, uint32_t time) {
  const SegmentStep rate{0.1f, 1.0f, 0};
  std::vector<float> gradient(ids.size() * 4, 1.0f);
  Update u;
  u.ids = ids.data();
  u.n = static_cast<int64_t>(ids.size());
  u.flat = gradient.data();
  u.steps = &rate;
  u.time = time;
  u.step = time;
  table.update(u, 2);
}

void balanced(const Table& table) {
  const Table::Counters c = table.counters();
  CHECK(c.created - c.removed - c.evicted == table.size());
}

void capacity_holds_with_an_open_snapshot() {
  for (Score score : {Score::lru, Score::lfu, Score::step}) {
    TableOptions o = options();
    o.capacity = 500;
    o.score = score;
    o.counted = true;
    Table table(o);
    table.track(0);
    Random random{3};
    for (uint32_t step = 0; step < 200; ++step) {
      std::vector<int64_t> ids(100);
      for (int64_t& id : ids) id = random.below(40) + random.below(40) * random.below(100);
      if (step == 100) {
        std::vector<int64_t> removed;
        CHECK(table.begin_snapshot(-1, false, 1 << 20, removed) == table.size());
      }
      if (step == 150) {
        std::vector<int64_t> got(1000), times(1000);
        const int64_t rows = table.read_snapshot(1000, {got.data(), {}, times.data(), nullptr, nullptr});
        CHECK(rows == 500);
        CHECK(std::set<int64_t>(got.begin(), got.begin() + rows).size() == 500);
        table.end_snapshot(false);
      }
      train(table, ids, step);
      CHECK(table.size() <= 500);
      for (int64_t id : ids) {
        int32_t row;
        table.find(&id, 1, &row, 1);
        CHECK(row >= 0);  // an id of the current call is never removed
      }
      balanced(table);
    }
    CHECK(table.counters().evicted > 0);
    CHECK(static_cast<int64_t>(table.drain_evicted().size()) == table.counters().evicted);
  }
}

void a_full_table_raises_and_is_unchanged() {
  TableOptions o = options();
  o.capacity = 10;
  Table table(o);
  train(table, {1, 2, 3, 4, 5, 6, 7, 8}, 1);
  bool raised = false;
  try {
    train(table, {20, 21, 22}, 2);
  } catch (const TableFull&) {
    raised = true;
  }
  CHECK(raised && table.size() == 8);
  train(table, {20, 21}, 3);
  CHECK(table.size() == 10);
}

void counts_forget_the_oldest_id() {
  OccurrenceCounts counts(3);
  for (int64_t id : {1, 2, 3}) {
    counts.prepare(1);
    counts.add(id, 1);
  }
  counts.add(1, 5);
  counts.prepare(1);
  counts.add(4, 1);  // 1 was counted first
  CHECK(counts.count(1) == 0 && counts.count(2) == 1 && counts.dropped() == 1 && counts.size() == 3);
  counts.erase(3);
  std::vector<int64_t> ids, values;
  counts.copy().list(ids, values);
  CHECK((ids == std::vector<int64_t>{2, 4}));
}

void compaction_keeps_every_row() {
  Table table(options());
  table.track(2);
  std::vector<int64_t> ids(60000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i) * 977;
  train(table, ids, 5);
  const size_t before = table.memory().index + table.memory().slack;
  std::vector<int64_t> gone, kept;
  for (size_t i = 0; i < ids.size(); ++i) (i % 10 ? gone : kept).push_back(ids[i]);
  const int watch = table.open_watch();
  std::vector<int64_t> seen(ids.size()), times(ids.size());
  CHECK(table.scan(0, 60000, {seen.data(), {}, times.data(), nullptr, nullptr}, watch).count == 60000);
  train(table, {gone[0]}, 5);  // changed since the scan: it stays until the next one
  CHECK(table.evict(gone.data(), static_cast<int64_t>(gone.size()), watch).size() == gone.size() - 1);
  table.close_watch(watch);
  table.remove(gone.data(), 1);
  CHECK(table.memory().slack > 0);
  int rounds = 0;
  for (bool done = false; !done; ++rounds) {
    done = table.compact(1000);
    if (rounds == 20) train(table, {-1, -2, -3}, 6);  // rows are created between two parts
    if (rounds == 30) table.remove(kept.data(), 10);
  }
  CHECK(rounds > 20);
  CHECK(table.memory().index + table.memory().slack < before / 3);
  CHECK(table.size() == static_cast<int64_t>(kept.size()) + 3 - 10);
  std::vector<int32_t> rows(kept.size());
  table.find(kept.data(), static_cast<int64_t>(kept.size()), rows.data(), 1);
  std::vector<float> out(kept.size() * 4);
  table.read(rows.data(), table.epoch(), kept.data(), static_cast<int64_t>(kept.size()), out.data(), 1);
  for (size_t i = 10; i < kept.size(); ++i) {
    CHECK(rows[i] >= 0 && rows[i] < table.size() + 20);
    CHECK(out[i * 4] == -0.1f);
  }
  balanced(table);
}

void a_watch_covers_ranges_in_any_order() {
  Watch watch;
  watch.cover(300, 430);
  watch.cover(70, 75);  // before the first range
  watch.cover(1000, 1000);
  watch.cover(128, 192);
  const int32_t changed[] = {-1, 72, 300, 5000};
  watch.note(changed, 4);
  for (int32_t row = -2; row < 600; ++row) {
    const bool read = (row >= 300 && row < 430) || (row >= 70 && row < 75) || (row >= 128 && row < 192);
    CHECK(watch.unchanged(row) == (read && row != 72 && row != 300));
  }
  watch.cover(72, 73);
  CHECK(watch.unchanged(72));
  watch.forget();
  CHECK(!watch.unchanged(72) && !watch.unchanged(429));
}

void a_new_key_changes_only_rows_created_later() {
  TableOptions o = options();
  o.segments[0].init = InitKind::uniform;
  o.segments[0].init_a = -1.0f;
  o.segments[0].init_b = 1.0f;
  Table table(o);
  o.key = 8;
  const Table expected(o);
  train(table, {1}, 0);
  const std::vector<int64_t> ids{1, 2};
  std::vector<float> before(8), after(8), fresh(8);
  table.read(nullptr, -1, ids.data(), 2, before.data(), 1);
  expected.read(nullptr, -1, ids.data(), 2, fresh.data(), 1);

  table.set_key(8);

  table.read(nullptr, -1, ids.data(), 2, after.data(), 1);
  for (int k = 0; k < 4; ++k) {
    CHECK(after[k] == before[k]);
    CHECK(after[4 + k] == fresh[4 + k] && after[4 + k] != before[4 + k]);
  }
}

}  // namespace

int main() {
  capacity_holds_with_an_open_snapshot();
  a_full_table_raises_and_is_unchanged();
  counts_forget_the_oldest_id();
  compaction_keeps_every_row();
  a_watch_covers_ranges_in_any_order();
  a_new_key_changes_only_rows_created_later();
  return 0;
}
