// Calls over several tables: the bits of calls of one table each, failures that change nothing, and no deadlock.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "group.hpp"
#include "random_data.hpp"

using namespace megalith;

namespace {

struct Kind {
  int dim;
  const char* optimizer;
  Precision precision;
};
// A dim with code of its own, one with a rest, a large one, a single column, narrow rows; the last is mixed.
const Kind kKinds[] = {{16, "adagrad", Precision::float32}, {20, "sgd", Precision::float16},
                       {70, "adam", Precision::float32},    {1, "sgd", Precision::float32},
                       {8, "adagrad", Precision::bfloat16}, {24, "sgd", Precision::float32},
                       {12, "adagrad", Precision::float32}};
constexpr size_t kTables = sizeof(kKinds) / sizeof(kKinds[0]);

std::unique_ptr<Table> make_table(size_t k, int64_t max_rows = Rows::kMaxRows) {
  TableOptions o;
  o.name = "t" + std::to_string(k);
  o.key = k;
  o.missing_zeros = k == 2;
  o.max_rows = max_rows;
  SegmentPlan s{};
  s.dim = kKinds[k].dim;
  s.optimizer = optimizer_index(kKinds[k].optimizer);
  s.base = -1;
  s.init = InitKind::normal;
  s.init_b = 0.5f;
  s.precision = kKinds[k].precision;
  for (int h = 0; h < 6; ++h) s.hyper[h] = 0.05f;
  o.segments = {s};
  if (k + 1 == kTables) {
    s.dim = 5;
    s.precision = Precision::float16;
    o.segments.push_back(s);
  }
  return std::make_unique<Table>(o);
}

std::vector<std::unique_ptr<Table>> make_tables() {
  std::vector<std::unique_ptr<Table>> tables;
  for (size_t k = 0; k < kTables; ++k) tables.push_back(make_table(k));
  return tables;
}

// A batch over all tables. Two features per table: the columns [dim_0 | dim_1 | ...] of one output, and an output
// [rows, 1] to which the first column of each table's second feature is added. Some occurrences are in no bag.
struct Batch {
  int64_t rows;
  int width = 0;
  std::vector<Ints> ids, first, second;
  std::vector<std::vector<float>> weights, divisors;
  std::vector<std::vector<PartView>> parts;
  std::vector<float> out, sum;
  int64_t stride;  // of `out`: wider than its columns

