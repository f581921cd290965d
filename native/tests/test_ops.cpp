// The native ops on rows against naive models: any sizes, portable and AVX2 bit for bit, one thread
// against four. Memory is as small as it may be, so that sanitizers see a step too far.

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "bags.hpp"
#include "layout.hpp"
#include "moves.hpp"
#include "random_data.hpp"

using namespace megalith;

namespace {

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

void blocks_are_joined_by_table(Random& random) {
  const int64_t peers = random.below(4) + 1, tables = random.below(4);
  Ints counts(z(peers * tables)), widths(z(tables)), begins(z(peers));
  for (int64_t& c : counts) c = random.below(4);
  for (int64_t& w : widths) w = random.below(20) + 1;
  std::vector<char> data;
  std::vector<std::vector<char>> blocks(z(peers * tables));
  for (int64_t p = 0; p < peers; ++p) {
    for (int64_t gap = random.below(9); gap > 0; --gap) data.push_back('-');
    begins[z(p)] = static_cast<int64_t>(data.size());
    for (int64_t t = 0; t < tables; ++t)
      for (int64_t b = counts[z(p * tables + t)] * widths[z(t)]; b > 0; --b) {
        blocks[z(p * tables + t)].push_back(static_cast<char>(random.next()));
        data.push_back(blocks[z(p * tables + t)].back());
      }
  }
  std::vector<char> expected;
  for (int64_t t = 0; t < tables; ++t)
    for (int64_t p = 0; p < peers; ++p)
      expected.insert(expected.end(), blocks[z(p * tables + t)].begin(), blocks[z(p * tables + t)].end());
  std::vector<char> out(expected.size());
  join_blocks(data.data(), begins.data(), counts.data(), widths.data(), peers, tables, out.data());
  CHECK(out == expected);
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
  Random random{11};
  for (int round = 0; round < 300; ++round) {
    runs_move_as_a_whole(random);
    blocks_are_joined_by_table(random);
    packed_offsets_stay_in_their_list(random);
    layouts_are_bags<float>(random);
    layouts_are_bags<double>(random);
  }

  std::vector<const Kernels*> all;
  for (const char* name : kKernelNames)
    if (const Kernels* k = find_kernels(name)) all.push_back(k);
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
