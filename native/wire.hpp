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
  [[noreturn, gnu::cold, gnu::noinline]] void fail(const std::string& problem) const {
    throw Error(problem, data - base);
  }
};

// A field as it is encoded. `value` is the number of a varint; `span` holds the bytes of the other types.
struct Field {
  uint32_t number, type;
  uint64_t value;
  Span span;

  void expect(uint32_t wanted) const {
    if (type != wanted) fail(std::string("is ") + name_of(type) + ", not " + name_of(wanted));
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
      fail("is " + std::to_string(number_read) + ", which does not fit in 32 bits");
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
    if (type != bytes || span.size % width) fail_count(width);
    return span.size / width;
  }
  // A string, which must be UTF-8.
  std::string_view text() const;

 private:
  // Errors are built out of line: the hot path stays small.
  [[noreturn, gnu::cold, gnu::noinline]] void fail(const std::string& problem) const {
    span.fail("field " + std::to_string(number) + " " + problem);
  }
  [[noreturn, gnu::cold, gnu::noinline]] void fail_count(size_t width) const {
    if (type != bytes) fail(std::string("is ") + name_of(type) + ", not " + (width == 8 ? "8 bytes" : "4 bytes"));
    fail("has " + std::to_string(span.size) + " bytes, not a multiple of " + std::to_string(width));
  }
};

class Fields {
 public:
  explicit Fields(const Span& message) : at_(message.data), end_(message.data + message.size), base_(message.base) {}

  bool next(Field& field) {
    const uint8_t* at = at_;  // errors are built out of line and get values: all of this stays in registers
    if (at == end_) return false;
    const Varint key = read(at, 5);
    const uint32_t number = static_cast<uint32_t>(key.value >> 3), type = static_cast<uint32_t>(key.value & 7);
    if (key.value >> 32 || number == 0) fail_key(key.value, at - base_);
    field.number = number;
    field.type = type;
    field.value = 0;
    Varint size{type == fixed64 ? 8u : 4u, key.end};
    if (type == varint) {
      const Varint value = read(key.end, 10);
      field.value = value.value;
      size = {static_cast<uint64_t>(value.end - key.end), key.end};
    } else if (type == bytes) {
      size = read(key.end, 5);
    } else if (type != fixed64 && type != fixed32) {
      fail_key(key.value, at - base_);
    }
    if (size.value > static_cast<uint64_t>(end_ - size.end)) fail_size(number, size.value, end_ - size.end, size.end - base_);
    field.span = {size.end, static_cast<size_t>(size.value), base_};
    at_ = size.end + size.value;
    return true;
  }

  // For packed runs: whether the end is reached, and the next varint.
  bool done() const { return at_ == end_; }
  uint64_t read_varint(int most_bytes) {
    const Varint read_one = read(at_, most_bytes);
    at_ = read_one.end;
    return read_one.value;
  }

 private:
  struct Varint {
    uint64_t value;
    const uint8_t* end;
  };

  Varint read(const uint8_t* at, int most_bytes) const {
    if (at != end_ && *at < 0x80) return {*at, at + 1};
    return read_long(at, end_, base_, most_bytes);
  }

  static Varint read_long(const uint8_t* start, const uint8_t* end, const uint8_t* base, int most_bytes) {
    uint64_t value = 0;
    const uint8_t* at = start;
    for (int k = 0; k < most_bytes; ++k) {
      if (at == end) throw Error("a varint is truncated", start - base);
      const uint8_t byte = *at++;
      if (k == 9 && byte > 1) throw Error("a varint has more than 64 bits", start - base);
      value |= static_cast<uint64_t>(byte & 0x7f) << 7 * k;
      if (byte < 0x80) return {value, at};
    }
    throw Error("a varint has more than " + std::to_string(most_bytes) + " bytes", start - base);
  }

  [[noreturn, gnu::cold, gnu::noinline]] static void fail_key(uint64_t key, int64_t at) {
    const std::string number = std::to_string(key >> 3);
    if (key >> 32 || key >> 3 == 0) throw Error("field number " + number + " is out of range", at);
    const bool group = (key & 7) == 3 || (key & 7) == 4;
    const std::string type = group ? "a group, which is not supported" : "of wire type " + std::to_string(key & 7);
    throw Error("field " + number + " is " + type, at);
  }

  [[noreturn, gnu::cold, gnu::noinline]] static void fail_size(uint32_t number, uint64_t size, int64_t left, int64_t at) {
    throw Error("field " + std::to_string(number) + " has " + std::to_string(size) + " bytes, but " +
                    std::to_string(left) + " are left",
                at);
  }

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
  if (!is_utf8(span.text())) fail("is not UTF-8");
  return span.text();
}

}  // namespace wire
}  // namespace megalith
