// A request for scores in the form that most clients send: one id for each row and feature as int64 [rows], and float32
// dense values [rows, k]. The readers of the two protocols (predict_request.hpp, infer_request.hpp) return a ScoreMessage,
// and ScoreReader finds the inputs of one model in it.
//
// A message in any other form is not an error here: the caller reads it with protobuf, which then finds what is wrong. What
// the readers accept, protobuf accepts too: they refuse unknown fields, a second occurrence of a field and texts that are
// not UTF-8.
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

// An input. Its values are fixed-width numbers in `content`, or varints there.
struct ScoreTensor {
  enum Kind { kOther, kInt64, kFloat };

  std::string_view name;
  Kind kind = kOther;
  int rank = 0;
  int64_t shape[2] = {};
  wire::Span content{};
  bool has_content = false;
  bool varints = false;
  int64_t count = 0;  // of varints
};

// Views into the bytes of the message.
struct ScoreMessage {
  static constexpr size_t kMaxInputs = 4096, kMaxOutputs = 256;

  std::string_view model, signature, id;
  std::string_view version_text;  // a label, or the number as text
  int64_t version = 0;
  bool has_version = false;
  std::vector<std::string_view> outputs;
  std::vector<ScoreTensor> inputs;
};

namespace score_message {

// The first occurrence of a field that may occur once; `seen` has a bit for each field below 32.
inline bool once(uint32_t number, uint32_t* seen) {
  const uint32_t bit = 1u << number;
  const bool first = !(*seen & bit);
  *seen |= bit;
  return first;
}

inline bool is_bytes(const wire::Field& f) { return f.type == wire::bytes; }

// A text; false for another type or if it is not UTF-8.
inline bool read_text(const wire::Field& f, std::string_view* text) {
  if (!is_bytes(f) || !wire::is_utf8(f.span.text())) return false;
  *text = f.span.text();
  return true;
}

inline bool add_output(std::string_view name, ScoreMessage* message) {
  if (message->outputs.size() == ScoreMessage::kMaxOutputs) return false;
  message->outputs.push_back(name);
  return true;
}

inline bool add_size(uint64_t size, ScoreTensor* tensor) {
  if (tensor->rank == 2) return false;
  tensor->shape[tensor->rank++] = static_cast<int64_t>(size);
  return true;
}

inline bool set_content(const wire::Span& content, ScoreTensor* tensor) {
  if (tensor->has_content) return false;
  tensor->has_content = true;
  tensor->content = content;
  return true;
}

// The packed values of a repeated int64: varints, which must be complete.
inline bool set_varints(const wire::Field& f, ScoreTensor* tensor) {
  if (!is_bytes(f) || !set_content(f.span, tensor)) return false;
  wire::Fields values(f.span);
  for (tensor->count = 0; !values.done(); ++tensor->count) values.read_varint(10);
  tensor->varints = true;
  return true;
}

// The packed values of a repeated float. Protobuf gives them to Python as doubles, which changes the bits of some NaNs.
inline bool set_floats(const wire::Field& f, ScoreTensor* tensor) {
  if (!is_bytes(f) || f.span.size % 4 || !set_content(f.span, tensor)) return false;
  for (size_t at = 0; at < f.span.size; at += 4) {
    uint32_t bits;
    std::memcpy(&bits, f.span.data + at, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return false;
  }
  return true;
}

}  // namespace score_message

// Finds the inputs of one model in messages.
class ScoreReader {
 public:
  // num_dense: columns of the dense values; 0: the model takes none.
  ScoreReader(const std::vector<std::string>& features, std::string dense, int64_t num_dense)
      : count_(features.size()), dense_(std::move(dense)), num_dense_(num_dense) {
    for (size_t k = 0; k < features.size(); ++k) names_.emplace_back(features[k], k);
    std::sort(names_.begin(), names_.end());
  }

  struct Found {
    int64_t rows = 0;
    std::vector<const ScoreTensor*> ids;  // of each feature
    wire::Span dense{};                   // float32 [rows, num_dense]

    size_t id_bytes() const { return static_cast<size_t>(rows) * 8 * ids.size(); }
    // Writes int64 [features, rows], which takes id_bytes().
    void fill_ids(uint8_t* to) const {
      const size_t each = static_cast<size_t>(rows) * 8;
      for (const ScoreTensor* tensor : ids) {
        if (!tensor->varints) {
          std::memcpy(to, tensor->content.data, each);
          to += each;
          continue;
        }
        wire::Fields values(tensor->content);
        for (int64_t k = 0; k < rows; ++k, to += 8) {
          const uint64_t id = values.read_varint(10);
          std::memcpy(to, &id, 8);
        }
      }
    }
  };

  // Returns false unless the message has exactly the inputs of the model, all with the same number of rows. The message
  // must outlive what was found.
  bool find(const ScoreMessage& message, Found* found) const {
    if (message.inputs.size() != count_ + (num_dense_ ? 1 : 0)) return false;
    found->ids.assign(count_, nullptr);
    found->rows = 0;
    bool has_dense = false;
    for (const ScoreTensor& tensor : message.inputs) {
      if (num_dense_ && tensor.name == dense_) {
        if (has_dense || tensor.kind != ScoreTensor::kFloat || tensor.rank != 2 || tensor.shape[1] != num_dense_) return false;
        if (!has_rows(tensor, 4 * num_dense_, found)) return false;
        has_dense = true;
        found->dense = tensor.content;
        continue;
      }
      const auto at = std::lower_bound(names_.begin(), names_.end(), tensor.name,
                                       [](const auto& each, std::string_view wanted) { return each.first < wanted; });
      if (at == names_.end() || at->first != tensor.name || found->ids[at->second]) return false;
      if (tensor.kind != ScoreTensor::kInt64 || tensor.rank != 1 || !has_rows(tensor, 8, found)) return false;
      found->ids[at->second] = &tensor;
    }
    return found->rows > 0;  // as many inputs as names, and none twice: each name has its input
  }

 private:
  // Whether a tensor has as many rows as those before it, of `width` bytes each.
  static bool has_rows(const ScoreTensor& tensor, int64_t width, Found* found) {
    const int64_t rows = tensor.shape[0], bytes = static_cast<int64_t>(tensor.content.size);
    if (rows <= 0) return false;
    if (tensor.varints ? tensor.count != rows : bytes % width || bytes / width != rows) return false;
    if (!found->rows) found->rows = rows;
    return found->rows == rows;
  }

  size_t count_;
  std::vector<std::pair<std::string, size_t>> names_;  // sorted
  std::string dense_;
  int64_t num_dense_;
};

}  // namespace megalith
