// Monolith's Example, ExampleBatch and Instance records into columns; compat/monolith/proto has the messages.
//
//   record -> rows; a row has a cell in each wanted column, a label, a weight and maybe a time.
//   Example, Instance   one row
//   ExampleBatch        batch_size rows, stored by column; a SHARED column has one value for all rows
//
// Repeated fields, oneofs and submessages that occur twice are merged as protobuf merges them. Of two features
// with the same name in a record, the last counts. v1 fids become v2 fids, lists of lists are flattened, bytes
// become xxHash64 ids. Records are untrusted: each is read completely or not at all, with its reason and byte.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "record_values.hpp"
#include "wire.hpp"

namespace megalith {

enum class RecordKind { example, example_batch, instance };

constexpr int64_t kMaxBatchRows = int64_t{1} << 20;
// Cells and shared values that one ExampleBatch may expand to.
constexpr int64_t kMaxExpandedValues = int64_t{1} << 26;

// Why a record could not be read. at: the byte, counted from the first of the record.
struct RecordError {
  int64_t record, at;
  std::string problem;
};

// Decodes records into columns, row after row.
class RecordDecoder {
 public:
  // names: the wanted columns. label_index: which label of a row counts.
  RecordDecoder(RecordKind kind, const std::vector<std::string>& names, int64_t label_index)
      : columns(names.size()), kind_(kind), label_index_(label_index) {
    slots_.fill(-1);
    for (size_t i = 0; i < names.size(); ++i) {
      by_name_.emplace_back(names[i], static_cast<int>(i));
      const int slot = kind == RecordKind::instance ? slot_number(names[i]) : -1;
      if (slot >= 0) slots_[static_cast<size_t>(slot)] = static_cast<int>(i);
      if (names[i] == "value") value_ = static_cast<int>(i);
    }
    if (kind != RecordKind::instance)
      for (int i = 0; i < 3; ++i) by_name_.emplace_back(special_names[i], label_column - i);
    std::stable_sort(by_name_.begin(), by_name_.end(), [](const Named& a, const Named& b) {
      return a.first != b.first ? a.first < b.first : a.second < b.second;
    });
    own_cells_.assign(columns.size(), 0);
  }

  std::vector<RecordColumn> columns;
  std::vector<float> labels, weights;  // [rows]; a missing label is NaN, a missing weight is 1
  std::vector<int64_t> times;          // [rows]; 0 where unknown
  std::vector<uint8_t> has_time;       // [rows]
  std::vector<int64_t> rows;           // [records]; 0 for a record with an error
  std::vector<RecordError> errors;

  void decode(const uint8_t* data, size_t size) {
    const wire::Span record{data, size, data};
    const size_t first = labels.size();
    for (RecordColumn& column : columns) column.begin_record();
    try {
      const int64_t count = kind_ == RecordKind::example         ? example(record)
                            : kind_ == RecordKind::example_batch ? example_batch(record)
                                                                 : instance(record);
      for (RecordColumn& column : columns) column.end_record(count);
      rows.push_back(count);
    } catch (const wire::Error& error) {
      for (RecordColumn& column : columns) column.reset_record();
      resize_rows(first);
      errors.push_back({static_cast<int64_t>(rows.size()), error.at, error.what()});
      rows.push_back(0);
    }
  }

 private:
  using Named = std::pair<std::string, int>;
  static constexpr int label_column = -1, weight_column = -2, line_id_column = -3, unwanted = -4;
  static constexpr const char* special_names[] = {"__LABEL__", "instance_weight", "__LINE_ID__"};

  // 17 for "fc_slot_17"; -1 for other names.
  static int slot_number(const std::string& name) {
    const std::string prefix = "fc_slot_";
    const size_t digits = name.size() - std::min(name.size(), prefix.size());
    if (name.rfind(prefix, 0) != 0 || digits < 1 || digits > 4) return -1;
    if (name[prefix.size()] == '0' && digits > 1) return -1;
    int slot = 0;
    for (size_t i = prefix.size(); i < name.size(); ++i) {
      if (name[i] < '0' || name[i] > '9') return -1;
      slot = 10 * slot + (name[i] - '0');
    }
    return slot < 1024 ? slot : -1;
  }

  void resize_rows(size_t n) {
    labels.resize(n, std::numeric_limits<float>::quiet_NaN());
    weights.resize(n, 1.0f);
    times.resize(n, 0);
    has_time.resize(n, 0);
    label_counts_.assign(n - std::min(n, row_), 0);
  }

  // Adds rows for the current record.
  void add_rows(int64_t n) {
    row_ = labels.size();
    resize_rows(row_ + static_cast<size_t>(n));
  }

  // The column of a name; specials are below zero and win over wanted columns of the same name.
  int find(std::string_view name) const {
    const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                     [](const Named& a, std::string_view b) { return a.first < b; });
    return at != by_name_.end() && at->first == name ? at->second : unwanted;
  }

