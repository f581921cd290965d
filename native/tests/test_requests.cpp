// Requests for scores of both protocols: the usual form is read, and every other one is refused without a read outside of
// the message. Every buffer has exactly the size of its bytes, so that the sanitizer detects a read beyond it.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "infer_request.hpp"
#include "predict_request.hpp"

using namespace megalith;

namespace {

using Bytes = std::string;
using Read = bool (*)(const uint8_t*, size_t, ScoreMessage*);

Bytes varint(uint64_t value) {
  Bytes out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
Bytes message(uint32_t field, const Bytes& inside) { return varint(field << 3 | 2) + varint(inside.size()) + inside; }
Bytes number(uint32_t field, uint64_t value) { return varint(field << 3) + varint(value); }
Bytes varints(const std::vector<uint64_t>& values) {
  Bytes out;
  for (uint64_t value : values) out += varint(value);
  return out;
}

template <class T>
Bytes content(const std::vector<T>& values) {
  return Bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

const Bytes kIds = content<int64_t>({-1, 2}), kTags = content<int64_t>({3, 4}), kDense = content<float>({1, 2, 3, 4, 5, 6});
const Bytes kTyped = varints({UINT64_MAX, 2});

// What a reader finds in a copy of exactly these bytes.
struct Result {
  std::unique_ptr<uint8_t[]> kept;
  ScoreMessage message;
  ScoreReader::Found found;
  std::vector<int64_t> ids;
};

bool read(Read reader, const Bytes& data, Result* result) {
  static const ScoreReader model({"user", "tags"}, "dense", 3);
  result->kept.reset(new uint8_t[data.size()]);
  std::memcpy(result->kept.get(), data.data(), data.size());
  if (!reader(result->kept.get(), data.size(), &result->message)) return false;
  if (!model.find(result->message, &result->found)) return false;
  // What was accepted can be read.
  const ScoreReader::Found& found = result->found;
  CHECK(found.rows > 0 && found.id_bytes() == static_cast<size_t>(found.rows) * 16);
  result->ids.resize(found.id_bytes() / 8);
  found.fill_ids(reinterpret_cast<uint8_t*>(result->ids.data()));
  CHECK(found.dense.size == static_cast<size_t>(found.rows) * 12);
  unsigned sum = 0;
  for (size_t k = 0; k < found.dense.size; ++k) sum += found.dense.data[k];
  for (std::string_view each : result->message.outputs)
    for (char letter : each) sum += static_cast<unsigned char>(letter);
  return sum != UINT32_MAX;
}

bool accepted(Read reader, const Bytes& data) {
  Result result;
  return read(reader, data, &result);
}

// ---- PredictRequest

namespace predict {

Bytes shape(const std::vector<uint64_t>& sizes) {
  Bytes dims;
  for (uint64_t size : sizes) dims += message(2, number(1, size));
  return message(2, dims);
}
Bytes tensor(uint64_t dtype, const std::vector<uint64_t>& sizes, const Bytes& data, uint32_t field = 4) {
  return number(1, dtype) + shape(sizes) + message(field, data);
}
Bytes input(const Bytes& name, const Bytes& value) { return message(2, message(1, name) + message(2, value)); }

Bytes request() {
  const Bytes spec = message(1, "movies") + message(2, number(1, 7)) + message(3, "serving_default");
  return message(1, spec) + input("tags", tensor(9, {2}, kTags)) + input("dense", tensor(1, {2, 3}, kDense)) +
         input("user", tensor(9, {2}, kIds)) + message(3, "logits");
}
Bytes typed_request() {
  return message(1, message(1, "movies") + message(4, "stable")) + input("tags", tensor(9, {2}, varints({3, 4}), 10)) +
         input("dense", tensor(1, {2, 3}, kDense, 5)) + input("user", tensor(9, {2}, kTyped, 10));
}
bool accepted(const Bytes& data) { return ::accepted(read_predict_request, data); }

void the_usual_form() {
  Result result;
  CHECK(read(read_predict_request, request(), &result));
  const ScoreMessage& found = result.message;
  CHECK(found.model == "movies" && found.signature == "serving_default" && found.has_version && found.version == 7);
  CHECK(found.outputs.size() == 1 && found.outputs[0] == "logits" && found.version_text.empty());
  CHECK(result.found.rows == 2 && (result.ids == std::vector<int64_t>{-1, 2, 3, 4}));

  Result typed;
  CHECK(read(read_predict_request, typed_request(), &typed));
  CHECK(typed.ids == result.ids && typed.message.version_text == "stable" && !typed.message.has_version);
  CHECK(!std::memcmp(typed.found.dense.data, kDense.data(), kDense.size()));
}

void other_forms() {
  CHECK(!accepted(""));
  CHECK(!accepted(request() + input("user", tensor(9, {2}, kIds))));  // twice
  CHECK(!accepted(request() + input("more", tensor(9, {2}, kIds))));  // unknown
  CHECK(!accepted(request() + message(1, message(1, "movies"))));     // two specs
  CHECK(!accepted(request() + message(4, "")));                       // an unknown field
  CHECK(!accepted(request() + message(3, "\xff")));                   // not UTF-8
  const Bytes rest = input("tags", tensor(9, {2}, kTags)) + input("dense", tensor(1, {2, 3}, kDense));
  const Bytes both = message(1, message(2, number(1, 7)) + message(4, "stable"));
  CHECK(accepted(rest + input("user", tensor(9, {2}, kIds))));
  CHECK(!accepted(both + rest + input("user", tensor(9, {2}, kIds))));  // a version and a label
  CHECK(!accepted(rest));
  CHECK(!accepted(rest + input("user", tensor(3, {2}, kIds))));
  CHECK(!accepted(rest + input("user", tensor(9, {2, 1}, kIds))));
  CHECK(!accepted(rest + input("user", tensor(9, {2, 1, 1}, kIds))));
  CHECK(!accepted(rest + input("user", tensor(9, {3}, kIds))));
  CHECK(!accepted(rest + input("user", tensor(9, {1}, content<int64_t>({1})))));
  CHECK(!accepted(rest + input("user", tensor(9, {0}, ""))));
  CHECK(!accepted(rest + input("user", tensor(9, {UINT64_MAX}, kIds))));
  CHECK(!accepted(rest + input("user", tensor(9, {(uint64_t{1} << 61) + 2}, kIds))));
  CHECK(!accepted(rest + input("user", tensor(9, {2}, varints({1}), 10))));  // TF repeats the last value
  CHECK(!accepted(rest + input("user", tensor(9, {2}, kIds) + message(10, kTyped))));
  CHECK(!accepted(rest + input("user", number(1, 9) + shape({2}) + number(10, 1) + number(10, 2))));  // not packed
}

}  // namespace predict

// ---- ModelInferRequest

namespace infer {

Bytes tensor(const Bytes& name, const Bytes& datatype, const std::vector<uint64_t>& shape, const Bytes& more = "") {
  return message(5, message(1, name) + message(2, datatype) + message(3, varints(shape)) + more);
}
Bytes raw(const Bytes& data) { return message(7, data); }
Bytes ints(const Bytes& values) { return message(5, message(3, values)); }
Bytes floats(const Bytes& values) { return message(5, message(6, values)); }

Bytes parameters(uint32_t field) {
  const Bytes one = message(1, "b") + message(2, number(1, 1)), two = message(1, "i") + message(2, number(2, UINT64_MAX));
  const Bytes three = message(1, "s") + message(2, message(3, "text")), five = message(1, "u") + message(2, number(5, 9));
  const Bytes four = message(1, "d") + message(2, varint(4 << 3 | 1) + content<double>({0.5}));
  return message(field, one) + message(field, two) + message(field, three) + message(field, four) + message(field, five);
}
Bytes head() {
  return message(1, "movies") + message(2, "7") + message(3, "r1") + parameters(4);
}
Bytes request() {
  return head() + tensor("tags", "INT64", {2}, parameters(4)) + tensor("dense", "FP32", {2, 3}) + tensor("user", "INT64", {2}) +
         message(6, message(1, "logits") + parameters(2)) + raw(kTags) + raw(kDense) + raw(kIds);
}
Bytes typed_request() {
  return head() + tensor("tags", "INT64", {2}, ints(varints({3, 4}))) + tensor("dense", "FP32", {2, 3}, floats(kDense)) +
         tensor("user", "INT64", {2}, ints(kTyped));
}
bool accepted(const Bytes& data) { return ::accepted(read_infer_request, data); }

void the_usual_form() {
  for (const Bytes& data : {request(), typed_request()}) {
    Result result;
    CHECK(read(read_infer_request, data, &result));
    const ScoreMessage& found = result.message;
    CHECK(found.model == "movies" && found.version_text == "7" && found.id == "r1" && !found.has_version);
    CHECK(result.found.rows == 2 && (result.ids == std::vector<int64_t>{-1, 2, 3, 4}));
    CHECK(!std::memcmp(result.found.dense.data, kDense.data(), kDense.size()));
  }
  Result result;
  CHECK(read(read_infer_request, request(), &result));
  CHECK(result.message.outputs.size() == 1 && result.message.outputs[0] == "logits");
}

void other_forms() {
  CHECK(!accepted(""));
  CHECK(!accepted(request() + tensor("user", "INT64", {2}) + raw(kIds)));                 // twice
  CHECK(!accepted(request() + tensor("more", "INT64", {2}) + raw(kIds)));                 // unknown
  CHECK(!accepted(request() + raw(kIds)));                                                // more contents than inputs
  CHECK(!accepted(request() + message(1, "movies")));                                     // two names
  CHECK(!accepted(request() + message(8, "")));                                           // an unknown field
  CHECK(!accepted(request() + message(6, message(1, "\xff"))));                           // not UTF-8
  CHECK(!accepted(request() + message(4, message(1, "p") + message(2, number(4, 1)))));   // a double as varint
  CHECK(!accepted(request() + message(4, message(1, "p") + message(2, message(3, "\xc0")))));
  const Bytes tags = tensor("tags", "INT64", {2}), dense = tensor("dense", "FP32", {2, 3});
  const Bytes contents = raw(kTags) + raw(kDense) + raw(kIds);
  const auto user = [&](const Bytes& each) { return accepted(tags + dense + each + contents); };
  CHECK(user(tensor("user", "INT64", {2})));
  CHECK(!accepted(tags + dense + tensor("user", "INT64", {2}) + raw(kTags) + raw(kDense)));
  CHECK(!accepted(contents + tags + dense + tensor("user", "INT64", {2})));
  CHECK(!user(""));
  CHECK(!user(tensor("user", "UINT64", {2})));
  CHECK(!user(tensor("user", "FP32", {2})));
  CHECK(!user(tensor("user", "INT64", {2, 1})));
  CHECK(!user(tensor("user", "INT64", {2, 1, 1})));
  CHECK(!user(tensor("user", "INT64", {})));
  CHECK(!user(tensor("user", "INT64", {3})));
  CHECK(!user(tensor("user", "INT64", {0})));
  CHECK(!user(tensor("user", "INT64", {UINT64_MAX})));
  CHECK(!user(tensor("user", "INT64", {(uint64_t{1} << 61) + 2})));
  CHECK(!user(tensor("user", "INT64", {2}, ints(kTyped))));                               // both kinds of contents
  CHECK(!user(tensor("user", "INT64", {2}, message(5, ""))));
  const Bytes rest = tensor("tags", "INT64", {2}, ints(varints({3, 4}))) + tensor("dense", "FP32", {2, 3}, floats(kDense));
  CHECK(accepted(rest + tensor("user", "INT64", {2}, ints(kTyped))));
  CHECK(!accepted(rest + tensor("user", "INT64", {2}, ints(varints({1, 2, 3})))));
  CHECK(!accepted(rest + tensor("user", "INT64", {2}, ints(kTyped.substr(0, 5)))));       // a truncated varint
  CHECK(!accepted(rest + tensor("user", "INT64", {2}, ints(Bytes(11, '\x80') + '\1'))));  // one of 12 bytes
  CHECK(!accepted(rest + tensor("user", "INT64", {2}, floats(kTyped))));
  CHECK(!accepted(rest + tensor("user", "INT64", {2})));
  CHECK(!accepted(rest + raw(kIds)));
  const Bytes not_a_number = content<uint32_t>({0x7fa00000, 0, 0, 0, 0, 0});
  CHECK(!accepted(tensor("user", "INT64", {2}, ints(kTyped)) + tensor("tags", "INT64", {2}, ints(kTyped)) +
                  tensor("dense", "FP32", {2, 3}, floats(not_a_number))));
  // Lengths beyond the message, and a number of inputs that nobody sends.
  CHECK(!accepted(varint(7 << 3 | 2) + varint(UINT32_MAX)));
  CHECK(!accepted(varint(7 << 3 | 2) + varint(UINT64_MAX)));
  Bytes many;
  for (size_t k = 0; k <= ScoreMessage::kMaxInputs; ++k) many += message(5, "");
  CHECK(!accepted(many));
}

}  // namespace infer

// Bytes changed, removed, repeated or replaced in messages that are accepted.
void damage(Read reader, const std::vector<Bytes>& messages) {
  Random random{1};
  int64_t taken = 0;
  for (const Bytes& whole : messages) {
    for (size_t end = 0; end < whole.size(); ++end) accepted(reader, whole.substr(0, end));
    for (int k = 0; k < 20000; ++k) {
      Bytes data = whole;
      for (int64_t changes = 1 + random.below(4); changes-- && !data.empty();) {
        const size_t at = static_cast<size_t>(random.below(static_cast<int64_t>(data.size())));
        const size_t length = static_cast<size_t>(1 + random.below(20));
        const int64_t how = random.below(5);
        if (how == 0) data[at] = static_cast<char>(data[at] ^ (1 << random.below(8)));
        if (how == 1) data.erase(at, length);
        if (how == 2) data.insert(at, data.substr(at, length));
        if (how == 3) data[at] = static_cast<char>(random.below(256));
        if (how == 4) data.insert(at, length / 2, '\xff');  // a huge length or a varint without an end
      }
      taken += accepted(reader, data);
    }
  }
  CHECK(taken > 500);
}

void random_bytes(Read reader) {
  Random random{2};
  for (int k = 0; k < 20000; ++k) {
    Bytes data(static_cast<size_t>(random.below(64)), '\0');
    for (char& each : data) each = static_cast<char>(random.below(random.below(2) ? 256 : 64));
    accepted(reader, data);
  }
}

}  // namespace

int main() {
  predict::the_usual_form();
  predict::other_forms();
  damage(read_predict_request, {predict::request(), predict::typed_request()});
  random_bytes(read_predict_request);
  infer::the_usual_form();
  infer::other_forms();
  damage(read_infer_request, {infer::request(), infer::typed_request()});
  random_bytes(read_infer_request);
}
