// The ops' native code against naive models: any sizes, portable and AVX2 bit for bit, one thread
// against four. Memory is as small as it may be, so that sanitizers see a step too far.

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "bags.hpp"
#include "check.hpp"
#include "dedup.hpp"
#include "layout.hpp"
#include "moves.hpp"

using namespace megalith;

namespace {

using Ints = std::vector<int64_t>;
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

size_t z(int64_t n) { return static_cast<size_t>(n); }

int64_t any_id(Random& random) {
  const int64_t extremes[] = {0, -1, 1, kLowest, kLowest + 1, kHighest, kHighest - 1, int64_t{1} << 32};
  switch (random.below(4)) {
    case 0: return extremes[random.below(8)];
    case 1: return static_cast<int64_t>(random.next());
    default: return random.below(60) - 20;
  }
}

// rows + 1 cuts from 0 to n.
Ints any_splits(Random& random, int64_t rows, int64_t n) {
  Ints splits(z(rows + 1), 0);
  for (int64_t r = 1; r < rows; ++r) splits[z(r)] = random.below(n + 1);
  if (rows) splits[z(rows)] = n;
  std::sort(splits.begin(), splits.end());
  return splits;
}

template <class T>
std::vector<T> any_numbers(Random& random, int64_t n) {
  std::vector<T> out(z(n));
  for (T& x : out) x = static_cast<T>(random.below(2000001) - 1000000) / T(999983);
  return out;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(T)));
}

// ---- routes

void remainders_are_exact() {
  Random random{1};
  std::vector<uint64_t> divisors;
  for (uint64_t d = 1; d <= 300; ++d) divisors.push_back(d);
  for (int k = 9; k < 63; ++k)
    for (int d = -1; d <= 1; ++d) divisors.push_back((uint64_t{1} << k) + static_cast<uint64_t>(d));
  for (int k = 0; k < 300; ++k) divisors.push_back((random.next() >> (1 + random.below(60))) + 1);
  for (uint64_t d : divisors) {
    const Divider by(d);
    std::vector<uint64_t> numbers = {0, 1, d - 1, d, d + 1, ~uint64_t{0}, uint64_t{1} << 63, ~uint64_t{0} / d * d,
                                     ~uint64_t{0} / d * d - 1, (uint64_t{1} << 63) - 1, uint64_t{1} << 32};
    for (int k = 0; k < 40; ++k) numbers.push_back(random.next() >> random.below(64));
    for (uint64_t x : numbers) CHECK(by.quotient(x) == x / d && by.remainder(x) == x % d);
  }
}

int32_t naive_owner(RouteMode mode, uint64_t owners, uint64_t block, int32_t first, int64_t id) {
  const uint64_t u = static_cast<uint64_t>(id);
  uint64_t owner = (mode == RouteMode::hash_roundrobin ? murmur_finalizer(u) : u) % owners;
  if (mode == RouteMode::continuous && u < block * owners) owner = u / block;
  return static_cast<int32_t>(owner) + first;
}

Route any_route(Random& random, uint64_t owners, int32_t first, RouteMode* mode, uint64_t* block) {
  *mode = static_cast<RouteMode>(random.below(3));
  *block = *mode == RouteMode::continuous ? static_cast<uint64_t>(random.below(40) + 1) : 0;
  return Route(*mode, owners, *block, first);
}

// ---- distinct ids

