// The Python module and its Table class: checks arguments, releases the GIL, calls the core. The other bind*.cpp
// files add functions and classes to the module; no other file depends on Python.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "table.hpp"

namespace megalith {
namespace {

// dim, optimizer, the optimizer that it wraps (or empty), hyperparameters, initial state, initializer, its two parameters,
// precision, whether steps round stochastically
using SegmentTuple = std::tuple<int, std::string, std::string, std::vector<float>, std::vector<float>, int, float,
                                float, int, bool>;

TableOptions make_options(const std::string& name, const std::vector<SegmentTuple>& segments,
                          uint64_t key, bool missing_zeros, int64_t max_rows, const std::string& kernels) {
  TableOptions options;
  options.name = name;
  for (const auto& [dim, optimizer, base, hyper, state, init, a, b, precision, stochastic] : segments) {
    SegmentPlan plan{};
    plan.dim = dim;
    plan.optimizer = optimizer_index(optimizer.c_str());
    plan.base = base.empty() ? -1 : optimizer_index(base.c_str());
    if (plan.optimizer < 0 || (plan.base < 0 && !base.empty()))
      throw std::invalid_argument("the cpu engine has no optimizer \"" + optimizer + "\" or \"" + base + "\"");
    require((optimizer == "delay_compensated") != base.empty() && base != optimizer && base != "custom",
            "segments: an optimizer cannot wrap this one");
    if (dim < 1 || hyper.size() > kMaxHyper || init < 0 || init > 3 || precision < 0 || precision > 2)
      throw std::invalid_argument("segments: invalid dim, hyperparameters, initializer or precision");
    for (size_t k = 0; k < hyper.size(); ++k) plan.hyper[k] = hyper[k];
    plan.init = static_cast<InitKind>(init);
    plan.init_a = a;
    plan.init_b = b;
    plan.precision = static_cast<Precision>(precision);
    plan.stochastic = stochastic;
    options.segments.push_back(plan);
    options.initial_state.push_back(state);
  }
  if (options.segments.empty()) throw std::invalid_argument("segments: expected at least one");
  options.key = key;
  options.missing_zeros = missing_zeros;
  require(max_rows >= 0 && max_rows <= Rows::kMaxRows, "max_rows: expected 0 to 2^31 - 1");
  options.max_rows = max_rows;
  options.kernels = kernels;
  return options;
}

// Tensors float32 [n, width] which together hold the floats of a row, in order: the weights, then each state.
std::vector<Column> borrow_columns(nb::sequence tensors, int64_t n, const Table& t, bool whole) {
  std::vector<Column> columns;
  int32_t at = 0;
  for (handle tensor : tensors) {
    TensorView v = borrow(tensor, Kind::float32, "columns");
    require(v.ndim == 2 && v.shape[0] == n, "columns: expected one row per id");
    if (v.shape[1] == 0) continue;
    columns.push_back({v.as<float>(), at, static_cast<int32_t>(v.shape[1])});
    at += columns.back().width;
  }
  require(columns.empty() || columns[0].width == t.dim(), "columns: the first one must hold the weights");
  require(at == t.row_floats() || (at == 0 && !whole), "columns: their widths do not add up to a stored row");
  return columns;
}

// Complete rows. `counts` and `steps` may be None. Without `whole` the columns may be empty.
RowColumns borrow_chunk(const Ids& ids, nb::sequence columns, handle times, handle counts, handle steps,
                        const Table& t, bool whole) {
  RowColumns chunk;
  chunk.ids = const_cast<int64_t*>(ids.data);
  chunk.columns = borrow_columns(columns, ids.n, t, whole);
  chunk.times = borrow_per_id(times, "times", ids.n);
  require(!times.is_none(), "times: expected one per id");
  chunk.counts = borrow_per_id(counts, "counts", ids.n);
  chunk.steps = borrow_per_id(steps, "steps", ids.n);
  return chunk;
}

// A numpy array that owns the ids, without a copy.
nb::object as_array(std::vector<int64_t>& ids) {
  auto kept = std::make_unique<std::vector<int64_t>>(std::move(ids));
  kept->reserve(1);  // an empty array has an address too
  const nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  std::vector<int64_t>& all = *kept.release();
  return nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(all.data(), {all.size()}, owner));
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // a table that lives until the interpreter exits is not a leak
  nb::object errors = nb::module_::import_("megalith.errors");
  static nb::handle table_full = nb::object(errors.attr("TableFullError")).release();
  static nb::handle bad_input = nb::object(errors.attr("InputError")).release();
  static nb::handle misuse = nb::object(errors.attr("UsageError")).release();
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const TableFull& e) {
      PyErr_SetString(table_full.ptr(), e.what());
    } catch (const SnapshotStalled& e) {
      PyErr_SetString(misuse.ptr(), e.what());
    } catch (const std::invalid_argument& e) {
      PyErr_SetString(bad_input.ptr(), e.what());
    }
  });

  m.attr("MAX_CONSUMERS") = kMaxConsumers;
  m.attr("MAX_ROWS") = Rows::kMaxRows;
  m.attr("PRECISIONS") = nb::make_tuple("float32", "float16", "bfloat16");  // in the order of the enum Precision
  m.attr("SCORES") = nb::make_tuple("lru", "lfu", "step");  // in the order of the enum Score
  m.attr("UNKNOWN_EPOCH") = Table::kUnknownEpoch;

  m.def("kernels", [] { return std::string(find_kernels(nullptr)->name); });
  m.def("kernel_sets", [] {  // those of this CPU and build, the best first
    nb::list names;
    for (const char* name : kKernelNames)
      if (find_kernels(name)) names.append(name);
    return names;
  });
  m.def("uses_torch_threads", [](int threads) { return OpenMp::get(threads) != nullptr; }, nb::arg("threads"));
  m.def("set_huge_pages", [](bool on) { use_huge_pages() = on; }, nb::arg("on"));
  m.def("set_exchange_api", [](bool on) { exchange_api_enabled() = on; }, nb::arg("on"));
  m.def("check_tensors",
        [](handle ids, handle values) {
          borrow(ids, Kind::int64, "ids");
          borrow(values, Kind::float32, "values");
        },
        nb::arg("ids"), nb::arg("values"));
  // Whether these are tensors that calls take as ids without a copy.
  m.def("are_ids",
        [](nb::sequence tensors) {
          try {
            for (handle each : tensors) borrow_ids(each);
          } catch (const std::exception&) {
            return false;
          }
          return true;
        },
        nb::arg("tensors"));
  m.def("all_finite",
        [](handle tensor, int threads) {
          TensorView v = borrow(tensor, Kind::float32, "tensor", Strides::rows);
          nb::gil_scoped_release release;
          const Kernels* k = find_kernels(nullptr);
          constexpr int64_t kGrain = 1 << 16;
          // Rows of a wider tensor, or contiguous numbers.
          const bool apart = v.ndim == 2 && v.row_stride != v.shape[1];
          const int64_t columns = apart ? v.shape[1] : 1, n = apart ? v.shape[0] : v.numel();
          const int64_t grain = std::max<int64_t>(1, kGrain / columns);
          std::atomic<bool> good{true};
          ThreadPool::get().run((n + grain - 1) / grain, threads, [&](int64_t t, int) {
            const int64_t first = t * grain, rows = std::min(grain, n - first);
            const float* x = v.as<float>() + first * (apart ? v.row_stride : 1);
            const bool fine = apart ? k->all_finite(x, rows, columns, v.row_stride) : k->all_finite(x, 1, rows, rows);
            if (!fine) good = false;
          });
          return good.load();
        },
        nb::arg("tensor"), nb::arg("threads"));

  bind_ids(m);
  bind_rows(m);
  bind_view(m);
  bind_pool(m);
  bind_layout(m);
  bind_chunks(m);
  bind_files(m);
  bind_frozen(m);
  bind_mailbox(m);
  bind_group(m);
  bind_requests(m);

  nb::class_<Table>(m, "Table")
      .def("__init__",
           [](Table* self, const std::string& name, const std::vector<SegmentTuple>& segments,
              uint64_t key, bool missing_zeros, int64_t max_rows, const std::string& kernels, bool counted,
              uint32_t min_count, int64_t max_counted_ids, uint32_t admission_limit, int64_t capacity, int score,
              int64_t log_ids, bool huge_pages) {
             TableOptions options = make_options(name, segments, key, missing_zeros, max_rows, kernels);
             require(max_counted_ids >= 0 && capacity >= 0 && score >= 0 && score <= static_cast<int>(Score::none) &&
                         log_ids > 0 && log_ids <= IdLog::kMost,
                     "policies: a setting is out of range");
             options.counted = counted;
             options.min_count = min_count;
             options.max_counted_ids = std::min<int64_t>(max_counted_ids, Rows::kMaxRows);
             options.admission_limit = admission_limit;
             options.capacity = capacity;
             options.score = static_cast<Score>(score);
             options.log_ids = log_ids;
             options.huge_pages = huge_pages;
             new (self) Table(std::move(options));
           },
           nb::arg("name"), nb::arg("segments"), nb::kw_only(), nb::arg("key"), nb::arg("missing_zeros"),
           nb::arg("max_rows") = Rows::kMaxRows, nb::arg("kernels") = "", nb::arg("counted") = false,
           nb::arg("min_count") = 0, nb::arg("max_counted_ids") = 0, nb::arg("admission_limit") = 0,
           nb::arg("capacity") = 0, nb::arg("score") = static_cast<int>(Score::none),
           nb::arg("log_ids") = IdLog::kMost, nb::arg("huge_pages") = true)
      .def("__len__", &Table::size, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("epoch", &Table::epoch, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("kernels", &Table::kernels_name)
      .def_prop_ro("row_floats", [](const Table& t) { return t.row_floats(); })
      .def("set_key", &Table::set_key, nb::arg("key"), nb::call_guard<nb::gil_scoped_release>())
      .def("read",
           [](const Table& t, handle rows, int64_t epoch, handle ids, handle out, int threads) {
             const Ids i = borrow_ids(ids);
             const int32_t* r = borrow_rows(rows, i.n);
             float* o = borrow_matrix(out, "out", i.n, t.dim()).as<float>();
             nb::gil_scoped_release release;
             t.read(r, epoch, i.data, i.n, o, threads);
           },
           nb::arg("rows").none(), nb::arg("epoch"), nb::arg("ids"), nb::arg("out"),
           nb::arg("threads"))
      .def("read_finite",
           [](const Table& t, handle rows, int64_t epoch, handle ids, handle out, int threads) {
             const Ids i = borrow_ids(ids);
             const int32_t* r = borrow_rows(rows, i.n);
             float* o = borrow_matrix(out, "out", i.n, t.dim()).as<float>();
             nb::gil_scoped_release release;
             return t.read_finite(r, epoch, i.data, i.n, o, threads);
           },
           nb::arg("rows").none(), nb::arg("epoch"), nb::arg("ids"), nb::arg("out"), nb::arg("threads"))
      .def("assign",
           [](Table& t, handle ids, handle values, bool add, uint32_t time, int threads) {
             const Ids i = borrow_ids(ids);
             const float* v = borrow_matrix(values, "values", i.n, t.dim()).as<float>();
             nb::gil_scoped_release release;
             t.assign(i.data, i.n, v, add, time, threads);
           })
      .def("assign_filled",
           [](Table& t, handle ids, handle values, float fill, uint32_t time, int threads) {
             const Ids i = borrow_ids(ids);
             const TensorView v = borrow(values, Kind::float32, "values");
             require(v.ndim == 2 && v.shape[0] == i.n && v.shape[1] <= t.dim(), "values: expected [n, at most dim]");
             nb::gil_scoped_release release;
             t.assign(i.data, i.n, v.as<float>(), false, time, threads, static_cast<int>(v.shape[1]), fill);
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
           [](Table& t, handle ids, nb::sequence columns, handle times, handle counts, handle steps,
              int threads) {
             const Ids i = borrow_ids(ids);
             const RowColumns chunk = borrow_chunk(i, columns, times, counts, steps, t, true);
             nb::gil_scoped_release release;
             t.restore(chunk, i.n, threads);
           },
           nb::arg("ids"), nb::arg("columns"), nb::arg("times"), nb::arg("counts").none(), nb::arg("steps").none(),
           nb::arg("threads"))
      .def("write_rows",
           [](Table& t, handle ids, handle occurrences, int64_t reached, nb::sequence columns, int64_t rows_given,
              int64_t step, uint32_t time, int threads) {
             const Ids i = borrow_ids(ids);
             Update u;
             u.ids = i.data;
             u.n = i.n;
             u.occurrences = borrow_per_id(occurrences, "occurrences", i.n);
             require(0 <= reached && reached <= i.n, "reached: expected a number of ids");
             u.time = time;
             u.step = static_cast<uint64_t>(step);
             RowColumns from{};
             from.columns = borrow_columns(columns, rows_given, t, true);
             nb::gil_scoped_release release;
             t.write_rows(u, reached, from, rows_given, threads);
           })
      .def("read_complete",
           [](const Table& t, handle ids, nb::sequence columns, int threads) {
             const Ids i = borrow_ids(ids);
             const std::vector<Column> c = borrow_columns(columns, i.n, t, true);
             nb::gil_scoped_release release;
             t.read_complete(i.data, i.n, c, threads);
           })
      .def("admits",
           [](const Table& t, handle ids, handle occurrences, int64_t step, handle out) {
             const Ids i = borrow_ids(ids);
             const int64_t* seen = borrow_per_id(occurrences, "occurrences", i.n);
             int64_t* admitted = borrow_per_id(out, "out", i.n);
             require(!occurrences.is_none() && !out.is_none(), "admits: expected occurrences and out");
             nb::gil_scoped_release release;
             t.admits(i.data, i.n, seen, static_cast<uint64_t>(step), admitted);
           })
      .def("scan",
           [](Table& t, int64_t start, handle ids, nb::sequence columns, handle times, handle counts, handle steps,
              int watch, int64_t stop) {
             const Ids i = borrow_ids(ids);
             const RowColumns chunk = borrow_chunk(i, columns, times, counts, steps, t, false);
             require(start >= 0, "start: must not be negative");
             Table::ScanResult result;
             {
               nb::gil_scoped_release release;
               result = t.scan(start, i.n, chunk, watch, stop);
             }
             return std::make_pair(result.count, result.next);
           },
           nb::arg("start"), nb::arg("ids"), nb::arg("columns"), nb::arg("times"), nb::arg("counts").none(),
           nb::arg("steps").none(), nb::arg("watch") = -1, nb::arg("stop") = INT64_MAX)
      .def("begin_snapshot",
           [](Table& t, int consumer, bool touched_only, int64_t room, bool with_pending, double reader_seconds) {
             require(consumer < kMaxConsumers && room > 0, "begin_snapshot: consumer or room is out of range");
             std::vector<int64_t> removed, ids, counts;
             int64_t rows, live;
             {
               nb::gil_scoped_release release;
               OccurrenceCounts::Copy pending;
               rows = t.begin_snapshot(consumer, touched_only, room, removed, with_pending ? &pending : nullptr,
                                       reader_seconds);
               live = t.snapshot_live();
               pending.list(ids, counts);
             }
             return nb::make_tuple(rows, live, as_array(removed), as_array(ids), as_array(counts));
           })
      .def("read_snapshot",
           [](Table& t, handle ids, nb::sequence columns, handle times, handle counts, handle steps) {
             const Ids i = borrow_ids(ids);
             const RowColumns chunk = borrow_chunk(i, columns, times, counts, steps, t, true);
             nb::gil_scoped_release release;
             return t.read_snapshot(i.n, chunk);
           },
           nb::arg("ids"), nb::arg("columns"), nb::arg("times"), nb::arg("counts").none(), nb::arg("steps").none())
      .def("snapshot_pressure", &Table::snapshot_pressure, nb::call_guard<nb::gil_scoped_release>())
      .def("end_snapshot", &Table::end_snapshot, nb::call_guard<nb::gil_scoped_release>())
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
             return nb::make_tuple(as_array(updated), as_array(removed));
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
             return std::make_tuple(m.index, m.rows, m.state, m.side, m.counters, m.slack);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("open_watch", &Table::open_watch, nb::call_guard<nb::gil_scoped_release>())
      .def("close_watch", &Table::close_watch, nb::call_guard<nb::gil_scoped_release>())
      .def("evict",
           [](Table& t, handle ids, int watch) {
             const Ids i = borrow_ids(ids);
             std::vector<int64_t> gone;
             {
               nb::gil_scoped_release release;
               gone = t.evict(i.data, i.n, watch);
             }
             return as_array(gone);
           })
      .def("compact", &Table::compact, nb::call_guard<nb::gil_scoped_release>())
      .def("drain_evicted",
           [](Table& t) {
             std::vector<int64_t> ids;
             {
               nb::gil_scoped_release release;
               ids = t.drain_evicted();
             }
             return as_array(ids);
           })
      .def("drain_refused",
           [](Table& t) {
             std::vector<int64_t> ids;
             {
               nb::gil_scoped_release release;
               ids = t.drain_refused();
             }
             return as_array(ids);
           })
      .def("pending",
           [](const Table& t) {
             std::vector<int64_t> ids, counts;
             {
               nb::gil_scoped_release release;
               t.pending().list(ids, counts);
             }
             return nb::make_tuple(as_array(ids), as_array(counts));
           })
      .def("restore_pending",
           [](Table& t, handle ids, handle counts) {
             const Ids i = borrow_ids(ids);
             const int64_t* c = borrow_per_id(counts, "counts", i.n);
             require(!counts.is_none(), "counts: expected one per id");
             nb::gil_scoped_release release;
             t.restore_pending(i.data, i.n, c);
           })
      .def("counters",
           [](const Table& t) {
             const Table::Counters c = t.counters();
             return std::make_tuple(c.created, c.removed, c.evicted, c.refused, c.pending, c.pending_dropped,
                                    c.log_lost);
           },
           nb::call_guard<nb::gil_scoped_release>())
      .def("shape", [](const Table& t) {
        const Table::Shape s = t.shape();
        return std::make_tuple(s.rows, s.capacity, s.epoch, s.growing);
      }, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace megalith
