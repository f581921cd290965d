// The rows that a server returns: those of an export, below layers of rows that were written since.
//
// A layer is a table, or a file of rows that used to be in one. Its rows have one column more than needed, a flag: the
// row is present, or it was removed. The first layer that has an id decides, then the export. A call reads the ids of all
// tables, so that the cache misses of different tables overlap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "frozen.hpp"
#include "table.hpp"

namespace megalith {

constexpr float kPresent = 1.0f, kRemoved = -1.0f;

// One of both.
struct RowLayer {
  const Table* table = nullptr;
  const FrozenRows* frozen = nullptr;

  int64_t width() const { return table ? table->dim() : frozen->dim; }
};

// Layers of some tables hold codes: three bytes in the integer of each column.
struct RowCodes {
  const StoredPart* parts = nullptr;
  int64_t num_parts = 0;
  const float* steps = nullptr;
  int64_t bytes = 0;

  void decode(const float* columns, char* scratch, float* out) const {
    for (int64_t b = 0; b < bytes; ++b)
      scratch[b] = static_cast<char>(static_cast<uint32_t>(columns[b / 3]) >> (8 * (b % 3)) & 255);
    decode_parts(parts, num_parts, steps, scratch, out);
  }
};

struct ServedTable {
  std::vector<RowLayer> layers;      // the newest first
  const FrozenRows* base = nullptr;  // null: ids that are in no layer have no row
  RowCodes codes;                    // without parts: layers hold the numbers themselves
  int64_t dim = 0;

  int64_t layer_width() const { return 1 + (codes.num_parts ? (codes.bytes + 2) / 3 : dim); }
};

class ServedRows {
 public:
  explicit ServedRows(std::vector<ServedTable> tables) : tables_(std::move(tables)) {
    for (const ServedTable& t : tables_) width_ = std::max(width_, t.layer_width());
  }

  int64_t num_tables() const { return static_cast<int64_t>(tables_.size()); }
  int64_t dim(int64_t table) const { return tables_[static_cast<size_t>(table)].dim; }

  // Reads counts[t] ids of each table, all in `ids`, and writes their rows to `out`, zeros for an id without one.
  // Returns how many ids have no row.
  int64_t read(const int64_t* ids, const int64_t* counts, float* out) const {
    int64_t n = 0, missing = 0;
    for (size_t t = 0; t < tables_.size(); ++t) n += counts[t];
    if (!n) return 0;
    std::vector<uint8_t> decided(static_cast<size_t>(n));  // 0: not in a layer
    missing += read_layers(ids, counts, out, decided.data());
    return missing + read_bases(ids, counts, n, out, decided.data());
  }

 private:
  int64_t read_layers(const int64_t* ids, const int64_t* counts, float* out, uint8_t* decided) const {
    std::vector<float> weights(static_cast<size_t>(width_));
    std::vector<char> bytes(static_cast<size_t>(width_) * 3);
    int64_t missing = 0;
    for (size_t t = 0; t < tables_.size(); ++t) {
      const ServedTable& table = tables_[t];
      const int64_t count = counts[t], columns = table.layer_width() - 1;
      const auto take = [&](int64_t i, const float* row) {
        if (decided[i]) return;
        float* to = out + i * table.dim;
        decided[i] = 1;
        if (row[columns] != kPresent) {
          std::fill(to, to + table.dim, 0.0f);
          ++missing;
        } else if (table.codes.num_parts) {
          table.codes.decode(row, bytes.data(), to);
        } else {
          std::memcpy(to, row, sizeof(float) * static_cast<size_t>(columns));
        }
      };
      for (const RowLayer& layer : table.layers) {
        if (layer.table) {
          layer.table->for_rows(ids, count, weights.data(), take);
          continue;
        }
        for (int64_t i = 0; i < count; ++i) {
          if (decided[i]) continue;
          const int64_t at = layer.frozen->find_in(layer.frozen->bucket(ids[i]), ids[i]);
          if (at < 0) continue;
          layer.frozen->decode(at, weights.data());
          take(i, weights.data());
        }
      }
      ids += count;
      decided += count;
      out += count * table.dim;
    }
    return missing;
  }

  // Four passes over a block of ids, of any tables, let its cache misses overlap.
  int64_t read_bases(const int64_t* ids, const int64_t* counts, int64_t n, float* out, const uint8_t* decided) const {
    constexpr int64_t kBlock = 32;
    const ServedTable* of[kBlock];
    uint64_t in[kBlock];
    int64_t found[kBlock], missing = 0;
    size_t t = 0;
    int64_t left = counts[0];
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t size = std::min(kBlock, n - begin);
      for (int64_t i = 0; i < size; ++i) {
        while (!left) left = counts[++t];
        --left;
        of[i] = &tables_[t];
        const FrozenRows* base = of[i]->base;
        if (!base || decided[begin + i]) continue;
        in[i] = base->bucket(ids[begin + i]);
        __builtin_prefetch(base->buckets + in[i]);
      }
      for (int64_t i = 0; i < size; ++i)
        if (of[i]->base && !decided[begin + i]) of[i]->base->prefetch_ids(in[i]);
      for (int64_t i = 0; i < size; ++i) {
        const FrozenRows* base = of[i]->base;
        found[i] = base && !decided[begin + i] ? base->find_in(in[i], ids[begin + i]) : -1;
        if (found[i] >= 0) __builtin_prefetch(static_cast<const char*>(base->rows) + found[i] * base->row_bytes);
      }
      for (int64_t i = 0; i < size; out += of[i]->dim, ++i) {
        if (decided[begin + i]) continue;
        if (found[i] >= 0) {
          of[i]->base->decode(found[i], out);
        } else {
          std::fill(out, out + of[i]->dim, 0.0f);
          ++missing;
        }
      }
    }
    return missing;
  }

  std::vector<ServedTable> tables_;
  int64_t width_ = 0;  // of the widest row of a layer
};

}  // namespace megalith
