// Served rows: the first layer that has an id decides, then the export; bytes that changed in a mapped file since it was
// checked are never followed outside of it. Writers and readers run at once, for the sanitizer of data races.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "check.hpp"
#include "served_rows.hpp"

using namespace megalith;

namespace {

constexpr int64_t kDim = 3;

// A file whose buffers end where their data end. The row of id i is (value, i, value).
struct File {
  std::unique_ptr<int64_t[]> ids, buckets;
  std::unique_ptr<float[]> rows, steps;
  std::vector<StoredPart> parts;
  FrozenRows view;

  File(std::vector<int64_t> given, int64_t width, float value, int bits, float flag = 0.0f) : parts{{Stored::float32, width}} {
    const int64_t n = static_cast<int64_t>(given.size());
    std::sort(given.begin(), given.end(), [](int64_t a, int64_t b) { return slot_hash(a) < slot_hash(b); });
    ids.reset(new int64_t[given.size()]);
    std::copy(given.begin(), given.end(), ids.get());
    const size_t count = (size_t{1} << bits) + 1;
    buckets.reset(new int64_t[count]());
    for (int64_t id : given) ++buckets[(bits ? slot_hash(id) >> (64 - bits) : 0) + 1];
    std::partial_sum(buckets.get(), buckets.get() + count, buckets.get());
    rows.reset(new float[static_cast<size_t>(n * width)]);
    steps.reset(new float[static_cast<size_t>(width)]());
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < width; ++c)
        rows[static_cast<size_t>(i * width + c)] =
            c == kDim ? flag : c == 1 ? static_cast<float>(ids[static_cast<size_t>(i)]) : value;
    view = {ids.get(), n, buckets.get(), rows.get(), parts.data(), 1, steps.get(), width, 4 * width, bits};
  }
};

std::unique_ptr<Table> layer() {
  TableOptions options;
  options.name = "t";
  SegmentPlan plan{};
  plan.dim = kDim + 1;
  plan.optimizer = optimizer_index("sgd");
  plan.base = -1;
  plan.hyper[0] = 0.0f;
  options.segments.push_back(plan);
  options.initial_state.emplace_back();
  options.missing_zeros = true;
  return std::make_unique<Table>(std::move(options));
}

void put(Table& table, const std::vector<int64_t>& ids, float value, float flag) {
  std::vector<float> rows;
  for (int64_t id : ids) rows.insert(rows.end(), {value, static_cast<float>(id), value, flag});
  table.assign(ids.data(), static_cast<int64_t>(ids.size()), rows.data(), false, 1, 1);
}

void the_first_layer_decides() {
  const File base({1, 2, 3, 4, 5, 6}, kDim, 1.0f, 2), folded({2, 3, 7}, kDim + 1, 2.0f, 0, kPresent);
  const File gone({4}, kDim + 1, 0.0f, 0, kRemoved);
  const auto sealed = layer(), newest = layer();
  put(*sealed, {3, 8}, 3.0f, kPresent);
  put(*newest, {8}, 4.0f, kPresent);
  put(*newest, {5}, 0.0f, kRemoved);
  ServedTable table;
  table.layers = {{newest.get(), nullptr}, {sealed.get(), nullptr}, {nullptr, &folded.view}, {nullptr, &gone.view}};
  table.base = &base.view;
  table.dim = kDim;
  ServedTable other;
  other.base = &base.view;
  other.dim = kDim;
  ServedTable hidden = table;
  hidden.base = nullptr;
  const ServedRows served({table, other, hidden});
  const std::vector<int64_t> ids{1, 2, 3, 4, 5, 6, 7, 8, 9, 4, 9, 1, 2};
  const int64_t counts[] = {9, 2, 2};
  const std::vector<float> values{1, 2, 3, 0, 0, 1, 2, 4, 0, 1, 0, 0, 2};
  std::unique_ptr<float[]> out(new float[ids.size() * kDim]);
  CHECK(served.read(ids.data(), counts, out.get()) == 5);
  for (size_t i = 0; i < ids.size(); ++i) {
    CHECK(out[i * kDim] == values[i] && out[i * kDim + 2] == values[i]);
    CHECK(out[i * kDim + 1] == (values[i] != 0.0f ? static_cast<float>(ids[i]) : 0.0f));
  }
  const int64_t none[] = {0, 0, 0};
  CHECK(served.read(ids.data(), none, out.get()) == 0);
}

