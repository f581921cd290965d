// Helpers of the bind*.cpp files: checking arguments and borrowing tensors.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "tensor.hpp"

namespace megalith {

using nb::handle;

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

struct Ids {
  const int64_t* data;
  int64_t n;
};

inline Ids borrow_ids(handle ids) {
  TensorView v = borrow(ids, Kind::int64, "ids");
  if (v.ndim != 1) throw std::invalid_argument("ids: expected one dimension");
  if (v.shape[0] >= int64_t{1} << 31) throw std::invalid_argument("ids: at most 2^31 - 1 per call");
  return {v.as<int64_t>(), v.shape[0]};
}

inline const int32_t* borrow_rows(handle rows, int64_t n) {
  if (rows.is_none()) return nullptr;
  TensorView v = borrow(rows, Kind::int32, "rows");
  if (v.ndim != 1 || v.shape[0] != n) throw std::invalid_argument("rows: expected one per id");
  return v.as<int32_t>();
}

inline int64_t* borrow_per_id(handle values, const char* name, int64_t n) {
  if (values.is_none()) return nullptr;
  TensorView v = borrow(values, Kind::int64, name);
  if (v.ndim != 1 || v.shape[0] != n) throw std::invalid_argument(std::string(name) + ": expected one per id");
  return v.as<int64_t>();
}

// A float32 matrix of this shape.
inline TensorView borrow_matrix(handle tensor, const char* name, int64_t rows, int64_t columns,
                                Strides accepted = Strides::contiguous) {
  TensorView v = borrow(tensor, Kind::float32, name, accepted);
  if (v.ndim != 2 || v.shape[0] != rows || v.shape[1] != columns)
    throw std::invalid_argument(std::string(name) + ": expected shape [" + std::to_string(rows) +
                                ", " + std::to_string(columns) + "]");
  return v;
}

// Offsets that are known to ascend, because features of one id per example share theirs.
struct KnownOffsets {
  const int64_t* data = nullptr;
  int64_t size = 0;
};

// A pooling in the form of Bags.native in ops/pooling.py: per feature (offsets, weights, divisor, shared, parts);
// a part is (output, column, start, end, inner, accumulate, step).
template <class T>
struct BagsList {
  std::vector<BagsOf<T>> views;
  std::vector<std::vector<PartOf<T>>> parts;

  BagsList(nb::handle bags, nb::handle outputs, int64_t n, int dim)
      : BagsList(bags, borrow_outputs(outputs), n, dim) {}

  // `known`: offsets that were checked in this call, or null.
  BagsList(nb::handle bags, const std::vector<TensorView>& out, int64_t n, int dim, KnownOffsets* known = nullptr) {
    int64_t end = 0;
    for (handle item : bags) {
      nb::tuple bag = nb::cast<nb::tuple>(item);
      require(bag.size() == 5, "pooling: bags must have five fields");
      TensorView offsets = borrow(bag[0], Kind::int64, "offsets");
      require(offsets.ndim == 1 && offsets.shape[0] >= 1, "offsets: expected [bags + 1]");
      BagsOf<T> view{};
      view.offsets = offsets.as<int64_t>();
      view.num_bags = offsets.shape[0] - 1;
      bool ascend = view.offsets[0] >= end;
      if (!known || known->data != view.offsets || known->size != view.num_bags)
        for (int64_t b = 0; b < view.num_bags; ++b) ascend &= view.offsets[b] <= view.offsets[b + 1];
      if (known && ascend) *known = {view.offsets, view.num_bags};
      require(ascend, "offsets: must ascend from feature to feature");
      end = view.offsets[view.num_bags];
      require(end <= n, "offsets: beyond the number of ids");
      view.weights = vector_or_null(bag[1], "weights", n);
      view.divisor = vector_or_null(bag[2], "divisor", view.num_bags);
      view.shared = PyObject_IsTrue(bag[3].ptr()) == 1;
      const int64_t first = view.offsets[0];
      require(!view.weights || finite(view.weights + first, end - first), "weights: NaN or Inf");
      require(!view.divisor || finite(view.divisor, view.num_bags), "divisor: NaN or Inf");
      for (int64_t b = 0; view.divisor && b < view.num_bags; ++b)
        require(view.divisor[b] != T(0), "divisor: zero");
      parts.push_back(read_parts(bag[4], out, view, dim));
      views.push_back(view);
    }
    for (size_t k = 0; k < views.size(); ++k) {
      views[k].parts = parts[k].data();
      views[k].num_parts = static_cast<int32_t>(parts[k].size());
    }
  }

