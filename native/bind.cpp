// The only file that knows Python: checks arguments, lets go of the GIL, calls the core.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "route.hpp"
#include "table.hpp"
#include "tensor.hpp"

namespace megalith {
namespace {

using nb::handle;

// dim, optimizer, its hyper-parameters, initializer, its two parameters
using SegmentTuple = std::tuple<int, std::string, std::vector<float>, int, float, float>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

TableOptions make_options(const std::string& name, const std::vector<SegmentTuple>& segments,
                          uint64_t key, bool missing_zeros, int64_t max_rows, const std::string& kernels) {
  TableOptions options;
  options.name = name;
  for (const auto& [dim, optimizer, hyper, init, a, b] : segments) {
    SegmentPlan plan{};
    plan.dim = dim;
    plan.optimizer = optimizer_index(optimizer.c_str());
    if (plan.optimizer < 0)
      throw std::invalid_argument("the cpu engine has no optimizer \"" + optimizer + "\"");
    if (dim < 1 || hyper.size() > kMaxHyper || init < 0 || init > 3)
      throw std::invalid_argument("bad segment");
    for (size_t k = 0; k < hyper.size(); ++k) plan.hyper[k] = hyper[k];
    plan.init = static_cast<InitKind>(init);
    plan.init_a = a;
    plan.init_b = b;
    options.segments.push_back(plan);
  }
  if (options.segments.empty()) throw std::invalid_argument("a table needs a segment");
  options.key = key;
  options.missing_zeros = missing_zeros;
  require(max_rows >= 0 && max_rows <= Rows::kMaxRows, "max_rows: at most 2^31 - 1");
  options.max_rows = max_rows;
  options.kernels = kernels;
  return options;
}

struct Ids {
  const int64_t* data;
  int64_t n;
};

Ids borrow_ids(handle ids) {
  TensorView v = borrow(ids, Kind::int64, "ids");
  if (v.ndim != 1) throw std::invalid_argument("ids: expected one dimension");
  if (v.shape[0] >= int64_t{1} << 31) throw std::invalid_argument("ids: at most 2^31 - 1 a call");
  return {v.as<int64_t>(), v.shape[0]};
}

const int32_t* borrow_rows(handle rows, int64_t n) {
  if (rows.is_none()) return nullptr;
  TensorView v = borrow(rows, Kind::int32, "rows");
  if (v.ndim != 1 || v.shape[0] != n) throw std::invalid_argument("rows: expected one per id");
  return v.as<int32_t>();
}

float* borrow_matrix(handle tensor, const char* name, int64_t rows, int64_t columns) {
  TensorView v = borrow(tensor, Kind::float32, name);
  if (v.ndim != 2 || v.shape[0] != rows || v.shape[1] != columns)
    throw std::invalid_argument(std::string(name) + ": expected shape [" + std::to_string(rows) +
                                ", " + std::to_string(columns) + "]");
  return v.as<float>();
}

// A pooling in the form of ops/pooling.py's Bags.native(): per feature (offsets, weights, divisor,
// parts), a part being (output, column, start, end, inner, accumulate).
struct BagsList {
  std::vector<BagsView> views;
  std::vector<std::vector<PartView>> parts;

