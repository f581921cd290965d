// The values of a record: a column of cells, and the protobuf fields whose values are added to a cell.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "strings.hpp"
#include "wire.hpp"

namespace megalith {

// What a cell holds; `none` also stands for a feature without values.
enum class CellKind : uint8_t { none, ids, floats };

inline int64_t fid_v1_to_v2(uint64_t fid) {
  return static_cast<int64_t>((fid >> 54) << 48 | (fid & ((uint64_t{1} << 48) - 1)));
}

// The cells of one wanted name. A cell has values in `ids` or in `floats`, by its kind.
class RecordColumn {
 public:
  std::vector<int64_t> ids;
  std::vector<float> floats;
  std::vector<CellKind> kinds;
  std::vector<int64_t> lengths;

  void begin_record() {
    record_ids_ = ids.size();
    record_floats_ = floats.size();
    record_cells_ = kinds.size();
  }

  // Removes the cells of the current record.
  void reset_record() {
    ids.resize(record_ids_);
    floats.resize(record_floats_);
    kinds.resize(record_cells_);
    lengths.resize(record_cells_);
  }

  void end_record(int64_t rows) {
    kinds.resize(record_cells_ + static_cast<size_t>(rows), CellKind::none);
    lengths.resize(kinds.size(), 0);
  }

  void begin_cell() {
    cell_ids_ = ids.size();
    cell_floats_ = floats.size();
    kind = CellKind::none;
    is_bytes = false;
  }

  void clear_cell() {
    ids.resize(cell_ids_);
    floats.resize(cell_floats_);
  }

  void end_cell() {
    kinds.push_back(kind);
    lengths.push_back(cell_length());
  }

  int64_t cell_length() const {
    return static_cast<int64_t>(ids.size() - cell_ids_ + floats.size() - cell_floats_);
  }

  float cell_float(int64_t i) const { return floats[cell_floats_ + static_cast<size_t>(i)]; }

  // Repeats the last cell until there are `copies`.
  void repeat_cell(int64_t copies) {
    const size_t new_ids = ids.size() - cell_ids_, new_floats = floats.size() - cell_floats_;
    for (int64_t k = 1; k < copies; ++k) {
      kinds.push_back(kinds.back());
      lengths.push_back(lengths.back());
      ids.resize(ids.size() + new_ids);
      floats.resize(floats.size() + new_floats);
      std::copy_n(ids.end() - 2 * static_cast<ptrdiff_t>(new_ids), new_ids, ids.end() - static_cast<ptrdiff_t>(new_ids));
      std::copy_n(floats.end() - 2 * static_cast<ptrdiff_t>(new_floats), new_floats,
                  floats.end() - static_cast<ptrdiff_t>(new_floats));
    }
  }

  // ---- values of the open cell

  void add_fids(const wire::Field& field, bool is_v1) {
    const size_t n = field.count(8), old = ids.size();
    ids.resize(old + n);
    if (n) std::memcpy(ids.data() + old, field.span.data, n * 8);
    for (size_t i = old; is_v1 && i < ids.size(); ++i) ids[i] = fid_v1_to_v2(static_cast<uint64_t>(ids[i]));
  }

  void add_floats(const wire::Field& field) {
    const size_t n = field.count(4), old = floats.size();
    floats.resize(old + n);
    if (n) std::memcpy(floats.data() + old, field.span.data, n * 4);
  }

  void add_doubles(const wire::Field& field) {
    const size_t n = field.count(8);
    for (size_t i = 0; i < n; ++i) {
      double value;
      std::memcpy(&value, field.span.data + 8 * i, 8);
      add_double(value);
    }
  }

  // A double that float32 cannot hold becomes infinite.
  void add_double(double value) { floats.push_back(static_cast<float>(value)); }

  void add_int64s(const wire::Field& field) {
    if (field.type == wire::varint) return ids.push_back(field.int64());
    for (wire::Fields run(field.message()); !run.done();) ids.push_back(static_cast<int64_t>(run.read_varint(10)));
  }

  void add_bytes(const wire::Field& field) {
    const wire::Span& value = field.message();
    if (cell_length() == 0) first_bytes = value;
    ids.push_back(static_cast<int64_t>(xxhash64(value.data, value.size, 0)));
  }

  CellKind kind = CellKind::none;   // of the open cell
  bool is_bytes = false;            // of the open cell: its ids are hashes
  wire::Span first_bytes{};         // of the open cell, if it holds bytes

 private:
  size_t record_ids_ = 0, record_floats_ = 0, record_cells_ = 0, cell_ids_ = 0, cell_floats_ = 0;
};

// ---- fields of protobuf messages

// type: 0 fids, 1 floats, 2 int64, 3 bytes, 4 doubles, 5 v1 fids.
inline void add_values(const wire::Field& field, RecordColumn& to, uint32_t type) {
  if (type == 0 || type == 5) return to.add_fids(field, type == 5);
  if (type == 1) return to.add_floats(field);
  if (type == 2) return to.add_int64s(field);
  if (type == 3) return to.add_bytes(field);
  to.add_doubles(field);
}

inline void add_instance_values(const wire::Field& field, RecordColumn& to) {
  const uint32_t type = (field.number - 2) % 4;
  to.kind = type == 1 ? CellKind::floats : CellKind::ids;
  if (field.number <= 5) return add_values(field, to, type);
  wire::Fields list(field.message());
  wire::Field value;
  while (list.next(value))
    if (value.number == 1) add_values(value, to, type);
}

inline void add_single(const wire::Field& field, RecordColumn& to, uint8_t type) {
  if (type == 1) return to.floats.push_back(field.fixed<float>());
  if (type == 2) return to.ids.push_back(field.int64());
  if (type == 3) return to.add_bytes(field);
  to.add_double(field.fixed<double>());
}

inline void add_lists(const wire::Span& message, RecordColumn& to, uint8_t type, int depth) {
  wire::Fields fields(message);
  wire::Field field;
  while (fields.next(field)) {
    if (field.number != 1) continue;
    if (depth == 1)
      add_values(field, to, type);
    else
      add_lists(field.message(), to, type, depth - 1);
  }
}

// Adds a Feature to the open cell. member: the field of the oneof that is set so far, 0 for none.
inline void add_feature(const wire::Span& message, RecordColumn& to, int& member) {
  // Of each member: the type of its values, and how many messages deep they are.
  static constexpr uint8_t types[] = {0, 5, 0, 1, 4, 2, 3, 0, 1, 4, 2, 3, 2, 1, 4, 3, 5};
  static constexpr uint8_t depths[] = {0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0, 0, 0, 2};
  wire::Fields fields(message);
  wire::Field field;
  while (fields.next(field)) {
    if (field.number < 1 || field.number > 16) continue;
    const uint8_t type = types[field.number], depth = depths[field.number];
    if (static_cast<int>(field.number) != member || depth == 0) to.clear_cell();
    member = static_cast<int>(field.number);
    to.kind = type == 1 || type == 4 ? CellKind::floats : CellKind::ids;
    to.is_bytes = type == 3;
    if (depth == 0)
      add_single(field, to, type);
    else
      add_lists(field.message(), to, type, depth);
  }
}

}  // namespace megalith