void dedup_is_a_map(int64_t lists, int64_t n, Random& random) {
  const int32_t first = static_cast<int32_t>(random.below(2));
  const int64_t owners = random.below(9) + 1, shards = owners + first;
  RouteMode mode;
  uint64_t block;
  const Route route = any_route(random, static_cast<uint64_t>(owners), first, &mode, &block);
  const Ints splits = any_splits(random, lists, n);
  Ints ids(z(splits.back())), widths(z(lists));
  n = splits.back();
  for (int64_t& id : ids) id = any_id(random);
  for (int64_t& w : widths) w = random.below(6);
  std::vector<int32_t> given(z(n));
  for (int32_t& g : given) g = static_cast<int32_t>(random.below(shards));
  const bool distinct = random.below(3) > 0, by_rule = random.below(2) > 0;

  // The model: for each bucket the distinct ids in order, and where each occurrence's is.
  std::vector<Ints> bucket(z(shards * lists));
  std::vector<std::pair<int64_t, int64_t>> where(z(n));  // bucket, place in it
  for (int64_t m = 0; m < lists; ++m) {
    std::map<int64_t, std::pair<int64_t, int64_t>> seen;
    for (int64_t i = splits[z(m)]; i < splits[z(m + 1)]; ++i) {
      const auto known = seen.find(ids[z(i)]);
      if (distinct && known != seen.end()) {
        where[z(i)] = known->second;
        continue;
      }
      const int64_t owner = by_rule ? naive_owner(mode, static_cast<uint64_t>(owners), block, first, ids[z(i)])
                                    : given[z(i)];
      Ints& b = bucket[z(owner * lists + m)];
      where[z(i)] = seen[ids[z(i)]] = {owner * lists + m, static_cast<int64_t>(b.size())};
      b.push_back(i);
    }
  }
  Ints begin, element, unique, firsts;
  int64_t elements = 0;
  for (int64_t b = 0; b < shards * lists; ++b) {
    begin.push_back(static_cast<int64_t>(unique.size()));
    element.push_back(elements);
    for (int64_t i : bucket[z(b)]) unique.push_back(ids[z(i)]), firsts.push_back(i);
    elements += static_cast<int64_t>(bucket[z(b)].size()) * widths[z(b % lists)];
  }

  for (int threads : {1, 4}) {
    Ints index(z(n)), at(z(n)), found(z(n)), counts(z(shards * lists)), offsets(z(n));
    const Deduped out{index.data(), at.data(), found.data(), counts.data(), offsets.data(), widths.data()};
    const int64_t u = dedup(ids.data(), splits.data(), lists, {route, by_rule ? nullptr : given.data()}, shards,
                            distinct, out, threads);
    CHECK(u == static_cast<int64_t>(unique.size()));
    CHECK(std::equal(unique.begin(), unique.end(), found.begin()));
    CHECK(std::equal(firsts.begin(), firsts.end(), at.begin()));
    for (int64_t b = 0; b < shards * lists; ++b) CHECK(counts[z(b)] == static_cast<int64_t>(bucket[z(b)].size()));
    for (int64_t i = 0; i < n; ++i) {
      const auto [b, k] = where[z(i)];
      CHECK(index[z(i)] == begin[z(b)] + k);
      CHECK(offsets[z(i)] == element[z(b)] + k * widths[z(b % lists)]);
    }
  }
}

void match_is_a_map(int64_t m, int64_t n, Random& random) {
  Ints keys(z(m)), queries(z(n)), out(z(n)), expected(z(n), -1);
  std::map<int64_t, int64_t> first;
  for (int64_t i = 0; i < m; ++i) first.emplace(keys[z(i)] = any_id(random), i);
  for (int64_t i = 0; i < n; ++i) {
    const auto known = first.find(queries[z(i)] = any_id(random));
    if (known != first.end()) expected[z(i)] = known->second;
  }
  for (int threads : {1, 4}) {
    match(keys.data(), m, queries.data(), n, out.data(), threads);
    CHECK(out == expected);
  }
}

void bucketize_keeps_order(int64_t rows, int64_t n, Random& random) {
  const int32_t first = static_cast<int32_t>(random.below(2));
  const int64_t owners = random.below(12) + 1, shards = owners + first;
  RouteMode mode;
  uint64_t block;
  const Route route = any_route(random, static_cast<uint64_t>(owners), first, &mode, &block);
  const Ints splits = any_splits(random, rows, n);
  n = splits.back();
  Ints ids(z(n)), lengths(z(shards * rows)), expected_lengths(lengths), expected(z(n));
  std::vector<int32_t> given(z(n));
  for (int64_t& id : ids) id = any_id(random);
  for (int64_t i = 0; i < n; ++i)
    given[z(i)] = naive_owner(mode, static_cast<uint64_t>(owners), block, first, ids[z(i)]);
  for (int64_t s = 0, next = 0; s < shards; ++s)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = splits[z(r)]; i < splits[z(r + 1)]; ++i)
        if (given[z(i)] == s) expected[z(i)] = next++, ++expected_lengths[z(s * rows + r)];
  for (int threads : {1, 4})
    for (const bool by_rule : {true, false}) {
      Ints place(z(n));
      bucketize(by_rule ? ids.data() : nullptr, splits.data(), rows, {route, by_rule ? nullptr : given.data()},
                shards, lengths.data(), place.data(), threads);
      CHECK(place == expected && lengths == expected_lengths);
    }
}

// ---- whole rows