  BagsList(nb::sequence bags, nb::sequence outputs, int64_t n, int dim) {
    std::vector<TensorView> out;
    for (handle o : outputs) {
      out.push_back(borrow(o, Kind::float32, "outputs"));
      require(out.back().ndim == 2, "outputs: expected two dimensions each");
    }
    int64_t end = 0;
    for (handle item : bags) {
      nb::tuple bag = nb::cast<nb::tuple>(item);
      require(bag.size() == 4, "pooling: bad bags");
      TensorView offsets = borrow(bag[0], Kind::int64, "offsets");
      require(offsets.ndim == 1 && offsets.shape[0] >= 1, "offsets: expected [bags + 1]");
      BagsView view{};
      view.offsets = offsets.as<int64_t>();
      view.num_bags = offsets.shape[0] - 1;
      for (int64_t b = 0; b <= view.num_bags; ++b) {
        require(view.offsets[b] >= end, "offsets: must ascend from feature to feature");
        end = view.offsets[b];
      }
      require(end <= n, "offsets: beyond the number of ids");
      view.weights = vector_or_null(bag[1], "weights", n);
      view.divisor = vector_or_null(bag[2], "divisor", view.num_bags);
      const Kernels* k = find_kernels(nullptr);
      const int64_t first = view.offsets[0];
      require(!view.weights || k->all_finite(view.weights + first, end - first), "weights: NaN or Inf");
      require(!view.divisor || k->all_finite(view.divisor, view.num_bags), "divisor: NaN or Inf");
      for (int64_t b = 0; view.divisor && b < view.num_bags; ++b)
        require(view.divisor[b] != 0.0f, "divisor: zero");
      parts.emplace_back();
      for (handle p : bag[3]) parts.back().push_back(part(nb::cast<nb::tuple>(p), out, view, dim));
      for (const PartView& p : parts.back())
        require(p.inner == parts.back()[0].inner, "pooling: parts of a feature differ in inner");
      views.push_back(view);
    }
    for (size_t k = 0; k < views.size(); ++k) {
      views[k].parts = parts[k].data();
      views[k].num_parts = static_cast<int32_t>(parts[k].size());
    }
  }

 private:
  static const float* vector_or_null(handle tensor, const char* name, int64_t n) {
    if (tensor.is_none()) return nullptr;
    TensorView v = borrow(tensor, Kind::float32, name);
    if (v.ndim != 1 || v.shape[0] != n)
      throw std::invalid_argument(std::string(name) + ": expected length " + std::to_string(n));
    return v.as<float>();
  }

  static int64_t number(handle h) {
    int64_t value;
    if (!nb::try_cast<int64_t>(h, value)) throw std::invalid_argument("pooling: a bad number in a part");
    return value;
  }

