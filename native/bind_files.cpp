// The Python side of other systems' files: checksums, Snappy, Monolith's entries.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind.hpp"
#include "crc32c.hpp"
#include "entries.hpp"
#include "snappy.hpp"

namespace megalith {
namespace {

using PieceTuple = std::tuple<uint64_t, int64_t, int64_t>;
using SegmentTuple = std::tuple<uint64_t, bool, std::vector<PieceTuple>>;
using LayoutTuple = std::tuple<int64_t, int64_t, bool, bool, std::vector<SegmentTuple>>;

const char* told(snappy::Result result) {
  switch (result) {
    case snappy::Result::no_length:
      return "it does not begin with a length of 32 bits";
    case snappy::Result::cut_off:
      return "an element is cut off";
    case snappy::Result::too_long:
      return "there is more than the stated length";
    case snappy::Result::bad_copy:
      return "a copy reaches back before the beginning";
    default:
      return "there is less than the stated length";
  }
}

[[noreturn]] void refuse(snappy::Result result, size_t at) {
  throw std::invalid_argument("snappy: " + std::string(told(result)) + ", at byte " + std::to_string(at));
}

nb::object unsnap(nb::bytes data, uint64_t max_bytes) {
  const uint8_t* in = reinterpret_cast<const uint8_t*>(data.c_str());
  uint64_t length;
  size_t at = 0;
  snappy::Result result = snappy::read_length(in, data.size(), length, at);
  if (result != snappy::Result::good) refuse(result, 0);
  if (length > max_bytes)
    throw std::invalid_argument("snappy: it states " + std::to_string(length) + " bytes, over the bound of " +
                                std::to_string(max_bytes));
  nb::object out = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(length)));
  if (!out.is_valid()) throw nb::python_error();
  uint8_t* to = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(out.ptr()));
  {
    nb::gil_scoped_release release;
    result = snappy::unpack(in, data.size(), at, to, length);
  }
  if (result != snappy::Result::good) refuse(result, at);
  return out;
}

EntryLayout make_layout(const LayoutTuple& tuple) {
  EntryLayout layout;
  std::vector<SegmentTuple> segments;
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

// (rows, bytes used, end): 0 wants more bytes, 1 has as many rows as asked for, 2 met a wrong record.
std::tuple<int64_t, int64_t, int> entries(nb::bytes data, int64_t limit, int64_t max_bytes,
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
  const EntriesRead read = read_entries(in, size, limit, static_cast<uint64_t>(max_bytes), &layout,
                                        i.as<int64_t>(), r.as<float>(), t.as<int64_t>());
  return {read.rows, read.used, static_cast<int>(read.end)};
}

std::tuple<int64_t, int64_t, int> skip_entries(nb::bytes data, int64_t limit, int64_t max_bytes) {
  require(limit >= 0 && max_bytes >= 0 && max_bytes < int64_t{1} << 62, "skip_entries: bad limits");
  const uint8_t* in = reinterpret_cast<const uint8_t*>(data.c_str());
  const int64_t size = static_cast<int64_t>(data.size());
  nb::gil_scoped_release release;
  const EntriesRead read =
      read_entries(in, size, limit, static_cast<uint64_t>(max_bytes), nullptr, nullptr, nullptr, nullptr);
  return {read.rows, read.used, static_cast<int>(read.end)};
}

}  // namespace

void bind_files(nb::module_& m) {
  m.def("crc32c", [](nb::bytes data) { return crc32c(data.c_str(), data.size()); });
  m.def("unsnap", unsnap);
  m.def("entries", entries);
  m.def("skip_entries", skip_entries);
}

}  // namespace megalith
