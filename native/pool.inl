// Reads rows, one by one or directly into pooled outputs, from a table's storage or from contiguous memory.
// unpool.inl has the gradient of the latter.

constexpr int64_t kReadAhead = 64, kWriteAhead = 32;

MEGALITH_PREFETCHER prefetch_row(const TableView& table, int32_t row) {
  if (row < 0) return;
  const char* p = weights_at(table.rows, row);
  const int bytes = static_cast<int>(table.rows.weight_bytes);
  for (int i = 0; i < bytes; i += 64) MEGALITH_FETCH(p + i);
  MEGALITH_FETCH(p + bytes - 1);
}

static void read(const TableView& table, const int32_t* rows, const int64_t* ids, int64_t n,
                 float* out, float* scratch) {
  const int dim = table.dim;
  const bool wide = stored_wide(table);
  for (int64_t i = 0; i < n; ++i, out += dim) {
    if (i + kReadAhead < n) prefetch_row(table, rows[i + kReadAhead]);
    if (rows[i] >= 0) {
      const char* stored = weights_at(table.rows, rows[i]);
      if (wide)
        __builtin_memcpy(out, stored, sizeof(float) * dim);
      else
        widen(table.runs, table.num_runs, stored, out);
    } else if (table.missing_zeros) {
      __builtin_memset(out, 0, sizeof(float) * dim);
    } else {
      initial_weights(table, ids[i], out, reinterpret_cast<char*>(scratch));
    }
  }
}

// ---- the row of an occurrence: `stored` finds it in memory (null: absent), `missing` gives what to read
// instead (null: zeros).

// The weights of an id without a row as they would be stored. They are in `scratch`, which has room for two rows.
static __attribute__((noinline)) const void* missing_weights(const TableView& table, int64_t id, float* scratch) {
  if (table.missing_zeros) return nullptr;
  draw_weights(table, id, scratch);
  if (stored_wide(table)) return scratch;
  narrow(table.runs, table.num_runs, scratch, reinterpret_cast<char*>(scratch + table.dim));
  return scratch + table.dim;
}

// Rows of a table whose weights are all stored as S.
template <class S>
struct TableSource {
  typedef S Stored;
  char* const* chunks;
  uint32_t shift, stride;
  const int32_t* rows;
  const TableView* table;
  const int64_t* ids;
  float* scratch;

  TableSource(const TableView& t, const int32_t* found, const int64_t* wanted, float* memory)
      : chunks(t.rows.weights),
        shift(t.rows.shift),
        stride(t.rows.stride),
        rows(found),
        table(&t),
        ids(wanted),
        scratch(memory) {}

  const S* stored(int64_t i) const {
    const int32_t row = rows[i];
    if (__builtin_expect(row < 0, 0)) return nullptr;
    const uint32_t r = static_cast<uint32_t>(row), in_chunk = r & ((1u << shift) - 1);
    return reinterpret_cast<const S*>(chunks[r >> shift] + uint64_t{in_chunk} * stride);
  }
  const S* missing(int64_t i) const { return static_cast<const S*>(missing_weights(*table, ids[i], scratch)); }
  bool rows_fill_lines() const { return stride % 64 == 0; }
  bool scattered() const { return true; }
  const float* run() const { return nullptr; }
};

template <class T>
struct FlatSource {
  typedef T Stored;
  FlatRows<T> rows;

  const T* stored(int64_t i) const {
    if (!rows.index) return rows.data + i * rows.stride;
    const int64_t at = rows.index[i];
    return __builtin_expect(at >= 0, 1) ? rows.data + at * rows.stride : nullptr;
  }
  const T* missing(int64_t) const { return nullptr; }
  bool rows_fill_lines() const { return false; }
  bool scattered() const { return rows.index != nullptr; }
  // Contiguous rows of one column, or null.
  const T* run() const { return rows.index || rows.stride != 1 ? nullptr : rows.data; }
};

template <class T>
static inline T* part_address(const PartOf<T>& part, int64_t bag) {
  if (part.inner == 1) return part.data + bag * part.stride + part.column;
  return part.data + (bag / part.inner) * part.stride + part.column +
         (bag % part.inner) * part.step;
}

template <class T, class Vec>
static inline void finish(const BagsOf<T>& bags, const PartOf<T>& part, int64_t bag, Vec sum, T* out) {
  if (bags.divisor) sum = sum / bags.divisor[bag];
  if (part.accumulate) sum = load8(out) + sum;
  store8(out, sum);
}

