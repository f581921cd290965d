// Batched lookup of ids: hashes a block and prefetches its cache lines while it searches the previous block.

// Returns a bit for each slot that holds the key.
static inline uint32_t match(const Bucket& bucket, int64_t key) {
#if defined(__AVX2__)
  __m256i four = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket.keys));
  __m256i equal = _mm256_cmpeq_epi64(four, _mm256_set1_epi64x(key));
  uint32_t mask = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)));
  mask |= static_cast<uint32_t>(bucket.keys[4] == key) << 4;
#else
  uint32_t mask = 0;
  for (uint32_t k = 0; k < kBucketSlots; ++k)
    mask |= static_cast<uint32_t>(bucket.keys[k] == key) << k;
#endif
  return mask & ((1u << (bucket.meta & kCountMask)) - 1);
}

static inline const Bucket* home_of(const IndexView& index, uint64_t hash) {
  uint64_t b = high_product(hash, index.count);
  if (b >= index.cursor) return index.buckets + b;
  return index.next + high_product(hash, index.next_count);
}

// Searches the buckets after a full home bucket. This is rare, so it starts again from the hash.
static __attribute__((noinline)) int32_t find_displaced(const IndexView& index, int64_t id) {
  const uint64_t hash = slot_hash(id);
  const Bucket* buckets = index.buckets;
  uint64_t count = index.count;
  uint64_t b = high_product(hash, count);
  if (b < index.cursor) {
    buckets = index.next;
    count = index.next_count;
    b = high_product(hash, count);
  }
  for (uint64_t left = count; left > 0; --left) {  // at most once around all buckets
    uint32_t mask = match(buckets[b], id);
    if (mask) return buckets[b].rows[__builtin_ctz(mask)];
    if (buckets[b].meta < kPassedOne) return -1;
    if (++b == count) b = 0;
  }
  return -1;
}

static inline int32_t find_at(const IndexView& index, const Bucket* bucket, int64_t id) {
  uint32_t mask = match(*bucket, id);
  if (mask) return bucket->rows[__builtin_ctz(mask)];
  if (bucket->meta < kPassedOne) return -1;
  return find_displaced(index, id);
}

static void find(const IndexView& index, const int64_t* ids, int64_t n, int32_t* rows) {
  constexpr int kBlock = 32;
  const Bucket* homes[2][kBlock];
  const int64_t blocks = n / kBlock;
  if (blocks > 0) {
    for (int k = 0; k < kBlock; ++k) {
      homes[0][k] = home_of(index, slot_hash(ids[k]));
      __builtin_prefetch(homes[0][k]);
    }
  }
  for (int64_t block = 0; block < blocks; ++block) {
    const Bucket** now = homes[block & 1];
    if (block + 1 < blocks) {
      const Bucket** then = homes[(block + 1) & 1];
      const int64_t* ahead = ids + (block + 1) * kBlock;
      for (int k = 0; k < kBlock; ++k) {
        then[k] = home_of(index, slot_hash(ahead[k]));
        __builtin_prefetch(then[k]);
      }
    }
    for (int k = 0; k < kBlock; ++k)
      rows[block * kBlock + k] = find_at(index, now[k], ids[block * kBlock + k]);
  }
  for (int64_t i = blocks * kBlock; i < n; ++i)
    rows[i] = find_at(index, home_of(index, slot_hash(ids[i])), ids[i]);
}
