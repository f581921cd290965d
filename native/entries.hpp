// Monolith's EntryDumps out of TFRecords; compat/monolith/proto has the messages. Files are untrusted: checksums
// are checked, lengths are bounded, and each entry must have exactly the floats of the table's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32c.hpp"
#include "wire.hpp"

namespace megalith {

// A field whose floats go to row[start] .. row[start + size - 1].
struct EntryPiece {
  uint64_t field;
  int64_t start, size;
};

// A segment's optimizer state: the field of SingleOptimizerDump that holds it, and the floats inside.
// may_be_empty: an empty SingleOptimizerDump is accepted.
struct EntrySegment {
  uint64_t kind;
  bool may_be_empty;
  std::vector<EntryPiece> pieces;
};

// reads_state: false ignores all optimizer state. needs_state: a record without optimizer state is an error.
struct EntryLayout {
  int64_t dim, width;
  bool reads_state, needs_state;
  std::vector<EntrySegment> segments;
};

// The optimizer whose state a field of SingleOptimizerDump holds.
inline std::string optimizer_name(uint64_t kind) {
  static const char* const names[] = {"",        "adagrad", "sgd",      "ftrl", "dynamic_wd_adagrad", "",
                                      "adadelta", "adam",    "amsgrad",  "momentum", "", "rmsprop",
                                      "rmspropv2", "group_ftrl", "batch_softmax", "group_adagrad"};
  const bool known = kind < sizeof names / sizeof names[0] && *names[kind];
  return known ? names[kind] : "unknown kind " + std::to_string(kind);
}

// An entry that does not have the layout of the table.
struct EntryError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One EntryDump into one row.
class EntryParser {
 public:
  explicit EntryParser(const EntryLayout& layout) : layout_(layout) {}

  // Sets `time` to 0 if the record has none. Throws wire::Error or EntryError if the record is wrong.
  void parse(const uint8_t* data, uint64_t size, int64_t& id, float* row, int64_t& time) {
    bool has_id = false;
    int64_t weights = 0;
    size_t segments = 0;
    time = 0;
    wire::Fields fields({data, size, data});
    wire::Field field;
    while (fields.next(field)) {
      if (field.number == 1) {
        id = static_cast<int64_t>(field.fixed<uint64_t>());
        has_id = true;
      } else if (field.number == 2) {
        floats(field, row, layout_.dim, weights, "weights");
      } else if (field.number == 3) {
        const wire::Span& opt = field.message();
        if (layout_.reads_state) optimizers(opt, row, segments);
      } else if (field.number == 4) {
        time = field.int64();
      }
    }
    const size_t expected = layout_.segments.size();
    if (!has_id) throw EntryError("it has no id");
    if (weights != layout_.dim)
      throw EntryError("it has " + std::to_string(weights) + " weights, but the rows of the table have " +
                       std::to_string(layout_.dim));
    if (layout_.reads_state && segments != expected && (layout_.needs_state || segments))
      throw EntryError("it has optimizer state for " + std::to_string(segments) + " segments, but the table has " +
                       std::to_string(expected));
  }

 private:
  // Appends the floats of one field, packed or not, to the `done` of `size` floats that are there.
  static void floats(const wire::Field& field, float* to, int64_t size, int64_t& done, const char* what) {
    const size_t n = field.count(4);
    if (n > static_cast<uint64_t>(size - done)) too_many(field.number, size, what);
    if (n == 1)
      std::memcpy(to + done, field.span.data, 4);
    else if (n)
      std::memcpy(to + done, field.span.data, n * 4);
    done += static_cast<int64_t>(n);
  }

  [[noreturn, gnu::cold, gnu::noinline]] static void too_many(uint32_t field, int64_t size, const char* what) {
    throw EntryError("field " + std::to_string(field) + " has more than " + std::to_string(size) + " " + what);
  }

  void optimizers(const wire::Span& opt, float* row, size_t& segments) {
    wire::Fields dumps(opt);
    wire::Field dump;
    while (dumps.next(dump)) {
      if (dump.number != 1) continue;
      if (segments == layout_.segments.size())
        throw EntryError("it has optimizer state for more than the " + std::to_string(segments) +
                         " segments of the table");
      segment(dump.message(), segments, row);
      ++segments;
    }
  }