void blocks_cross_tables() {
  for (int64_t n : {31, 32, 33, 100}) {
    std::vector<int64_t> known(static_cast<size_t>(n));
    std::iota(known.begin(), known.end(), 0);
    const File a(known, kDim, 1.0f, 3), b(known, kDim, 2.0f, 1);
    ServedTable one, two;
    one.base = &a.view, two.base = &b.view;
    one.dim = two.dim = kDim;
    const ServedRows served({one, two});
    std::vector<int64_t> ids(known);
    ids.insert(ids.end(), known.begin(), known.end());
    const int64_t counts[] = {n, n};
    std::unique_ptr<float[]> out(new float[ids.size() * kDim]);
    CHECK(served.read(ids.data(), counts, out.get()) == 0);
    for (int64_t i = 0; i < 2 * n; ++i)
      CHECK(out[i * kDim] == (i < n ? 1.0f : 2.0f) && out[i * kDim + 1] == static_cast<float>(i % n));
  }
}

// A file that is overwritten after it was checked: any bytes, as base and as layer.
void damaged_files() {
  Random random{3};
  std::vector<int64_t> known(40);
  std::iota(known.begin(), known.end(), 0);
  for (int k = 0; k < 300; ++k) {
    File base(known, kDim, 1.0f, 3), folded(known, kDim + 1, 2.0f, 2, kPresent);
    for (File* file : {&base, &folded}) {
      const int64_t count = (int64_t{1} << file->view.bits) + 1;
      for (int changes = 0; changes < 4; ++changes) {
        file->buckets[static_cast<size_t>(random.below(count))] = static_cast<int64_t>(random.next());
        file->ids[static_cast<size_t>(random.below(40))] = random.below(40);
      }
    }
    ServedTable table;
    table.layers = {{nullptr, &folded.view}};
    table.base = &base.view;
    table.dim = kDim;
    const ServedRows served({table});
    std::vector<int64_t> ids(known);
    ids.push_back(1000);
    const int64_t counts[] = {41};
    std::unique_ptr<float[]> out(new float[ids.size() * kDim]);
    CHECK(served.read(ids.data(), counts, out.get()) >= 1);
  }
}

void codes() {
  const std::vector<StoredPart> parts{{Stored::float32, 1}, {Stored::int8, 2}, {Stored::bit, 3}};
  const float steps[] = {1, 0.5f, 0.25f, 2, 2, 2};
  const RowCodes codes{parts.data(), 3, steps, 7};
  // 1.5f is 00 00 c0 3f; int8 3 and -4; bits 101.
  const uint8_t bytes[] = {0x00, 0x00, 0xc0, 0x3f, 3, 0xfc, 5};
  float columns[3] = {};
  for (int b = 0; b < 7; ++b) columns[b / 3] += static_cast<float>(uint32_t{bytes[b]} << (8 * (b % 3)));
  char scratch[7];
  float out[6];
  codes.decode(columns, scratch, out);
  const float expected[] = {1.5f, 1.5f, -1.0f, 2, -2, 2};
  CHECK(std::equal(out, out + 6, expected));
}

void writes_while_reading() {
  const File base({1, 2, 3}, kDim, 1.0f, 1);
  const auto newest = layer();
  ServedTable table;
  table.layers = {{newest.get(), nullptr}};
  table.base = &base.view;
  table.dim = kDim;
  const ServedRows served({table});
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int k = 0; k < 200; ++k) put(*newest, {1, 2, 100 + k}, static_cast<float>(2 + k), kPresent);
    done = true;
  });
  const int64_t ids[] = {1, 2, 3}, counts[] = {3};
  while (!done) {
    float out[3 * kDim];
    CHECK(served.read(ids, counts, out) == 0);
    for (int i = 0; i < 3; ++i) CHECK(out[i * kDim] == out[i * kDim + 2]);  // a row is read whole
  }
  writer.join();
}

}  // namespace

int main() {
  the_first_layer_decides();
  blocks_cross_tables();
  damaged_files();
  codes();
  writes_while_reading();
}