void gather_copies_bytes(const Kernels& kernels, int64_t width, int64_t stride, Random& random) {
  const int64_t rows = random.below(20) + 1, n = random.below(100);
  const int64_t size = (rows - 1) * stride + width;
  std::unique_ptr<char[]> source(new char[z(size)]), out(new char[z(n * width)]);
  for (int64_t i = 0; i < size; ++i) source[z(i)] = static_cast<char>(random.next());
  Ints index(z(n));
  for (int64_t& i : index) i = random.below(rows);
  kernels.gather(source.get(), index.data(), n, stride, width, out.get());
  for (int64_t i = 0; i < n; ++i)
    CHECK(!std::memcmp(out.get() + i * width, source.get() + index[z(i)] * stride, z(width)));
}

template <class T>
void scatter_adds_in_order(const FlatKernels<T>& kernels, Random& random) {
  const int64_t width = random.below(40), stride = random.below(30), rows = random.below(9) + 1, n = random.below(60);
  const int64_t size = (rows - 1) * stride + width;
  const std::vector<T> values = any_numbers<T>(random, n * width);
  Ints index(z(n));
  for (int64_t& i : index) i = random.below(rows);
  std::vector<T> expected(z(size), T(0)), whole = expected, shared = expected;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < width; ++c) expected[z(index[z(i)] * stride + c)] += values[z(i * width + c)];
  kernels.scatter(values.data(), index.data(), n, stride, width, 0, size, whole.data());
  const int64_t tasks = random.below(4) + 2;
  for (int64_t t = 0; t < tasks; ++t)
    kernels.scatter(values.data(), index.data(), n, stride, width, size * t / tasks, size * (t + 1) / tasks,
                    shared.data());
  CHECK(same_bits(whole, expected) && same_bits(shared, expected));
}

// ---- pooling

// A feature with memory of its own.
template <class T>
struct Feature {
  Ints offsets;
  std::vector<T> divisor;
  std::vector<PartOf<T>> parts;  // data is set by `views`
  std::vector<int64_t> outputs;
  bool weighted, shared;
};

template <class T>
struct Pool {
  int dim;
  int64_t stride, size, batch;
  std::vector<Feature<T>> features;
  Ints index, columns;  // columns of each output
  std::vector<T> source, weights;

  std::vector<BagsOf<T>> views(std::vector<std::vector<T>>& outputs) {
    std::vector<BagsOf<T>> bags;
    for (Feature<T>& f : features) {
      for (size_t p = 0; p < f.parts.size(); ++p) {
        f.parts[p].data = outputs[z(f.outputs[p])].data();
        f.parts[p].stride = columns[z(f.outputs[p])];
      }
      bags.push_back({f.offsets.data(), static_cast<int64_t>(f.offsets.size()) - 1,
                      f.weighted ? weights.data() : nullptr, f.divisor.empty() ? nullptr : f.divisor.data(),
                      f.parts.data(), static_cast<int32_t>(f.parts.size()), f.shared});
    }
    return bags;
  }
  std::vector<std::vector<T>> zeros() const {
    std::vector<std::vector<T>> outputs;
    for (int64_t c : columns) outputs.emplace_back(z(batch * c), T(0));
    return outputs;
  }
  T* cell(std::vector<std::vector<T>>& outputs, const Feature<T>& f, size_t p, int64_t bag, int64_t tile) const {
    const PartOf<T>& part = f.parts[p];
    const int64_t periods = (static_cast<int64_t>(f.offsets.size()) - 1) / part.inner;
    const int64_t row = tile * periods + bag / part.inner;
    return outputs[z(f.outputs[p])].data() + row * columns[z(f.outputs[p])] + part.column + bag % part.inner * part.step;
  }
};

