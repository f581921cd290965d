// The table's calls: results by hand, portable against AVX2 bit for bit, one thread against four.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "check.hpp"
#include "group.hpp"
#include "table.hpp"

using namespace megalith;

namespace {

SegmentPlan segment(int dim, const char* optimizer) {
  SegmentPlan s{};
  s.dim = dim;
  s.optimizer = optimizer_index(optimizer);
  CHECK(s.optimizer >= 0);
  s.init = InitKind::normal;
  s.init_b = 0.1f;
  const std::string name = optimizer;
  const bool adam = name == "adam" || name == "adamw" || name == "amsgrad" || name == "lamb";
  const std::vector<float> hyper = adam ? std::vector<float>{0.9f, 0.99f, 0.1f, 0.01f, 0.01f, 0.001f, 1.0f}
                                        : std::vector<float>{0.1f, 0.01f, 0.05f, 0.02f, 0.03f};
  std::copy(hyper.begin(), hyper.end(), s.hyper);
  s.base = -1;
  if (name == "delay_compensated") s.base = optimizer_index("adagrad");
  return s;
}

TableOptions options(std::vector<SegmentPlan> segments, const char* kernels = "") {
  TableOptions o;
  o.name = "t";
  o.segments = std::move(segments);
  o.key = 42;
  o.kernels = kernels;
  return o;
}

using Rows1 = std::map<int64_t, std::vector<float>>;

Rows1 contents(Table& table) {
  Rows1 rows;
  const int dim = table.dim(), rest = table.row_floats() - dim;
  std::vector<int64_t> ids(7), times(7);
  std::vector<float> weights(7 * static_cast<size_t>(dim)), state(7 * static_cast<size_t>(rest));
  std::vector<Column> columns{{weights.data(), 0, dim}};
  if (rest) columns.push_back({state.data(), dim, rest});
  for (int64_t at = 0; at >= 0;) {
    const auto result = table.scan(at, 7, {ids.data(), columns, times.data(), nullptr, nullptr});
    for (int64_t i = 0; i < result.count; ++i) {
      std::vector<float>& row = rows[ids[static_cast<size_t>(i)]];
      row.assign(weights.begin() + i * dim, weights.begin() + (i + 1) * dim);
      row.insert(row.end(), state.begin() + i * rest, state.begin() + (i + 1) * rest);
    }
    at = result.next;
  }
  return rows;
}

bool same_bits(const Rows1& a, const Rows1& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [id, row] : a) {
    const auto it = b.find(id);
    if (it == b.end() || std::memcmp(row.data(), it->second.data(), row.size() * 4)) return false;
  }
  return true;
}

// A program of calls; the answer must not depend on kernels or threads.
Rows1 program(const std::vector<SegmentPlan>& segments, const char* kernels, int threads,
              std::vector<float>* pooled, int rounds = 6) {
  Table table(options(segments, kernels));
  const int dim = table.dim();
  const std::vector<SegmentStep> steps(segments.size(), {0.05f, 1.0f, 3});
  Random random{7};
  table.track(1);
  for (int step = 0; step < rounds; ++step) {
    const int64_t n = 12000, bags = n / 4;
    std::vector<int64_t> ids(static_cast<size_t>(n)), offsets;
    for (int64_t& id : ids) id = random.below(step < 3 ? 2000 : 50);
    for (int64_t b = 0; b <= bags; ++b) offsets.push_back(b * 4);
    std::vector<float> gradient(static_cast<size_t>(bags * dim)), out(gradient.size());
    std::vector<float> weights(static_cast<size_t>(n)), divisor(static_cast<size_t>(bags), 4.0f);
    for (float& g : gradient) g = static_cast<float>(random.below(2000) - 1000) * 1e-3f;
    for (float& w : weights) w = static_cast<float>(random.below(100)) * 1e-2f;
    const bool weighted = step % 2;
    PartView read{out.data(), dim, 0, 0, dim, 1, false, dim, 1}, back = read;
    back.data = gradient.data();
    BagsView bag{offsets.data(), bags, weighted ? weights.data() : nullptr,
                 step % 3 ? divisor.data() : nullptr, &read, 1, false};
    std::vector<int32_t> rows(static_cast<size_t>(n));
    std::vector<TableRead> reads(1);
    reads[0] = {&table, ids.data(), n, nullptr, rows.data(), -1, {bag}};
    TableGroup::read(reads, threads);
    const int64_t epoch = reads[0].epoch;
    pooled->insert(pooled->end(), out.begin(), out.end());
    if (step == 4) table.remove(ids.data(), 100);
    BagsView gradients = bag;
    gradients.parts = &back;
    Update u;
    u.rows = rows.data();
    u.epoch = epoch;
    u.ids = ids.data();
    u.n = n;
    u.bags = {gradients};
    u.scale = 0.5f;
    u.steps = steps.data();
    u.time = static_cast<uint32_t>(step);
    table.update(u, threads);
  }
  std::vector<int64_t> updated, removed;
  table.drain(1, updated, removed);
  CHECK(updated.size() == static_cast<size_t>(table.size()));
  return contents(table);
}

