// The Python side of frozen.hpp and served_rows.hpp: rows of exported files, and those written since.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bags.hpp"
#include "bind.hpp"
#include "bind_checks.hpp"
#include "frozen.hpp"
#include "served_rows.hpp"

namespace megalith {
namespace {

int bits_of(int64_t buckets) {
  int bits = 0;
  while (bits < 40 && (int64_t{1} << bits) + 1 < buckets) ++bits;
  require((int64_t{1} << bits) + 1 == buckets, "buckets: their number must be a power of two, and one more");
  return bits;
}

std::vector<StoredPart> parts_of(const TensorView& parts) {
  require(parts.ndim == 2 && parts.shape[1] == 2 && parts.shape[0] >= 1, "parts: [n, 2]");
  std::vector<StoredPart> found;
  for (int64_t p = 0; p < parts.shape[0]; ++p) {
    const int64_t kind = parts.as<int64_t>()[2 * p], dim = parts.as<int64_t>()[2 * p + 1];
    require(kind >= 0 && kind < kStoredKinds && dim >= 1 && dim <= int64_t{1} << 30, "parts: (kind, dim)");
    found.push_back({static_cast<Stored>(kind), dim});
  }
  return found;
}

// A file of rows, which stays as it is: its tensors are checked once, and kept.
// parts: int64 [n, 2], kind (a number of Stored) and columns of each part of a row. `buckets` must have passed
// `frozen_fits`.
struct FrozenFile {
  FrozenFile(handle ids, handle buckets, handle rows, handle parts, handle steps)
      : kept_(nb::make_tuple(ids, buckets, rows, steps)), parts_(parts_of(borrow(parts, Kind::int64, "parts"))) {
    TensorView i = borrow(ids, Kind::int64, "ids"), b = borrow(buckets, Kind::int64, "buckets"),
               r = borrow(rows, Kind::any, "rows"), s = borrow(steps, Kind::float32, "steps");
    require(i.ndim == 1 && b.ndim == 1 && s.ndim == 1, "ids, buckets, steps: [n]");
    int64_t dim = 0, row_bytes = 0;
    for (const StoredPart& part : parts_) dim += part.dim, row_bytes += part.bytes();
    require(r.ndim == 2 && r.shape[0] == i.shape[0] && r.shape[1] * r.item_bytes == row_bytes,
            "rows: [ids, bytes of the parts]");
    require(s.shape[0] == dim, "steps: one for each column of the parts");
    rows_ = {i.as<int64_t>(), i.shape[0],    b.as<int64_t>(), r.data,    parts_.data(), static_cast<int64_t>(parts_.size()),
             s.as<float>(),   dim,           row_bytes,       bits_of(b.shape[0])};
  }
  FrozenFile(const FrozenFile&) = delete;
  FrozenFile& operator=(const FrozenFile&) = delete;

  int64_t read(handle queries, handle skip, handle out) const {
    TensorView q = borrow(queries, Kind::int64, "queries"), o = borrow(out, Kind::float32, "out");
    require(q.ndim == 1, "queries: [n]");
    require(o.ndim == 2 && o.shape[0] == q.shape[0] && o.shape[1] == rows_.dim, "out: [queries, dim]");
    const uint8_t* skipped = nullptr;
    if (!skip.is_none()) {
      TensorView k = borrow(skip, Kind::uint8, "skip");
      require(k.ndim == 1 && k.shape[0] == q.shape[0], "skip: [queries]");
      skipped = k.as<uint8_t>();
    }
    nb::gil_scoped_release release;
    return rows_.read(q.as<int64_t>(), q.shape[0], skipped, o.as<float>());
  }

  const FrozenRows& rows() const { return rows_; }

 private:
  nb::object kept_;
  std::vector<StoredPart> parts_;
  FrozenRows rows_;
};

// The parts of a request for scores that do not depend on its ids: how the rows of a batch size become the inputs of the
// dense program. `features`: number of features of each table; every feature has one id for each of `size` rows.
class PoolPlan {
 public:
  PoolPlan(handle bags, handle shapes, handle index, int dim, int64_t elements, const std::vector<int64_t>& features,
           int64_t size)
      : kept_(nb::make_tuple(bags, index)), elements_(elements), dim_(dim), size_(size) {
    TensorView i = borrow(index, Kind::int64, "index");
    require(i.ndim == 1 && size > 0, "index: expected one dimension");
    for (int64_t each : features) {
      require(each >= 0 && each <= i.shape[0], "features: out of range");
      counts_.push_back(each * size);
      num_features_ += each;
    }
    n_ = i.shape[0];
    require(n_ == num_features_ * size, "index: expected one for each id");
    index_ = i.as<int64_t>();
    check_range(index_, n_, 0, index_limit(elements, 1, 1), "index");
    static float nothing;
    std::vector<TensorView> outputs;
    for (handle shape : shapes) {
      const nb::tuple pair = nb::cast<nb::tuple>(shape);
      require(pair.size() == 2, "shapes: expected pairs");
      TensorView view;
      view.data = &nothing;  // only its address is used
      view.ndim = 2;
      view.item_bytes = 4;
      view.shape[0] = nb::cast<int64_t>(pair[0]);
      view.shape[1] = view.row_stride = nb::cast<int64_t>(pair[1]);
      require(view.shape[0] >= 0 && view.shape[1] >= 0, "shapes: negative");
      outputs.push_back(view);
      shapes_.emplace_back(view.shape[0], view.shape[1]);
    }
    const BagsList<float> list(bags, outputs, n_, dim);
    size_t bag = 0;
    for (handle item : bags) {
      int64_t reach = 1;
      for (const PartOf<float>& part : list.parts[bag]) {
        parts_.push_back(part);
        reach = std::max<int64_t>(reach, part.end);
      }
      for (handle part : nb::cast<nb::tuple>(item)[4]) output_of_.push_back(nb::cast<size_t>(part[0]));
      const BagsView& view = list.views[bag++];
      check_range(index_, view.offsets[view.num_bags], 0, index_limit(elements, 1, reach), "index", view.offsets[0]);
      bags_.push_back(view);
    }
  }

