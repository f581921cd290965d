// The Python side of files: checksums, writing in the background; of other systems' files: Monolith's entries and records.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <fcntl.h>
#endif

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "crc32.hpp"
#include "crc32c.hpp"
#include "entries.hpp"
#include "examples.hpp"

namespace megalith {
namespace {

using PieceTuple = std::tuple<uint64_t, int64_t, int64_t>;
using FileSegment = std::tuple<uint64_t, bool, std::vector<PieceTuple>>;
using LayoutTuple = std::tuple<int64_t, int64_t, bool, bool, std::vector<FileSegment>>;

EntryLayout make_layout(const LayoutTuple& tuple) {
  EntryLayout layout;
  std::vector<FileSegment> segments;
  std::tie(layout.dim, layout.width, layout.reads_state, layout.needs_state, segments) = tuple;
  require(layout.dim >= 1 && layout.width >= layout.dim, "layout: bad dim or width");
  for (const auto& [kind, may_be_empty, pieces] : segments) {
    layout.segments.push_back({kind, may_be_empty, {}});
    for (const auto& [field, start, size] : pieces) {
      require(start >= 0 && size >= 0 && size <= layout.width && start <= layout.width - size,
              "layout: a piece lies outside the row");
      layout.segments.back().pieces.push_back({field, start, size});
    }
  }
  return layout;
}

// Returns (rows, bytes used).
std::tuple<int64_t, int64_t> entries(nb::bytes data, int64_t at, int64_t limit, int64_t max_bytes,
                                     const LayoutTuple& tuple, handle ids, handle rows, handle times) {
  const EntryLayout layout = make_layout(tuple);
  TensorView i = borrow(ids, Kind::int64, "ids"), r = borrow(rows, Kind::float32, "rows"),
             t = borrow(times, Kind::int64, "times");
  require(i.ndim == 1 && t.ndim == 1 && r.ndim == 2 && r.shape[1] == layout.width, "entries: bad shapes");
  require(limit >= 0 && limit <= std::min({i.shape[0], r.shape[0], t.shape[0]}), "limit: beyond the room");
  require(max_bytes >= 0 && max_bytes < int64_t{1} << 62, "max_bytes: out of range");
  const uint8_t* in = reinterpret_cast<const uint8_t*>(data.c_str());
  const int64_t size = static_cast<int64_t>(data.size());
  nb::gil_scoped_release release;
  const EntriesRead read = read_entries(in, size, at, limit, static_cast<uint64_t>(max_bytes), &layout,
                                        i.as<int64_t>(), r.as<float>(), t.as<int64_t>());
  return {read.rows, read.used};
}

std::tuple<int64_t, int64_t> skip_entries(nb::bytes data, int64_t at, int64_t limit, int64_t max_bytes) {
  require(limit >= 0 && max_bytes >= 0 && max_bytes < int64_t{1} << 62, "skip_entries: bad limits");
  const uint8_t* in = reinterpret_cast<const uint8_t*>(data.c_str());
  const int64_t size = static_cast<int64_t>(data.size());
  nb::gil_scoped_release release;
  const EntriesRead read =
      read_entries(in, size, at, limit, static_cast<uint64_t>(max_bytes), nullptr, nullptr, nullptr, nullptr);
  return {read.rows, read.used};
}

// ---- own files

// Continues a CRC-32 over the bytes of any contiguous buffer.
uint32_t crc32_of(handle data, uint32_t value) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  {
    nb::gil_scoped_release release;
    value = crc32(value, view.buf, static_cast<size_t>(view.len));
  }
  PyBuffer_Release(&view);
  return value;
}

// ---- records

// A numpy array that owns a vector.
template <class Element, class T>
nb::object to_numpy(std::vector<T>&& values) {
  static_assert(sizeof(Element) == sizeof(T));
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  const size_t shape[] = {owned->size()};
  return nb::cast(nb::ndarray<nb::numpy, Element>(owned->data(), 1, shape, owner));
}

// Returns (columns, labels, weights, times, has_time, rows of each record, errors); a column is
// (ids, floats, kinds, lengths), an error (record, byte, problem).
nb::tuple decode_records(int kind, const std::vector<nb::bytes>& messages, const std::vector<std::string>& names,
                         int64_t label_index) {
  require(kind >= 0 && kind <= 2 && label_index >= 0, "decode_records: bad kind or label_index");
  RecordDecoder decoder(static_cast<RecordKind>(kind), names, label_index);
  {
    std::vector<std::pair<const uint8_t*, size_t>> spans;
    for (const nb::bytes& message : messages)
      spans.emplace_back(reinterpret_cast<const uint8_t*>(message.c_str()), message.size());
    nb::gil_scoped_release release;
    for (const auto& [data, size] : spans) decoder.decode(data, size);
  }
  nb::list columns, errors;
  for (RecordColumn& column : decoder.columns)
    columns.append(nb::make_tuple(to_numpy<int64_t>(std::move(column.ids)), to_numpy<float>(std::move(column.floats)),
                                  to_numpy<uint8_t>(std::move(column.kinds)),
                                  to_numpy<int64_t>(std::move(column.lengths))));
  for (const RecordError& error : decoder.errors)
    errors.append(nb::make_tuple(error.record, error.at,
                                 nb::steal(PyUnicode_DecodeUTF8(error.problem.data(),
                                                                static_cast<Py_ssize_t>(error.problem.size()),
                                                                "replace"))));
  return nb::make_tuple(columns, to_numpy<float>(std::move(decoder.labels)),
                        to_numpy<float>(std::move(decoder.weights)), to_numpy<int64_t>(std::move(decoder.times)),
                        to_numpy<uint8_t>(std::move(decoder.has_time)), to_numpy<int64_t>(std::move(decoder.rows)),
                        errors);
}

}  // namespace

void bind_files(nb::module_& m) {
  if (has_fast_crc32()) m.def("crc32", crc32_of, nb::arg("data"), nb::arg("value") = 0);
#if defined(__linux__)
  // A hint: an error that matters is reported by fsync.
  m.def("start_writeback", [](int file) { sync_file_range(file, 0, 0, SYNC_FILE_RANGE_WRITE); },
        nb::call_guard<nb::gil_scoped_release>());
#endif
  m.def("crc32c", [](nb::bytes data) { return crc32c(data.c_str(), data.size()); });
  m.def("entries", entries);
  m.def("skip_entries", skip_entries);
  m.def("decode_records", decode_records);
}

}  // namespace megalith
