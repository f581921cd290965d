// Finds rows and pools them in one pass, a pipeline over occurrences:
//
//   occurrence i + kReadAhead + kHashAhead   hashes its id, requests the cache line of its bucket
//   occurrence i + kReadAhead                finds its row in the bucket, stores the row number, requests the weights
//   occurrence i                             adds the weights to the sum of its bag
//
// Both requests of an occurrence overlap with those of its neighbours, so an id costs two independent cache misses and
// no waiting. `pool_ahead` drives it: it asks for each row once, kReadAhead occurrences before it reads the row.

constexpr int64_t kHashAhead = 32;

// Rows of a table whose weights are all stored as S. It has copies of what it reads in the loop: the compiler must
// assume that a row number that is stored changes anything in memory.
template <class S>
struct SearchSource {
  typedef S Stored;
  static constexpr bool kPlain = false, kOnce = true;
  static constexpr int64_t kRing = 64;
  static_assert(kHashAhead < kRing, "a bucket must outlive its wait");

  const IndexView index;
  char* const* const chunks;
  const uint32_t shift, stride;
  const bool rows_fill_lines_;
  const TableView& table;
  int32_t* const rows;
  const int64_t* const ids;
  float* const scratch;
  const Bucket** const ring;  // [kRing]
  const int64_t end;

  // Occurrences [first, last) will be asked for.
  SearchSource(const IndexView& i, const TableView& t, int32_t* found, const int64_t* wanted, float* memory,
               const Bucket** buckets, int64_t first, int64_t last)
      : index(i),
        chunks(t.rows.weights),
        shift(t.rows.shift),
        stride(t.rows.stride),
        rows_fill_lines_(t.rows.stride % 64 == 0),
        table(t),
        rows(found),
        ids(wanted),
        scratch(memory),
        ring(buckets),
        end(last) {
    for (int64_t k = first; k < last && k < first + kHashAhead; ++k) hash(k);
  }

  __attribute__((always_inline)) void hash(int64_t k) const {
    const Bucket* home = home_of(index, slot_hash(ids[k]));
    __builtin_prefetch(home);
    ring[k % kRing] = home;
  }

  __attribute__((always_inline)) const S* stored(int64_t i) const {
    if (i + kHashAhead < end) hash(i + kHashAhead);
    const int32_t row = find_at(index, ring[i % kRing], ids[i]);
    rows[i] = row;
    if (__builtin_expect(row < 0, 0)) return nullptr;
    const uint32_t r = static_cast<uint32_t>(row), in_chunk = r & ((1u << shift) - 1);
    return reinterpret_cast<const S*>(chunks[r >> shift] + uint64_t{in_chunk} * stride);
  }
  const S* missing(int64_t i) const { return static_cast<const S*>(missing_weights(table, ids[i], scratch)); }
  bool rows_fill_lines() const { return rows_fill_lines_; }
};

template <class S>
static void find_pool_as(const IndexView& index, const TableView& table, int32_t* rows, const int64_t* ids,
                         const BagsView& bags, int64_t first_bag, int64_t last_bag, float* scratch) {
  int first, last;
  columns_read(bags, &first, &last);
  const int64_t from = bags.offsets[first_bag], to = bags.offsets[last_bag];
  if (last - first >= 8 && last - first <= 64) {
    const Bucket* ring[SearchSource<S>::kRing];
    const SearchSource<S> source(index, table, rows, ids, scratch, ring, from, to);
    return pool_from(source, bags, first_bag, last_bag);
  }
  find(index, ids + from, to - from, rows + from);
  pool_from(TableSource<S>{table, rows, ids, scratch}, bags, first_bag, last_bag);
}

static void find_pool(const IndexView& index, const TableView& table, int32_t* rows, const int64_t* ids,
                      const BagsView& bags, int64_t first_bag, int64_t last_bag, float* scratch) {
  if (first_bag >= last_bag) return;
  switch (table.runs[0].precision) {
    case Precision::float16:
      return find_pool_as<Half>(index, table, rows, ids, bags, first_bag, last_bag, scratch);
    case Precision::bfloat16:
      return find_pool_as<Bf16>(index, table, rows, ids, bags, first_bag, last_bag, scratch);
    default:
      return find_pool_as<float>(index, table, rows, ids, bags, first_bag, last_bag, scratch);
  }
}