  void add_label(size_t row, float value) {
    if (label_counts_[row - row_]++ == label_index_) labels[row] = value;
  }

  void add_labels(size_t row, const wire::Field& field) {
    const size_t n = field.count(4);
    for (size_t i = 0; i < n; ++i) {
      float value;
      std::memcpy(&value, field.span.data + 4 * i, 4);
      add_label(row, value);
    }
  }

  void line_id(size_t row, const wire::Span& message) {
    wire::Fields fields(message);
    wire::Field field;
    while (fields.next(field))
      if (field.number == 3) {
        times[row] = field.int64();
        has_time[row] = 1;
      }
  }

  // ---- the three messages

  int64_t example(const wire::Span& message) {
    add_rows(1);
    wire::Field field;
    for (wire::Fields fields(message); fields.next(field);)
      if (field.number == 1) named_feature(field.message());
    for (wire::Fields fields(message); fields.next(field);) {  // after the special columns, in any order
      if (field.number == 100)
        line_id(row_, field.message());
      else if (field.number == 101)
        add_labels(row_, field);
      else if (field.number == 102)
        weights[row_] = field.fixed<float>();
    }
    return 1;
  }

  void named_feature(const wire::Span& message) {
    std::string_view name;
    bool has_feature = false;
    wire::Field field;
    for (wire::Fields fields(message); fields.next(field);) {
      if (field.number == 1)
        name = field.text();
      else if (field.number == 2)
        has_feature = true;
    }
    const int place = find(name);
    RecordColumn& to = place >= 0 ? columns[static_cast<size_t>(place)] : scratch_;
    if (place < 0) to.begin_record();
    if (place < 0 || has_feature) to.reset_record();
    to.begin_cell();
    int member = 0;
    for (wire::Fields fields(message); fields.next(field);)
      if (field.number == 2) add_feature(field.message(), to, member);
    if (place >= 0 && has_feature) to.end_cell();
    if (place < 0 && has_feature) special(place, row_, message);
    if (place < 0) to.reset_record();
  }

  int64_t example_batch(const wire::Span& message) {
    int64_t count = 0;
    wire::Field field;
    for (wire::Fields fields(message); fields.next(field);)
      if (field.number == 3) count = field.int32();
    if (count < 0 || count > std::min(static_cast<int64_t>(message.size), kMaxBatchRows))
      message.fail("batch_size is " + std::to_string(count) + " in a message of " + std::to_string(message.size) +
                   " bytes");
    expanded_ = 0;
    expand(message, count, static_cast<int64_t>(columns.size()), "the batch");
    add_rows(count);
    for (wire::Fields fields(message); fields.next(field);)
      if (field.number == 1) named_list(field.message(), count);
    return count;
  }

  void named_list(const wire::Span& message, int64_t count) {
    std::string_view name;
    bool is_shared = false;
    int64_t values = 0;
    wire::Field field;
    for (wire::Fields fields(message); fields.next(field);) {
      if (field.number == 1)
        name = field.text();
      else if (field.number == 2)
        ++values;
      else if (field.number == 3)
        is_shared = field.int32() == 1;
    }
    const int place = find(name);
    if (place != unwanted && (is_shared ? values == 0 : values != count))
      message.fail("column '" + std::string(name) + "' has " + std::to_string(values) + " values in a batch of " +
                   std::to_string(count));
    RecordColumn& to = place >= 0 ? columns[static_cast<size_t>(place)] : scratch_;
    if (place < 0) to.begin_record();
    to.reset_record();
    size_t row = row_;
    for (wire::Fields fields(message); fields.next(field);) {
      if (field.number != 2) continue;
      const bool used = place != unwanted && !(is_shared && row > row_);
      RecordColumn& cell = used ? to : scratch_;
      if (!used) scratch_.begin_record();
      cell.begin_cell();
      int member = 0;
      add_feature(field.message(), cell, member);
      if (place >= 0 && used) {
        if (!is_shared || count > 0) cell.end_cell();
        else cell.clear_cell();
      }
      if (used && is_shared) share(cell, place, name, message, count);
      else if (used && place < 0) special(place, row, message);
      if (place < 0 || !used) scratch_.reset_record();
      ++row;
    }
  }

  void share(RecordColumn& cell, int place, std::string_view name, const wire::Span& message, int64_t count) {
    if (count == 0) return;
    expand(message, count, place < 0 ? cell.cell_length() : cell.lengths.back(), name);
    if (place < 0)
      for (int64_t k = 0; k < count; ++k) special(place, row_ + static_cast<size_t>(k), message);
    else
      cell.repeat_cell(count);
  }

