// Monolith's EntryDumps out of TFRecords: the twin of checkpoint/importers/entries.py, which says what the
// fields mean. What is wrong with a record is the twin's to say; here it is only found. Records are
// hostile: no stated length is believed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "crc32c.hpp"

namespace megalith {

// Where the floats of a record go: row[start] .. row[start + size].
struct EntryPiece {
  uint64_t field;
  int64_t start, size;
};

// A segment's optimizer state: the field of SingleOptimizerDump that holds it, and the floats in there.
// May be empty: whether an empty SingleOptimizerDump will do.
struct EntrySegment {
  uint64_t kind;
  bool may_be_empty;
  std::vector<EntryPiece> pieces;
};

// needs_state: a record without optimizer state is wrong. reads_state: false leaves all state alone.
struct EntryLayout {
  int64_t dim, width;
  bool reads_state, needs_state;
  std::vector<EntrySegment> segments;
};

namespace wire {

enum Type { varint = 0, fixed64 = 1, bytes = 2, fixed32 = 5 };

struct Field {
  uint64_t number, type, value;  // bytes: value is the length
  const uint8_t* data;           // of bytes, fixed32 and fixed64
};

// The fields of a message one after the other; `good` is false from the first byte that is not protobuf.
class Fields {
 public:
  Fields(const uint8_t* at, uint64_t size) : at_(at), end_(at + size) {}

  bool next(Field& field) {
    if (!good_ || at_ == end_) return false;
    uint64_t key;
    if (!read_varint(key)) return false;
    field.number = key >> 3;
    field.type = key & 7;
    if (field.number < 1 || field.number > (uint64_t{1} << 29) - 1) return fail();
    field.value = 0;
    field.data = at_;
    uint64_t size = 0;
    if (field.type == varint) return read_varint(field.value);
    if (field.type == bytes) {
      if (!read_varint(size)) return false;
      field.value = size;
      field.data = at_;
    } else if (field.type == fixed64 || field.type == fixed32) {
      size = field.type == fixed64 ? 8 : 4;
    } else {
      return fail();
    }
    if (size > static_cast<uint64_t>(end_ - at_)) return fail();
    at_ += size;
    return true;
  }

  bool good() const { return good_; }

 private:
  bool fail() { return good_ = false; }

  bool read_varint(uint64_t& value) {
    value = 0;
    for (int k = 0; k < 10; ++k) {
      if (at_ == end_) return fail();
      const uint8_t byte = *at_++;
      if (k == 9 && byte > 1) return fail();
      value |= static_cast<uint64_t>(byte & 0x7f) << 7 * k;
      if (byte < 0x80) return true;
    }
    return fail();
  }

  const uint8_t *at_, *end_;
  bool good_ = true;
};

}  // namespace wire

// One EntryDump into one row.
class EntryParser {
 public:
  explicit EntryParser(const EntryLayout& layout) : layout_(layout) {}

  // `time` is 0 where the record has none.
  bool parse(const uint8_t* data, uint64_t size, int64_t& id, float* row, int64_t& time) {
    bool has_id = false;
    int64_t weights = 0;
    size_t segments = 0;
    time = 0;
    wire::Fields fields(data, size);
    wire::Field field;
    while (fields.next(field)) {
      switch (field.number) {
        case 1:
          if (field.type != wire::fixed64) return false;
          std::memcpy(&id, field.data, 8);
          has_id = true;
          break;
        case 2:
          if (!floats(field, row, layout_.dim, weights)) return false;
          break;
        case 3:
          if (field.type != wire::bytes) return false;
          if (layout_.reads_state && !optimizers(field, row, segments)) return false;
          break;
        case 4:
          if (field.type != wire::varint) return false;
          time = static_cast<int64_t>(field.value);
          break;
        default:
          break;
      }
    }
    const bool stateless = !layout_.needs_state && segments == 0;
    return fields.good() && has_id && weights == layout_.dim &&
           (!layout_.reads_state || stateless || segments == layout_.segments.size());
  }

