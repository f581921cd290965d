// Monolith's records: Example, ExampleBatch and Instance into columns, and damage. Every buffer has exactly the
// size of its bytes, so that the sanitizer detects a read beyond it.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "examples.hpp"

using namespace megalith;

namespace {

using Bytes = std::string;

Bytes varint(uint64_t value) {
  Bytes out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}

Bytes message(uint32_t field, const Bytes& inside) { return varint(field << 3 | 2) + varint(inside.size()) + inside; }

template <class T>
Bytes packed(uint32_t field, const std::vector<T>& values) {
  return message(field, Bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)));
}

Bytes fids(const std::vector<uint64_t>& values, uint32_t member = 2) { return message(member, packed(1, values)); }

Bytes named(const Bytes& name, const Bytes& feature) { return message(1, message(1, name) + message(2, feature)); }

Bytes example() {
  return named("f", fids({1, 2})) + named("v1", fids({900ull << 54 | 5}, 1)) + named("d", message(3, packed<float>(1, {0.5f}))) +
         named("unwanted", fids({7})) + message(100, varint(3 << 3) + varint(42)) + packed<float>(101, {1.0f, 2.0f});
}

Bytes example_batch() {
  const Bytes shared = message(1, message(1, "f") + message(2, fids({9})) + varint(3 << 3) + varint(1));
  const Bytes labels = message(1, message(1, "__LABEL__") + message(2, message(3, packed<float>(1, {1.0f}))) +
                                      message(2, message(3, packed<float>(1, {2.0f}))));
  return shared + labels + varint(3 << 3) + varint(2);
}

Bytes instance() {
  return packed<uint64_t>(1, {1ull << 54 | 5, 900ull << 54 | 6}) + packed<float>(2, {0.25f}) + packed<float>(3, {1.0f}) +
         message(9, message(1, "f") + packed<uint64_t>(2, {11}) + message(6, packed<uint64_t>(1, {12})));
}

const std::vector<std::string> kNames = {"f", "v1", "d", "value", "fc_slot_1"};

struct Decoded {
  RecordDecoder decoder;
  Decoded(RecordKind kind, const std::vector<Bytes>& records, int64_t label_index = 0)
      : decoder(kind, kNames, label_index) {
    for (const Bytes& record : records) {
      const std::unique_ptr<uint8_t[]> exact(new uint8_t[record.size()]);
      if (!record.empty()) std::memcpy(exact.get(), record.data(), record.size());
      decoder.decode(exact.get(), record.size());
    }
    for (const RecordColumn& column : decoder.columns) CHECK(column.kinds.size() == decoder.labels.size());
  }
  const RecordColumn& operator[](size_t i) const { return decoder.columns[i]; }
};

void examples_into_columns() {
  const Decoded got(RecordKind::example, {example(), "\x08", example()}, 1);
  CHECK((got.decoder.rows == std::vector<int64_t>{1, 0, 1}));
  CHECK(got.decoder.errors.size() == 1 && got.decoder.errors[0].record == 1 && got.decoder.errors[0].at == 1);
  CHECK((got[0].ids == std::vector<int64_t>{1, 2, 1, 2}));
  CHECK((got[1].ids == std::vector<int64_t>{900ll << 48 | 5, 900ll << 48 | 5}));
  CHECK((got[2].floats == std::vector<float>{0.5f, 0.5f}) && got[2].kinds[0] == CellKind::floats);
  CHECK(got[3].kinds[1] == CellKind::none && got[3].lengths[1] == 0);
  CHECK((got.decoder.labels == std::vector<float>{2, 2}));
  CHECK((got.decoder.times == std::vector<int64_t>{42, 42}));
  const Decoded unlabelled(RecordKind::example, {""});
  CHECK(unlabelled.decoder.rows[0] == 1 && std::isnan(unlabelled.decoder.labels[0]));
}

void a_later_feature_replaces_an_earlier_one() {
  const Decoded got(RecordKind::example, {named("f", fids({1, 2})) + named("f", fids({3}))});
  CHECK((got[0].ids == std::vector<int64_t>{3}) && got[0].lengths[0] == 1);
  // Two `feature` fields of one NamedFeature are merged.
  const Bytes twice = message(1, message(1, "f") + message(2, fids({1})) + message(2, fids({2})));
  CHECK((Decoded(RecordKind::example, {twice})[0].ids == std::vector<int64_t>{1, 2}));
}

void batches_into_rows() {
  const Decoded got(RecordKind::example_batch, {example_batch(), example_batch().substr(0, 40), example_batch()});
  CHECK((got.decoder.rows == std::vector<int64_t>{2, 0, 2}));
  CHECK((got[0].ids == std::vector<int64_t>{9, 9, 9, 9}));
  CHECK((got.decoder.labels == std::vector<float>{1, 2, 1, 2}));
}

void instances_into_columns() {
  const Decoded got(RecordKind::instance, {instance(), instance() + "\xff", instance()});
  CHECK((got.decoder.rows == std::vector<int64_t>{1, 0, 1}));
  CHECK((got[0].ids == std::vector<int64_t>{11, 11}));
  CHECK((got[3].floats == std::vector<float>{0.25f, 0.25f}));
  CHECK((got[4].ids == std::vector<int64_t>{1ll << 48 | 5, 1ll << 48 | 5}));
}

void damage(RecordKind kind, const Bytes& good) {
  for (size_t cut = 0; cut < good.size(); ++cut) Decoded(kind, {good.substr(0, cut), good});
  Random random{3};
  for (int round = 0; round < 2000; ++round) {
    Bytes damaged = good;
    for (int64_t flips = 1 + random.below(4); flips > 0; --flips)
      damaged[static_cast<size_t>(random.below(static_cast<int64_t>(good.size())))] = static_cast<char>(random.next());
    if (random.below(2)) damaged.resize(static_cast<size_t>(random.below(static_cast<int64_t>(good.size()) + 1)));
    const Decoded got(kind, {good, damaged, good});
    const std::vector<int64_t>& rows = got.decoder.rows;
    CHECK(rows.front() == rows.back() && rows.front() > 0);
    CHECK(got.decoder.errors.size() == 0 || rows[1] == 0);
  }
}

void utf8() {
  CHECK(wire::is_utf8("a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80"));
  for (const char* wrong : {"\xff", "\xc3", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"})
    CHECK(!wire::is_utf8(wrong));
}

}  // namespace

int main() {
  examples_into_columns();
  a_later_feature_replaces_an_earlier_one();
  batches_into_rows();
  instances_into_columns();
  damage(RecordKind::example, example());
  damage(RecordKind::example_batch, example_batch());
  damage(RecordKind::instance, instance());
  utf8();
  std::puts("examples ok");
}