  void segment(const wire::Span& dump, size_t number, float* row) {
    const EntrySegment& expected = layout_.segments[number];
    bool found = false;
    wire::Fields kinds(dump);
    wire::Field kind;
    while (kinds.next(kind)) {
      if (found || kind.number != expected.kind)
        differs(number, "holds the state of " + optimizer_name(kind.number) + (found ? " as well" : ""));
      state(kind.message(), expected, row);
      found = true;
    }
    if (!found && !expected.may_be_empty) differs(number, "holds no state");
  }

  [[noreturn]] void differs(size_t number, const std::string& found) const {
    throw EntryError("segment " + std::to_string(number) + " " + found + ", but the table keeps that of " +
                     optimizer_name(layout_.segments[number].kind) +
                     "; pass drop_optimizer_state=True to start with fresh state");
  }

  void state(const wire::Span& kind, const EntrySegment& segment, float* row) {
    done_.assign(segment.pieces.size(), 0);
    wire::Fields fields(kind);
    wire::Field field;
    while (fields.next(field))
      for (size_t k = 0; k < segment.pieces.size(); ++k)
        if (field.number == segment.pieces[k].field)
          floats(field, row + segment.pieces[k].start, segment.pieces[k].size, done_[k], "numbers");
    for (size_t k = 0; k < segment.pieces.size(); ++k)
      if (done_[k] != segment.pieces[k].size)
        throw EntryError("field " + std::to_string(segment.pieces[k].field) + " of " + optimizer_name(segment.kind) +
                         " has " + std::to_string(done_[k]) + " numbers, not " +
                         std::to_string(segment.pieces[k].size));
  }

  const EntryLayout& layout_;
  std::vector<int64_t> done_;
};

struct EntriesRead {
  int64_t rows, used;
};

// Reads complete TFRecords of EntryDumps, at most `limit`, into rows of `layout.width` floats; without a layout,
// records are only checked and counted. `at`: the position of `data` in its stream, for errors.
// Throws std::invalid_argument, with the reason and the byte, at the first wrong record.
inline EntriesRead read_entries(const uint8_t* data, int64_t size, int64_t at, int64_t limit, uint64_t max_bytes,
                                const EntryLayout* layout, int64_t* ids, float* rows, int64_t* times) {
  std::vector<EntryParser> parser;
  if (layout) parser.emplace_back(*layout);
  EntriesRead read{0, 0};
  for (; read.rows < limit; ++read.rows) {
    const uint8_t* record = data + read.used;
    const int64_t start = at + read.used;
    const uint64_t left = static_cast<uint64_t>(size - read.used);
    if (left < 12) break;
    uint64_t length;
    uint32_t crc;
    std::memcpy(&length, record, 8);
    std::memcpy(&crc, record + 8, 4);
    if (crc != masked_crc32c(record, 8))
      throw std::invalid_argument("the checksum at byte " + std::to_string(start + 8) +
                                  " does not match the length before it");
    if (length > max_bytes)
      throw std::invalid_argument("the length at byte " + std::to_string(start) + " is " + std::to_string(length) +
                                  ", over the limit of " + std::to_string(max_bytes));
    if (left - 12 < length + 4) break;
    const int64_t end = start + 12 + static_cast<int64_t>(length);
    std::memcpy(&crc, record + 12 + length, 4);
    if (crc != masked_crc32c(record + 12, length))
      throw std::invalid_argument("the checksum at byte " + std::to_string(end) +
                                  " does not match the record before it");
    const int64_t r = read.rows;
    const auto wrong = [&](const std::string& problem) {
      return std::invalid_argument("the entry at byte " + std::to_string(start + 12) + ": " + problem);
    };
    try {
      if (layout) parser[0].parse(record + 12, length, ids[r], rows + r * layout->width, times[r]);
    } catch (const EntryError& error) {
      throw wrong(error.what());
    } catch (const wire::Error& error) {
      throw wrong("protobuf: " + std::string(error.what()) + " at byte " + std::to_string(start + 12 + error.at));
    }
    read.used += static_cast<int64_t>(16 + length);
  }
  return read;
}

}  // namespace megalith