// Sums columns [start, start + 8 * Vectors) of a bag's rows in the order of its occurrences and
// stores them.
template <int Vectors, class Source, class T>
static inline void pool_vectors(const Source& source, const BagsOf<T>& bags, const PartOf<T>& part,
                                int64_t bag, int start, T* out) {
  typename Eight<T>::type sums[Vectors] = {};
  for (int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i) {
    const typename Source::Stored* row = source.stored(i);
    if (!row && !(row = source.missing(i))) continue;
    if (bags.weights) {
      const T w = bags.weights[i];
      for (int v = 0; v < Vectors; ++v) sums[v] = sums[v] + load8(row + start + 8 * v) * w;
    } else {
      for (int v = 0; v < Vectors; ++v) sums[v] = sums[v] + load8(row + start + 8 * v);
    }
  }
  for (int v = 0; v < Vectors; ++v) finish(bags, part, bag, sums[v], out + 8 * v);
}

template <class Source, class T>
static inline void pool_tail(const Source& source, const BagsOf<T>& bags, const PartOf<T>& part,
                             int64_t bag, int start, int columns, T* out) {
  T sums[8] = {};
  for (int64_t i = bags.offsets[bag]; i < bags.offsets[bag + 1]; ++i) {
    const typename Source::Stored* row = source.stored(i);
    if (!row && !(row = source.missing(i))) continue;
    const T w = bags.weights ? bags.weights[i] : T(1);
    for (int c = 0; c < columns; ++c) sums[c] = sums[c] + static_cast<T>(row[start + c]) * w;
  }
  for (int c = 0; c < columns; ++c) {
    if (bags.divisor) sums[c] = sums[c] / bags.divisor[bag];
    out[c] = part.accumulate ? out[c] + sums[c] : sums[c];
  }
}

// The columns [first, last) that a feature's parts read.
template <class T>
static inline void columns_read(const BagsOf<T>& bags, int* first, int* last) {
  *first = 1 << 30, *last = 0;
  for (int p = 0; p < bags.num_parts; ++p) {
    *first = bags.parts[p].start < *first ? bags.parts[p].start : *first;
    *last = bags.parts[p].end > *last ? bags.parts[p].end : *last;
  }
}

// Copies the pooled columns of bags [first_bag, last_bag) to their parts. A bag's row begins with
// column `first`; the next bag's is `step` elements further.
template <class T>
static void hand_out(const BagsOf<T>& bags, int64_t first_bag, int64_t last_bag, const T* rows,
                     int64_t step, int first) {
  for (int p = 0; p < bags.num_parts; ++p) {
    const PartOf<T> part = bags.parts[p];
    const T* from = rows + part.start - first;
    const int n = part.end - part.start;
    for (int64_t bag = first_bag; bag < last_bag; ++bag, from += step) {
      T* out = part_address(part, bag);
      int c = 0;
      if (part.accumulate) {
        for (; c + 8 <= n; c += 8) store8(out + c, load8(out + c) + load8(from + c));
        for (; c < n; ++c) out[c] = out[c] + from[c];
      } else {
        for (; c + 8 <= n; c += 8) store8(out + c, load8(from + c));
        for (; c < n; ++c) out[c] = from[c];
      }
    }
  }
}

