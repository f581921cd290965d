// Other systems' files: crc32c and EntryDumps, against known values and against damage. Every buffer
// has exactly the size of its bytes, so that the sanitizer detects a read or a write beyond it.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "crc32.hpp"
#include "crc32c.hpp"
#include "entries.hpp"

using namespace megalith;

namespace {

using Bytes = std::vector<uint8_t>;

std::unique_ptr<uint8_t[]> exact(const Bytes& bytes) {
  std::unique_ptr<uint8_t[]> copy(new uint8_t[bytes.size()]);
  if (!bytes.empty()) std::memcpy(copy.get(), bytes.data(), bytes.size());
  return copy;
}

void append(Bytes& to, const Bytes& bytes) { to.insert(to.end(), bytes.begin(), bytes.end()); }

// ---- crc32c

void known_checksums() {  // RFC 3720, B.4
  Bytes bytes(32, 0);
  CHECK(crc32c(bytes.data(), 0) == 0);
  CHECK(crc32c(bytes.data(), 32) == 0x8a9136aau);
  bytes.assign(32, 0xff);
  CHECK(crc32c(bytes.data(), 32) == 0x62a8ab43u);
  for (int i = 0; i < 32; ++i) bytes[static_cast<size_t>(i)] = static_cast<uint8_t>(i);
  CHECK(crc32c(bytes.data(), 32) == 0x46dd794eu);
  CHECK(crc32c("123456789", 9) == 0xe3069283u);
}

// ---- crc32

uint32_t crc32_by_bits(uint32_t value, const uint8_t* data, size_t n) {
  uint32_t crc = ~value;
  for (; n > 0; --n, ++data) {
    crc ^= *data;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

void folded_checksums() {
  if (!has_fast_crc32()) return;
  CHECK(crc32(0, "123456789", 9) == 0xcbf43926u);
  uint32_t random = 1;
  for (size_t n = 0; n < 400; ++n) {
    Bytes bytes(n);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((random = random * 1664525u + 1013904223u) >> 24);
    const auto data = exact(bytes);
    for (uint32_t value : {0u, 0x12345678u, 0xffffffffu})
      CHECK(crc32(value, data.get(), n) == crc32_by_bits(value, data.get(), n));
    const size_t cut = n / 3;  // a checksum continues
    CHECK(crc32(crc32(0, data.get(), cut), data.get() + cut, n - cut) == crc32(0, data.get(), n));
  }
}

// ---- entries

Bytes message(uint8_t field, const Bytes& inside) {
  Bytes out = {static_cast<uint8_t>(field << 3 | 2), static_cast<uint8_t>(inside.size())};
  append(out, inside);
  return out;
}

Bytes number(uint8_t field, float value) {
  Bytes out(5, static_cast<uint8_t>(field << 3 | 5));
  std::memcpy(out.data() + 1, &value, 4);
  return out;
}

// id, two weights, Adagrad's two sums, a time: as Monolith writes it, with unpacked floats.
Bytes entry(int64_t id, float weight, float sum) {
  Bytes out(9, 1 << 3 | 1);
  std::memcpy(out.data() + 1, &id, 8);
  append(out, number(2, weight));
  append(out, number(2, weight + 1));
  Bytes sums = number(1, sum);
  append(sums, number(1, sum + 1));
  append(out, message(3, message(1, message(1, sums))));
  append(out, {4 << 3, 0xe8, 7});
  return out;
}

Bytes record(const Bytes& inside) {
  Bytes out(12);
  const uint64_t length = inside.size();
  std::memcpy(out.data(), &length, 8);
  uint32_t crc = masked_crc32c(out.data(), 8);
  std::memcpy(out.data() + 8, &crc, 4);
  append(out, inside);
  crc = masked_crc32c(inside.data(), inside.size());
  out.resize(out.size() + 4);
  std::memcpy(out.data() + out.size() - 4, &crc, 4);
  return out;
}

EntryLayout adagrad() { return {2, 4, true, true, {{1, false, {{1, 2, 2}}}}}; }

struct Rows {
  EntriesRead read{0, 0};
  std::string problem;
  int64_t ids[3] = {}, times[3] = {};
  float rows[12] = {};
};

Rows read(const Bytes& bytes, const EntryLayout& layout, int64_t limit = 3) {
  const auto in = exact(bytes);
  Rows out;
  try {
    out.read = read_entries(in.get(), static_cast<int64_t>(bytes.size()), 0, limit, 1000, &layout, out.ids, out.rows,
                            out.times);
  } catch (const std::invalid_argument& error) {
    out.problem = error.what();
  }
  return out;
}

void entries_into_rows() {
  Bytes file = record(entry(-5, 1, 10));
  append(file, record(entry(7, 3, 30)));
  Rows got = read(file, adagrad());
  CHECK(got.read.rows == 2 && got.problem.empty());
  CHECK(got.read.used == static_cast<int64_t>(file.size()));
  CHECK(got.ids[0] == -5 && got.ids[1] == 7 && got.times[0] == 1000);
  const float expected[] = {1, 2, 10, 11, 3, 4, 30, 31};
  CHECK(std::memcmp(got.rows, expected, sizeof expected) == 0);
  got = read(file, adagrad(), 1);
  CHECK(got.read.rows == 1 && got.problem.empty());
}

void other_shapes_are_refused() {
  const Bytes file = record(entry(1, 1, 1));
  EntryLayout layout = adagrad();
  layout.segments[0].kind = 3;
  CHECK(read(file, layout).problem.find("the entry at byte 12: segment 0 holds the state of adagrad") == 0);
  layout.reads_state = false;
  CHECK(read(file, layout).read.rows == 1);
  layout = adagrad();
  layout.dim = 1;
  CHECK(read(file, layout).problem == "the entry at byte 12: field 2 has more than 1 weights");
  layout = adagrad();
  layout.segments.push_back({2, true, {}});
  CHECK(read(file, layout).problem.find("optimizer state for 1 segments, but the table has 2") != std::string::npos);
}

void entries_cut_off_and_damaged() {
  const Bytes file = record(entry(1, 1, 1));
  for (size_t cut = 0; cut < file.size(); ++cut) {
    const Rows got = read(Bytes(file.begin(), file.begin() + static_cast<long>(cut)), adagrad());
    CHECK(got.read.rows == 0 && got.read.used == 0 && got.problem.empty());
  }
  for (size_t bit = 0; bit < file.size() * 8; ++bit) {
    Bytes damaged = file;
    damaged[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
    CHECK(!read(damaged, adagrad()).problem.empty());
  }
  // With matching checksums, but damaged messages.
  Random random{2};
  const Bytes inside = entry(1, 1, 1);
  for (int round = 0; round < 20000; ++round) {
    Bytes damaged = inside;
    for (int64_t flips = 1 + random.below(4); flips > 0; --flips)
      damaged[static_cast<size_t>(random.below(static_cast<int64_t>(inside.size())))] =
          static_cast<uint8_t>(random.next());
    damaged.resize(static_cast<size_t>(random.below(static_cast<int64_t>(inside.size()) + 1)));
    read(record(damaged), adagrad());
  }
}

}  // namespace

int main() {
  known_checksums();
  folded_checksums();
  entries_into_rows();
  other_shapes_are_refused();
  entries_cut_off_and_damaged();
  std::puts("files ok");
}