 private:
  // Appends what one field holds of `size` floats, packed or not.
  static bool floats(const wire::Field& field, float* to, int64_t size, int64_t& done) {
    uint64_t n;
    if (field.type == wire::fixed32) {
      n = 1;
    } else {
      if (field.type != wire::bytes || field.value % 4) return false;
      n = field.value / 4;
    }
    if (n > static_cast<uint64_t>(size - done)) return false;
    if (n) std::memcpy(to + done, field.data, n * 4);
    done += static_cast<int64_t>(n);
    return true;
  }

  bool optimizers(const wire::Field& opt, float* row, size_t& segments) {
    wire::Fields dumps(opt.data, opt.value);
    wire::Field dump;
    while (dumps.next(dump)) {
      if (dump.number != 1) continue;
      if (dump.type != wire::bytes || segments == layout_.segments.size()) return false;
      if (!segment(dump, layout_.segments[segments++], row)) return false;
    }
    return dumps.good();
  }

  bool segment(const wire::Field& dump, const EntrySegment& expected, float* row) {
    bool found = false;
    wire::Fields kinds(dump.data, dump.value);
    wire::Field kind;
    while (kinds.next(kind)) {
      if (found || kind.number != expected.kind || kind.type != wire::bytes) return false;
      if (!state(kind, expected.pieces, row)) return false;
      found = true;
    }
    return kinds.good() && (found || expected.may_be_empty);
  }

  bool state(const wire::Field& kind, const std::vector<EntryPiece>& pieces, float* row) {
    done_.assign(pieces.size(), 0);
    wire::Fields fields(kind.data, kind.value);
    wire::Field field;
    while (fields.next(field))
      for (size_t k = 0; k < pieces.size(); ++k)
        if (field.number == pieces[k].field && !floats(field, row + pieces[k].start, pieces[k].size, done_[k]))
          return false;
    for (size_t k = 0; k < pieces.size(); ++k)
      if (done_[k] != pieces[k].size) return false;
    return fields.good();
  }

  const EntryLayout& layout_;
  std::vector<int64_t> done_;
};

enum class EntriesEnd { more, full, bad };  // wants more bytes, as many rows as asked for, a wrong record

struct EntriesRead {
  int64_t rows, used;
  EntriesEnd end;
};

// TFRecords of EntryDumps, at most `limit`, into rows of `layout.width` floats; without a layout records are
// only checked and counted. `used` ends before the first record that is incomplete or wrong.
inline EntriesRead read_entries(const uint8_t* data, int64_t size, int64_t limit, uint64_t max_bytes,
                                const EntryLayout* layout, int64_t* ids, float* rows, int64_t* times) {
  std::vector<EntryParser> parser;
  if (layout) parser.emplace_back(*layout);
  EntriesRead read{0, 0, EntriesEnd::more};
  for (; read.rows < limit; ++read.rows) {
    const uint8_t* at = data + read.used;
    const uint64_t left = static_cast<uint64_t>(size - read.used);
    if (left < 12) return read;
    uint64_t length;
    uint32_t crc;
    std::memcpy(&length, at, 8);
    std::memcpy(&crc, at + 8, 4);
    read.end = EntriesEnd::bad;
    if (crc != masked_crc32c(at, 8) || length > max_bytes) return read;
    if (left - 12 < length + 4) {
      read.end = EntriesEnd::more;
      return read;
    }
    std::memcpy(&crc, at + 12 + length, 4);
    if (crc != masked_crc32c(at + 12, length)) return read;
    const int64_t r = read.rows;
    if (layout && !parser[0].parse(at + 12, length, ids[r], rows + r * layout->width, times[r])) return read;
    read.used += static_cast<int64_t>(16 + length);
    read.end = EntriesEnd::more;
  }
  read.end = EntriesEnd::full;
  return read;
}

}  // namespace megalith
