// Packed rows against a model that reads bit by bit. Memory is as small as it may be, so that sanitizers see a step too
// far.

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.hpp"
#include "chunk_rows.hpp"

using namespace megalith;

namespace {

using Bytes = std::vector<uint8_t>;

size_t z(int64_t n) { return static_cast<size_t>(n); }

// Number k of a row of numbers that have `bits` each.
uint32_t number_at(const uint8_t* row, int64_t k, int bits) {
  uint32_t value = 0;
  for (int b = 0; b < bits; ++b) {
    const int64_t at = k * bits + b;
    value |= static_cast<uint32_t>(row[at / 8] >> at % 8 & 1) << b;
  }
  return value;
}

Bytes packed(const std::vector<uint32_t>& numbers, int64_t rows, int64_t keep, int bits) {
  const int64_t width = (keep * bits + 7) / 8;
  Bytes out(z(rows * width), 0);
  for (int64_t i = 0; i < rows * keep; ++i)
    for (int b = 0; b < bits; ++b)
      if (numbers[z(i)] >> b & 1) {
        const int64_t at = i % keep * bits + b;
        out[z(i / keep * width + at / 8)] |= static_cast<uint8_t>(1 << at % 8);
      }
  return out;
}

std::vector<uint32_t> ascending(int64_t rows, int64_t keep, int64_t size, Random& random) {
  std::vector<uint32_t> all(z(size)), out;
  for (int64_t i = 0; i < size; ++i) all[z(i)] = static_cast<uint32_t>(i);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = size - 1; i > 0; --i) std::swap(all[z(i)], all[z(random.below(i + 1))]);
    std::vector<uint32_t> row(all.begin(), all.begin() + keep);
    std::sort(row.begin(), row.end());
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

void rows_are_checked_counted_and_added(int bits, Random& random) {
  const int64_t size = random.below(70) + 1, keep = random.below(size) + 1, rows = random.below(9);
  const std::vector<uint32_t> indices = ascending(rows, keep, size, random);
  std::vector<uint32_t> codes(z(rows * keep));
  for (uint32_t& code : codes) code = static_cast<uint32_t>(random.below(1 << bits));
  const Bytes i = packed(indices, rows, keep, 12), c = packed(codes, rows, keep, bits);
  for (int64_t n = 0; n < rows * keep; ++n)
    CHECK(number_at(i.data() + n / keep * index_row_bytes(keep), n % keep, 12) == indices[z(n)]);
  CHECK(check_indices(i.data(), rows, keep, static_cast<uint32_t>(size)) == 0);

  std::vector<int64_t> counts(z(1 << bits), 0), expected(z(1 << bits), 0);
  for (uint32_t code : codes) ++expected[code];
  CHECK(!count_codes(c.data(), rows, keep, bits, counts.data()));
  CHECK(counts == expected);

  std::vector<float> values(z(1 << bits)), total(z(rows * size), 0.5f), sums = total;
  for (float& value : values) value = static_cast<float>(random.below(1000)) / 7.0f;
  std::vector<uint8_t> sent(z(rows * size), 1), marks = sent;
  for (int64_t n = 0; n < rows * keep; ++n) {
    const size_t at = z(n / keep * size + indices[z(n)]);
    sums[at] += values[codes[z(n)]];
    ++marks[at];
  }
  const SentRows peer{i.data(), c.data(), keep, bits, values.data(), 1 << bits, size};
  CHECK(add_rows(peer, 0, rows, total.data(), sent.data()));
  CHECK(total == sums && sent == marks);
  CHECK(add_rows(peer, 0, rows, total.data(), static_cast<int32_t*>(nullptr)));

  std::vector<float> divided = sums;
  for (size_t n = 0; n < divided.size(); ++n) divided[n] /= static_cast<float>(marks[n]);
  std::vector<int32_t> wide(marks.begin(), marks.end());
  std::vector<float> other = sums;
  divide_by_counts(sums.data(), marks.data(), static_cast<int64_t>(sums.size()));
  divide_by_counts(other.data(), wide.data(), static_cast<int64_t>(other.size()));
  CHECK(sums == divided && other == divided);
}

void wrong_rows_are_found() {
  const std::vector<uint32_t> good{1, 5, 9};
  const auto problems = [](std::vector<uint32_t> row, uint32_t size) {
    const Bytes p = packed(row, 1, 3, 12);
    return check_indices(p.data(), 1, 3, size);
  };
  CHECK(problems(good, 10) == 0);
  CHECK(problems(good, 9) == kTooHigh);
  CHECK(problems({5, 1, 9}, 10) == kNotAscending);
  CHECK(problems({1, 5, 5}, 10) == kNotAscending);
  Bytes stray = packed(good, 1, 3, 12);
  stray.back() |= 0x80;
  CHECK(check_indices(stray.data(), 1, 3, 10) == kSpareBits);
  Bytes codes = packed({1, 2, 3}, 1, 3, 2);
  std::vector<int64_t> counts(4, 0);
  codes.back() |= 0x40;
  CHECK(count_codes(codes.data(), 1, 3, 2, counts.data()));

  const Bytes i = packed(good, 1, 3, 12), c = packed({0, 1, 3}, 1, 3, 2);
  std::vector<float> total(9), values(4);
  uint8_t* none = nullptr;
  CHECK(!add_rows(SentRows{i.data(), c.data(), 3, 2, values.data(), 4, 9}, 0, 1, total.data(), none));
  total.resize(10);
  CHECK(!add_rows(SentRows{i.data(), c.data(), 3, 2, values.data(), 3, 10}, 0, 1, total.data(), none));
}

void largest_are_found(Random& random) {
  const int64_t height = random.below(5) + 1, width = random.below(7) + 1, size = height * width;
  const int64_t lines = random.below(height) + 1, columns = random.below(width) + 1, keep = random.below(size) + 1;
  const int64_t stride = columns + random.below(3);
  std::vector<float> matrix(z((lines - 1) * stride + columns)), whole(z(size), 0.0f);
  for (float& value : matrix) value = static_cast<float>(random.below(9) - 4) * (random.below(2) ? 1e-3f : 1e3f);
  for (int64_t y = 0; y < lines; ++y)
    for (int64_t x = 0; x < columns; ++x) whole[z(y * width + x)] = matrix[z(y * stride + x)];
  std::vector<int64_t> order(z(size)), indices(z(keep));
  for (int64_t i = 0; i < size; ++i) order[z(i)] = i;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::abs(whole[z(a)]) > std::abs(whole[z(b)]);
  });
  order.resize(z(keep));
  std::sort(order.begin(), order.end());
  std::vector<float> values(z(keep));
  largest_of_chunk(matrix.data(), stride, lines, columns, height, width, keep, indices.data(), values.data());
  CHECK(indices == order);
  for (int64_t k = 0; k < keep; ++k) CHECK(values[z(k)] == whole[z(indices[z(k)])]);
}

void steps_round_twice() {
  const float chunk[6] = {1, 2, 3, 4, 5, 6};
  float weights[8] = {10, 10, 10, 10, 10, 10, 10, 10};
  step_chunk(chunk, 3, 2, 2, 0.5f, weights + 1, 4);
  const float expected[8] = {10, 9.5f, 9, 10, 10, 8, 7.5f, 10};
  CHECK(std::equal(weights, weights + 8, expected));
}

}  // namespace

int main() {
  Random random{7};
  for (int bits : {2, 4, 8})
    for (int round = 0; round < 200; ++round) rows_are_checked_counted_and_added(bits, random);
  for (int round = 0; round < 500; ++round) largest_are_found(random);
  wrong_rows_are_found();
  steps_round_twice();
}
