// Protobuf's wire format: the fields of a message, one after the other. Messages are untrusted: no stated length
// is followed beyond the end of the message.
//
// Stricter than protobuf in three places: groups are refused, a varint must fit in 64 bits (32 bits where the
// schema has an int32), and a known field of another wire type is an error, not an unknown field.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>

namespace megalith {
namespace wire {

enum Type : uint32_t { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

// A message that cannot be read. at: the position of the wrong byte, counted from the outermost message.
struct Error : std::runtime_error {
  Error(const std::string& problem, int64_t at) : std::runtime_error(problem), at(at) {}
  int64_t at;
};

inline const char* name_of(uint32_t type) {
  return type == varint ? "a varint" : type == fixed64 ? "8 bytes" : type == bytes ? "length-delimited" : "4 bytes";
}

// Part of an outermost message. base: the first byte of the outermost message, for positions in errors.
struct Span {
  const uint8_t* data;
  size_t size;
  const uint8_t* base;

  std::string_view text() const { return {reinterpret_cast<const char*>(data), size}; }
  [[noreturn]] void fail(const std::string& problem) const { throw Error(problem, data - base); }
};

// A field as it is encoded. `value` is the number of a varint; `span` holds the bytes of the other types.
struct Field {
  uint32_t number, type;
  uint64_t value;
  Span span;

  void expect(uint32_t wanted) const {
    if (type != wanted)
      span.fail("field " + std::to_string(number) + " is " + name_of(type) + ", not " + name_of(wanted));
  }
  const Span& message() const {
    expect(bytes);
    return span;
  }
  int64_t int64() const {
    expect(varint);
    return static_cast<int64_t>(value);
  }
  int32_t int32() const {
    const int64_t number_read = int64();
    if (number_read != static_cast<int32_t>(number_read))
      span.fail("field " + std::to_string(number) + ": " + std::to_string(number_read) + " does not fit in 32 bits");
    return static_cast<int32_t>(number_read);
  }
  // One value of a fixed width: float, double or uint64_t.
  template <class T>
  T fixed() const {
    expect(sizeof(T) == 8 ? fixed64 : fixed32);
    T read;
    std::memcpy(&read, span.data, sizeof read);
    return read;
  }
  // Number of values of a repeated field of width `width`, packed or not; they are in `span`.
  size_t count(size_t width) const {
    if (type == (width == 8 ? fixed64 : fixed32)) return 1;
    if (type != bytes) expect(width == 8 ? fixed64 : fixed32);
    if (span.size % width)
      span.fail("field " + std::to_string(number) + ": " + std::to_string(span.size) +
                " bytes are not a multiple of " + std::to_string(width));
    return span.size / width;
  }
  // A string, which must be UTF-8.
  std::string_view text() const;
};

class Fields {
 public:
  explicit Fields(const Span& message) : at_(message.data), end_(message.data + message.size), base_(message.base) {}

  bool next(Field& field) {
    if (at_ == end_) return false;
    const uint8_t* start = at_;
    const uint64_t key = read_varint(5);
    field.number = static_cast<uint32_t>(key >> 3);
    field.type = static_cast<uint32_t>(key & 7);
    if (key >> 32 || field.number == 0) fail("field number " + std::to_string(key >> 3) + " is out of range", start);
    field.value = 0;
    field.span = {at_, 0, base_};
    if (field.type == varint) {
      field.value = read_varint(10);
      return true;
    }
    uint64_t size = field.type == fixed64 ? 8 : 4;
    if (field.type == bytes) {
      size = read_varint(5);
      field.span.data = at_;
    } else if (field.type != fixed64 && field.type != fixed32) {
      const bool group = field.type == 3 || field.type == 4;
      fail("field " + std::to_string(field.number) +
               (group ? " is a group, which is not supported" : " is of wire type " + std::to_string(field.type)),
           start);
    }
    if (size > static_cast<uint64_t>(end_ - at_))
      fail("field " + std::to_string(field.number) + " has " + std::to_string(size) + " bytes, but " +
               std::to_string(end_ - at_) + " are left",
           at_);
    field.span.size = size;
    at_ += size;
    return true;
  }

  // The next varint of a packed run; `done` says whether one is left.
  bool done() const { return at_ == end_; }
  uint64_t read_varint(int most_bytes) {
    if (at_ != end_ && *at_ < 0x80) return *at_++;
    const uint8_t* start = at_;
    uint64_t value = 0;
    for (int k = 0; k < most_bytes; ++k) {
      if (at_ == end_) fail("a varint is cut off", start);
      const uint8_t byte = *at_++;
      if (k == 9 && byte > 1) fail("a varint has more than 64 bits", start);
      value |= static_cast<uint64_t>(byte & 0x7f) << 7 * k;
      if (byte < 0x80) return value;
    }
    fail("a varint has more than " + std::to_string(most_bytes) + " bytes", start);
  }

 private:
  [[noreturn]] void fail(const std::string& problem, const uint8_t* at) const { throw Error(problem, at - base_); }

  const uint8_t *at_, *end_, *base_;
};

// Whether text is UTF-8: no overlong forms, surrogates or code points above U+10FFFF.
inline bool is_utf8(std::string_view text) {
  const auto* p = reinterpret_cast<const uint8_t*>(text.data());
  const auto* end = p + text.size();
  while (p != end) {
    const uint8_t lead = *p++;
    if (lead < 0x80) continue;
    const int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4 || end - p < more) return false;
    const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (p[0] < low || p[0] > high) return false;
    for (int k = 1; k < more; ++k)
      if ((p[k] & 0xc0) != 0x80) return false;
    p += more;
  }
  return true;
}

inline std::string_view Field::text() const {
  expect(bytes);
  if (!is_utf8(span.text())) span.fail("field " + std::to_string(number) + " is not UTF-8");
  return span.text();
}

}  // namespace wire
}  // namespace megalith