  Batch(Random& random, int64_t n, const std::vector<std::unique_ptr<Table>>& tables) : rows(n) {
    for (const auto& t : tables) {
      const int64_t a = random.below(2 * n + 1), b = random.below(n + 1), gap = random.below(3);
      Ints own(z(a + gap + b + gap));
      for (int64_t& id : own) id = any_id(random);
      Ints splits = any_splits(random, n, a), more = any_splits(random, n, b);
      for (int64_t& at : more) at += a + gap;
      ids.push_back(own), first.push_back(splits), second.push_back(more);
      weights.push_back(any_numbers<float>(random, static_cast<int64_t>(own.size())));
      divisors.push_back(any_numbers<float>(random, n));
      for (float& d : divisors.back()) d = 1.0f + d * d;
      width += t->dim();
    }
    stride = width + 3;
    out = any_numbers<float>(random, n * stride);
    sum = any_numbers<float>(random, n);
    int column = 0;
    for (const auto& t : tables) {
      const int dim = t->dim();
      parts.push_back({{out.data(), stride, column, 0, dim, 1, false, dim, 1},
                       {sum.data(), 1, 0, 0, 1, 1, true, 1, 1}});
      column += dim;
    }
  }
  std::vector<BagsView> bags(size_t k) const {
    const float* w = k % 2 ? weights[k].data() : nullptr;
    const float* d = k % 3 ? divisors[k].data() : nullptr;
    return {{first[k].data(), rows, w, d, &parts[k][0], 1, false}, {second[k].data(), rows, w, nullptr, &parts[k][1], 1, false}};
  }
  int64_t size(size_t k) const { return static_cast<int64_t>(ids[k].size()); }
};

struct Found {
  std::vector<std::vector<int32_t>> rows;
  std::vector<int64_t> epochs;
};

// Finds and pools: in one call, or with a find and a pool per table.
Found forward(const std::vector<std::unique_ptr<Table>>& tables, const Batch& batch, bool together, int threads) {
  Found found;
  std::vector<TableRead> reads;
  for (size_t k = 0; k < kTables; ++k) {
    found.rows.emplace_back(z(batch.size(k)), -7);
    TableRead r{tables[k].get(), batch.ids[k].data(), batch.size(k), nullptr, found.rows[k].data(), -1, batch.bags(k)};
    if (!together) {
      r.epoch = tables[k]->find(r.ids, r.n, found.rows[k].data(), threads);
      r.known = found.rows[k].data();
      std::vector<TableRead> one{r};
      TableGroup::read(one, threads);
      found.epochs.push_back(one[0].epoch);
    }
    reads.push_back(r);
  }
  if (together) {
    TableGroup::read(reads, threads);
    for (const TableRead& r : reads) found.epochs.push_back(r.epoch);
  }
  return found;
}

void backward(const std::vector<std::unique_ptr<Table>>& tables, const Batch& batch, const Found& found, bool together,
              int threads) {
  static const std::vector<SegmentStep> steps(2, {0.05f, 1.0f, 3});
  std::vector<TableUpdate> updates;
  for (size_t k = 0; k < kTables; ++k) {
    TableUpdate each;
    each.table = tables[k].get();
    each.u.rows = found.rows[k].data();
    each.u.epoch = found.epochs[k];
    each.u.ids = batch.ids[k].data();
    each.u.n = batch.size(k);
    each.u.bags = batch.bags(k);
    each.u.steps = steps.data();
    each.u.scale = 0.5f;
    each.u.clip_norm = k == 4 ? 0.1f : 0.0f;
    updates.push_back(each);
    if (!together) tables[k]->update(each.u, threads);
  }
  if (together) TableGroup::update(updates, threads);
}

std::vector<float> contents(Table& table) {
  const int64_t n = table.size();
  const int dim = table.dim(), rest = table.row_floats() - dim;
  Ints ids(z(n)), times(z(n));
  std::vector<float> weights(z(n * dim)), state(z(n * rest));
  std::vector<Column> columns{{weights.data(), 0, dim}};
  if (rest) columns.push_back({state.data(), dim, rest});
  CHECK(table.scan(0, n + 1, {ids.data(), columns, times.data(), nullptr, nullptr}).count == n);
  std::vector<float> all = weights;
  all.insert(all.end(), state.begin(), state.end());
  for (int64_t id : ids) {
    float halves[2];
    std::memcpy(halves, &id, 8);
    all.insert(all.end(), halves, halves + 2);
  }
  return all;
}

void equals_one_table_at_a_time() {
  for (int threads : {1, 3}) {
    Random random{static_cast<uint64_t>(threads)};
    const auto joint = make_tables(), single = make_tables();
    for (int round = 0; round < 8; ++round) {
      const int64_t rows = round == 0 ? 0 : round == 7 ? 9000 : 1 + random.below(300);
      Random same = random;
      const Batch a(random, rows, joint), b(same, rows, single);
      const Found fa = forward(joint, a, true, threads), fb = forward(single, b, false, 1);
      CHECK(fa.rows == fb.rows && fa.epochs == fb.epochs);
      CHECK(same_bits(a.out, b.out) && same_bits(a.sum, b.sum));
      if (round == 4) {  // rows of an older epoch are found again
        const int64_t gone[] = {0, 1, 2};
        joint[0]->remove(gone, 3), single[0]->remove(gone, 3);
      }
      if (round == 5) {  // a snapshot: its table is updated alone
        std::vector<int64_t> removed;
        joint[1]->begin_snapshot(-1, false, int64_t{1} << 20, removed);
      }
      backward(joint, a, fa, true, threads);
      backward(single, b, fb, false, 1);
      if (round == 5) joint[1]->end_snapshot(false);
      for (size_t k = 0; k < kTables; ++k) CHECK(same_bits(contents(*joint[k]), contents(*single[k])));
    }
  }
}

void a_full_table_leaves_all_tables_unchanged() {
  const SegmentStep at[2] = {{0.05f, 1.0f, 0}, {0.05f, 1.0f, 0}};
  const int64_t ids[] = {1, 2, 3, 4};
  const std::vector<float> gradient(4 * 70, 1.0f);
  const auto first = make_table(0), full = make_table(3, 3);
  std::vector<TableUpdate> updates(2);
  for (size_t k = 0; k < 2; ++k) {
    updates[k].table = k ? full.get() : first.get();
    updates[k].u.ids = ids;
    updates[k].u.n = 4;
    updates[k].u.flat = gradient.data();
    updates[k].u.steps = at;
  }
  bool thrown = false;
  try {
    TableGroup::update(updates, 2);
  } catch (const TableFull&) {
    thrown = true;
  }
  CHECK(thrown && first->size() == 0 && full->size() == 0);
  updates[1].u.n = 3;
  TableGroup::update(updates, 2);
  CHECK(first->size() == 4 && full->size() == 3);
}

// Calls with tables in either order, single writes, and snapshots whose readers keep writers waiting.
void calls_do_not_wait_for_each_other() {
  const auto a = make_table(0), b = make_table(3);
  std::atomic<int> running{3};
  const auto call = [&](Table* x, Table* y, int64_t base) {
    const SegmentStep at[2] = {{0.05f, 1.0f, 0}, {0.05f, 1.0f, 0}};
    Ints ids(300);
    for (int64_t i = 0; i < 300; ++i) ids[z(i)] = base + i;
    const std::vector<float> gradient(300 * 16, 1.0f);
    std::vector<int32_t> rows(300), others(300);
    for (int round = 0; round < 60; ++round) {
      std::vector<TableUpdate> updates(2);
      for (size_t k = 0; k < 2; ++k) {
        updates[k].table = k ? y : x;
        updates[k].u.ids = ids.data();
        updates[k].u.n = 300;
        updates[k].u.flat = gradient.data();
        updates[k].u.steps = at;
      }
      TableGroup::update(updates, 2);
      std::vector<TableRead> reads{{y, ids.data(), 300, nullptr, rows.data(), -1, {}},
                                   {x, ids.data(), 300, nullptr, others.data(), -1, {}}};
      TableGroup::read(reads, 2);
      for (int64_t i = 0; i < 300; ++i) CHECK(rows[z(i)] >= 0 && others[z(i)] >= 0);
    }
    --running;
  };
  std::thread one([&] { call(a.get(), b.get(), 0); }), two([&] { call(b.get(), a.get(), 200); }),
      three([&] { call(a.get(), b.get(), 1000); });
  Ints ids(50), times(50);
  std::vector<float> weights(50 * 16), state(50 * 16);
  while (running > 0)
    for (Table* t : {a.get(), b.get()}) {
      std::vector<int64_t> removed;
      std::vector<Column> columns{{weights.data(), 0, t->dim()}};
      if (t->row_floats() > t->dim()) columns.push_back({state.data(), t->dim(), t->row_floats() - t->dim()});
      t->begin_snapshot(-1, false, /*room=*/20, removed);
      while (t->read_snapshot(50, {ids.data(), columns, times.data(), nullptr, nullptr}) > 0) {
      }
      t->end_snapshot(false);
    }
  one.join(), two.join(), three.join();
  CHECK(a->size() == 800 && b->size() == 800);
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not follow threads started after a fork
// A fork waits for calls in progress.
void fork_finds_all_tables_idle() {
  const auto a = make_table(0), b = make_table(3);
  const SegmentStep at{0.05f, 1.0f, 0};
  Ints ids(2000);
  for (int64_t i = 0; i < 2000; ++i) ids[z(i)] = i;
  const std::vector<float> gradient(2000 * 16, 1.0f);
  std::vector<TableUpdate> updates(2);
  for (size_t k = 0; k < 2; ++k) {
    updates[k].table = k ? a.get() : b.get();
    updates[k].u.ids = ids.data();
    updates[k].u.n = 2000;
    updates[k].u.flat = gradient.data();
    updates[k].u.steps = &at;
  }
  TableGroup::update(updates, 4);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    while (!done) TableGroup::update(updates, 4);
  });
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(30);
      TableGroup::update(updates, 4);
      _exit(a->size() == 2000 && b->size() == 2000 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  done = true;
  writer.join();
}
#endif

}  // namespace

int main() {
  equals_one_table_at_a_time();
  a_full_table_leaves_all_tables_unchanged();
  calls_do_not_wait_for_each_other();
#if !defined(__SANITIZE_THREAD__)
  // qemu 7.2 aborts in a child of a process with threads.
  if (!std::getenv("MEGALITH_EMULATED")) fork_finds_all_tables_idle();
#endif
  std::puts("group ok");
}
