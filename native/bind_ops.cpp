// Python bindings of the ops: dedup and bucketize, gather and scatter, pool and unpool.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <optional>

#include "bags.hpp"
#include "bind.hpp"
#include "dedup.hpp"
#include "layout.hpp"
#include "memory.hpp"
#include "moves.hpp"
#include "strings.hpp"

namespace megalith {
namespace {

// Divides 0 .. n into chunks of `grain` and calls one(begin, count) for each, on several threads.
template <class One>
void in_chunks(int64_t n, int64_t grain, int threads, One&& one) {
  ThreadPool::get().run((n + grain - 1) / grain, threads, [&](int64_t t, int) {
    one(t * grain, std::min(grain, n - t * grain));
  });
}

int64_t* borrow_int64(handle tensor, const char* name, int64_t n) {
  TensorView v = borrow(tensor, Kind::int64, name);
  if (v.ndim != 1 || v.shape[0] != n)
    throw std::invalid_argument(std::string(name) + ": expected length " + std::to_string(n));
  return v.as<int64_t>();
}

bool ascends(const int64_t* splits, int64_t rows, int64_t end) {
  bool good = splits[0] == 0 && splits[rows] == end;
  for (int64_t r = 0; r < rows; ++r) good &= splits[r] <= splits[r + 1];
  return good;
}

// Borrows splits that must ascend from 0 to n; `rule` and `what` are parts of the error message.
Ids borrow_splits(handle tensor, const char* name, int64_t n, const char* rule = ": must ascend from 0 to ",
                  const char* what = ", the number of values") {
  TensorView v = borrow(tensor, Kind::int64, name);
  require(v.ndim == 1 && v.shape[0] >= 1, "splits: expected [rows + 1]");
  const Ids splits{v.as<int64_t>(), v.shape[0] - 1};
  if (!ascends(splits.data, splits.n, n))
    throw std::invalid_argument(std::string(name) + rule + std::to_string(n) + what);
  return splits;
}

[[noreturn]] void refuse_index(const std::string& name, int64_t position, int64_t value,
                               int64_t limit) {
  throw std::invalid_argument(name + "[" + std::to_string(position) + "] = " + std::to_string(value) +
                              " is out of range: expected 0 to " + std::to_string(limit - 1));
}

// Raises unless every index from position `begin` on is in [low, high).
template <class Int>
void check_range(const Int* index, int64_t n, int64_t low, int64_t high, const std::string& name,
                 int64_t begin = 0) {
  constexpr int64_t kBlock = 4096;
  for (int64_t b = begin; b < n; b += kBlock) {
    const int64_t end = std::min(n, b + kBlock);
    Int least = std::numeric_limits<Int>::max(), most = std::numeric_limits<Int>::min();
    for (int64_t i = b; i < end; ++i) {
      least = index[i] < least ? index[i] : least;
      most = index[i] > most ? index[i] : most;
    }
    if (least >= low && most < high) continue;
    for (int64_t i = b; i < end; ++i)
      if (index[i] < low || index[i] >= high) refuse_index(name, i, index[i], high);
  }
}

// The number of legal indices: those whose `width` elements end within `size`.
int64_t index_limit(int64_t size, int64_t stride, int64_t width) {
  return size < width ? 0 : stride == 0 ? std::numeric_limits<int64_t>::max()
                                        : (size - width) / stride + 1;
}

Route make_route(nb::handle rule) {
  nb::tuple t = nb::cast<nb::tuple>(rule);
  require(t.size() == 4, "route: bad rule");
  const int64_t mode = nb::cast<int64_t>(t[0]), owners = nb::cast<int64_t>(t[1]);
  const int64_t block = nb::cast<int64_t>(t[2]), first = nb::cast<int64_t>(t[3]);
  require(mode >= 0 && mode <= 2 && owners >= 1 && owners < int64_t{1} << 31 && first >= 0 && first <= 1,
          "route: bad mode or number of owners");
  require(mode != 0 || (block >= 1 && block <= std::numeric_limits<int64_t>::max() / owners),
          "route: bad block");
  return Route(static_cast<RouteMode>(mode), static_cast<uint64_t>(owners),
               static_cast<uint64_t>(block), static_cast<int32_t>(first));
}

// `rule` is (mode, owners, block, first) or an int32 owner per occurrence.
Owners make_owners(nb::handle rule, int64_t n, int64_t shards, const std::string& name) {
  if (nb::isinstance<nb::tuple>(rule)) {
    const Route route = make_route(rule);
    require(shards >= nb::cast<int64_t>(nb::cast<nb::tuple>(rule)[1]) + route.first, "route: too few shards");
    return {route, nullptr};
  }
  const int32_t* given = borrow_rows(rule, n);
  require(given != nullptr || n == 0, "owners: missing");
  check_range(given, n, 0, shards, name);
  return {Route(RouteMode::roundrobin, 1, 0, 0), given};
}

template <class T>
void scatter_all(const FlatKernels<T>& kernels, nb::handle rows, nb::handle index, nb::handle strides,
                 nb::handle out, const std::string& name, int threads) {
  struct Piece {
    const T* rows;
    const int64_t* index;
    int64_t n, stride, width;
  };
  TensorView o = borrow(out, kind_of<T>(), "out");
  const int64_t size = o.numel();
  std::vector<Piece> pieces;
  int64_t total = 0;
  for (size_t k = 0; k < nb::len(rows); ++k) {
    TensorView r = borrow(rows[k], kind_of<T>(), "rows");
    require(r.ndim == 2, "rows: expected two dimensions each");
    Piece p{r.as<T>(), borrow_int64(index[k], name.c_str(), r.shape[0]), r.shape[0],
            nb::cast<int64_t>(strides[k]), r.shape[1]};
    require(p.stride >= 0, "strides: negative");
    check_range(p.index, p.n, 0, index_limit(size, p.stride, p.width), name);
    total += p.n;
    pieces.push_back(p);
  }
  nb::gil_scoped_release release;
  constexpr int64_t kGrain = 8192;
  const int64_t tasks = threads <= 1 ? 1 : std::min<int64_t>(threads, 1 + total / kGrain);
  // Each task owns a range of the output, so that sums do not depend on the number of threads.
  ThreadPool::get().run(tasks, threads, [&](int64_t task, int) {
    const int64_t low = size * task / tasks, high = size * (task + 1) / tasks;
    for (const Piece& p : pieces)
      kernels.scatter(p.rows, p.index, p.n, p.stride, p.width, low, high, o.as<T>());
  });
}

// Borrows rows of up to `dim` columns for bags to read; raises if an index is outside the memory.
template <class T>
FlatRows<T> flat_rows(nb::handle source, nb::handle index, int64_t stride, int dim,
                      const std::string& name, int64_t* n, int64_t* size) {
  TensorView s = borrow(source, kind_of<T>(), "source");
  require(stride >= 0 && dim >= 0, "source: bad stride or dim");
  *size = s.numel();
  if (index.is_none()) {
    *n = index_limit(*size, stride, dim);
    require(stride > 0 && stride == dim, "source: rows without an index must be contiguous");
    return {s.as<T>(), nullptr, stride};
  }
  TensorView i = borrow(index, Kind::int64, name.c_str());
  require(i.ndim == 1, "index: expected one dimension");
  *n = i.shape[0];
  check_range(i.as<int64_t>(), *n, -1, index_limit(*size, stride, 1), name);
  return {s.as<T>(), i.as<int64_t>(), stride};
}

// Raises unless the rows of each feature have all columns of its parts. Rows of a flat buffer have
// any width, so the last ones may be too narrow for some features.
template <class T>
void check_reach(const FlatRows<T>& rows, int64_t size, const std::vector<BagsOf<T>>& bags,
                 const std::string& name) {
  for (const BagsOf<T>& b : bags) {
    int64_t reach = 1;
    for (int p = 0; p < b.num_parts; ++p) reach = std::max<int64_t>(reach, b.parts[p].end);
    const int64_t limit = index_limit(size, rows.stride, reach);
    if (rows.index && limit < index_limit(size, rows.stride, 1))
      check_range(rows.index, b.offsets[b.num_bags], -1, limit, name, b.offsets[0]);
  }
}

template <class T>
void pool(const FlatKernels<T>& kernels, nb::handle source, nb::handle index, int64_t stride, int dim,
          nb::handle bags, nb::handle outputs, const std::string& name, int threads) {
  int64_t n, size;
  const FlatRows<T> rows = flat_rows<T>(source, index, stride, dim, name, &n, &size);
  const BagsList<T> list(bags, outputs, n, dim);
  check_reach(rows, size, list.views, name);
  nb::gil_scoped_release release;
  pool_flat(kernels, rows, n, list.views, threads);
}

template <class T>
void unpool(const FlatKernels<T>& kernels, nb::handle out, nb::handle index, int64_t stride, int dim,
            nb::handle bags, nb::handle gradients, const std::string& name, int threads) {
  int64_t n, size;
  const FlatRows<T> rows = flat_rows<T>(out, index, stride, dim, name, &n, &size);
  const BagsList<T> list(bags, gradients, n, dim);
  check_reach(rows, size, list.views, name);
  nb::gil_scoped_release release;
  unpool_flat(kernels, rows, n, size, dim, list.views, threads);
}

// Rows of a column [n, width], and the padded rows [splits, length, width].
struct Padding {
  TensorView rows, padded;
  int64_t bytes, length;
  Ids splits;