  // Outputs, or their gradients, whose rows may be part of wider ones.
  static std::vector<TensorView> borrow_outputs(nb::handle outputs) {
    std::vector<TensorView> out;
    for (handle o : outputs) {
      out.push_back(borrow(o, kind_of<T>(), "outputs", Strides::rows));
      require(out.back().ndim == 2, "outputs: expected two dimensions");
    }
    return out;
  }

  static std::vector<PartOf<T>> read_parts(nb::handle parts, const std::vector<TensorView>& out,
                                           const BagsOf<T>& bags, int dim) {
    std::vector<PartOf<T>> found;
    for (handle p : parts) found.push_back(part(nb::cast<nb::tuple>(p), out, bags, dim));
    for (const PartOf<T>& p : found)
      require(p.inner == found[0].inner && p.tiles == found[0].tiles,
              "pooling: parts of a feature differ in inner or in rows");
    // Bags without gaps between them need no division to find their position.
    const auto linear = [](const PartOf<T>& p) { return p.stride == p.inner * p.step; };
    if (std::all_of(found.begin(), found.end(), linear))
      for (PartOf<T>& p : found) p.stride = p.step, p.bags_in_row = p.inner, p.inner = 1;
    return found;
  }

 private:
  static bool finite(const float* x, int64_t n) { return find_kernels(nullptr)->all_finite(x, 1, n, n); }
  static bool finite(const double* x, int64_t n) {
    return std::all_of(x, x + n, [](double v) { return v - v == 0.0; });
  }

  static const T* vector_or_null(handle tensor, const char* name, int64_t n) {
    if (tensor.is_none()) return nullptr;
    TensorView v = borrow(tensor, kind_of<T>(), name);
    if (v.ndim != 1 || v.shape[0] != n)
      throw std::invalid_argument(std::string(name) + ": expected length " + std::to_string(n));
    return v.as<T>();
  }

  static int64_t number(handle h) {
    int64_t value;
    if (!nb::try_cast<int64_t>(h, value)) throw std::invalid_argument("pooling: a bad number in a part");
    return value;
  }

  static PartOf<T> part(nb::tuple p, const std::vector<TensorView>& out, const BagsOf<T>& bags,
                        int dim) {
    require(p.size() == 7, "pooling: a part must have seven fields");
    const int64_t output = number(p[0]);
    require(output >= 0 && output < static_cast<int64_t>(out.size()), "pooling: no such output");
    const TensorView& o = out[static_cast<size_t>(output)];
    PartOf<T> view{};
    view.data = o.as<T>();
    view.stride = o.row_stride;
    view.column = number(p[1]);
    const int64_t start = number(p[2]), end = number(p[3]), inner = number(p[4]);
    require(start >= 0 && start < end && end <= dim, "pooling: a slice lies outside the row");
    require(inner >= 1 && bags.num_bags % inner == 0, "pooling: bags do not fill output rows");
    const int64_t rows = bags.num_bags / inner;
    require(bags.shared ? rows >= 1 && o.shape[0] % rows == 0 : rows == o.shape[0],
            "pooling: an output's rows and the bags differ");
    view.tiles = bags.shared ? o.shape[0] / rows : 1;
    const int64_t step = number(p[6]), columns = o.shape[1], width = end - start;
    require(step >= width && inner <= columns && (inner == 1 || step <= columns), "pooling: bad step");
    require(view.column >= 0 && (inner - 1) * step + width <= columns &&
                view.column <= columns - (inner - 1) * step - width,
            "pooling: columns outside the output");
    view.step = step;
    view.start = static_cast<int32_t>(start);
    view.end = static_cast<int32_t>(end);
    view.inner = static_cast<int32_t>(inner);
    view.accumulate = PyObject_IsTrue(p[5].ptr()) == 1;
    return view;
  }
};

// Each adds functions or classes to the module; the file of the same name has it. Ops: bind_ids, bind_rows, bind_pool,
// bind_layout, bind_chunks. Tables: bind_group. Others: files of other systems, exported rows (bind_frozen), requests
// (bind_requests), exchanges between processes (bind_mailbox).
void bind_ids(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_view(nb::module_& m);
void bind_pool(nb::module_& m);
void bind_group(nb::module_& m);
void bind_layout(nb::module_& m);
void bind_chunks(nb::module_& m);
void bind_files(nb::module_& m);
void bind_frozen(nb::module_& m);
void bind_mailbox(nb::module_& m);
void bind_requests(nb::module_& m);

}  // namespace megalith
