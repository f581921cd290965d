// The Python side of score_message.hpp: requests for scores, from the bytes that a client sent.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "infer_request.hpp"
#include "predict_request.hpp"

namespace megalith {
namespace {

// A message and the bytes that its views point into.
struct BoundMessage {
  nb::bytes data;
  ScoreMessage message;
};

nb::str text_of_view(std::string_view text) { return nb::str(text.data(), text.size()); }

// None for a message in another form.
template <bool (*read)(const uint8_t*, size_t, ScoreMessage*)>
nb::object read_message(nb::bytes data) {
  ScoreMessage message;
  if (!read(static_cast<const uint8_t*>(data.data()), data.size(), &message)) return nb::none();
  return nb::cast(BoundMessage{std::move(data), std::move(message)});
}

nb::object version_of(const BoundMessage& bound) {
  return bound.message.has_version ? nb::object(nb::int_(bound.message.version)) : nb::none();
}

nb::list outputs_of(const BoundMessage& bound) {
  nb::list outputs;
  for (std::string_view each : bound.message.outputs) outputs.append(text_of_view(each));
  return outputs;
}

// (rows, ids as bytes of int64 [features, rows], dense values as bytes); None if the message has not just these inputs.
nb::object read_scores(const ScoreReader& reader, const BoundMessage& bound) {
  ScoreReader::Found found;
  if (!reader.find(bound.message, &found)) return nb::none();
  nb::object ids = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(found.id_bytes())));
  if (!ids.is_valid()) throw nb::python_error();
  found.fill_ids(reinterpret_cast<uint8_t*>(PyBytes_AsString(ids.ptr())));
  return nb::make_tuple(found.rows, ids, nb::bytes(reinterpret_cast<const char*>(found.dense.data), found.dense.size));
}

}  // namespace

void bind_requests(nb::module_& m) {
  nb::class_<BoundMessage>(m, "ScoreMessage")
      .def_prop_ro("model", [](const BoundMessage& b) { return text_of_view(b.message.model); })
      .def_prop_ro("signature", [](const BoundMessage& b) { return text_of_view(b.message.signature); })
      .def_prop_ro("version_text", [](const BoundMessage& b) { return text_of_view(b.message.version_text); })
      .def_prop_ro("version", version_of)
      .def_prop_ro("id", [](const BoundMessage& b) { return text_of_view(b.message.id); })
      .def_prop_ro("outputs", outputs_of);
  m.def("read_predict_request", read_message<read_predict_request>, nb::arg("data"));
  m.def("read_infer_request", read_message<read_infer_request>, nb::arg("data"));
  nb::class_<ScoreReader>(m, "ScoreReader")
      .def("__init__",
           [](ScoreReader* self, const std::vector<std::string>& features, const std::string& dense, int64_t num_dense) {
             const bool fits = num_dense >= 0 && num_dense <= int64_t{1} << 30;
             require(!features.empty() && fits, "features or num_dense: out of range");
             new (self) ScoreReader(features, dense, num_dense);
           },
           nb::arg("features"), nb::arg("dense"), nb::arg("num_dense"))
      .def("read", read_scores, nb::arg("message"));
}

}  // namespace megalith