  Padding(nb::handle rows_, nb::handle splits_, nb::handle padded_)
      : rows(borrow(rows_, Kind::any, "rows")), padded(borrow(padded_, Kind::any, "padded")) {
    require(rows.ndim == 2 && padded.ndim == 3 && rows.shape[1] == padded.shape[2] &&
                rows.item_bytes == padded.item_bytes,
            "pad: bad rows or padded");
    splits = borrow_splits(splits_, "splits", rows.shape[0]);
    require(splits.n == padded.shape[0], "pad: splits and padded differ in rows");
    bytes = rows.shape[1] * rows.item_bytes, length = padded.shape[1];
  }

  template <class Some>
  void run(int threads, Some&& some) const {
    in_chunks(splits.n, 4096, threads, [&](int64_t at, int64_t n) { some(at, at + n); });
  }
};

// A layout op's features, each (first_row, rows, width, keep, mean, shared, parts).
std::vector<LayoutFeature> layout_features(nb::handle features, const Ids& offsets) {
  std::vector<LayoutFeature> found;
  for (handle item : features) {
    nb::tuple t = nb::cast<nb::tuple>(item);
    require(t.size() == 7, "layout: bad feature");
    const auto number = [&](size_t k) { return nb::cast<int64_t>(t[k]); };
    const LayoutFeature f{number(0), number(1), number(2), number(3), number(4) != 0, number(5) != 0};
    require(f.rows >= 0 && f.width >= 1 && f.keep >= 0 && f.first_row >= 0 &&
                f.first_row <= offsets.n - f.rows,
            "layout: bad feature");
    found.push_back(f);
  }
  return found;
}

// The bags of a batch in Monolith's encoding, with their parts; raises if an offset is outside its list.
template <class T>
class Layout {
 public:
  Layout(nb::handle packed, nb::handle row_offsets, nb::handle features, nb::handle outputs,
         const int64_t* begins, const int64_t* ends, int64_t lists, int threads) {
    TensorView p = borrow(packed, Kind::int64, "fid_offset");
    require(p.ndim == 1, "fid_offset: expected one dimension");
    const Ids offsets = borrow_splits(row_offsets, "feature_offset", p.shape[0], " must ascend from 0 to ",
                                      ", the length of fid_offset");
    const std::vector<LayoutFeature> facts = layout_features(features, offsets);
    {
      nb::gil_scoped_release release;
      bags_.emplace(p.as<int64_t>(), offsets.data, facts, begins, ends, lists, threads);
    }
    if (bags_->first_bad >= 0) {
      const int64_t value = p.as<int64_t>()[bags_->first_bad];
      throw std::invalid_argument("fid_offset[" + std::to_string(bags_->first_bad) +
                                  "] is outside the embeddings: list " + std::to_string(value >> 32) +
                                  ", element " + std::to_string(value & 0xffffffff));
    }
    const std::vector<TensorView> out = BagsList<T>::borrow_outputs(outputs);
    for (handle item : features) {
      const size_t k = parts_.size();
      widest = std::max(widest, static_cast<int>(facts[k].width));
      parts_.push_back(BagsList<T>::read_parts(nb::cast<nb::tuple>(item)[6], out, bags_->views[k],
                                               static_cast<int>(facts[k].width)));
      bags_->views[k].parts = parts_.back().data();
      bags_->views[k].num_parts = static_cast<int32_t>(parts_.back().size());
    }
  }

