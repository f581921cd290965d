// The Python side of score_requests.hpp: requests for scores, from the bytes that a client sent.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <vector>

#include "bind.hpp"
#include "score_requests.hpp"

namespace megalith {
namespace {

nb::str text_of_view(std::string_view text) { return nb::str(text.data(), text.size()); }

// (model, signature, version or None, outputs); None for a message in another form.
nb::object score_head(nb::bytes data) {
  ScoreHead head;
  if (!read_score_head(static_cast<const uint8_t*>(data.data()), data.size(), &head)) return nb::none();
  nb::list outputs;
  for (std::string_view each : head.outputs) outputs.append(text_of_view(each));
  return nb::make_tuple(text_of_view(head.model), text_of_view(head.signature),
                        head.has_version ? nb::object(nb::int_(head.version)) : nb::none(), outputs);
}

// (rows, ids as bytes of int64 [features, rows], dense values as bytes); None for a message in another form.
nb::object read_scores(const ScoreReader& reader, nb::bytes data) {
  ScoreReader::Found found;
  if (!reader.read(static_cast<const uint8_t*>(data.data()), data.size(), &found)) return nb::none();
  const size_t each = static_cast<size_t>(found.rows) * 8;
  nb::object ids = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(each * found.ids.size())));
  if (!ids.is_valid()) throw nb::python_error();
  char* to = PyBytes_AS_STRING(ids.ptr());
  for (const wire::Span& span : found.ids) {
    std::memcpy(to, span.data, each);
    to += each;
  }
  return nb::make_tuple(found.rows, ids, nb::bytes(reinterpret_cast<const char*>(found.dense.data), found.dense.size));
}

}  // namespace

void bind_requests(nb::module_& m) {
  m.def("score_head", score_head, nb::arg("data"));
  nb::class_<ScoreReader>(m, "ScoreReader")
      .def("__init__",
           [](ScoreReader* self, const std::vector<std::string>& features, const std::string& dense, int64_t num_dense) {
             require(!features.empty() && num_dense >= 0 && num_dense <= int64_t{1} << 30, "features or num_dense: out of range");
             new (self) ScoreReader(features, dense, num_dense);
           },
           nb::arg("features"), nb::arg("dense"), nb::arg("num_dense"))
      .def("read", read_scores, nb::arg("data"));
}

}  // namespace megalith
