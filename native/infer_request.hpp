// Reads the ModelInferRequest of the Open Inference Protocol, which Triton's clients send; see score_message.hpp.
//
//     ModelInferRequest    1 model_name  2 model_version  3 id  4 parameters, entries of a map (1 name, 2 InferParameter)
//                          5 inputs      6 outputs (1 name, 2 parameters)  7 raw_input_contents, one for each input
//     InferInputTensor     1 name        2 datatype       3 shape  4 parameters  5 contents
//     InferTensorContents  3 int64_contents               6 fp32_contents
//     InferParameter       1 bool_param  2 int64_param    3 string_param  4 double_param  5 uint64_param
//
// Parameters change nothing about the scores; they are only checked, because protobuf refuses malformed ones.
#pragma once

#include "score_message.hpp"

namespace megalith {
namespace infer_request {

using namespace score_message;

// The entry of a map of parameters.
inline bool check_parameter(const wire::Field& field) {
  if (!is_bytes(field)) return false;
  wire::Fields entry(field.span);
  wire::Field part;
  uint32_t seen = 0;
  while (entry.next(part)) {
    std::string_view text;
    if (part.number > 2 || !is_bytes(part) || !once(part.number, &seen)) return false;
    if (part.number == 1) {
      if (!read_text(part, &text)) return false;
      continue;
    }
    wire::Fields choice(part.span);
    wire::Field value;
    while (choice.next(value)) {
      if (value.number > 5) return false;
      if (value.number == 3 ? !read_text(value, &text) : value.type != (value.number == 4 ? wire::fixed64 : wire::varint))
        return false;
    }
  }
  return true;
}

inline bool read_shape(const wire::Field& f, ScoreTensor* tensor) {
  if (!is_bytes(f)) return false;  // packed
  wire::Fields sizes(f.span);
  while (!sizes.done())
    if (!add_size(sizes.read_varint(10), tensor)) return false;
  return true;
}

inline bool read_contents(const wire::Field& field, ScoreTensor* tensor) {
  if (!is_bytes(field)) return false;
  wire::Fields fields(field.span);
  wire::Field f;
  while (fields.next(f)) {
    if (f.number == 3 && tensor->kind == ScoreTensor::kInt64) {
      if (!set_varints(f, tensor)) return false;
    } else if (f.number != 6 || tensor->kind != ScoreTensor::kFloat || !set_floats(f, tensor)) {
      return false;
    }
  }
  return tensor->has_content;
}

inline bool read_input(const wire::Field& field, ScoreMessage* message) {
  if (!is_bytes(field) || message->inputs.size() == ScoreMessage::kMaxInputs) return false;
  wire::Fields fields(field.span);
  wire::Field f;
  uint32_t seen = 0;
  ScoreTensor& tensor = message->inputs.emplace_back();
  while (fields.next(f)) {
    if (f.number > 5 || (f.number != 4 && !once(f.number, &seen))) return false;
    switch (f.number) {
      case 1:
        if (!read_text(f, &tensor.name)) return false;
        break;
      case 2:
        tensor.kind = f.span.text() == "INT64" ? ScoreTensor::kInt64 : ScoreTensor::kFloat;
        if (!is_bytes(f) || (tensor.kind == ScoreTensor::kFloat && f.span.text() != "FP32")) return false;
        break;
      case 3:
        if (!read_shape(f, &tensor)) return false;
        break;
      case 4:
        if (!check_parameter(f)) return false;
        break;
      default:  // after the datatype, as every writer orders them
        if (!read_contents(f, &tensor)) return false;
    }
  }
  return true;
}

inline bool read_output(const wire::Field& field, ScoreMessage* message) {
  if (!is_bytes(field)) return false;
  wire::Fields fields(field.span);
  wire::Field f;
  uint32_t seen = 0;
  std::string_view name;
  while (fields.next(f)) {
    if (f.number == 2) {
      if (!check_parameter(f)) return false;
    } else if (f.number != 1 || !once(1, &seen) || !read_text(f, &name)) {
      return false;
    }
  }
  return add_output(name, message);
}

inline bool read(const wire::Span& span, ScoreMessage* message) {
  wire::Fields fields(span);
  wire::Field f;
  uint32_t seen = 0;
  size_t raw = 0;
  while (fields.next(f)) {
    switch (f.number) {
      case 1:
      case 2:
      case 3: {
        std::string_view* texts[] = {&message->model, &message->version_text, &message->id};
        if (!once(f.number, &seen) || !read_text(f, texts[f.number - 1])) return false;
        break;
      }
      case 4:
        if (!check_parameter(f)) return false;
        break;
      case 5:
        if (!read_input(f, message)) return false;
        break;
      case 6:
        if (!read_output(f, message)) return false;
        break;
      case 7:  // after the inputs, as every writer orders them
        if (!is_bytes(f) || raw == message->inputs.size() || !set_content(f.span, &message->inputs[raw++])) return false;
        break;
      default:
        return false;
    }
  }
  return raw == 0 || raw == message->inputs.size();
}

}  // namespace infer_request

// Returns false for a message in another form.
inline bool read_infer_request(const uint8_t* data, size_t size, ScoreMessage* message) {
  try {
    message->inputs.reserve(32);
    return infer_request::read({data, size, data}, message);
  } catch (const wire::Error&) {
    return false;
  }
}

}  // namespace megalith