  static PartView part(nb::tuple p, const std::vector<TensorView>& out, const BagsView& bags,
                       int dim) {
    require(p.size() == 6, "pooling: bad part");
    const int64_t output = number(p[0]);
    require(output >= 0 && output < static_cast<int64_t>(out.size()), "pooling: no such output");
    const TensorView& o = out[static_cast<size_t>(output)];
    PartView view{};
    view.data = o.as<float>();
    view.stride = o.shape[1];
    view.column = number(p[1]);
    const int64_t start = number(p[2]), end = number(p[3]), inner = number(p[4]);
    require(start >= 0 && start < end && end <= dim, "pooling: a slice lies outside the row");
    require(inner >= 1 && bags.num_bags % inner == 0 && bags.num_bags / inner == o.shape[0],
            "pooling: an output's rows and the bags differ");
    require(view.column >= 0 && inner <= o.shape[1] / (end - start) &&
                view.column <= o.shape[1] - inner * (end - start),
            "pooling: columns outside the output");
    view.start = static_cast<int32_t>(start);
    view.end = static_cast<int32_t>(end);
    view.inner = static_cast<int32_t>(inner);
    view.accumulate = PyObject_IsTrue(p[5].ptr()) == 1;
    return view;
  }
};

nb::bytes as_bytes(const std::vector<int64_t>& ids) {
  return nb::bytes(ids.data(), ids.size() * sizeof(int64_t));
}

}  // namespace

NB_MODULE(_native, m) {
  static nb::handle table_full =
      nb::object(nb::module_::import_("megalith.errors").attr("TableFullError")).release();
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const TableFull& e) {
      PyErr_SetString(table_full.ptr(), e.what());
    }
  });

  m.attr("MAX_CONSUMERS") = Table::kMaxConsumers;
  m.attr("MAX_ROWS") = Rows::kMaxRows;
  m.attr("UNKNOWN_EPOCH") = Table::kUnknownEpoch;

  m.def("kernels", [] { return std::string(find_kernels(nullptr)->name); });
  m.def("set_huge_pages", [](bool on) { use_huge_pages() = on; }, nb::arg("on"));
  m.def("set_exchange_api", [](bool on) { exchange_api_enabled() = on; }, nb::arg("on"));
  m.def("check_tensors",
        [](handle ids, handle values) {
          borrow(ids, Kind::int64, "ids");
          borrow(values, Kind::float32, "values");
        },
        nb::arg("ids"), nb::arg("values"));
  m.def("all_finite",
        [](handle tensor, int threads) {
          TensorView v = borrow(tensor, Kind::float32, "tensor");
          nb::gil_scoped_release release;
          const Kernels* k = find_kernels(nullptr);
          constexpr int64_t kGrain = 1 << 16;
          std::atomic<bool> good{true};
          ThreadPool::get().run((v.numel() + kGrain - 1) / kGrain, threads, [&](int64_t t, int) {
            const int64_t n = std::min(kGrain, v.numel() - t * kGrain);
            if (!k->all_finite(v.as<float>() + t * kGrain, n)) good = false;
          });
          return good.load();
        },
        nb::arg("tensor"), nb::arg("threads"));

  m.def("route",
        [](handle ids, handle owners, int mode, uint64_t num_owners, uint64_t block, int first,
           int threads) {
          const Ids i = borrow_ids(ids);
          int32_t* out = const_cast<int32_t*>(borrow_rows(owners, i.n));
          require(mode >= 0 && mode <= 2 && num_owners >= 1 && num_owners < uint64_t{1} << 31,
                  "route: bad mode or number of owners");
          require(mode != 0 || (block >= 1 && block <= (uint64_t{1} << 63) / num_owners),
                  "route: bad block");
          nb::gil_scoped_release release;
          constexpr int64_t kGrain = 1 << 15;
          ThreadPool::get().run((i.n + kGrain - 1) / kGrain, threads, [&](int64_t t, int) {
            const int64_t at = t * kGrain;
            route(i.data + at, std::min(kGrain, i.n - at), static_cast<RouteMode>(mode), num_owners,
                  block, first, out + at);
          });
        },
        nb::arg("ids"), nb::arg("owners"), nb::arg("mode"), nb::arg("num_owners"), nb::arg("block"),
        nb::arg("first"), nb::arg("threads"));

  nb::class_<Table>(m, "Table")
      .def("__init__",
           [](Table* self, const std::string& name, const std::vector<SegmentTuple>& segments,
              uint64_t key, bool missing_zeros, int64_t max_rows, const std::string& kernels) {
             new (self) Table(make_options(name, segments, key, missing_zeros, max_rows, kernels));
           },
           nb::arg("name"), nb::arg("segments"), nb::kw_only(), nb::arg("key"), nb::arg("missing_zeros"),
           nb::arg("max_rows") = Rows::kMaxRows, nb::arg("kernels") = "")
      .def("__len__", &Table::size, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("epoch", &Table::epoch, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("kernels", &Table::kernels_name)
      .def_prop_ro("row_floats", [](const Table& t) { return t.row_floats(); })
      .def("find",
           [](const Table& t, handle ids, handle rows, int threads) {
             const Ids i = borrow_ids(ids);
             int32_t* r = const_cast<int32_t*>(borrow_rows(rows, i.n));
             nb::gil_scoped_release release;
             return t.find(i.data, i.n, r, threads);
           })
      .def("read",
           [](const Table& t, handle rows, int64_t epoch, handle ids, handle out, int threads) {
             const Ids i = borrow_ids(ids);
             const int32_t* r = borrow_rows(rows, i.n);
             float* o = borrow_matrix(out, "out", i.n, t.dim());
             nb::gil_scoped_release release;
             t.read(r, epoch, i.data, i.n, o, threads);
           },
           nb::arg("rows").none(), nb::arg("epoch"), nb::arg("ids"), nb::arg("out"),
           nb::arg("threads"))
      .def("pool",
           [](const Table& t, handle rows, int64_t epoch, handle ids, nb::sequence bags,
              nb::sequence outputs, int threads) {
             const Ids i = borrow_ids(ids);
             const int32_t* r = borrow_rows(rows, i.n);
             const BagsList list(bags, outputs, i.n, t.dim());
             nb::gil_scoped_release release;
             t.pool(r, epoch, i.data, i.n, list.views, threads);
           },
           nb::arg("rows").none(), nb::arg("epoch"), nb::arg("ids"), nb::arg("bags"),
           nb::arg("outputs"), nb::arg("threads"))
      .def("update",
           [](Table& t, handle rows, int64_t epoch, handle ids, handle gradients, handle bags,
              const std::vector<float>& learning_rates, uint32_t time, float scale, int threads) {
             const Ids i = borrow_ids(ids);
             Update u;
             u.rows = borrow_rows(rows, i.n);
             u.epoch = epoch;
             u.ids = i.data;
             u.n = i.n;
             std::optional<BagsList> list;
             if (bags.is_none()) {
               u.flat = borrow_matrix(gradients, "grads", i.n, t.dim());
             } else {
               list.emplace(nb::cast<nb::sequence>(bags), nb::cast<nb::sequence>(gradients), i.n,
                            t.dim());
               u.bags = list->views;
               if (u.bags.empty()) return;  // nothing reached an output
             }
             require(static_cast<int>(learning_rates.size()) == t.num_segments(),
                     "learning_rates: expected one per segment");
             u.learning_rates = learning_rates.data();
             u.time = time;
             u.scale = scale;
             nb::gil_scoped_release release;
             t.update(u, threads);
           },
           nb::arg("rows").none(), nb::arg("epoch"), nb::arg("ids"), nb::arg("gradients"),
           nb::arg("bags").none(), nb::arg("learning_rates"), nb::arg("time"), nb::arg("scale"),
           nb::arg("threads"))
      .def("assign",
           [](Table& t, handle ids, handle values, bool add, uint32_t time, int threads) {
             const Ids i = borrow_ids(ids);
             const float* v = borrow_matrix(values, "values", i.n, t.dim());
             nb::gil_scoped_release release;
             t.assign(i.data, i.n, v, add, time, threads);
           })
      .def("reinitialize",
           [](Table& t, handle ids, uint32_t time, handle status, int threads) {
             const Ids i = borrow_ids(ids);
             int32_t* s = const_cast<int32_t*>(borrow_rows(status, i.n));
             nb::gil_scoped_release release;
             t.reinitialize(i.data, i.n, time, s, threads);
           })
      .def("remove",
           [](Table& t, handle ids) {
             const Ids i = borrow_ids(ids);
             nb::gil_scoped_release release;
             return t.remove(i.data, i.n);
           })
      .def("restore",
           [](Table& t, handle ids, handle raw, handle times, int threads) {
             const Ids i = borrow_ids(ids);
             const float* r = borrow_matrix(raw, "raw", i.n, t.row_floats());
             TensorView when = borrow(times, Kind::int64, "times");
             require(when.ndim == 1 && when.shape[0] == i.n, "times: expected one per id");
             nb::gil_scoped_release release;
             t.restore(i.data, i.n, r, when.as<int64_t>(), threads);
           })
      .def("scan",
           [](const Table& t, int64_t start, handle ids, handle raw, handle times) {
             const Ids i = borrow_ids(ids);
             float* r = borrow_matrix(raw, "raw", i.n, t.row_floats());
             TensorView when = borrow(times, Kind::int64, "times");
             require(when.ndim == 1 && when.shape[0] == i.n, "times: expected one per id");
             require(start >= 0, "start: negative");
             Table::ScanResult result;
             {
               nb::gil_scoped_release release;
               result = t.scan(start, i.n, const_cast<int64_t*>(i.data), r, when.as<int64_t>());
             }
             return std::make_pair(result.count, result.next);
           })
      .def("clear", &Table::clear, nb::call_guard<nb::gil_scoped_release>())
      .def("reserve", &Table::reserve, nb::call_guard<nb::gil_scoped_release>())
      .def("track", &Table::track, nb::call_guard<nb::gil_scoped_release>())
      .def("untrack", &Table::untrack, nb::call_guard<nb::gil_scoped_release>())
      .def("drain",
           [](Table& t, int consumer) {
             std::vector<int64_t> updated, removed;
             {
               nb::gil_scoped_release release;
               t.drain(consumer, updated, removed);
             }
             return nb::make_tuple(as_bytes(updated), as_bytes(removed));
           })
      .def("mark",
           [](Table& t, int consumer, handle ids) {
             const Ids i = borrow_ids(ids);
             nb::gil_scoped_release release;
             t.mark(consumer, i.data, i.n);
           })
      .def("memory",
           [](const Table& t) {
             const Table::Memory m = t.memory();
             return std::make_tuple(m.index, m.rows, m.side);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("shape", [](const Table& t) {
        const Table::Shape s = t.shape();
        return std::make_tuple(s.rows, s.capacity, s.epoch, s.growing);
      }, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace megalith