// The common case: all parts together read 8 * (Vectors - 1) + 1 to 8 * Vectors columns, at least 8. The
// last vector may overlap the one before it. Several bags are pooled before they are copied to their parts,
// because a load that partly overlaps a recent store stalls.
template <int Vectors, bool Weighted, class Source, class T>
static void pool_ahead(const Source& given, const BagsOf<T>& bags, int first, int width,
                       int64_t first_bag, int64_t last_bag) {
  typedef typename Source::Stored Stored;
  typedef typename Eight<T>::type Vec;
  constexpr int64_t kLine = 64 / sizeof(Stored), kBags = 16;
  const Source source = given;  // a copy: an output cannot change it, so it stays in registers
  const PartOf<T> part = bags.parts[0];
  const int64_t* const offsets = bags.offsets;
  const T *const weights = bags.weights, *const divisor = bags.divisor;
  T pooled[kBags * 8 * Vectors];
  const bool direct = bags.num_parts == 1 && width == 8 * Vectors && part.inner == 1;
  const int tail = width - 8;  // where the last vector begins
  const int64_t end = offsets[last_bag];
  const bool straddles = !source.rows_fill_lines() || first % kLine != 0;
  const int64_t lines = straddles ? (width + kLine - 2) / kLine : (width + kLine - 1) / kLine;
  const auto request = [&](int64_t k) __attribute__((always_inline)) {
    const Stored* p = source.stored(k);
    if (__builtin_expect(p == nullptr, 0)) return;
    p += first;
    MEGALITH_FETCH(p);
    for (int64_t line = 1; line < lines; ++line) MEGALITH_FETCH(p + line * kLine);
    if (straddles) MEGALITH_FETCH(p + width - 1);
  };
  int64_t i = offsets[first_bag];
  for (int64_t k = i; k < end && k < i + kReadAhead; ++k) request(k);
  const bool apart = bags.num_parts > 1 || part.stride * static_cast<int64_t>(sizeof(T)) > 128;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    // The hardware prefetches outputs that follow each other.
    if (apart && bag + kWriteAhead < last_bag)
      for (int k = 0; k < bags.num_parts; ++k) MEGALITH_FETCH(part_address(bags.parts[k], bag + kWriteAhead));
    Vec sums[Vectors] = {};
    for (const int64_t stop = offsets[bag + 1]; i < stop; ++i) {
      if (i + kReadAhead < end) request(i + kReadAhead);
      const Stored* p = source.stored(i);
      if (__builtin_expect(!p, 0) && !(p = source.missing(i))) continue;
      p += first;
      if (Weighted) {
        const T w = weights[i];
        for (int v = 0; v < Vectors - 1; ++v) sums[v] = sums[v] + load8(p + 8 * v) * w;
        sums[Vectors - 1] = sums[Vectors - 1] + load8(p + tail) * w;
      } else {
        for (int v = 0; v < Vectors - 1; ++v) sums[v] = sums[v] + load8(p + 8 * v);
        sums[Vectors - 1] = sums[Vectors - 1] + load8(p + tail);
      }
    }
    if (divisor)
      for (int v = 0; v < Vectors; ++v) sums[v] = sums[v] / divisor[bag];
    if (direct) {
      T* out = part.data + bag * part.stride + part.column;
      if (part.accumulate)
        for (int v = 0; v < Vectors; ++v) sums[v] = load8(out + 8 * v) + sums[v];
      for (int v = 0; v < Vectors; ++v) store8(out + 8 * v, sums[v]);
      continue;
    }
    const int64_t slot = (bag - first_bag) % kBags;
    T* row = pooled + slot * 8 * Vectors;
    for (int v = 0; v < Vectors - 1; ++v) store8(row + 8 * v, sums[v]);
    store8(row + tail, sums[Vectors - 1]);
    if (slot == kBags - 1 || bag + 1 == last_bag)
      hand_out(bags, bag - slot, bag + 1, pooled, 8 * Vectors, first);
  }
}

// The sum of x[0 .. n) in order, n at most 8; x has eight elements. It does not branch on n, which is not
// predictable.
template <class T>
static inline T sum_up_to_8(const T* x, int n) {
  typedef typename Eight<T>::type Vec;
  typedef typename Eight<T>::Mask Mask;
  const Mask beyond = Mask{0, 1, 2, 3, 4, 5, 6, 7} - n;
  const Vec kept = beyond < Mask{} ? load8(x) : Vec{};
  T sum = T(0);
  for (int lane = 0; lane < 8; ++lane) sum = sum + kept[lane];
  return sum;
}

// One column.
template <bool Weighted, class Source, class T>
static void pool_column(const Source& source, const BagsOf<T>& bags, int column, int64_t first_bag,
                        int64_t last_bag) {
  const bool scattered = source.scattered();
  const T* run = Weighted ? nullptr : source.run();
  const PartOf<T> part = bags.parts[0];
  const bool alone = bags.num_parts == 1 && part.inner == 1 && !part.accumulate && !bags.divisor;
  const int64_t* offsets = bags.offsets;
  const int64_t end = offsets[last_bag];
  int64_t i = offsets[first_bag];
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    T sum = T(0);
    if (run && offsets[bag + 1] - i <= 8 && i + 8 <= end) {
      sum = sum_up_to_8(run + i, static_cast<int>(offsets[bag + 1] - i));
      i = offsets[bag + 1];
      if (alone) {
        part.data[bag * part.stride + part.column] = sum;
        continue;
      }
    }
    for (const int64_t stop = offsets[bag + 1]; i < stop; ++i) {
      if (scattered && i + kReadAhead < end) {
        const typename Source::Stored* later = source.stored(i + kReadAhead);
        if (later) MEGALITH_FETCH(later + column);
      }
      const typename Source::Stored* p = source.stored(i);
      if (__builtin_expect(!p, 0) && !(p = source.missing(i))) continue;
      const T x = p[column];
      sum = sum + (Weighted ? x * bags.weights[i] : x);
    }
    if (bags.divisor) sum = sum / bags.divisor[bag];
    for (int k = 0; k < bags.num_parts; ++k) {
      T* out = part_address(bags.parts[k], bag);
      *out = bags.parts[k].accumulate ? *out + sum : sum;
    }
  }
}

