// Many threads on one table, exceptions through the pool, and fork: run under TSan.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "buffers.hpp"
#include "check.hpp"
#include "table.hpp"

using namespace megalith;

namespace {

constexpr int kDim = 8;

TableOptions options() {
  TableOptions o;
  o.name = "t";
  SegmentPlan s{};
  s.dim = kDim;
  s.optimizer = optimizer_index("sgd");
  o.segments = {s};
  return o;
}

void pool_runs_every_task_once() {
  std::vector<std::atomic<int>> seen(1000);
  for (int round = 0; round < 20; ++round)
    ThreadPool::get().run(1000, 4, [&](int64_t task, int) { ++seen[static_cast<size_t>(task)]; });
  for (auto& s : seen) CHECK(s == 20);
}

void pool_passes_exceptions_on() {
  bool caught = false;
  try {
    ThreadPool::get().run(100, 4, [](int64_t task, int) {
      if (task == 50) throw std::runtime_error("fifty");
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  CHECK(caught);
}

// A writer sets all rows to one value at a time; a reader must never see two.
void writes_are_atomic_for_readers() {
  Table table(options());
  constexpr int64_t n = 3000;
  std::vector<int64_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = i * 977;
  std::vector<float> values(n * kDim, 0.0f);
  table.assign(ids.data(), n, values.data(), false, 0, 2);
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r)
    readers.emplace_back([&] {
      std::vector<float> out(n * kDim);
      while (!done) {
        table.read(nullptr, -1, ids.data(), n, out.data(), 2);
        for (float x : out) CHECK(x == out[0]);
      }
    });
  for (int round = 1; round <= 60; ++round) {
    values.assign(values.size(), static_cast<float>(round));
    table.assign(ids.data(), n, values.data(), false, 0, 2);
  }
  done = true;
  for (std::thread& t : readers) t.join();
}

// Writers with ids of their own and shared ones, growing the table; the sums must be right.
void concurrent_updates_add_up() {
  Table table(options());
  constexpr int kWriters = 3, kRounds = 30;
  constexpr int64_t kOwn = 2000;
  std::vector<std::thread> writers;
  for (int w = 0; w < kWriters; ++w)
    writers.emplace_back([&, w] {
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < kOwn; ++i) ids.push_back(w * kOwn + i + 1);
      ids.push_back(-7);
      std::vector<float> gradient(ids.size() * kDim, 1.0f);
      const SegmentStep at{1.0f, 1.0f, 0};
      for (int round = 0; round < kRounds; ++round) {
        Update u;
        u.ids = ids.data();
        u.n = static_cast<int64_t>(ids.size());
        u.flat = gradient.data();
        u.steps = &at;
        table.update(u, 2);
        int32_t row;
        table.find(ids.data(), 1, &row, 1);
        CHECK(row >= 0);
      }
    });
  for (std::thread& t : writers) t.join();
  CHECK(table.size() == kWriters * kOwn + 1);
  const int64_t ids[] = {-7, 1, kWriters * kOwn};
  float out[3 * kDim];
  table.read(nullptr, -1, ids, 3, out, 1);
  CHECK(out[0] == -kWriters * kRounds);
  CHECK(out[kDim] == -kRounds && out[2 * kDim] == -kRounds);
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not follow threads started after a fork
// A fork waits for a write under way; the child has the whole table and its own workers.
void child_can_use_the_table() {
  Table table(options());
  constexpr int64_t n = 20000;
  std::vector<int64_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[static_cast<size_t>(i)] = i;
  std::vector<float> values(n * kDim, 1.0f);
  table.assign(ids.data(), n, values.data(), false, 0, 4);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    while (!done) table.assign(ids.data(), n, values.data(), false, 0, 4);
  });
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(30);
      std::vector<float> out(n * kDim);
      table.read(nullptr, -1, ids.data(), n, out.data(), 4);
      values.assign(values.size(), 2.0f);
      table.assign(ids.data(), n, values.data(), false, 0, 4);
      _exit(out[0] == 1.0f && out.back() == 1.0f ? 0 : 1);
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

// Buffers of one pool are taken and returned by several threads, and survive the pool.
void buffers_are_used_again() {
  auto pool = std::make_shared<BufferPool>();
  char* first = pool->get(1000)->data();  // returned at once
  auto second = pool->get(1100);
  CHECK(second->data() == first);
  CHECK(pool->get(1100)->data() != first);
  CHECK(pool->num_free() == 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([pool, t] {
      for (int i = 0; i < 200; ++i) {
        auto one = pool->get(static_cast<size_t>(5000 + 300 * i)), two = pool->get(8000);
        std::memset(one->data(), t, static_cast<size_t>(5000 + 300 * i));
        std::memset(two->data(), t, 8000);
        CHECK(one->data()[4999] == t && two->data()[0] == t);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(pool->num_free() <= BufferPool::kMaxFree);
  pool.reset();
  second->data()[1099] = 1;
}

int main() {
  buffers_are_used_again();
  pool_runs_every_task_once();
  pool_passes_exceptions_on();
  writes_are_atomic_for_readers();
  concurrent_updates_add_up();
#if !defined(__SANITIZE_THREAD__)
  // qemu 7.2 aborts in a child of a process with threads.
  if (!std::getenv("MEGALITH_EMULATED")) child_can_use_the_table();
#endif
  std::puts("threads ok");
}
