// Python bindings of the ops that move rows: gather and scatter, place, take, pad, runs.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "bind.hpp"
#include "bind_checks.hpp"
#include "memory.hpp"
#include "moves.hpp"

namespace megalith {
namespace {

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

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("prefer_huge_pages", [](handle tensor) {
    TensorView v = borrow(tensor, Kind::any, "tensor");
    prefer_huge_pages(v.data, static_cast<size_t>(v.numel() * v.item_bytes));
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

  m.def("scatter",
        [](nb::list rows, nb::list index, nb::list strides, handle out, const std::string& name,
           int threads) {
          require(nb::len(rows) == nb::len(index) && nb::len(rows) == nb::len(strides),
                  "scatter: lists of different lengths");
          with_kernels(out, "out", [&](const auto& kernels) {
            scatter_all(kernels, rows, index, strides, out, name, threads);
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
}

}  // namespace megalith