  int64_t num_features() const { return num_features_; }
  int64_t size() const { return size_; }
  int64_t n() const { return n_; }
  int64_t elements() const { return elements_; }
  const std::vector<int64_t>& counts() const { return counts_; }

  std::vector<float*> borrow_outputs(handle outputs) const {
    std::vector<float*> found;
    for (handle output : outputs) {
      TensorView o = borrow(output, Kind::float32, "outputs");
      require(found.size() < shapes_.size() && o.ndim == 2, "outputs: expected those of the plan");
      const auto& shape = shapes_[found.size()];
      require(o.shape[0] == shape.first && o.shape[1] == shape.second, "outputs: another shape than in the plan");
      found.push_back(o.as<float>());
    }
    require(found.size() == shapes_.size(), "outputs: expected those of the plan");
    return found;
  }

  // `rows`: as many floats as `elements`.
  void run(float* rows, const std::vector<float*>& outputs) const {
    std::vector<PartOf<float>> parts = parts_;
    for (size_t k = 0; k < parts.size(); ++k) parts[k].data = outputs[output_of_[k]];
    std::vector<BagsView> bags = bags_;
    const PartOf<float>* next = parts.data();
    for (BagsView& each : bags) {
      each.parts = next;
      next += each.num_parts;
    }
    pool_flat(find_kernels(nullptr)->flat32, FlatRows<float>{rows, index_, 1}, n_, bags, 1);
  }

 private:
  nb::object kept_;
  const int64_t* index_;
  int64_t n_, elements_;
  int dim_;
  int64_t size_, num_features_ = 0;
  std::vector<int64_t> counts_;
  std::vector<std::pair<int64_t, int64_t>> shapes_;
  std::vector<BagsView> bags_;
  std::vector<PartOf<float>> parts_;  // of all bags
  std::vector<size_t> output_of_;
};

// The tables of a version: (base or None, layers, codes or None, dim) for each; see served_rows.hpp. A layer is a Table or a
// FrozenFile; codes are (parts, steps).
class ServedFiles {
 public:
  explicit ServedFiles(nb::sequence tables) : kept_(nb::list(tables)), rows_(read_tables(tables)) {}
  ServedFiles(const ServedFiles&) = delete;
  ServedFiles& operator=(const ServedFiles&) = delete;

  int64_t read(handle ids, handle counts, handle out) const {
    const Ids i = borrow_ids(ids);
    TensorView c = borrow(counts, Kind::int64, "counts"), o = borrow(out, Kind::float32, "out");
    require(c.ndim == 1 && c.shape[0] == rows_.num_tables(), "counts: expected one for each table");
    check_counts(c.as<int64_t>(), i.n, o.numel());
    nb::gil_scoped_release release;
    return rows_.read(i.data, c.as<int64_t>(), o.as<float>());
  }

  // batch: the ids of each request, bytes of int64 [features, rows]; all rows together are those of the plan.
  int64_t pool(nb::list batch, const PoolPlan& plan, handle outputs) const {
    std::vector<int64_t> counts = plan.counts();  // of the tables that the model reads, which come first
    require(static_cast<int64_t>(counts.size()) <= rows_.num_tables(), "plan: it reads more tables");
    counts.resize(static_cast<size_t>(rows_.num_tables()));
    check_counts(counts.data(), plan.n(), plan.elements());
    const std::vector<float*> out = plan.borrow_outputs(outputs);
    std::vector<int64_t> ids(static_cast<size_t>(plan.n()));
    const int64_t features = plan.num_features(), size = plan.size();
    int64_t at = 0;
    for (handle each : batch) {
      require(PyBytes_Check(each.ptr()), "batch: expected bytes");
      const int64_t bytes = PyBytes_Size(each.ptr()), rows = features ? bytes / 8 / features : 0;
      require(bytes == rows * features * 8 && rows <= size - at, "batch: other ids than the plan has");
      const char* data = PyBytes_AsString(each.ptr());
      for (int64_t f = 0; f < features; ++f)
        std::memcpy(ids.data() + f * size + at, data + f * rows * 8, static_cast<size_t>(rows) * 8);
      at += rows;
    }
    require(at == size, "batch: fewer rows than the plan has");
    nb::gil_scoped_release release;
    std::vector<float> rows(static_cast<size_t>(plan.elements()));
    const int64_t missing = rows_.read(ids.data(), counts.data(), rows.data());
    plan.run(rows.data(), out);
    return missing;
  }

