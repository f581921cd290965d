// Frozen rows: halves of every bit pattern, ids found and missed around the size of a block, rows left alone.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "check.hpp"
#include "frozen.hpp"

using namespace megalith;

namespace {

// By the definition of IEEE 754, without a look at the bits of a float.
double half_by_definition(unsigned h) {
  const double sign = h & 0x8000u ? -1.0 : 1.0;
  const int exponent = static_cast<int>((h >> 10) & 31u);
  const double fraction = (h & 1023u) / 1024.0;
  if (exponent == 31) return fraction != 0.0 ? std::nan("") : sign * HUGE_VAL;
  return sign * (exponent ? std::ldexp(1.0 + fraction, exponent - 15) : std::ldexp(fraction, -14));
}

void every_half() {
  for (unsigned h = 0; h < 65536; ++h) {
    const float got = half_to_float(static_cast<uint16_t>(h));
    const double wanted = half_by_definition(h);
    if (std::isnan(wanted)) {
      CHECK(std::isnan(got));
    } else {
      CHECK(static_cast<double>(got) == wanted);
      CHECK(std::signbit(got) == std::signbit(wanted));
    }
  }
}

// A table whose row of an id is the id's last digits, column by column. Buffers end where their data end, so
// that the sanitizer sees a read beyond them.
template <class T>
struct Table {
  std::unique_ptr<int64_t[]> ids, buckets;
  std::unique_ptr<T[]> rows;
  std::unique_ptr<float[]> steps;
  std::vector<StoredPart> parts;
  int64_t n, dim;
  int bits;

  Table(std::vector<int64_t> given, int64_t width, int leading, T (*cell)(int64_t, int64_t))
      : n(static_cast<int64_t>(given.size())), dim(width), bits(leading) {
    std::sort(given.begin(), given.end(), [](int64_t a, int64_t b) { return slot_hash(a) < slot_hash(b); });
    ids.reset(new int64_t[given.size()]);
    std::copy(given.begin(), given.end(), ids.get());
    const size_t count = (size_t{1} << bits) + 1;
    buckets.reset(new int64_t[count]());
    for (int64_t id : given) ++buckets[(bits ? slot_hash(id) >> (64 - bits) : 0) + 1];
    std::partial_sum(buckets.get(), buckets.get() + count, buckets.get());
    rows.reset(new T[given.size() * static_cast<size_t>(dim)]);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t c = 0; c < dim; ++c) rows[i * dim + c] = cell(ids[i], c);
    steps.reset(new float[static_cast<size_t>(dim)]);
    for (int64_t c = 0; c < dim; ++c) steps[c] = 0.5f * static_cast<float>(c + 1);
  }

  FrozenRows frozen(Stored stored) {
    parts = {{stored, dim}};
    return view();
  }

  FrozenRows view() const {
    const int64_t count = static_cast<int64_t>(parts.size()), bytes = dim * static_cast<int64_t>(sizeof(T));
    return {ids.get(), n, buckets.get(), rows.get(), parts.data(), count, steps.get(), dim, bytes, bits};
  }
};

float float_cell(int64_t id, int64_t column) { return static_cast<float>(id % 1000 + column); }
int8_t byte_cell(int64_t id, int64_t column) { return static_cast<int8_t>(id % 100 - column); }
uint16_t half_cell(int64_t id, int64_t) { return static_cast<uint16_t>(0x3c00 + id % 16); }

// The ids 0, 3, 6, ... and some at the ends of the range; queries that have a row and queries that have none.
std::vector<int64_t> every_third(int64_t n) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(3 * i);
  if (n > 2) ids[1] = INT64_MIN, ids[2] = INT64_MAX;
  return ids;
}