  // Counts values that a record repeats for all its rows: a small record must not cost much memory or time.
  void expand(const wire::Span& message, int64_t count, int64_t length, std::string_view name) {
    expanded_ += count * std::max<int64_t>(length, 1);
    if (expanded_ > kMaxExpandedValues)
      message.fail("column '" + std::string(name) + "' repeats " + std::to_string(length) + " values for " +
                   std::to_string(count) + " rows, more than a record may expand to");
  }

  // The label, weight or line id in the open scratch cell.
  void special(int place, size_t row, const wire::Span& message) {
    if (place == unwanted) return;
    const char* name = special_names[label_column - place];
    if (place == line_id_column) {
      if (!scratch_.is_bytes) message.fail(std::string("column '") + name + "' does not hold bytes");
      if (scratch_.cell_length()) line_id(row, scratch_.first_bytes);
      return;
    }
    if (scratch_.kind != CellKind::floats) message.fail(std::string("column '") + name + "' does not hold floats");
    const int64_t n = scratch_.cell_length();
    if (place == weight_column) weights[row] = n ? scratch_.cell_float(0) : 1.0f;
    for (int64_t i = 0; place == label_column && i < n; ++i) add_label(row, scratch_.cell_float(i));
  }

  int64_t instance(const wire::Span& message) {
    add_rows(1);
    wire::Fields fields(message);
    wire::Field field;
    while (fields.next(field)) {
      if (field.number == 1)
        slot_fids(field);
      else if (field.number == 2)
        value_floats(field);
      else if (field.number == 3)
        add_labels(row_, field);
      else if (field.number == 4)
        weights[row_] = field.fixed<float>();
      else if (field.number == 5)
        line_id(row_, field.message());
      else if (field.number == 9)
        instance_feature(field.message());
    }
    return 1;
  }

  // Opens the cell of a column that field 1 or 2 of an Instance fills; these win over named features.
  RecordColumn& own_cell(int place, CellKind kind) {
    RecordColumn& to = columns[static_cast<size_t>(place)];
    size_t& last = own_cells_[static_cast<size_t>(place)];
    if (last != rows.size() + 1) {
      last = rows.size() + 1;
      to.reset_record();
      to.begin_cell();
      to.kind = kind;
      to.end_cell();
    }
    return to;
  }

  void slot_fids(const wire::Field& field) {
    const size_t n = field.count(8);
    for (size_t i = 0; i < n; ++i) {
      uint64_t fid;
      std::memcpy(&fid, field.span.data + 8 * i, 8);
      const int place = slots_[fid >> 54];
      if (place < 0) continue;
      RecordColumn& to = own_cell(place, CellKind::ids);
      to.ids.push_back(fid_v1_to_v2(fid));
      ++to.lengths.back();
    }
  }

  void value_floats(const wire::Field& field) {
    const size_t n = field.count(4);
    if (value_ < 0 || n == 0) return;
    RecordColumn& to = own_cell(value_, CellKind::floats);
    to.add_floats(field);
    to.lengths.back() += static_cast<int64_t>(n);
  }

  void instance_feature(const wire::Span& message) {
    std::string_view name;
    uint32_t member = 10;  // the first field that has values
    wire::Field field;
    for (wire::Fields fields(message); fields.next(field);) {
      if (field.number == 1)
        name = field.text();
      else if (field.number >= 2 && field.number <= 9) {
        const bool is_run = field.number <= 4 && field.type == wire::bytes;
        if (!is_run || field.span.size) member = std::min(member, field.number);
      }
    }
    const int place = member == 10 ? unwanted : find(name);
    const bool used = place >= 0 && own_cells_[static_cast<size_t>(place)] != rows.size() + 1;
    RecordColumn& to = used ? columns[static_cast<size_t>(place)] : scratch_;
    if (!used) scratch_.begin_record();
    to.reset_record();
    to.begin_cell();
    for (wire::Fields fields(message); fields.next(field);) {
      if (field.number < 2 || field.number > 9) continue;
      if (field.number == member) {
        add_instance_values(field, to);
      } else {  // only checked
        RecordColumn other;
        other.begin_cell();
        add_instance_values(field, other);
      }
    }
    if (used)
      to.end_cell();
    else
      to.reset_record();
  }

  RecordKind kind_;
  int64_t label_index_;
  std::vector<Named> by_name_;           // sorted
  std::array<int, 1024> slots_{};        // column of each slot, -1 for none
  int value_ = -1;                       // column "value", -1 for none
  RecordColumn scratch_;                 // a cell that is only checked, or of a special column
  std::vector<size_t> own_cells_;        // per column: the last record, counted from 1, with an own_cell()
  std::vector<int64_t> label_counts_;    // per row of the record: labels so far
  size_t row_ = 0;                       // the first row of the record
  int64_t expanded_ = 0;
};

}  // namespace megalith
