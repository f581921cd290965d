// Python bindings of calls over several tables: find and pool, update. An error about one table begins with its name.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bind.hpp"
#include "group.hpp"

namespace megalith {
namespace {

// Reads the fields of one table; an error names the table.
template <class Read>
void for_table(const Table& table, Read&& read) {
  const auto prefix = [&] { return "table '" + table.name() + "': "; };
  try {
    read();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(prefix() + error.what());
  } catch (const nb::builtin_exception& error) {
    throw std::invalid_argument(prefix() + error.what());
  } catch (const nb::cast_error&) {
    throw std::invalid_argument(prefix() + "a field has the wrong type");
  }
}

float number(handle h, const char* name) {
  double value;
  if (!nb::try_cast<double>(h, value)) throw std::invalid_argument(std::string(name) + ": expected a number");
  return static_cast<float>(value);
}

int64_t integer(handle h, const char* name) {
  int64_t value;
  if (!nb::try_cast<int64_t>(h, value)) throw std::invalid_argument(std::string(name) + ": expected an integer");
  return value;
}

nb::tuple fields(handle item, size_t count, const char* what) {
  nb::tuple tuple;
  if (!nb::try_cast<nb::tuple>(item, tuple) || tuple.size() != count) throw std::invalid_argument(what);
  return tuple;
}

// (rates, time, scale, clip_norm, step), as Step in table_data.py, and a correction per segment.
void read_step(handle step, handle corrections, const Table& table, Update& u, std::vector<SegmentStep>& steps) {
  const nb::tuple s = fields(step, 5, "step: expected five numbers");
  const size_t segments = static_cast<size_t>(table.num_segments());
  const handle rates = s[0];
  require(nb::len(rates) == segments && nb::len(corrections) == segments, "learning_rates: expected one per segment");
  const int64_t time = integer(s[1], "time"), at = integer(s[4], "step");
  require(time >= 0 && time <= int64_t{UINT32_MAX}, "time: out of range");
  for (size_t k = 0; k < segments; ++k)
    steps.push_back({number(rates[k], "learning_rates"), number(corrections[k], "corrections"), at});
  u.steps = steps.data();
  u.time = static_cast<uint32_t>(time);
  u.scale = number(s[2], "scale");
  u.clip_norm = number(s[3], "clip_norm");
  u.step = static_cast<uint64_t>(at);
}

}  // namespace

void bind_group(nb::module_& m) {
  // reads: (table, ids, rows, epoch, bags) per table. If the epoch is None, the rows are found and stored in `rows`. Without
  // bags nothing is read. Returns the epoch of each table.
  m.def("read_tables",
        [](nb::sequence reads, nb::sequence outputs, int threads) {
          const std::vector<TensorView> out = BagsList<float>::borrow_outputs(outputs);
          const size_t count = nb::len(reads);
          std::vector<TableRead> calls(count);
          std::vector<BagsList<float>> lists;
          lists.reserve(count);
          KnownOffsets known;
          for (size_t k = 0; k < count; ++k) {
            const nb::tuple f = fields(reads[k], 5, "read_tables: expected five fields per table");
            TableRead& call = calls[k];
            const Table& table = nb::cast<const Table&>(f[0]);
            call.table = &table;
            for_table(table, [&] {
              const Ids ids = borrow_ids(f[1]);
              call.ids = ids.data;
              call.n = ids.n;
              require(!f[2].is_none(), "rows: expected a tensor");
              const int32_t* rows = borrow_rows(f[2], ids.n);
              if (f[3].is_none()) {
                call.found = const_cast<int32_t*>(rows);
              } else {
                call.epoch = integer(f[3], "epoch");
                call.known = rows;
              }
              lists.emplace_back(f[4], out, ids.n, table.dim(), &known);
              call.bags = lists.back().views;
            });
          }
          {
            nb::gil_scoped_release release;
            TableGroup::read(calls, threads);
          }
          std::vector<int64_t> epochs;
          for (const TableRead& call : calls) epochs.push_back(call.epoch);
          return epochs;
        },
        nb::arg("reads"), nb::arg("outputs"), nb::arg("threads"));

  // reads: (table, ids, rows, epoch) per table, with the ids of all peers in their order; counts: [peers, tables]. Writes
  // the rows of each peer to `out`, by table.
  m.def("read_blocks",
        [](nb::sequence reads, handle counts, handle out, int threads) {
          struct Block {
            const Table* table;
            const int64_t* ids;
            const int32_t* rows;
            int64_t epoch, n;
            float* out;
          };
          const TensorView c = borrow(counts, Kind::int64, "counts");
          const int64_t tables = static_cast<int64_t>(nb::len(reads));
          require(c.ndim == 2 && c.shape[1] == tables, "counts: expected [peers, tables]");
          const int64_t peers = c.shape[0];
          std::vector<Block> blocks(static_cast<size_t>(peers * tables));
          for (int64_t t = 0; t < tables; ++t) {
            const nb::tuple f = fields(reads[static_cast<size_t>(t)], 4, "read_blocks: expected four fields per table");
            const Table& table = nb::cast<const Table&>(f[0]);
            for_table(table, [&] {
              const Ids ids = borrow_ids(f[1]);
              const int32_t* rows = borrow_rows(f[2], ids.n);
              require(rows || ids.n == 0, "rows: expected a tensor");
              int64_t at = 0;
              for (int64_t p = 0; p < peers; ++p) {
                const int64_t n = c.as<int64_t>()[p * tables + t];
                require(n >= 0 && n <= ids.n - at, "counts: more than there are ids");
                blocks[static_cast<size_t>(p * tables + t)] = {&table,        ids.data + at, rows + at,
                                                               integer(f[3], "epoch"), n,    nullptr};
                at += n;
              }
              require(at == ids.n, "counts: fewer than there are ids");
            });
          }
          const TensorView o = borrow(out, Kind::float32, "out");
          int64_t left = o.numel();
          for (Block& b : blocks) {
            require(b.n <= left / b.table->dim(), "out: too small");
            b.out = o.as<float>() + (o.numel() - left);
            left -= b.n * b.table->dim();
          }
          require(left == 0, "out: too large");
          nb::gil_scoped_release release;
          ThreadPool::get().run(static_cast<int64_t>(blocks.size()), threads, [&](int64_t k, int) {
            const Block& b = blocks[static_cast<size_t>(k)];
            if (b.n) b.table->read(b.rows, b.epoch, b.ids, b.n, b.out, 1);
          });
        },
        nb::arg("reads"), nb::arg("counts"), nb::arg("out"), nb::arg("threads"));

  // updates: (table, ids, rows, epoch, bags, gradient, step, corrections, occurrences) per table. `bags` are those of a
  // pooling whose outputs have these gradients; None: `gradient` has a row per id.
  m.def("update_tables",
        [](nb::sequence updates, nb::sequence gradients, int threads) {
          const std::vector<TensorView> grads = BagsList<float>::borrow_outputs(gradients);
          const size_t count = nb::len(updates);
          std::vector<TableUpdate> calls;
          std::vector<BagsList<float>> lists;
          std::vector<std::vector<SegmentStep>> steps(count);
          calls.reserve(count);
          lists.reserve(count);
          KnownOffsets known;
          for (size_t k = 0; k < count; ++k) {
            const nb::tuple f = fields(updates[k], 9, "update_tables: expected nine fields per table");
            TableUpdate call;
            Table& table = nb::cast<Table&>(f[0]);
            call.table = &table;
            for_table(table, [&] {
              const Ids ids = borrow_ids(f[1]);
              Update& u = call.u;
              u.ids = ids.data;
              u.n = ids.n;
              u.rows = borrow_rows(f[2], ids.n);
              u.epoch = integer(f[3], "epoch");
              if (f[4].is_none()) {
                const TensorView flat = borrow_matrix(f[5], "grads", ids.n, table.dim(), Strides::rows);
                u.flat = flat.as<float>();
                u.flat_stride = flat.row_stride;
              } else {
                lists.emplace_back(f[4], grads, ids.n, table.dim(), &known);
                u.bags = lists.back().views;
                // Without bags no occurrence reaches an output, but the table has made a step.
                if (u.bags.empty()) u.n = 0;
              }
              read_step(f[6], f[7], table, u, steps[k]);
              u.occurrences = borrow_per_id(f[8], "occurrences", ids.n);
              calls.push_back(std::move(call));
            });
          }
          nb::gil_scoped_release release;
          TableGroup::update(calls, threads);
        },
        nb::arg("updates"), nb::arg("gradients"), nb::arg("threads"));
}

}  // namespace megalith
