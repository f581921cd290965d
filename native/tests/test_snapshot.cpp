// A snapshot read while other threads write: it must hold what was there when it was taken. Run under TSan.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <thread>
#include <vector>

#include "check.hpp"
#include "table.hpp"

using namespace megalith;

namespace {

constexpr int kDim = 3;

TableOptions options() {
  TableOptions o;
  o.name = "t";
  SegmentPlan s{};
  s.dim = kDim;
  s.optimizer = optimizer_index("adagrad");
  o.segments = {s};
  o.initial_state = {std::vector<float>(kDim, 0.1f)};
  return o;
}

std::vector<int64_t> numbers(int64_t n, int64_t step = 1) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(i * step);
  return ids;
}

void set(Table& table, const std::vector<int64_t>& ids, float value) {
  const std::vector<float> values(ids.size() * kDim, value);
  table.assign(ids.data(), static_cast<int64_t>(ids.size()), values.data(), false, 7, 2);
}

void train(Table& table, const std::vector<int64_t>& ids) {
  const std::vector<float> grads(ids.size() * kDim, 1.0f);
  const SegmentStep at{0.5f, 1.0f, 0};
  Update u;
  u.ids = ids.data();
  u.n = static_cast<int64_t>(ids.size());
  u.flat = grads.data();
  u.steps = &at;
  u.time = 9;
  table.update(u, 2);
}

// First weight by id; every id once.
std::map<int64_t, float> read_all(Table& table, int64_t step) {
  std::map<int64_t, float> rows;
  const size_t n = static_cast<size_t>(step);
  std::vector<int64_t> ids(n), times(n);
  std::vector<float> weights(n * kDim), state(n * kDim);
  const std::vector<Column> columns{{weights.data(), 0, kDim}, {state.data(), kDim, kDim}};
  while (const int64_t count = table.read_snapshot(step, {ids.data(), columns, times.data(), nullptr, nullptr}))
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      CHECK(rows.emplace(ids[i], weights[i * kDim]).second);
      CHECK(times[i] == 7);
    }
  return rows;
}

// Updates, assignments, removals and new rows beside the reader, with room for few rows set aside.
void holds_what_was_there() {
  Table table(options());
  constexpr int64_t n = 20000;
  const std::vector<int64_t> ids = numbers(n);
  set(table, ids, 5.0f);
  std::vector<int64_t> removed;
  CHECK(table.begin_snapshot(-1, false, 100, removed) == n);
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  writers.emplace_back([&] {
    while (!stop) train(table, numbers(700, 29));
  });
  writers.emplace_back([&] {
    for (int64_t round = 0; !stop; ++round) {
      const std::vector<int64_t> some = numbers(300, 61 + round % 5);
      table.remove(some.data(), 300);
      set(table, numbers(400, 59), 1.0f);
      set(table, numbers(50, -3 - round), 2.0f);
    }
  });
  const auto rows = read_all(table, 64);
  table.end_snapshot(false);
  stop = true;
  for (auto& w : writers) w.join();
  CHECK(rows.size() == static_cast<size_t>(n));
  for (const auto& [id, value] : rows) CHECK(id >= 0 && id < n && value == 5.0f);
}

void touched_rows_alone_and_given_back() {
  Table table(options());
  set(table, numbers(1000), 1.0f);
  table.track(2);
  set(table, numbers(10, 7), 3.0f);
  const int64_t gone[] = {999, 5000};
  table.remove(gone, 2);
  for (const bool give_back : {true, true, false}) {
    std::vector<int64_t> removed;
    CHECK(table.begin_snapshot(2, true, 5, removed) == 10);
    CHECK(removed == std::vector<int64_t>{999});
    const auto rows = read_all(table, 3);
    CHECK(rows.size() == 10);
    for (const auto& [id, value] : rows) CHECK(id % 7 == 0 && value == 3.0f);
    table.end_snapshot(give_back);
  }
  std::vector<int64_t> updated, removed;
  table.drain(2, updated, removed);
  CHECK(updated.empty() && removed.empty());
}

void one_at_a_time() {
  Table table(options());
  std::vector<int64_t> removed;
  table.begin_snapshot(-1, false, 1, removed);
  bool refused = false;
  try {
    table.begin_snapshot(-1, false, 1, removed);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
  table.end_snapshot(false);
  table.begin_snapshot(-1, false, 1, removed);
}

void clear_waits_for_the_reader() {
  Table table(options());
  set(table, numbers(500), 5.0f);
  std::vector<int64_t> removed;
  table.begin_snapshot(-1, false, 1, removed);
  std::thread other([&] { table.clear(); });
  const auto rows = read_all(table, 16);
  CHECK(rows.size() == 500);
  table.end_snapshot(false);
  other.join();
  CHECK(table.size() == 0);
}

// The child has no reader: it must not wait for one.
void a_forked_child_writes_on() {
  Table table(options());
  set(table, numbers(500), 5.0f);
  std::vector<int64_t> removed;
  table.begin_snapshot(-1, false, 1, removed);
  const pid_t child = fork();
  if (child == 0) {
    set(table, numbers(500), 6.0f);
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(read_all(table, 16).size() == 500);
  table.end_snapshot(false);
}

void a_reader_that_has_stopped_is_an_error() {
  Table table(options());
  set(table, numbers(500), 5.0f);
  std::vector<int64_t> removed;
  table.begin_snapshot(-1, false, 1, removed, nullptr, 0.05);
  std::vector<std::thread> writers;
  std::atomic<int> stalled{0};
  for (int k = 0; k < 3; ++k)
    writers.emplace_back([&] {
      try {
        set(table, numbers(500), 6.0f);
      } catch (const SnapshotStalled&) {
        ++stalled;
      }
    });
  for (auto& w : writers) w.join();
  CHECK(stalled == 3);
  const auto rows = read_all(table, 16);
  for (const auto& [id, value] : rows) CHECK(value == 5.0f);
}

}  // namespace

int main() {
  holds_what_was_there();
  touched_rows_alone_and_given_back();
  one_at_a_time();
  clear_waits_for_the_reader();
  a_forked_child_writes_on();
  a_reader_that_has_stopped_is_an_error();
  return 0;
}