// The general case: any parts, any widths.
template <class Source, class T>
static void pool_any(const Source& source, const BagsOf<T>& bags, int64_t first_bag, int64_t last_bag) {
  constexpr int kLine = 64 / sizeof(typename Source::Stored);
  int first, last;
  columns_read(bags, &first, &last);
  if (first >= last) return;
  int64_t ahead = bags.offsets[first_bag];
  const int64_t end = bags.offsets[last_bag];
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    for (; ahead < end && ahead < bags.offsets[bag + 1] + kReadAhead; ++ahead) {
      const typename Source::Stored* row = source.stored(ahead);
      if (!row) continue;
      for (int c = first; c < last; c += kLine) MEGALITH_FETCH(row + c);
      MEGALITH_FETCH(row + last - 1);
    }
    for (int p = 0; p < bags.num_parts; ++p) {
      const PartOf<T>& part = bags.parts[p];
      T* out = part_address(part, bag);
      int start = part.start;
      int columns = part.end - part.start;
      for (; columns >= 64; columns -= 64, start += 64, out += 64)
        pool_vectors<8>(source, bags, part, bag, start, out);
      if (columns >= 32) {
        pool_vectors<4>(source, bags, part, bag, start, out);
        columns -= 32, start += 32, out += 32;
      }
      if (columns >= 16) {
        pool_vectors<2>(source, bags, part, bag, start, out);
        columns -= 16, start += 16, out += 16;
      }
      if (columns >= 8) {
        pool_vectors<1>(source, bags, part, bag, start, out);
        columns -= 8, start += 8, out += 8;
      }
      if (columns > 0) pool_tail(source, bags, part, bag, start, columns, out);
    }
  }
}

template <bool Weighted, class Source, class T>
static void pool_weighted(const Source& source, const BagsOf<T>& bags, int64_t first_bag,
                          int64_t last_bag) {
  int first, last;
  columns_read(bags, &first, &last);
  const int width = last - first;
  if (width == 1) return pool_column<Weighted>(source, bags, first, first_bag, last_bag);
  switch (width < 8 ? 0 : (width + 7) / 8) {
    case 1: return pool_ahead<1, Weighted>(source, bags, first, width, first_bag, last_bag);
    case 2: return pool_ahead<2, Weighted>(source, bags, first, width, first_bag, last_bag);
    case 3: return pool_ahead<3, Weighted>(source, bags, first, width, first_bag, last_bag);
    case 4: return pool_ahead<4, Weighted>(source, bags, first, width, first_bag, last_bag);
    case 5: return pool_ahead<5, Weighted>(source, bags, first, width, first_bag, last_bag);
    case 6: return pool_ahead<6, Weighted>(source, bags, first, width, first_bag, last_bag);
    case 7: return pool_ahead<7, Weighted>(source, bags, first, width, first_bag, last_bag);
    case 8: return pool_ahead<8, Weighted>(source, bags, first, width, first_bag, last_bag);
    default: return pool_any(source, bags, first_bag, last_bag);
  }
}

template <class Source, class T>
static void pool_from(const Source& source, const BagsOf<T>& bags, int64_t first_bag, int64_t last_bag) {
  if (first_bag >= last_bag) return;
  if (bags.weights)
    pool_weighted<true>(source, bags, first_bag, last_bag);
  else
    pool_weighted<false>(source, bags, first_bag, last_bag);
}

static void pool(const TableView& table, const int32_t* rows, const int64_t* ids,
                 const BagsView& bags, int64_t first_bag, int64_t last_bag, float* scratch) {
  switch (table.runs[0].precision) {
    case Precision::float16:
      return pool_from(TableSource<Half>(table, rows, ids, scratch), bags, first_bag, last_bag);
    case Precision::bfloat16:
      return pool_from(TableSource<Bf16>(table, rows, ids, scratch), bags, first_bag, last_bag);
    default:
      return pool_from(TableSource<float>(table, rows, ids, scratch), bags, first_bag, last_bag);
  }
}

template <class T>
static void pool_flat(const FlatRows<T>& rows, const BagsOf<T>& bags, int64_t first_bag,
                      int64_t last_bag) {
  pool_from(FlatSource<T>{rows}, bags, first_bag, last_bag);
}