template <class T>
Pool<T> any_pool(Random& random, int64_t batch, int64_t most) {
  Pool<T> pool{};
  const int dims[] = {1, 3, 8, 12, 16, 21, 32, 45, 64, 75};
  pool.dim = dims[random.below(10)];
  const bool flat = random.below(2) > 0;
  pool.stride = flat ? 1 : pool.dim;
  pool.size = (random.below(9) + 1) * pool.dim + (flat ? random.below(pool.dim) : 0);
  pool.batch = batch;
  pool.columns = {pool.dim};
  for (int64_t f = random.below(4); f >= 0; --f) {
    Feature<T> feature{};
    const int32_t inner = random.below(3) ? 1 : 3;
    feature.shared = random.below(3) == 0 && batch % 2 == 0;
    feature.weighted = random.below(2) > 0;
    const int64_t periods = feature.shared ? (batch && random.below(2) ? 2 : 1) : batch;
    const int32_t start = static_cast<int32_t>(random.below(pool.dim));
    const int32_t end = start + 1 + static_cast<int32_t>(random.below(pool.dim - start));
    const int64_t step = end - start + random.below(3), column = random.below(3);
    const int64_t tiles = feature.shared ? batch / periods : 1;
    feature.parts.push_back({nullptr, 0, column, start, end, inner, false, step, tiles});
    feature.outputs.push_back(static_cast<int64_t>(pool.columns.size()));
    pool.columns.push_back(column + inner * step + 1);
    int32_t reach = end;
    if (inner == 1 && random.below(2)) {  // added to output 0, which is as wide as a row
      feature.parts.push_back({nullptr, 0, 0, 0, pool.dim, 1, true, pool.dim, tiles});
      feature.outputs.push_back(0);
      reach = pool.dim;
    }
    feature.offsets.push_back(static_cast<int64_t>(pool.index.size()));
    const int64_t last = (pool.size - reach) / pool.stride;
    for (int64_t b = 0; b < periods * inner; ++b) {
      for (int64_t k = random.below(most + 1); k > 0; --k)
        pool.index.push_back(random.below(8) ? random.below(last + 1) : -1);
      feature.offsets.push_back(static_cast<int64_t>(pool.index.size()));
    }
    if (random.below(2)) {
      feature.divisor = any_numbers<T>(random, periods * inner);
      for (T& d : feature.divisor) d = d < 0 ? d - 1 : d + 1;
    }
    pool.features.push_back(feature);
  }
  pool.source = any_numbers<T>(random, pool.size);
  pool.weights = any_numbers<T>(random, static_cast<int64_t>(pool.index.size()));
  return pool;
}

template <class T>
std::vector<std::vector<T>> naive_pool(Pool<T>& pool) {
  std::vector<std::vector<T>> outputs = pool.zeros();
  for (const Feature<T>& f : pool.features)
    for (size_t b = 0; b + 1 < f.offsets.size(); ++b) {
      std::vector<T> sum(z(pool.dim), T(0));
      for (size_t p = 0; p < f.parts.size(); ++p) {
        for (int32_t c = f.parts[p].start; c < f.parts[p].end; ++c) {
          T s = T(0);
          for (int64_t i = f.offsets[b]; i < f.offsets[b + 1]; ++i)
            if (pool.index[z(i)] >= 0)
              s += pool.source[z(pool.index[z(i)] * pool.stride + c)] * (f.weighted ? pool.weights[z(i)] : T(1));
          sum[z(c)] = f.divisor.empty() ? s : s / f.divisor[b];
        }
        for (int64_t t = 0; t < f.parts[p].tiles; ++t) {
          T* out = pool.cell(outputs, f, p, static_cast<int64_t>(b), t);
          for (int32_t c = f.parts[p].start; c < f.parts[p].end; ++c, ++out)
            *out = f.parts[p].accumulate ? *out + sum[z(c)] : sum[z(c)];
        }
      }
    }
  return outputs;
}

template <class T>
std::vector<T> naive_unpool(Pool<T>& pool, std::vector<std::vector<T>>& grads) {
  std::vector<T> memory(z(pool.size), T(0));
  for (const Feature<T>& f : pool.features)
    for (size_t b = 0; b + 1 < f.offsets.size(); ++b)
      for (int64_t i = f.offsets[b]; i < f.offsets[b + 1]; ++i) {
        std::vector<T> row(z(pool.dim), T(0));
        for (size_t p = 0; p < f.parts.size(); ++p)
          for (int32_t c = f.parts[p].start; c < f.parts[p].end; ++c) {
            T g = T(0);
            for (int64_t t = 0; t < f.parts[p].tiles; ++t)
              g += pool.cell(grads, f, p, static_cast<int64_t>(b), t)[c - f.parts[p].start];
            if (!f.divisor.empty()) g = g / f.divisor[b];
            if (f.weighted) g = g * pool.weights[z(i)];
            row[z(c)] += g;
          }
        for (int c = 0; c < pool.dim && pool.index[z(i)] >= 0; ++c)
          if (row[z(c)] != T(0)) memory[z(pool.index[z(i)] * pool.stride + c)] += row[z(c)];
      }
  return memory;
}

