// The plain data that kernels see: no classes, no ownership, no standard containers.
#pragma once

#include <cstdint>

namespace megalith {

// One cache line of the index: five ids, their rows, and in `meta` the number of
// used slots (low 3 bits) and the number of ids that found this bucket full and
// moved on (the rest). Used slots come first.
struct alignas(64) Bucket {
  int64_t keys[5];
  int32_t rows[5];
  uint32_t meta;
};

constexpr uint32_t kBucketSlots = 5;
constexpr uint32_t kCountMask = 7;
constexpr uint32_t kPassedOne = 8;

// While the index grows, ids whose home in `buckets` lies below `cursor` live in `next`.
struct IndexView {
  const Bucket* buckets;
  uint64_t count;
  const Bucket* next;
  uint64_t next_count;
  uint64_t cursor;
};

enum class InitKind : int32_t { constant, uniform, normal, truncated_normal };

constexpr int kMaxHyper = 6;

// A segment of a row. Offsets and sizes are in floats, from the row's first weight and from
// its first float of state.
struct SegmentPlan {
  int32_t dim;
  int32_t offset;
  int32_t state_offset;
  int32_t state_size;
  int32_t optimizer;  // index into the optimizers' table of names
  InitKind init;
  float init_a;
  float init_b;
  float hyper[kMaxHyper];
};

struct RowsView {
  char* const* weights;      // of 1 << shift rows each
  char* const* states;       // of the same rows, each followed by its time; may lie between the weights
  uint8_t* const* flags;     // touched bits, null when nobody tracks
  uint32_t shift;
  uint32_t stride;           // bytes from row to row, of weights
  uint32_t state_stride;
  uint32_t state_bytes;
};

struct TableView {
  RowsView rows;
  const SegmentPlan* segments;
  int32_t num_segments;
  int32_t dim;               // weights of a row, all segments
  uint64_t key;              // of (seed, table name)
  bool missing_zeros;
};

// Where a slice of a feature's pooled rows goes: output row `bag / inner`, columns
// from `column + (bag % inner) * step`. `data` is the output in a read
// and the output's gradient in an update. A shared feature's rows stand for the whole
// batch: the output repeats them `tiles` times.
template <class T>
struct PartOf {
  T* data;
  int64_t stride;
  int64_t column;
  int32_t start;
  int32_t end;
  int32_t inner;
  bool accumulate;
  int64_t step;
  int64_t tiles;
};
using PartView = PartOf<float>;

// The occurrences offsets[b] .. offsets[b + 1] - 1 form bag b.
template <class T>
struct BagsOf {
  const int64_t* offsets;
  int64_t num_bags;
  const T* weights;   // one per occurrence of the table, or null
  const T* divisor;   // one per bag, or null
  const PartOf<T>* parts;
  int32_t num_parts;
  bool shared;
};
using BagsView = BagsOf<float>;

// Rows in one piece of memory: occurrence i reads from element index[i] * stride on, or zeros
// where the index is negative. Without an index it reads row i.
template <class T>
struct FlatRows {
  T* data;
  const int64_t* index;
  int64_t stride;
};

// One occurrence on its way to its row's gradient sum: `source` counts the bags of
// all features of the table (or is the occurrence itself when nothing is pooled).
struct Entry {
  int32_t row;
  uint32_t source;
};

static inline float* weights_at(const RowsView& rows, int32_t row) {
  const uint32_t r = static_cast<uint32_t>(row), in_chunk = r & ((1u << rows.shift) - 1);
  return reinterpret_cast<float*>(rows.weights[r >> rows.shift] + uint64_t{in_chunk} * rows.stride);
}

// A row's optimizer state. The time of its last update, in seconds, stands behind it.
static inline float* state_at(const RowsView& rows, int32_t row) {
  const uint32_t r = static_cast<uint32_t>(row), in_chunk = r & ((1u << rows.shift) - 1);
  return reinterpret_cast<float*>(rows.states[r >> rows.shift] +
                                  uint64_t{in_chunk} * rows.state_stride);
}

static inline uint32_t* time_behind(const RowsView& rows, float* state) {
  return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(state) + rows.state_bytes);
}

}  // namespace megalith
