// Python bindings of Monolith's layout ops: pooling by packed fid offsets, and its gradient.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "bags.hpp"
#include "bind.hpp"
#include "bind_checks.hpp"
#include "layout.hpp"

namespace megalith {
namespace {

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

}  // namespace

void bind_layout(nb::module_& m) {
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
}

}  // namespace megalith