template <class T>
void pooling_is_the_model(const std::vector<const FlatKernels<T>*>& kernels, int64_t batch, int64_t most,
                          Random& random) {
  Pool<T> pool = any_pool<T>(random, batch, most);
  const int64_t n = static_cast<int64_t>(pool.index.size());
  std::vector<std::vector<T>> grads = pool.zeros();
  for (auto& g : grads) g = any_numbers<T>(random, static_cast<int64_t>(g.size()));
  const std::vector<std::vector<T>> expected = naive_pool(pool);
  const std::vector<T> expected_back = naive_unpool(pool, grads);
  for (const FlatKernels<T>* k : kernels)
    for (int threads : {1, 4}) {
      std::vector<std::vector<T>> outputs = pool.zeros();
      pool_flat(*k, {pool.source.data(), pool.index.data(), pool.stride}, n, pool.views(outputs), threads);
      for (size_t o = 0; o < outputs.size(); ++o) CHECK(same_bits(outputs[o], expected[o]));
      std::vector<T> back(z(pool.size), T(0));
      unpool_flat(*k, {back.data(), pool.index.data(), pool.stride}, n, pool.size, pool.dim, pool.views(grads),
                  threads);
      CHECK(same_bits(back, expected_back));
    }
}

// ---- runs

void runs_move_as_a_whole(Random& random) {
  const int64_t rows = random.below(6) + 1, n = random.below(30);
  const Ints splits = any_splits(random, rows, n);
  Ints values(z(n)), chosen(z(random.below(9))), expected;
  for (int64_t& v : values) v = any_id(random);
  for (int64_t& r : chosen) {
    r = random.below(rows);
    expected.insert(expected.end(), values.begin() + splits[z(r)], values.begin() + splits[z(r + 1)]);
  }
  Ints out(expected.size());
  take_rows(reinterpret_cast<const char*>(values.data()), 8, splits.data(), chosen.data(),
            static_cast<int64_t>(chosen.size()), reinterpret_cast<char*>(out.data()));
  CHECK(out == expected);

  const int64_t size = random.below(20) + 1, m = random.below(20) + 1, runs = random.below(12);
  const std::vector<double> source = any_numbers<double>(random, m);
  std::vector<double> sums(z(size), 0.0), moved = sums;
  Ints from, to, widths;
  for (int64_t k = 0; k < runs; ++k) {
    widths.push_back(random.below(std::min(m, size) + 1));
    from.push_back(random.below(m - widths.back() + 1));
    to.push_back(random.below(size - widths.back() + 1));
    for (int64_t c = 0; c < widths.back(); ++c) sums[z(to.back() + c)] += source[z(from.back() + c)];
  }
  move_runs(source.data(), from.data(), to.data(), widths.data(), runs, moved.data());
  CHECK(same_bits(moved, sums));
}

void packed_offsets_stay_in_their_list(Random& random) {
  const int64_t lists = random.below(4) + 1, features = random.below(3) + 1, n = random.below(12);
  Ints bases(z(lists + 1), 0), ends = any_splits(random, features, n), widths(z(features)), packed(z(n));
  ends.erase(ends.begin());
  for (int64_t l = 0; l < lists; ++l) bases[z(l + 1)] = bases[z(l)] + random.below(20);
  for (int64_t& w : widths) w = random.below(5) + 1;
  for (int64_t& p : packed)
    p = random.below(20) ? random.below(lists + 1) << 32 | random.below(20) : static_cast<int64_t>(random.next());
  int64_t bad = -1;
  Ints expected(z(n)), out(z(n));
  for (int64_t i = 0, f = 0; i < n && bad < 0; ++i) {
    while (i >= ends[z(f)]) ++f;
    const uint64_t list = static_cast<uint64_t>(packed[z(i)]) >> 32;
    const int64_t element = packed[z(i)] & 0xffffffff;
    if (list >= static_cast<uint64_t>(lists) || bases[list] + element + widths[z(f)] > bases[list + 1])
      bad = i;
    else
      expected[z(i)] = bases[list] + element;
  }
  CHECK(locate(packed.data(), bases.data(), lists, ends.data(), widths.data(), features, out.data()) == bad);
  CHECK(bad >= 0 || out == expected);
}

