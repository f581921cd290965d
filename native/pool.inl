// Reading rows: one by one, or straight into pooled outputs.

constexpr int64_t kReadAhead = 16;

static inline void prefetch_row(const TableView& table, int32_t row, int first, int last) {
  if (row < 0) return;
  const char* p = row_address(table.rows, row);
  for (int byte = first * 4; byte < last * 4; byte += 64) __builtin_prefetch(p + byte);
}

// The weights of a row, or of a missing id (zeros are null).
static inline const float* weights_of(const TableView& table, int32_t row, int64_t id,
                                      float* scratch) {
  if (row >= 0) return reinterpret_cast<const float*>(row_address(table.rows, row));
  if (table.missing_zeros) return nullptr;
  initial_weights(table, id, scratch);
  return scratch;
}

static void read(const TableView& table, const int32_t* rows, const int64_t* ids, int64_t n,
                 float* out) {
  const int dim = table.dim;
  for (int64_t i = 0; i < n; ++i, out += dim) {
    if (i + kReadAhead < n) prefetch_row(table, rows[i + kReadAhead], 0, dim);
    if (rows[i] >= 0) {
      __builtin_memcpy(out, row_address(table.rows, rows[i]), sizeof(float) * dim);
    } else if (table.missing_zeros) {
      __builtin_memset(out, 0, sizeof(float) * dim);
    } else {
      initial_weights(table, ids[i], out);
    }
  }
}

// Sums columns [start, start + 8 * Vectors + Tail) of a bag's rows in the order of its
// occurrences and stores them.
template <int Vectors>
static inline void pool_vectors(const TableView& table, const int32_t* rows, const int64_t* ids,
                                const BagsView& bags, const PartView& part, int64_t bag, int start,
                                float* out, float* scratch) {
  Vec8 sums[Vectors] = {};
  for (int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i) {
    const float* row = weights_of(table, rows[i], ids[i], scratch);
    if (!row) continue;
    if (bags.weights) {
      const float w = bags.weights[i];
      for (int v = 0; v < Vectors; ++v) sums[v] = sums[v] + load8(row + start + 8 * v) * w;
    } else {
      for (int v = 0; v < Vectors; ++v) sums[v] = sums[v] + load8(row + start + 8 * v);
    }
  }
  for (int v = 0; v < Vectors; ++v) {
    if (bags.divisor) sums[v] = sums[v] / bags.divisor[bag];
    if (part.accumulate) sums[v] = load8(out + 8 * v) + sums[v];
    store8(out + 8 * v, sums[v]);
  }
}

static inline void pool_tail(const TableView& table, const int32_t* rows, const int64_t* ids,
                             const BagsView& bags, const PartView& part, int64_t bag, int start,
                             int columns, float* out, float* scratch) {
  float sums[8] = {};
  for (int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i) {
    const float* row = weights_of(table, rows[i], ids[i], scratch);
    if (!row) continue;
    const float w = bags.weights ? bags.weights[i] : 1.0f;
    for (int c = 0; c < columns; ++c) sums[c] = sums[c] + row[start + c] * w;
  }
  for (int c = 0; c < columns; ++c) {
    if (bags.divisor) sums[c] = sums[c] / bags.divisor[bag];
    out[c] = part.accumulate ? out[c] + sums[c] : sums[c];
  }
}

static inline float* part_address(const PartView& part, int64_t bag) {
  if (part.inner == 1) return part.data + bag * part.stride + part.column;
  return part.data + (bag / part.inner) * part.stride + part.column +
         (bag % part.inner) * (part.end - part.start);
}

static void pool(const TableView& table, const int32_t* rows, const int64_t* ids,
                 const BagsView& bags, int64_t first_bag, int64_t last_bag, float* scratch) {
  int first = table.dim, last = 0;
  for (int p = 0; p < bags.num_parts; ++p) {
    first = bags.parts[p].start < first ? bags.parts[p].start : first;
    last = bags.parts[p].end > last ? bags.parts[p].end : last;
  }
  if (first_bag >= last_bag || first >= last) return;
  int64_t ahead = bags.offsets[first_bag];
  const int64_t end = bags.offsets[last_bag];
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    for (; ahead < end && ahead < bags.offsets[bag + 1] + kReadAhead; ++ahead)
      prefetch_row(table, rows[ahead], first, last);
    for (int p = 0; p < bags.num_parts; ++p) {
      const PartView& part = bags.parts[p];
      float* out = part_address(part, bag);
      int start = part.start;
      int columns = part.end - part.start;
      const int64_t f = bag;
      for (; columns >= 64; columns -= 64, start += 64, out += 64)
        pool_vectors<8>(table, rows, ids, bags, part, f, start, out, scratch);
      if (columns >= 32) {
        pool_vectors<4>(table, rows, ids, bags, part, f, start, out, scratch);
        columns -= 32, start += 32, out += 32;
      }
      if (columns >= 16) {
        pool_vectors<2>(table, rows, ids, bags, part, f, start, out, scratch);
        columns -= 16, start += 16, out += 16;
      }
      if (columns >= 8) {
        pool_vectors<1>(table, rows, ids, bags, part, f, start, out, scratch);
        columns -= 8, start += 8, out += 8;
      }
      if (columns > 0) pool_tail(table, rows, ids, bags, part, f, start, columns, out, scratch);
    }
  }
}