void check_program(const std::vector<SegmentPlan>& segments, int rounds = 2) {
  std::vector<float> out, other;
  const Rows1 rows = program(segments, "portable", 1, &out, rounds);
  for (const auto& [id, row] : rows)
    for (float x : row) CHECK(std::isfinite(x));
  CHECK(std::count(out.begin(), out.end(), 0.0f) < static_cast<int64_t>(out.size()) / 2);
  const auto agrees = [&](const char* kernels, int threads) {
    other.clear();
    CHECK(same_bits(rows, program(segments, kernels, threads, &other, rounds)));
    CHECK(out.size() == other.size());
    CHECK(!std::memcmp(out.data(), other.data(), out.size() * 4));
  };
  for (const char* name : kKernelNames)
    if (find_kernels(name)) agrees(name, 1);
  agrees("", 4);
}

SegmentPlan stored_as(SegmentPlan s, Precision precision, bool stochastic) {
  s.precision = precision;
  s.stochastic = stochastic;
  return s;
}

void narrow_rows_agree() {
  const SegmentPlan wide = segment(20, "adagrad"), small = segment(3, "sgd");
  for (Precision precision : {Precision::float16, Precision::bfloat16})
    for (bool stochastic : {false, true}) {
      const SegmentPlan narrow = stored_as(wide, precision, stochastic);
      check_program({narrow});
      check_program({stored_as(small, precision, false), narrow});
      check_program({stored_as(small, precision, stochastic), wide, narrow, small});
    }
}

void kernels_and_threads_agree() {
#define X(text, type) text,
  for (const char* optimizer : {MEGALITH_OPTIMIZERS(X)}) {
#undef X
    const std::string name = optimizer;
    const bool thorough = name == "adagrad" || name == "adam" || name == "lamb";
    const int rounds = thorough ? 6 : 2;
    for (int dim : {20, 3, 16}) {  // vectors and a rest, the rest only, a dim with code of its own
      if (dim != 20 && !thorough) continue;
      check_program({segment(dim, optimizer), segment(2, "sgd")}, rounds);
    }
  }
}

void adagrad_by_hand() {
  SegmentPlan s = segment(2, "adagrad");
  s.init = InitKind::constant;
  s.init_a = 0.0f;
  s.hyper[0] = s.hyper[1] = 0.0f;  // eps, weight decay
  TableOptions o = options({s});
  o.initial_state = {{1.0f, 1.0f}};
  Table table(o);
  const int64_t ids[] = {5};
  const float gradient[] = {1.0f, 2.0f};
  const SegmentStep at{0.1f, 1.0f, 0};
  Update u;
  u.ids = ids;
  u.n = 1;
  u.flat = gradient;
  u.steps = &at;
  table.update(u, 1);
  float out[2];
  table.read(nullptr, -1, ids, 1, out, 1);
  CHECK(std::fabs(out[0] + 0.07071067f) < 1e-7f);
  CHECK(std::fabs(out[1] + 0.08944272f) < 1e-7f);
}

void narrow_assigns_and_checked_reads() {
  TableOptions o = options({segment(3, "adagrad")});
  o.initial_state = {{0.5f, 0.5f, 0.5f}};
  Table table(o);
  const std::vector<int64_t> ids{7, 8, 7};
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  table.assign(ids.data(), 3, values.data(), false, 1, 1, 2, -1.0f);
  const Rows1 rows = contents(table);
  CHECK(rows.at(7) == (std::vector<float>{5, 6, -1, 0.5f, 0.5f, 0.5f}));
  CHECK(rows.at(8) == (std::vector<float>{3, 4, -1, 0.5f, 0.5f, 0.5f}));
  for (int threads : {1, 4}) {
    const int64_t n = 10000;
    std::vector<int64_t> many(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) many[static_cast<size_t>(i)] = i;
    std::vector<float> weights(static_cast<size_t>(n) * 3, 0.25f), out(weights.size());
    table.assign(many.data(), n, weights.data(), false, 1, threads);
    std::vector<int32_t> found(static_cast<size_t>(n));
    const int64_t epoch = table.find(many.data(), n, found.data(), threads);
    CHECK(table.read_finite(found.data(), epoch, many.data(), n, out.data(), threads));
    CHECK(out == weights);
    weights[20001] = std::nanf("");
    table.assign(many.data(), n, weights.data(), false, 1, threads);
    CHECK(!table.read_finite(found.data(), epoch, many.data(), n, out.data(), threads));
  }
}

void full_table_changes_nothing() {
  TableOptions o = options({segment(4, "sgd")});
  o.max_rows = 3;
  Table table(std::move(o));
  const int64_t ids[] = {1, 2, 3, 4};
  const float values[16] = {};
  table.assign(ids, 2, values, false, 0, 1);
  bool thrown = false;
  try {
    table.assign(ids, 4, values, false, 0, 1);
  } catch (const TableFull&) {
    thrown = true;
  }
  CHECK(thrown && table.size() == 2);
  table.remove(ids, 1);
  const int64_t others[] = {8, 9};
  table.assign(others, 2, values, false, 0, 1);  // the removed row's place is used again
  CHECK(table.size() == 3);
}

}  // namespace

int main() {
  adagrad_by_hand();
  narrow_assigns_and_checked_reads();
  full_table_changes_nothing();
  kernels_and_threads_agree();
  narrow_rows_agree();
  std::puts("table ok");
}
