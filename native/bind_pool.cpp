// Python bindings of pooling rows of one contiguous buffer, and of its gradient.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <vector>

#include "bags.hpp"
#include "bind.hpp"
#include "bind_checks.hpp"

namespace megalith {
namespace {

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

}  // namespace

void bind_pool(nb::module_& m) {
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
