// Every allocation of a write fails once: the table must be as before or as after, never between.

#include <cstdlib>
#include <map>
#include <new>
#include <vector>

#include "check.hpp"
#include "table.hpp"

namespace {
long countdown = -1;  // allocations until one fails; negative: none
}

// GCC does not see that these belong together.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

void* operator new(size_t size) {
  if (countdown >= 0 && countdown-- == 0) throw std::bad_alloc();
  if (void* p = std::malloc(size ? size : 1)) return p;
  throw std::bad_alloc();
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }

using namespace megalith;

namespace {

constexpr int kDim = 4;

TableOptions options() {
  TableOptions o;
  o.name = "t";
  SegmentPlan s{};
  s.dim = kDim;
  s.optimizer = optimizer_index("adagrad");
  s.init = InitKind::uniform;
  s.init_b = 1.0f;
  o.segments = {s};
  return o;
}

std::vector<int64_t> numbers(int64_t first, int64_t last) {
  std::vector<int64_t> ids;
  for (int64_t id = first; id < last; ++id) ids.push_back(id);
  return ids;
}

// Ids by scan, which must be those that find knows.
std::map<int64_t, float> contents(Table& table) {
  std::map<int64_t, float> rows;
  std::vector<int64_t> ids(8192), times(8192);
  std::vector<float> raw(8192 * static_cast<size_t>(table.dim()));
  const auto result = table.scan(0, 8192, {ids.data(), {{raw.data(), 0, table.dim()}}, times.data(), nullptr, nullptr});
  CHECK(result.next == -1 && result.count == table.size());
  for (int64_t i = 0; i < result.count; ++i) {
    const size_t k = static_cast<size_t>(i);
    rows[ids[k]] = raw[k * static_cast<size_t>(table.dim())];
    int32_t row;
    table.find(&ids[k], 1, &row, 1);
    CHECK(row >= 0);
  }
  return rows;
}

template <class Write>
void survives(Write&& write) {
  int failures = 0;
  for (long n = 0;; ++n) {
    // A thread of its own: scratch memory of earlier rounds must not hide allocations.
    bool failed = false;
    std::thread([&] {
      Table table(options());
      table.track(0);
      const std::vector<int64_t> ids = numbers(0, 1000);
      const std::vector<float> values(ids.size() * kDim, 1.0f);
      table.assign(ids.data(), 1000, values.data(), false, 1, 1);
      const std::map<int64_t, float> before = contents(table);
      const int64_t epoch = table.epoch();
      countdown = n;
      try {
        write(table);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      countdown = -1;
      if (failed) {
        CHECK(contents(table) == before);
        CHECK(table.epoch() == epoch);
      }
    }).join();
    if (!failed) break;
    ++failures;
  }
  CHECK(failures > 0);
}

}  // namespace

int main() {
  const std::vector<int64_t> ids = numbers(500, 3000);
  const std::vector<float> values(ids.size() * kDim, 2.0f);
  const int64_t n = static_cast<int64_t>(ids.size());
  survives([&](Table& t) { t.assign(ids.data(), n, values.data(), false, 1, 1); });
  survives([&](Table& t) { t.remove(ids.data(), n); });
  survives([&](Table& t) { t.clear(); });
  survives([&](Table& t) {
    const SegmentStep at{0.1f, 1.0f, 0};
    Update u;
    u.ids = ids.data();
    u.n = n;
    u.flat = values.data();
    u.steps = &at;
    t.update(u, 1);
  });
  std::puts("memory ok");
}
