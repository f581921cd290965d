// Python bindings of serving_view.hpp. Compiled without -ftrapping-math, which would keep its loops from being
// vectorized; results do not depend on it.

#include <nanobind/nanobind.h>

#include <vector>

#include "bind.hpp"
#include "bind_checks.hpp"
#include "serving_view.hpp"

namespace megalith {
namespace {

// parts: tuples (view, begin, end, a, b) of columns below `dim`; see ViewPart.
std::vector<ViewPart> view_parts(nb::handle parts, int64_t dim) {
  std::vector<ViewPart> found;
  for (size_t k = 0; k < nb::len(parts); ++k) {
    nb::handle part = parts[k];
    const int view = nb::cast<int>(part[0]);
    require(view >= 0 && view < kViews, "parts: unknown view");
    const ViewPart own{static_cast<View>(view), nb::cast<int64_t>(part[1]), nb::cast<int64_t>(part[2]),
                       nb::cast<float>(part[3]), nb::cast<float>(part[4])};
    require(0 <= own.begin && own.begin <= own.end && own.end <= dim, "parts: columns are outside the rows");
    found.push_back(own);
  }
  return found;
}

constexpr int64_t kViewGrain = 1024;  // rows of a task

}  // namespace

void bind_view(nb::module_& m) {
  m.def("view_rows", [](handle rows, handle parts, int threads) {
    TensorView r = borrow(rows, Kind::float32, "rows");
    require(r.ndim == 2, "rows: expected two dimensions");
    const int64_t dim = r.shape[1];
    const std::vector<ViewPart> own = view_parts(parts, dim);
    nb::gil_scoped_release release;
    in_chunks(r.shape[0], kViewGrain, threads, [&](int64_t at, int64_t n) {
      for (float* row = r.as<float>() + at * dim; n--; row += dim)
        for (const ViewPart& part : own) view_row(part, row);
    });
  });
  m.def("view_slopes", [](handle gradients, handle rows, handle parts, handle factors, int threads) {
    TensorView g = borrow(gradients, Kind::float32, "gradients"), r = borrow(rows, Kind::float32, "rows");
    require(r.ndim == 2 && g.ndim == 2 && g.shape[0] == r.shape[0] && g.shape[1] == r.shape[1],
            "gradients: expected the shape of rows");
    const int64_t dim = r.shape[1];
    const std::vector<ViewPart> own = view_parts(parts, dim);
    std::vector<float> factor;
    for (size_t k = 0; k < nb::len(factors); ++k) factor.push_back(nb::cast<float>(factors[k]));
    require(factor.size() == own.size(), "factors: expected one for each part");
    nb::gil_scoped_release release;
    in_chunks(r.shape[0], kViewGrain, threads, [&](int64_t at, int64_t n) {
      for (int64_t row = at; row < at + n; ++row)
        for (size_t p = 0; p < own.size(); ++p)
          slope_row(own[p], factor[p], r.as<float>() + row * dim, g.as<float>() + row * dim);
    });
  });
}

}  // namespace megalith