 private:
  void check_counts(const int64_t* counts, int64_t ids, int64_t floats) const {
    for (int64_t t = 0; t < rows_.num_tables(); ++t) {
      require(counts[t] >= 0 && counts[t] <= ids && counts[t] * rows_.dim(t) <= floats, "counts: out of range");
      ids -= counts[t];
      floats -= counts[t] * rows_.dim(t);
    }
    require(ids == 0 && floats == 0, "counts: they do not add up to the ids and to the output");
  }

  std::vector<ServedTable> read_tables(nb::sequence tables) {
    std::vector<ServedTable> found;
    for (handle item : tables) {
      const nb::tuple fields = nb::cast<nb::tuple>(item);
      require(fields.size() == 4, "tables: expected four fields for each");
      ServedTable table;
      table.dim = nb::cast<int64_t>(fields[3]);
      require(table.dim >= 1 && table.dim <= int64_t{1} << 30, "dim: out of range");
      if (!fields[0].is_none()) table.base = &nb::cast<const FrozenFile&>(fields[0]).rows();
      require(!table.base || table.base->dim == table.dim, "base: rows of another width");
      if (!fields[2].is_none()) {
        const nb::tuple codes = nb::cast<nb::tuple>(fields[2]);
        require(codes.size() == 2, "codes: expected parts and steps");
        parts_.push_back(std::make_unique<std::vector<StoredPart>>(parts_of(borrow(codes[0], Kind::int64, "parts"))));
        TensorView steps = borrow(codes[1], Kind::float32, "steps");
        table.codes = {parts_.back()->data(), static_cast<int64_t>(parts_.back()->size()), steps.as<float>(), 0};
        int64_t dim = 0;
        for (const StoredPart& part : *parts_.back()) dim += part.dim, table.codes.bytes += part.bytes();
        require(dim == table.dim && steps.ndim == 1 && steps.shape[0] == dim, "codes: columns of another table");
      }
      for (handle layer : fields[1]) {
        RowLayer own;
        if (nb::isinstance<FrozenFile>(layer))
          own.frozen = &nb::cast<const FrozenFile&>(layer).rows();
        else
          own.table = &nb::cast<const Table&>(layer);
        require(own.width() == table.layer_width(), "layers: rows of another width");
        table.layers.push_back(own);
      }
      found.push_back(std::move(table));
    }
    require(!found.empty(), "tables: expected at least one");
    return found;
  }

  nb::object kept_;
  std::vector<std::unique_ptr<std::vector<StoredPart>>> parts_;
  ServedRows rows_;
};

bool frozen_fits(handle buckets, int64_t n) {
  TensorView b = borrow(buckets, Kind::int64, "buckets");
  require(b.ndim == 1 && b.shape[0] >= 2, "buckets: [2 or more]");
  bits_of(b.shape[0]);
  nb::gil_scoped_release release;
  return buckets_fit(b.as<int64_t>(), b.shape[0], n);
}

}  // namespace

void bind_frozen(nb::module_& m) {
  nb::class_<FrozenFile>(m, "FrozenFile")
      .def(nb::init<handle, handle, handle, handle, handle>(), nb::arg("ids"), nb::arg("buckets"), nb::arg("rows"),
           nb::arg("parts"), nb::arg("steps"))
      .def("read", &FrozenFile::read, nb::arg("queries"), nb::arg("skip").none(), nb::arg("out"));
  nb::class_<PoolPlan>(m, "PoolPlan")
      .def(nb::init<handle, handle, handle, int, int64_t, const std::vector<int64_t>&, int64_t>(), nb::arg("bags"),
           nb::arg("shapes"), nb::arg("index"), nb::arg("dim"), nb::arg("elements"), nb::arg("features"), nb::arg("size"));
  nb::class_<ServedFiles>(m, "ServedFiles")
      .def(nb::init<nb::sequence>(), nb::arg("tables"))
      .def("read", &ServedFiles::read, nb::arg("ids"), nb::arg("counts"), nb::arg("out"))
      .def("pool", &ServedFiles::pool, nb::arg("batch"), nb::arg("plan"), nb::arg("outputs"));
  m.def("frozen_fits", frozen_fits);
}

}  // namespace megalith