// Monolith's encoding as bags: every occurrence located, the first ones of FIRSTN side by side.
template <class T>
void layouts_are_bags(Random& random) {
  const int64_t lists = random.below(4) + 1, batch = random.below(6);
  Ints begins(z(lists)), ends(z(lists)), packed, offsets = {0};
  for (int64_t l = 0; l < lists; ++l) {
    begins[z(l)] = l * 40 + random.below(5);  // apart, as tensors are
    ends[z(l)] = begins[z(l)] + 8 + random.below(20);
  }
  std::vector<LayoutFeature> features;
  int64_t bad = -1;
  for (int64_t k = random.below(4); k >= 0; --k) {
    const bool shared = random.below(3) == 0;
    LayoutFeature f{static_cast<int64_t>(offsets.size()) - 1, shared ? 1 : batch, random.below(8) + 1, 0,
                    random.below(2) > 0, shared};
    if (!f.mean) f.keep = random.below(2) * 3;
    for (int64_t r = 0; r < f.rows; ++r) {
      for (int64_t n = random.below(5); n > 0; --n) {
        const int64_t list = random.below(lists), room = ends[z(list)] - begins[z(list)] - f.width + 1;
        const bool wrong = bad < 0 && random.below(200) == 0;
        if (wrong) bad = static_cast<int64_t>(packed.size());
        packed.push_back(wrong ? list << 32 | (room + random.below(3)) : list << 32 | random.below(room));
      }
      offsets.push_back(static_cast<int64_t>(packed.size()));
    }
    features.push_back(f);
  }
  for (int threads : {1, 4}) {
    const LayoutBags<T> bags(packed.data(), offsets.data(), features, begins.data(), ends.data(), lists, threads);
    CHECK(bags.first_bad == bad);
    if (bad >= 0) continue;
    const auto element = [&](int64_t i) { return begins[z(packed[z(i)] >> 32)] + (packed[z(i)] & 0xffffffff); };
    for (size_t k = 0; k < features.size(); ++k) {
      const LayoutFeature& f = features[k];
      const BagsOf<T>& view = bags.views[k];
      CHECK(view.num_bags == f.rows * (f.keep ? f.keep : 1) && view.shared == f.shared && !view.weights);
      CHECK((view.divisor != nullptr) == (f.mean && f.rows > 0) || f.rows == 0);
      for (int64_t b = 0; b < view.num_bags; ++b) {
        const int64_t row = f.keep ? b / f.keep : b, skip = f.keep ? b % f.keep : 0;
        const int64_t first = offsets[z(f.first_row + row)], last = offsets[z(f.first_row + row + 1)];
        const int64_t n = f.keep ? 1 : last - first, from = view.offsets[b];
        CHECK(view.offsets[b + 1] - from == n && from + n <= bags.occurrences);
        for (int64_t i = 0; i < n; ++i)
          CHECK(bags.index[from + i] == (first + skip + i < last ? element(first + skip + i) : -1));
        if (f.mean) CHECK(view.divisor[b] == static_cast<T>(std::max<int64_t>(1, last - first)));
      }
    }
  }
}

}  // namespace

int main() {
  remainders_are_exact();
  Random random{11};
  for (int round = 0; round < 300; ++round) {
    dedup_is_a_map(random.below(6), random.below(round % 10 ? 60 : 4000), random);
    match_is_a_map(random.below(50), random.below(60), random);
    bucketize_keeps_order(random.below(9), random.below(80), random);
    runs_move_as_a_whole(random);
    packed_offsets_stay_in_their_list(random);
    layouts_are_bags<float>(random);
    layouts_are_bags<double>(random);
  }
  match_is_a_map(3000, 70000, random);  // several threads' worth
  bucketize_keeps_order(500, 70000, random);

  std::vector<const Kernels*> all = {find_kernels("portable")};
  if (const Kernels* k = find_kernels("avx2")) all.push_back(k);
  std::vector<const FlatKernels<float>*> singles;
  std::vector<const FlatKernels<double>*> doubles;
  for (const Kernels* k : all) {
    singles.push_back(&k->flat32);
    doubles.push_back(&k->flat64);
    for (int64_t width : {0, 1, 2, 4, 8, 12, 16, 32, 64, 100, 128, 256, 300})
      for (int64_t stride : {int64_t{0}, int64_t{1}, width, width + 3}) gather_copies_bytes(*k, width, stride, random);
    for (int round = 0; round < 100; ++round) {
      scatter_adds_in_order(k->flat32, random);
      scatter_adds_in_order(k->flat64, random);
    }
  }
  for (int round = 0; round < 300; ++round) {
    pooling_is_the_model(singles, random.below(5) * 2, 3, random);
    pooling_is_the_model(doubles, random.below(9), 3, random);
  }
  for (int round = 0; round < 3; ++round) {  // several threads' worth
    pooling_is_the_model(singles, 3000, 12, random);
    pooling_is_the_model(doubles, 3000, 12, random);
  }
  std::puts("ops ok");
}