bool among(const std::vector<int64_t>& ids, int64_t id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

void blocks_of_every_size() {
  for (int64_t n : {0, 1, 2, 7, 8, 33, 500}) {
    const std::vector<int64_t> ids = every_third(n);
    for (int bits : {0, 1, 3, 9}) {
      Table<float> table(ids, 3, bits, float_cell);
      CHECK(buckets_fit(table.buckets.get(), (int64_t{1} << bits) + 1, n));
      const FrozenRows frozen = table.frozen(Stored::float32);
      for (int64_t asked = 0; asked <= 100; ++asked) {
        const std::unique_ptr<int64_t[]> queries(new int64_t[static_cast<size_t>(asked)]);
        const std::unique_ptr<float[]> out(new float[static_cast<size_t>(asked) * 3]);
        int64_t none = 0;
        for (int64_t i = 0; i < asked; ++i) {
          queries[i] = i % 11 == 5 ? INT64_MIN : i % 11 == 7 ? INT64_MAX : (i * 7) % 200;
          none += !among(ids, queries[i]);
        }
        CHECK(frozen.read(queries.get(), asked, nullptr, out.get()) == none);
        for (int64_t i = 0; i < asked; ++i)
          for (int64_t c = 0; c < 3; ++c)
            CHECK(out[i * 3 + c] == (among(ids, queries[i]) ? float_cell(queries[i], c) : 0.0f));
      }
    }
  }
}

void what_is_skipped_is_left_alone() {
  const std::vector<int64_t> ids = every_third(100);
  Table<float> table(ids, 2, 4, float_cell);
  std::vector<int64_t> queries(70);
  std::vector<uint8_t> skip(70);
  std::vector<float> out(140, 7.5f);
  int64_t none = 0;
  for (int64_t i = 0; i < 70; ++i) {
    queries[static_cast<size_t>(i)] = i;
    skip[static_cast<size_t>(i)] = static_cast<uint8_t>(i % 4 == 1 ? 255 : 0);
    none += i % 4 != 1 && !among(ids, i);
  }
  CHECK(table.frozen(Stored::float32).read(queries.data(), 70, skip.data(), out.data()) == none);
  for (size_t i = 0; i < 70; ++i) {
    const int64_t id = static_cast<int64_t>(i);
    const float wanted = skip[i] ? 7.5f : among(ids, id) ? float_cell(id, 1) : 0.0f;
    CHECK(out[i * 2 + 1] == wanted);
  }
}

void halves_and_bytes() {
  const std::vector<int64_t> ids = every_third(40);
  Table<uint16_t> halves(ids, 5, 2, half_cell);
  Table<int8_t> bytes(ids, 5, 2, byte_cell);
  std::vector<float> out(ids.size() * 5);
  CHECK(halves.frozen(Stored::float16).read(ids.data(), 40, nullptr, out.data()) == 0);
  for (size_t i = 0; i < ids.size(); ++i) CHECK(out[i * 5 + 4] == half_to_float(half_cell(ids[i], 4)));
  CHECK(bytes.frozen(Stored::int8).read(ids.data(), 40, nullptr, out.data()) == 0);
  for (size_t i = 0; i < ids.size(); ++i)
    for (int64_t c = 0; c < 5; ++c)
      CHECK(out[i * 5 + static_cast<size_t>(c)] ==
            static_cast<float>(byte_cell(ids[i], c)) * (0.5f * static_cast<float>(c + 1)));
}

// Rows of 19 bytes: a float32, 2 int8, 2 float16 and 65 bits, none of them aligned.
void parts_of_a_row() {
  const std::vector<int64_t> ids = every_third(40);
  const int64_t bytes = 19, dim = 1 + 2 + 2 + 65;
  Table<int8_t> table(ids, bytes, 2, byte_cell);
  table.parts = {{Stored::float32, 1}, {Stored::int8, 2}, {Stored::float16, 2}, {Stored::bit, 65}};
  const std::unique_ptr<float[]> steps(new float[static_cast<size_t>(dim)]);
  std::fill(steps.get(), steps.get() + dim, 0.25f);
  FrozenRows frozen = table.view();
  frozen.steps = steps.get();
  frozen.dim = dim;
  CHECK(frozen.row_bytes == bytes);
  std::vector<float> out(ids.size() * static_cast<size_t>(dim));
  CHECK(frozen.read(ids.data(), 40, nullptr, out.data()) == 0);
  for (size_t i = 0; i < ids.size(); ++i) {
    const float* row = out.data() + i * static_cast<size_t>(dim);
    int8_t stored[19];
    for (int64_t c = 0; c < bytes; ++c) stored[c] = byte_cell(ids[i], c);
    CHECK(std::memcmp(row, stored, 4) == 0);
    CHECK(row[2] == 0.25f * static_cast<float>(stored[5]));
    uint16_t half;
    std::memcpy(&half, stored + 8, 2);
    const float wanted = half_to_float(half);
    CHECK(std::memcmp(row + 4, &wanted, 4) == 0);
    for (int c = 0; c < 65; ++c)
      CHECK(row[5 + c] == ((static_cast<uint8_t>(stored[10 + c / 8]) >> (c % 8)) & 1 ? 0.25f : -0.25f));
  }
}

void an_empty_table_needs_no_memory() {
  const int64_t buckets[] = {0, 0};
  const StoredPart parts[] = {{Stored::int8, 2}};
  const FrozenRows frozen{nullptr, 0, buckets, nullptr, parts, 1, nullptr, 2, 2, 0};
  const int64_t queries[] = {0, -1};
  float out[] = {1, 1, 1, 1};
  CHECK(frozen.read(queries, 2, nullptr, out) == 2);
  for (float x : out) CHECK(x == 0.0f);
  CHECK(frozen.read(nullptr, 0, nullptr, nullptr) == 0);
}

// A file that is overwritten after it was checked must not lead a lookup outside its ids.
void buckets_that_were_overwritten() {
  Table<float> table(every_third(8), 2, 1, float_cell);
  const FrozenRows frozen = table.frozen(Stored::float32);
  const int64_t queries[] = {0, 3};
  for (const int64_t wrong : {INT64_MIN, int64_t{-5}, int64_t{9}, INT64_MAX})
    for (int64_t k = 0; k < 3; ++k) {
      const int64_t before = table.buckets[k];
      table.buckets[k] = wrong;
      float out[4];
      CHECK(frozen.read(queries, 2, nullptr, out) <= 2);
      table.buckets[k] = before;
    }
}

void buckets_that_do_not_fit() {
  const int64_t good[] = {0, 2, 2, 5}, late[] = {1, 2, 2, 5}, down[] = {0, 3, 2, 5}, beyond[] = {0, 9, 2, 5};
  CHECK(buckets_fit(good, 4, 5));
  CHECK(!buckets_fit(good, 4, 4));
  CHECK(!buckets_fit(good, 4, 6));
  for (const int64_t* wrong : {late, down, beyond}) CHECK(!buckets_fit(wrong, 4, 5));
  const int64_t below[] = {0, -1, 2, 5};
  CHECK(!buckets_fit(below, 4, 5));
}

}  // namespace

int main() {
  every_half();
  blocks_of_every_size();
  what_is_skipped_is_left_alone();
  halves_and_bytes();
  parts_of_a_row();
  an_empty_table_needs_no_memory();
  buckets_that_were_overwritten();
  buckets_that_do_not_fit();
  std::puts("frozen ok");
}