  const LayoutBags<T>& bags() const { return *bags_; }
  int widest = 0;

 private:
  std::optional<LayoutBags<T>> bags_;
  std::vector<std::vector<PartOf<T>>> parts_;
};

template <class T>
void layout(const FlatKernels<T>& kernels, nb::handle lists, nb::handle packed, nb::handle row_offsets,
            nb::handle features, nb::handle outputs, int threads) {
  // All lists are addressed relative to the one with the lowest address.
  std::vector<TensorView> rows;
  for (handle list : lists) rows.push_back(borrow(list, kind_of<T>(), "embeddings_list"));
  T* lowest = nullptr;
  for (const TensorView& r : rows)
    if (r.numel() && (!lowest || std::less<T*>()(r.as<T>(), lowest))) lowest = r.as<T>();
  std::vector<int64_t> begins, ends;
  for (const TensorView& r : rows) {
    const int64_t bytes = r.numel() ? r.as<char>() - reinterpret_cast<char*>(lowest) : 0;
    require(bytes % int64_t{sizeof(T)} == 0, "embeddings_list: memory is not aligned");
    begins.push_back(bytes / int64_t{sizeof(T)});
    ends.push_back(begins.back() + r.numel());
  }
  const Layout<T> all(packed, row_offsets, features, outputs, begins.data(), ends.data(),
                      static_cast<int64_t>(rows.size()), threads);
  const LayoutBags<T>& bags = all.bags();
  nb::gil_scoped_release release;
  pool_flat(kernels, FlatRows<T>{lowest, bags.index, 1}, bags.occurrences, bags.views, threads);
}

template <class T>
void layout_gradient(const FlatKernels<T>& kernels, nb::handle out, nb::handle bases, nb::handle packed,
                     nb::handle row_offsets, nb::handle features, nb::handle gradients, int threads) {
  TensorView o = borrow(out, kind_of<T>(), "out"), b = borrow(bases, Kind::int64, "bases");
  require(b.ndim == 1 && b.shape[0] >= 1, "bases: expected [lists + 1]");
  const int64_t* begins = b.as<int64_t>();
  borrow_splits(bases, "bases", o.numel());
  const Layout<T> all(packed, row_offsets, features, gradients, begins, begins + 1, b.shape[0] - 1,
                      threads);
  const LayoutBags<T>& bags = all.bags();
  nb::gil_scoped_release release;
  unpool_flat(kernels, FlatRows<T>{o.as<T>(), bags.index, 1}, bags.occurrences, o.numel(), all.widest,
              bags.views, threads);
}

// Calls use(kernels) with the kernels for the tensor's float type.
template <class Use>
void with_kernels(handle tensor, const char* name, Use&& use) {
  const Kernels* k = find_kernels(nullptr);
  if (borrow(tensor, Kind::any, name).item_bytes == 8)
    use(k->flat64);
  else
    use(k->flat32);
}

}  // namespace

void bind_ops(nb::module_& m) {
  m.def("prefer_huge_pages", [](handle tensor) {
    TensorView v = borrow(tensor, Kind::any, "tensor");
    prefer_huge_pages(v.data, static_cast<size_t>(v.numel() * v.item_bytes));
  });

  m.def("route",
        [](handle ids, handle rule, handle owners, int threads) {
          const Ids i = borrow_ids(ids);
          int32_t* out = const_cast<int32_t*>(borrow_rows(owners, i.n));
          const Route r = make_route(rule);
          nb::gil_scoped_release release;
          in_chunks(i.n, 1 << 15, threads,
                    [&](int64_t at, int64_t n) { route(i.data + at, n, r, out + at); });
        },
        nb::arg("ids"), nb::arg("rule"), nb::arg("owners"), nb::arg("threads"));

  m.def("dedup",
        [](handle ids, handle splits, handle owners, int64_t shards, bool distinct, handle index,
           handle first, handle unique, handle counts, handle widths, handle offsets,
           const std::string& name, int threads) {
          const Ids i = borrow_ids(ids);
          const Ids s = borrow_splits(splits, "splits", i.n);
          require(shards >= 1 && shards < int64_t{1} << 31, "shards: out of range");
          const Owners o = make_owners(owners, i.n, shards, name);
          const Deduped out{borrow_int64(index, "index", i.n), borrow_int64(first, "first", i.n),
                            borrow_int64(unique, "unique", i.n),
                            borrow_int64(counts, "counts", shards * s.n),
                            offsets.is_none() ? nullptr : borrow_int64(offsets, "offsets", i.n),
                            widths.is_none() ? nullptr : borrow_int64(widths, "widths", s.n)};
          require(offsets.is_none() == widths.is_none(), "widths: missing");
          nb::gil_scoped_release release;
          return dedup(i.data, s.data, s.n, o, shards, distinct, out, threads);
        },
        nb::arg("ids"), nb::arg("splits"), nb::arg("owners"), nb::arg("shards"), nb::arg("distinct"),
        nb::arg("index"), nb::arg("first"), nb::arg("unique"), nb::arg("counts"),
        nb::arg("widths").none(), nb::arg("offsets").none(), nb::arg("name"), nb::arg("threads"));

  m.def("match",
        [](handle keys, handle queries, handle out, int threads) {
          const Ids k = borrow_ids(keys), q = borrow_ids(queries);
          int64_t* o = borrow_int64(out, "out", q.n);
          nb::gil_scoped_release release;
          match(k.data, k.n, q.data, q.n, o, threads);
        });

  m.def("bucketize",
        [](handle ids, handle splits, handle owners, int64_t shards, handle lengths, handle place,
           const std::string& name, int threads) {
          TensorView p = borrow(place, Kind::int64, "place");
          require(p.ndim == 1, "place: expected one dimension");
          const int64_t n = p.shape[0];
          const int64_t* i = ids.is_none() ? nullptr : borrow_int64(ids, "ids", n);
          require(!ids.is_none() || !nb::isinstance<nb::tuple>(owners), "ids: missing");
          const Ids s = borrow_splits(splits, "row_splits", n);
          require(shards >= 1 && shards < int64_t{1} << 31, "shards: out of range");
          const Owners o = make_owners(owners, n, shards, name);
          int64_t* l = borrow_int64(lengths, "lengths", shards * s.n);
          nb::gil_scoped_release release;
          bucketize(i, s.data, s.n, o, shards, l, p.as<int64_t>(), threads);
        },
        nb::arg("ids").none(), nb::arg("splits"), nb::arg("owners"), nb::arg("shards"),
        nb::arg("lengths"), nb::arg("place"), nb::arg("name"), nb::arg("threads"));

  m.def("hash_strings",
        [](nb::bytes data, handle offsets, uint64_t seed, handle out, int threads) {
          TensorView o = borrow(out, Kind::int64, "out");
          require(o.ndim == 1, "out: expected one dimension");
          const int64_t n = o.shape[0];
          const int64_t* at = borrow_int64(offsets, "offsets", n + 1);
          bool good = at[0] >= 0 && at[n] <= static_cast<int64_t>(data.size());
          for (int64_t i = 0; i < n; ++i) good &= at[i] <= at[i + 1];
          require(good, "offsets: must ascend within the data");
          const char* bytes = data.c_str();
          nb::gil_scoped_release release;
          in_chunks(n, 1 << 13, threads, [&](int64_t first, int64_t count) {
            hash_strings(bytes, at + first, count, seed, o.as<int64_t>() + first);
          });
        });

  // Copies the elements at index[i] * stride to row i of out.
  m.def("gather",
        [](handle source, handle index, int64_t stride, handle out, const std::string& name,
           int threads) {
          TensorView s = borrow(source, Kind::any, "source"), o = borrow(out, Kind::any, "out");
          require(o.ndim == 2 && o.item_bytes == s.item_bytes && stride >= 0, "gather: bad out or stride");
          const int64_t n = o.shape[0], width = o.shape[1];
          const int64_t* i = borrow_int64(index, name.c_str(), n);
          nb::gil_scoped_release release;
          check_range(i, n, 0, index_limit(s.numel(), stride, width), name);
          const Kernels* k = find_kernels(nullptr);
          in_chunks(n, 4096, threads, [&](int64_t at, int64_t count) {
            k->gather(s.as<char>(), i + at, count, stride * s.item_bytes, width * s.item_bytes,
                      o.as<char>() + at * width * s.item_bytes);
          });
        });

  // The reverse without sums: copies row i of rows to row place[i] of out.
  m.def("place",
        [](handle rows, handle place, handle out, int threads) {
          TensorView r = borrow(rows, Kind::any, "rows"), o = borrow(out, Kind::any, "out");
          require(r.ndim == 2 && o.ndim == 2 && r.shape[1] == o.shape[1] && r.item_bytes == o.item_bytes,
                  "place: bad out");
          const int64_t n = r.shape[0], bytes = r.shape[1] * r.item_bytes;
          const int64_t* p = borrow_int64(place, "place", n);
          check_range(p, n, 0, o.shape[0], "place");
          nb::gil_scoped_release release;
          in_chunks(n, 4096, threads, [&](int64_t at, int64_t count) {
            place_rows(r.as<char>() + at * bytes, p + at, count, bytes, o.as<char>());
          });
        });

  m.def("ascends", [](handle splits, int64_t end) {
    TensorView v = borrow(splits, Kind::int64, "splits");
    require(v.ndim == 1 && v.shape[0] >= 1, "splits: expected [rows + 1]");
    return ascends(v.as<int64_t>(), v.shape[0] - 1, end);
  });

  m.def("take_splits", [](handle splits, handle rows, int64_t values, handle new_splits) {
    const Ids s = borrow_splits(splits, "row_splits", values);
    TensorView r = borrow(rows, Kind::int64, "rows");
    require(r.ndim == 1, "rows: expected one dimension");
    check_range(r.as<int64_t>(), r.shape[0], 0, s.n, "rows");
    return take_splits(s.data, r.as<int64_t>(), r.shape[0],
                       borrow_int64(new_splits, "new_splits", r.shape[0] + 1));
  });

  m.def("take_rows",
        [](handle values, handle splits, handle rows, handle new_splits, handle out, int threads) {
          TensorView v = borrow(values, Kind::any, "values"), o = borrow(out, Kind::any, "out");
          require(v.ndim == 2 && o.ndim == 2 && v.shape[1] == o.shape[1] && v.item_bytes == o.item_bytes,
                  "take: bad values or out");
          const Ids s = borrow_splits(splits, "row_splits", v.shape[0]);
          const Ids to = borrow_splits(new_splits, "new_splits", o.shape[0]);
          const int64_t* r = borrow_int64(rows, "rows", to.n);
          check_range(r, to.n, 0, s.n, "rows");
          const int64_t item = v.shape[1] * v.item_bytes;
          std::atomic<bool> good{true};
          nb::gil_scoped_release release;
          in_chunks(to.n, 4096, threads, [&](int64_t at, int64_t n) {
            const TakeRoom room{v.shape[0], to.data + at};
            if (!take_rows(v.as<char>(), item, s.data, r + at, n, o.as<char>() + to.data[at] * item, &room))
              good = false;
          });
          require(good, "new_splits: do not match the rows");
        });

  // Rows [n, bytes] to padded rows [splits, length, bytes], and back.
  m.def("pad_rows", [](handle rows, handle splits, handle out, int threads) {
    const Padding p(rows, splits, out);
    nb::gil_scoped_release release;
    p.run(threads, [&](int64_t first, int64_t last) {
      pad_rows(p.rows.as<char>(), p.bytes, p.splits.data, first, last, p.length, p.padded.as<char>(),
               p.padded.numel() * p.padded.item_bytes);
    });
  });

  m.def("unpad_rows", [](handle padded, handle splits, handle out, int threads) {
    const Padding p(out, splits, padded);
    nb::gil_scoped_release release;
    p.run(threads, [&](int64_t first, int64_t last) {
      unpad_rows(p.padded.as<char>(), p.bytes, p.splits.data, first, last, p.length, p.rows.as<char>(),
                 p.rows.numel() * p.rows.item_bytes);
    });
  });

  m.def("move_runs",
        [](handle source, handle from, handle to, handle widths, handle out, const std::string& name) {
          TensorView s = borrow(source, Kind::any, "source");
          const Kind kind = s.item_bytes == 8 ? Kind::float64 : Kind::float32;
          borrow(source, kind, "source");
          TensorView o = borrow(out, kind, "out"), w = borrow(widths, Kind::int64, "widths");
          require(w.ndim == 1, "widths: expected one dimension");
          const int64_t n = w.shape[0];
          const int64_t *f = borrow_int64(from, "from", n), *t = borrow_int64(to, "to", n);
          const int64_t* wide = w.as<int64_t>();
          for (int64_t i = 0; i < n; ++i) {
            require(wide[i] >= 0, "widths: negative");
            if (f[i] < 0 || wide[i] > s.numel() || f[i] > s.numel() - wide[i])
              refuse_index(name, i, f[i], s.numel() - wide[i] + 1);
            if (t[i] < 0 || wide[i] > o.numel() || t[i] > o.numel() - wide[i])
              refuse_index(name, i, t[i], o.numel() - wide[i] + 1);
          }
          nb::gil_scoped_release release;
          if (kind == Kind::float64)
            move_runs(s.as<double>(), f, t, wide, n, o.as<double>());
          else
            move_runs(s.as<float>(), f, t, wide, n, o.as<float>());
        });

  // Returns the first occurrence outside its list, or -1.
  m.def("locate", [](handle packed, handle bases, handle ends, handle widths, handle out) {
    TensorView b = borrow(bases, Kind::int64, "bases"), e = borrow(ends, Kind::int64, "ends");
    TensorView o = borrow(out, Kind::int64, "out");
    require(b.ndim == 1 && b.shape[0] >= 1 && e.ndim == 1 && o.ndim == 1, "locate: bad arguments");
    const int64_t n = o.shape[0], features = e.shape[0];
    const int64_t* p = borrow_int64(packed, "packed", n);
    const int64_t* w = borrow_int64(widths, "widths", features);
    const int64_t* end = e.as<int64_t>();
    int64_t before = 0;
    for (int64_t f = 0; f < features; before = end[f++])
      require(end[f] >= before && end[f] <= n, "feature_offset must ascend within the occurrences");
    nb::gil_scoped_release release;
    return locate(p, b.as<int64_t>(), b.shape[0] - 1, end, w, features, o.as<int64_t>());
  });

  m.def("layout", [](handle lists, handle packed, handle offsets, handle features, handle outputs,
                     bool wide, int threads) {
    const Kernels* k = find_kernels(nullptr);
    if (wide)
      layout(k->flat64, lists, packed, offsets, features, outputs, threads);
    else
      layout(k->flat32, lists, packed, offsets, features, outputs, threads);
  });

  m.def("layout_gradient", [](handle out, handle bases, handle packed, handle offsets, handle features,
                              handle gradients, int threads) {
    with_kernels(out, "out", [&](const auto& kernels) {
      layout_gradient(kernels, out, bases, packed, offsets, features, gradients, threads);
    });
  });

  m.def("scatter",
        [](nb::list rows, nb::list index, nb::list strides, handle out, const std::string& name,
           int threads) {
          require(nb::len(rows) == nb::len(index) && nb::len(rows) == nb::len(strides),
                  "scatter: lists of different lengths");
          with_kernels(out, "out", [&](const auto& kernels) {
            scatter_all(kernels, rows, index, strides, out, name, threads);
          });
        });

  m.def("pool",
        [](handle source, handle index, int64_t stride, int dim, handle bags, handle outputs,
           const std::string& name, int threads) {
          with_kernels(source, "source", [&](const auto& kernels) {
            pool(kernels, source, index, stride, dim, bags, outputs, name, threads);
          });
        },
        nb::arg("source"), nb::arg("index").none(), nb::arg("stride"), nb::arg("dim"), nb::arg("bags"),
        nb::arg("outputs"), nb::arg("name"), nb::arg("threads"));

  m.def("unpool",
        [](handle out, handle index, int64_t stride, int dim, handle bags, handle gradients,
           const std::string& name, int threads) {
          with_kernels(out, "out", [&](const auto& kernels) {
            unpool(kernels, out, index, stride, dim, bags, gradients, name, threads);
          });
        },
        nb::arg("out"), nb::arg("index").none(), nb::arg("stride"), nb::arg("dim"), nb::arg("bags"),
        nb::arg("gradients"), nb::arg("name"), nb::arg("threads"));
}

}  // namespace megalith
