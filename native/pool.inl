// Reading rows: one by one, or straight into pooled outputs.

constexpr int64_t kReadAhead = 40;

MEGALITH_PREFETCHER prefetch_row(const TableView& table, int32_t row, int first, int last) {
  if (row < 0) return;
  const float* p = weights_at(table.rows, row);
  for (int i = first; i < last; i += 16) __builtin_prefetch(p + i);
  __builtin_prefetch(p + last - 1);
}

// The weights of a row, or of a missing id (zeros are null).
static inline const float* weights_of(const TableView& table, int32_t row, int64_t id,
                                      float* scratch) {
  if (row >= 0) return weights_at(table.rows, row);
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
      __builtin_memcpy(out, weights_at(table.rows, rows[i]), sizeof(float) * dim);
    } else if (table.missing_zeros) {
      __builtin_memset(out, 0, sizeof(float) * dim);
    } else {
      initial_weights(table, ids[i], out);
    }
  }
}

// Sums columns [start, start + 8 * Vectors) of a bag's rows in the order of its occurrences and
// stores them.
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

// One part, a whole number of vectors wide: the common case. Addresses are computed once, when
// their lines are requested, and kept in a ring until their turn.
template <int Vectors, bool Weighted>
static void pool_ahead(const TableView& table, const int32_t* rows, const int64_t* ids,
                       const BagsView& bags, int64_t first_bag, int64_t last_bag, float* scratch) {
  constexpr int64_t kRing = 64;
  static_assert(kReadAhead < kRing, "an address must outlive its wait");
  const PartView part = bags.parts[0];
  const RowsView storage = table.rows;
  const int64_t* offsets = bags.offsets;
  const int64_t end = offsets[last_bag];
  const bool straddles = storage.stride % 64 != 0 || part.start % 16 != 0;
  const float* ring[kRing];
  int64_t i = offsets[first_bag], next = i;
  auto request = [&] {
    const int32_t row = rows[next];
    const float* p = nullptr;
    if (__builtin_expect(row >= 0, 1)) {
      p = weights_at(storage, row) + part.start;
      for (int v = 0; v < Vectors; v += 2) __builtin_prefetch(p + 8 * v);
      if (straddles) __builtin_prefetch(p + 8 * Vectors - 1);
    }
    ring[next % kRing] = p;
    ++next;
  };
  while (next < end && next < i + kReadAhead) request();
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    Vec8 sums[Vectors] = {};
    for (const int64_t stop = offsets[bag + 1]; i < stop; ++i) {
      if (next < end) request();
      const float* p = ring[i % kRing];
      if (__builtin_expect(!p, 0)) {
        p = weights_of(table, -1, ids[i], scratch);
        if (!p) continue;
        p += part.start;
      }
      if (Weighted) {
        const float w = bags.weights[i];
        for (int v = 0; v < Vectors; ++v) sums[v] = sums[v] + load8(p + 8 * v) * w;
      } else {
        for (int v = 0; v < Vectors; ++v) sums[v] = sums[v] + load8(p + 8 * v);
      }
    }
    float* out = part_address(part, bag);
    for (int v = 0; v < Vectors; ++v) {
      if (bags.divisor) sums[v] = sums[v] / bags.divisor[bag];
      if (part.accumulate) sums[v] = load8(out + 8 * v) + sums[v];
      store8(out + 8 * v, sums[v]);
    }
  }
}

// Any parts, any widths.
static void pool_any(const TableView& table, const int32_t* rows, const int64_t* ids,
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
      for (; columns >= 64; columns -= 64, start += 64, out += 64)
        pool_vectors<8>(table, rows, ids, bags, part, bag, start, out, scratch);
      if (columns >= 32) {
        pool_vectors<4>(table, rows, ids, bags, part, bag, start, out, scratch);
        columns -= 32, start += 32, out += 32;
      }
      if (columns >= 16) {
        pool_vectors<2>(table, rows, ids, bags, part, bag, start, out, scratch);
        columns -= 16, start += 16, out += 16;
      }
      if (columns >= 8) {
        pool_vectors<1>(table, rows, ids, bags, part, bag, start, out, scratch);
        columns -= 8, start += 8, out += 8;
      }
      if (columns > 0) pool_tail(table, rows, ids, bags, part, bag, start, columns, out, scratch);
    }
  }
}

template <bool Weighted>
static void pool_weighted(const TableView& table, const int32_t* rows, const int64_t* ids,
                          const BagsView& bags, int64_t first_bag, int64_t last_bag,
                          float* scratch) {
  const int columns = bags.num_parts == 1 ? bags.parts[0].end - bags.parts[0].start : 0;
  switch (columns) {
    case 8: return pool_ahead<1, Weighted>(table, rows, ids, bags, first_bag, last_bag, scratch);
    case 16: return pool_ahead<2, Weighted>(table, rows, ids, bags, first_bag, last_bag, scratch);
    case 32: return pool_ahead<4, Weighted>(table, rows, ids, bags, first_bag, last_bag, scratch);
    case 64: return pool_ahead<8, Weighted>(table, rows, ids, bags, first_bag, last_bag, scratch);
    default: return pool_any(table, rows, ids, bags, first_bag, last_bag, scratch);
  }
}

static void pool(const TableView& table, const int32_t* rows, const int64_t* ids,
                 const BagsView& bags, int64_t first_bag, int64_t last_bag, float* scratch) {
  if (first_bag >= last_bag) return;
  if (bags.weights)
    pool_weighted<true>(table, rows, ids, bags, first_bag, last_bag, scratch);
  else
    pool_weighted<false>(table, rows, ids, bags, first_bag, last_bag, scratch);
}
