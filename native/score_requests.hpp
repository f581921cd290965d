// Requests for scores in the form that most clients send: TF Serving's PredictRequest, with one id per row and feature as
// int64 [rows], float32 dense values [rows, k], and all numbers in `tensor_content`.
//
//     PredictRequest  1 model_spec  2 inputs, entries of a map (1 name, 2 TensorProto)  3 output_filter
//     ModelSpec       1 name        2 version (1 value)     3 signature_name     4 version_label
//     TensorProto     1 dtype       2 tensor_shape (2 dim (1 size))              4 tensor_content
//
// A message in any other form is not an error here: the caller reads it with protobuf, which then finds what is wrong. So
// every field occurs at most once, and unknown fields are refused.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "wire.hpp"

namespace megalith {

// What a request asks for, without its inputs. Views into the message.
struct ScoreHead {
  std::string_view model, signature;
  int64_t version = 0;
  bool has_version = false;
  std::vector<std::string_view> outputs;
};

namespace score_requests {

// The first occurrence of a field that may occur once; `seen` has a bit for each field.
inline bool once(uint32_t number, uint32_t* seen) {
  const uint32_t bit = 1u << number;
  const bool first = !(*seen & bit);
  *seen |= bit;
  return first;
}

inline bool is_bytes(const wire::Field& f) { return f.type == wire::bytes; }

inline bool read_spec(const wire::Span& message, ScoreHead* head) {
  wire::Fields fields(message);
  wire::Field f;
  uint32_t seen = 0;
  while (fields.next(f)) {
    if (f.number > 3 || !is_bytes(f) || !once(f.number, &seen)) return false;
    if (f.number != 2) {
      if (!wire::is_utf8(f.span.text())) return false;
      (f.number == 1 ? head->model : head->signature) = f.span.text();
      continue;
    }
    wire::Fields inner(f.span);
    wire::Field value;
    head->has_version = true;
    uint32_t inside = 0;
    while (inner.next(value)) {
      if (value.number != 1 || value.type != wire::varint || !once(1, &inside)) return false;
      head->version = static_cast<int64_t>(value.value);
    }
  }
  return true;
}

struct RawTensor {
  uint64_t dtype = 0;
  int64_t shape[2] = {};
  int rank = 0;
  wire::Span content{};
};

inline bool read_shape(const wire::Span& message, RawTensor* tensor) {
  wire::Fields dims(message);
  wire::Field dim;
  while (dims.next(dim)) {
    if (dim.number != 2 || !is_bytes(dim) || tensor->rank == 2) return false;
    wire::Fields inner(dim.span);
    wire::Field size;
    uint32_t seen = 0;
    while (inner.next(size)) {
      if (size.number != 1 || size.type != wire::varint || !once(1, &seen)) return false;
      tensor->shape[tensor->rank] = static_cast<int64_t>(size.value);
    }
    ++tensor->rank;
  }
  return true;
}

inline bool read_tensor(const wire::Span& message, RawTensor* tensor) {
  wire::Fields fields(message);
  wire::Field f;
  uint32_t seen = 0;
  while (fields.next(f)) {
    if (f.number > 4 || f.number == 3 || !once(f.number, &seen)) return false;
    if (f.number == 1) {
      if (f.type != wire::varint) return false;
      tensor->dtype = f.value;
    } else if (!is_bytes(f)) {
      return false;
    } else if (f.number == 4) {
      tensor->content = f.span;
    } else if (!read_shape(f.span, tensor)) {
      return false;
    }
  }
  return true;
}

}  // namespace score_requests

// Reads everything but the inputs. Returns false for another form.
inline bool read_score_head(const uint8_t* data, size_t size, ScoreHead* head) {
  try {
    wire::Fields fields({data, size, data});
    wire::Field f;
    uint32_t seen = 0;
    while (fields.next(f)) {
      if (f.number > 3 || !score_requests::is_bytes(f)) return false;
      if (f.number == 1 && (!score_requests::once(1, &seen) || !score_requests::read_spec(f.span, head))) return false;
      if (f.number == 3) {
        if (head->outputs.size() == 256 || !wire::is_utf8(f.span.text())) return false;
        head->outputs.push_back(f.span.text());
      }
    }
    return true;
  } catch (const wire::Error&) {
    return false;
  }
}

// Reads the inputs of requests to one model.
class ScoreReader {
 public:
  static constexpr uint64_t kFloat = 1, kInt64 = 9;  // of tensorflow.DataType

  // num_dense: columns of the dense values; 0: the model takes none.
  ScoreReader(const std::vector<std::string>& features, std::string dense, int64_t num_dense)
      : count_(features.size()), dense_(std::move(dense)), num_dense_(num_dense) {
    for (size_t k = 0; k < features.size(); ++k) names_.emplace_back(features[k], k);
    std::sort(names_.begin(), names_.end());
  }

  size_t num_features() const { return count_; }
  int64_t num_dense() const { return num_dense_; }

  struct Found {
    int64_t rows = 0;
    std::vector<wire::Span> ids;  // of each feature, int64 [rows]
    wire::Span dense{};           // float32 [rows, num_dense]
  };

  // Returns false for another form; an error in the message is one too.
  bool read(const uint8_t* data, size_t size, Found* found) const {
    try {
      return read_inputs({data, size, data}, found);
    } catch (const wire::Error&) {
      return false;
    }
  }

 private:
  bool read_inputs(const wire::Span& message, Found* found) const {
    wire::Fields fields(message);
    wire::Field f;
    size_t inputs = 0;
    bool has_dense = false;
    found->ids.assign(count_, wire::Span{});
    while (fields.next(f)) {
      if (f.number != 2) continue;  // the head was read
      if (!score_requests::is_bytes(f) || ++inputs > count_ + 1) return false;
      wire::Fields entry(f.span);
      wire::Field part;
      uint32_t seen = 0;
      std::string_view name;
      score_requests::RawTensor tensor;
      while (entry.next(part)) {
        if (part.number > 2 || !score_requests::is_bytes(part) || !score_requests::once(part.number, &seen)) return false;
        if (part.number == 1)
          name = part.span.text();
        else if (!score_requests::read_tensor(part.span, &tensor))
          return false;
      }
      if (num_dense_ && name == dense_) {
        if (has_dense || tensor.dtype != kFloat || tensor.rank != 2 || tensor.shape[1] != num_dense_) return false;
        if (!sized(tensor, 4 * num_dense_, found)) return false;
        has_dense = true;
        found->dense = tensor.content;
        continue;
      }
      const auto at = std::lower_bound(names_.begin(), names_.end(), name,
                                       [](const auto& each, std::string_view wanted) { return each.first < wanted; });
      if (at == names_.end() || at->first != name || found->ids[at->second].data) return false;
      if (tensor.dtype != kInt64 || tensor.rank != 1 || !sized(tensor, 8, found)) return false;
      found->ids[at->second] = tensor.content;
    }
    return inputs == count_ + (num_dense_ ? 1 : 0) && has_dense == (num_dense_ > 0) && found->rows > 0;
  }

  // Whether a tensor has as many rows as those before it, of `width` bytes each.
  static bool sized(const score_requests::RawTensor& tensor, int64_t width, Found* found) {
    const int64_t rows = tensor.shape[0], bytes = static_cast<int64_t>(tensor.content.size);
    if (rows <= 0 || bytes % width || bytes / width != rows) return false;
    if (!found->rows) found->rows = rows;
    return found->rows == rows;
  }

  size_t count_;
  std::vector<std::pair<std::string, size_t>> names_;  // sorted
  std::string dense_;
  int64_t num_dense_;
};

}  // namespace megalith
