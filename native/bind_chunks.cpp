// Python bindings of the ops on rows of compressed updates.

#include <nanobind/nanobind.h>

#include <atomic>

#include "bind.hpp"
#include "bind_checks.hpp"
#include "chunk_rows.hpp"

namespace megalith {
namespace {

constexpr int64_t kRowsAtOnce = 64;

// The packed rows of a tensor [rows, width].
const uint8_t* borrow_packed(handle tensor, const char* name, int64_t width, int64_t& rows) {
  TensorView v = borrow(tensor, Kind::uint8, name);
  require(v.ndim == 2 && v.shape[1] == width && (rows < 0 || rows == v.shape[0]), "packed rows: bad shape");
  rows = v.shape[0];
  return v.as<uint8_t>();
}

void check_sizes(int64_t keep, int bits, int64_t size) {
  require(keep >= 1 && keep <= 4096 && size >= 1 && size <= 4096 && (bits == 2 || bits == 4 || bits == 8),
          "packed rows: bad keep, bits or size");
}

}  // namespace

void bind_chunks(nb::module_& m) {
  m.def("check_indices", [](handle packed, int64_t keep, int64_t size) {
    check_sizes(keep, 8, size);
    int64_t rows = -1;
    const uint8_t* p = borrow_packed(packed, "indices", index_row_bytes(keep), rows);
    nb::gil_scoped_release release;
    return check_indices(p, rows, keep, static_cast<uint32_t>(size));
  });

  m.def("count_codes", [](handle packed, int64_t keep, int bits, handle counts) {
    check_sizes(keep, bits, 1);
    int64_t rows = -1;
    const uint8_t* p = borrow_packed(packed, "codes", code_row_bytes(keep, bits), rows);
    int64_t* c = borrow_int64(counts, "counts", int64_t{1} << bits);
    nb::gil_scoped_release release;
    return count_codes(p, rows, keep, bits, c);
  });

  // The positions of largest magnitude of each chunk of a matrix, which is divided from its top left.
  m.def("largest_of_chunks", [](handle matrix, int64_t height, int64_t width, handle indices, handle values,
                                int threads) {
    TensorView w = borrow(matrix, Kind::float32, "matrix"), i = borrow(indices, Kind::int64, "indices");
    TensorView v = borrow(values, Kind::float32, "values");
    require(w.ndim == 2 && i.ndim == 2 && v.ndim == 2 && height >= 1 && width >= 1 && height <= kMaxChunk &&
                width <= kMaxChunk && height * width <= kMaxChunk,
            "largest: bad matrix or chunk");
    const int64_t lines = w.shape[0], columns = w.shape[1], keep = i.shape[1];
    const int64_t across = (columns + width - 1) / width, rows = (lines + height - 1) / height * across;
    require(i.shape[0] == rows && v.shape[0] == rows && v.shape[1] == keep && keep >= 1 && keep <= height * width,
            "largest: bad indices or values");
    nb::gil_scoped_release release;
    in_chunks(rows, 16, threads, [&](int64_t at, int64_t count) {
      for (int64_t n = at; n < at + count; ++n) {
        const int64_t y = n / across * height, x = n % across * width;
        largest_of_chunk(w.as<float>() + y * columns + x, columns, std::min(height, lines - y),
                         std::min(width, columns - x), height, width, keep, i.as<int64_t>() + n * keep,
                         v.as<float>() + n * keep);
      }
    });
  });

  m.def("add_chunk_rows",
        [](handle indices, handle codes, int64_t keep, int bits, handle values, handle total, handle count,
           int threads) {
          TensorView t = borrow(total, Kind::float32, "total"), v = borrow(values, Kind::float32, "values");
          require(t.ndim == 2 && v.ndim == 1, "total: expected [rows, size]");
          check_sizes(keep, bits, t.shape[1]);
          int64_t rows = t.shape[0];
          const uint8_t* i = borrow_packed(indices, "indices", index_row_bytes(keep), rows);
          const uint8_t* c = borrow_packed(codes, "codes", code_row_bytes(keep, bits), rows);
          const SentRows sent{i, c, keep, bits, v.as<float>(), v.shape[0], t.shape[1]};
          TensorView n;
          if (!count.is_none()) {
            n = borrow(count, Kind::any, "count");
            require(n.numel() == t.numel() && (n.item_bytes == 1 || n.item_bytes == 4), "count: bad type or shape");
          }
          std::atomic<bool> good{true};
          {
            nb::gil_scoped_release release;
            in_chunks(rows, kRowsAtOnce, threads, [&](int64_t at, int64_t k) {
              const bool fine = n.item_bytes == 4 ? add_rows(sent, at, at + k, t.as<float>(), n.as<int32_t>())
                                                  : add_rows(sent, at, at + k, t.as<float>(), n.as<uint8_t>());
              if (!fine) good = false;
            });
          }
          require(good, "packed rows: an index or a code is out of range");
        },
        nb::arg("indices"), nb::arg("codes"), nb::arg("keep"), nb::arg("bits"), nb::arg("values"), nb::arg("total"),
        nb::arg("count").none(), nb::arg("threads"));

  m.def("divide_by_counts", [](handle total, handle count, int threads) {
    TensorView t = borrow(total, Kind::float32, "total"), n = borrow(count, Kind::any, "count");
    require(n.numel() == t.numel() && (n.item_bytes == 1 || n.item_bytes == 4), "count: bad type or shape");
    nb::gil_scoped_release release;
    in_chunks(t.numel(), 1 << 18, threads, [&](int64_t at, int64_t k) {
      if (n.item_bytes == 1)
        divide_by_counts(t.as<float>() + at, n.as<uint8_t>() + at, k);
      else
        divide_by_counts(t.as<float>() + at, n.as<int32_t>() + at, k);
    });
  });

  // Subtracts lr * tile from a matrix. The tile's rows are the chunks of [height, width] from number `first` on, of a
  // parameter with `across` chunks side by side; `top` and `left` are where the matrix begins in the parameter.
  m.def("step_chunks",
        [](handle tile, handle weights, int64_t first, int64_t across, int64_t height, int64_t width, int64_t top,
           int64_t left, float lr, int threads) {
          TensorView t = borrow(tile, Kind::float32, "tile"), w = borrow(weights, Kind::float32, "weights");
          require(t.ndim == 2 && w.ndim == 2 && height >= 1 && width >= 1 && t.shape[1] == height * width &&
                      across >= 1 && first >= 0,
                  "step: bad tile or chunk");
          const int64_t lines = w.shape[0], columns = w.shape[1];
          nb::gil_scoped_release release;
          in_chunks(t.shape[0], kRowsAtOnce, threads, [&](int64_t at, int64_t count) {
            for (int64_t n = at; n < at + count; ++n) {
              // The chunk's place relative to the matrix; parts outside of it are cut.
              const int64_t y = (first + n) / across * height - top, x = (first + n) % across * width - left;
              const int64_t y0 = std::max<int64_t>(y, 0), y1 = std::min(y + height, lines);
              const int64_t x0 = std::max<int64_t>(x, 0), x1 = std::min(x + width, columns);
              if (y0 >= y1 || x0 >= x1) continue;
              step_chunk(t.as<float>() + n * height * width + (y0 - y) * width + (x0 - x), width, y1 - y0, x1 - x0,
                         lr, w.as<float>() + y0 * columns + x0, columns);
            }
          });
        });
}

}  // namespace megalith
