// Reads TF Serving's PredictRequest; see score_message.hpp.
//
//     PredictRequest  1 model_spec  2 inputs, entries of a map (1 name, 2 TensorProto)  3 output_filter
//     ModelSpec       1 name        2 version (1 value)     3 signature_name     4 version_label
//     TensorProto     1 dtype       2 tensor_shape (2 dim (1 size))              4 tensor_content  5 float_val  10 int64_val
#pragma once

#include "score_message.hpp"

namespace megalith {
namespace predict_request {

using namespace score_message;

constexpr uint64_t kFloat = 1, kInt64 = 9;  // of tensorflow.DataType

// A message whose only field is varint 1.
inline bool read_number(const wire::Span& message, uint64_t* number) {
  wire::Fields fields(message);
  wire::Field f;
  uint32_t seen = 0;
  *number = 0;
  while (fields.next(f)) {
    if (f.number != 1 || f.type != wire::varint || !once(1, &seen)) return false;
    *number = f.value;
  }
  return true;
}

inline bool read_spec(const wire::Span& span, ScoreMessage* message) {
  wire::Fields fields(span);
  wire::Field f;
  uint32_t seen = 0;
  while (fields.next(f)) {
    if (f.number > 4 || !is_bytes(f) || !once(f.number, &seen)) return false;
    if (f.number == 2) {
      uint64_t version;
      if (!read_number(f.span, &version)) return false;
      message->version = static_cast<int64_t>(version);
      message->has_version = true;
    } else if (!read_text(f, f.number == 1 ? &message->model : f.number == 3 ? &message->signature : &message->version_text)) {
      return false;
    }
  }
  return !(message->has_version && seen & 1u << 4);  // of two, the last one counts
}

inline bool read_shape(const wire::Span& span, ScoreTensor* tensor) {
  wire::Fields dims(span);
  wire::Field dim;
  while (dims.next(dim)) {
    uint64_t size;
    if (dim.number != 2 || !is_bytes(dim) || !read_number(dim.span, &size) || !add_size(size, tensor)) return false;
  }
  return true;
}

inline bool read_tensor(const wire::Span& span, ScoreTensor* tensor) {
  wire::Fields fields(span);
  wire::Field f;
  uint32_t seen = 0;
  while (fields.next(f)) {
    if (f.number > 10 || !once(f.number, &seen)) return false;
    switch (f.number) {
      case 1:
        if (f.type != wire::varint) return false;
        tensor->kind = f.value == kInt64 ? ScoreTensor::kInt64 : f.value == kFloat ? ScoreTensor::kFloat : ScoreTensor::kOther;
        break;
      case 2:
        if (!is_bytes(f) || !read_shape(f.span, tensor)) return false;
        break;
      case 4:
        if (!is_bytes(f) || !set_content(f.span, tensor)) return false;
        break;
      case 5:
        if (!set_floats(f, tensor)) return false;
        break;
      case 10:
        if (!set_varints(f, tensor)) return false;
        break;
      default:
        return false;
    }
  }
  // Typed values belong to their dtype.
  if (seen & 1u << 5 && tensor->kind != ScoreTensor::kFloat) return false;
  return !(seen & 1u << 10 && tensor->kind != ScoreTensor::kInt64);
}

inline bool read_input(const wire::Span& span, ScoreMessage* message) {
  wire::Fields entry(span);
  wire::Field part;
  uint32_t seen = 0;
  if (message->inputs.size() == ScoreMessage::kMaxInputs) return false;
  ScoreTensor& tensor = message->inputs.emplace_back();
  while (entry.next(part)) {
    if (part.number > 2 || !is_bytes(part) || !once(part.number, &seen)) return false;
    if (!(part.number == 1 ? read_text(part, &tensor.name) : read_tensor(part.span, &tensor))) return false;
  }
  return true;
}

inline bool read(const wire::Span& span, ScoreMessage* message) {
  wire::Fields fields(span);
  wire::Field f;
  uint32_t seen = 0;
  while (fields.next(f)) {
    std::string_view output;
    switch (f.number) {
      case 1:
        if (!is_bytes(f) || !once(1, &seen) || !read_spec(f.span, message)) return false;
        break;
      case 2:
        if (!is_bytes(f) || !read_input(f.span, message)) return false;
        break;
      case 3:
        if (!read_text(f, &output) || !add_output(output, message)) return false;
        break;
      default:
        return false;
    }
  }
  return true;
}

}  // namespace predict_request

// Returns false for a message in another form.
inline bool read_predict_request(const uint8_t* data, size_t size, ScoreMessage* message) {
  try {
    message->inputs.reserve(32);
    return predict_request::read({data, size, data}, message);
  } catch (const wire::Error&) {
    return false;
  }
}

}  // namespace megalith
