// Requests for scores: the usual form is read, and every other one is refused without a read outside of the message. Every
// buffer has exactly the size of its bytes, so that the sanitizer detects a read beyond it.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "score_requests.hpp"

using namespace megalith;

namespace {

using Bytes = std::string;

Bytes varint(uint64_t value) {
  Bytes out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
Bytes message(uint32_t field, const Bytes& inside) { return varint(field << 3 | 2) + varint(inside.size()) + inside; }
Bytes number(uint32_t field, uint64_t value) { return varint(field << 3) + varint(value); }

template <class T>
Bytes content(const std::vector<T>& values) {
  return Bytes(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

Bytes tensor(uint64_t dtype, const std::vector<uint64_t>& shape, const Bytes& data) {
  Bytes dims;
  for (uint64_t size : shape) dims += message(2, number(1, size));
  return number(1, dtype) + message(2, dims) + message(4, data);
}
Bytes input(const Bytes& name, const Bytes& value) { return message(2, message(1, name) + message(2, value)); }

Bytes request() {
  const Bytes spec = message(1, "movies") + message(2, number(1, 7)) + message(3, "serving_default");
  return message(1, spec) + input("tags", tensor(9, {2}, content<int64_t>({3, 4}))) +
         input("dense", tensor(1, {2, 3}, content<float>({1, 2, 3, 4, 5, 6}))) +
         input("user", tensor(9, {2}, content<int64_t>({-1, 2}))) + message(3, "logits");
}

const ScoreReader& reader() {
  static const ScoreReader made({"user", "tags"}, "dense", 3);
  return made;
}

// Reads a copy of exactly these bytes; returns whether both parts were accepted.
bool read(const Bytes& data, ScoreHead* head, ScoreReader::Found* found, std::unique_ptr<uint8_t[]>* kept) {
  kept->reset(new uint8_t[data.size()]);
  std::memcpy(kept->get(), data.data(), data.size());
  const bool first = read_score_head(kept->get(), data.size(), head), second = reader().read(kept->get(), data.size(), found);
  return first && second;
}

bool accepted(const Bytes& data) {
  ScoreHead head;
  ScoreReader::Found found;
  std::unique_ptr<uint8_t[]> kept;
  if (!read(data, &head, &found, &kept)) return false;
  // What was accepted can be read.
  int64_t sum = static_cast<int64_t>(head.model.size());
  for (const wire::Span& span : found.ids) {
    CHECK(span.size == static_cast<size_t>(found.rows) * 8);
    for (size_t k = 0; k < span.size; ++k) sum += span.data[k];
  }
  CHECK(found.dense.size == static_cast<size_t>(found.rows) * 12);
  for (size_t k = 0; k < found.dense.size; ++k) sum += found.dense.data[k];
  return sum != INT64_MIN;
}

void the_usual_form() {
  ScoreHead head;
  ScoreReader::Found found;
  std::unique_ptr<uint8_t[]> kept;
  CHECK(read(request(), &head, &found, &kept));
  CHECK(head.model == "movies" && head.signature == "serving_default" && head.has_version && head.version == 7);
  CHECK(head.outputs.size() == 1 && head.outputs[0] == "logits");
  CHECK(found.rows == 2);
  int64_t user, tag;
  std::memcpy(&user, found.ids[0].data, 8);
  std::memcpy(&tag, found.ids[1].data + 8, 8);
  CHECK(user == -1 && tag == 4);
}

void other_forms() {
  const Bytes ids = content<int64_t>({1, 2});
  CHECK(!accepted(""));
  CHECK(!accepted(request() + input("user", tensor(9, {2}, ids))));           // twice
  CHECK(!accepted(request() + input("more", tensor(9, {2}, ids))));           // unknown
  CHECK(!accepted(request() + message(1, message(1, "movies"))));             // two specs
  CHECK(!accepted(request() + message(4, "")));                               // an unknown field
  CHECK(!accepted(message(1, message(4, "stable")) + request()));             // a label
  CHECK(!accepted(request() + message(3, "\xff")));                           // not UTF-8
  const Bytes rest = input("tags", tensor(9, {2}, ids)) + input("dense", tensor(1, {2, 3}, content<float>({1, 2, 3, 4, 5, 6})));
  CHECK(accepted(rest + input("user", tensor(9, {2}, ids))));
  CHECK(!accepted(rest));
  CHECK(!accepted(rest + input("user", tensor(3, {2}, ids))));
  CHECK(!accepted(rest + input("user", tensor(9, {2, 1}, ids))));
  CHECK(!accepted(rest + input("user", tensor(9, {2, 1, 1}, ids))));
  CHECK(!accepted(rest + input("user", tensor(9, {3}, ids))));
  CHECK(!accepted(rest + input("user", tensor(9, {1}, content<int64_t>({1})))));
  CHECK(!accepted(rest + input("user", tensor(9, {0}, ""))));
  CHECK(!accepted(rest + input("user", tensor(9, {UINT64_MAX}, ids))));
  CHECK(!accepted(rest + input("user", tensor(9, {(uint64_t{1} << 61) + 2}, ids))));
}

void damage() {
  const Bytes whole = request();
  for (size_t end = 0; end < whole.size(); ++end) CHECK(!accepted(whole.substr(0, end)) || end > whole.size() - 9);
  Random random{1};
  int64_t taken = 0;
  for (int k = 0; k < 20000; ++k) {
    Bytes data = whole;
    for (int64_t changes = 1 + random.below(4); changes-- && !data.empty();) {
      const size_t at = static_cast<size_t>(random.below(static_cast<int64_t>(data.size())));
      const size_t length = static_cast<size_t>(1 + random.below(20));
      const int64_t how = random.below(4);
      if (how == 0) data[at] = static_cast<char>(data[at] ^ (1 << random.below(8)));
      if (how == 1) data.erase(at, length);
      if (how == 2) data.insert(at, data.substr(at, length));
      if (how == 3) data[at] = static_cast<char>(random.below(256));
    }
    taken += accepted(data);
  }
  CHECK(taken > 500);
}

}  // namespace

int main() {
  the_usual_form();
  other_forms();
  damage();
}
