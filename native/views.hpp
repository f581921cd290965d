// The plain data that kernels use: no classes, no ownership, no standard containers.
#pragma once

#include <cstdint>

namespace megalith {

// Requests a cache line that is used 16 to 100 requests later, into the second-level cache. It waits for more lines at a
// time than the first level, so that random lines come up to twice as fast (measured on Zen 4), and a line in it is
// a few nanoseconds away. A macro, because GCC drops calls of functions that only prefetch.
#if !defined(MEGALITH_FETCH)
#define MEGALITH_FETCH(p) __builtin_prefetch(p, 0, 2)
#endif

// One cache line of the index: five ids, their rows, and `meta`: the number of used slots (low 3 bits) and the number
// of ids that passed this bucket because it was full (the other bits). Used slots come first.
struct alignas(64) Bucket {
  int64_t keys[5];
  int32_t rows[5];
  uint32_t meta;
};

constexpr uint32_t kBucketSlots = 5;
constexpr uint32_t kCountMask = 7;
constexpr uint32_t kPassedOne = 8;

// While the index grows, ids whose home in `buckets` is below `cursor` are in `next`.
struct IndexView {
  const Bucket* buckets;
  uint64_t count;
  const Bucket* next;
  uint64_t next_count;
  uint64_t cursor;
};

// Touched rows of a consumer, in chunks of 1 << shift rows: a bit per row in words of 64, then a bit per word. If a word
// has bits, its own bit is set.
constexpr int kMaxConsumers = 8;

static inline uint64_t touched_words(uint32_t shift) {
  const uint64_t words = (uint64_t{1} << shift) / 64;
  return words + (words + 63) / 64;
}

// Marks a row as touched. Several threads may do so at the same time for rows of different words.
static inline void touch_row(uint64_t* const* chunks, uint32_t shift, int32_t row) {
  const uint32_t r = static_cast<uint32_t>(row), word = (r & ((1u << shift) - 1)) / 64;
  uint64_t* chunk = chunks[r >> shift];
  if (chunk[word] == 0) {
    uint64_t* above = chunk + (uint64_t{1} << shift) / 64 + word / 64;
    const uint64_t bit = uint64_t{1} << (word % 64);
    if (!(__atomic_load_n(above, __ATOMIC_RELAXED) & bit)) __atomic_fetch_or(above, bit, __ATOMIC_RELAXED);
  }
  chunk[word] |= uint64_t{1} << (r % 64);
}

// How a weight is stored.
enum class Precision : int32_t { float32, float16, bfloat16 };

enum class InitKind : int32_t { constant, uniform, normal, truncated_normal };

constexpr int kMaxHyper = 8;

// A segment of a row. Offsets and sizes are in floats, from the first weight and from the first float of state of the
// row.
struct SegmentPlan {
  int32_t dim;
  int32_t offset;
  int32_t state_offset;
  int32_t state_size;
  int32_t optimizer;  // position in the list of optimizers
  int32_t base;       // the optimizer that this one wraps, or -1
  InitKind init;
  float init_a;
  float init_b;
  Precision precision;
  bool stochastic;  // how a step rounds to the precision; everything else rounds to nearest
  float hyper[kMaxHyper];
  const float* initial_state;  // [state_size]
};

// Adjacent weights of a row with the same precision and rounding. `byte` counts from the first weight of the row.
struct WeightRun {
  int32_t first;
  int32_t count;
  int32_t byte;
  Precision precision;
  bool stochastic;
};

struct RowsView {
  char* const* weights;      // chunks of 1 << shift rows
  char* const* states;       // of the same rows, each followed by its time; may be interleaved with weights
  uint32_t shift;
  uint32_t stride;           // bytes from the weights of a row to those of the next
  uint32_t state_stride;
  uint32_t state_bytes;
  int64_t* const* ids;
  uint32_t weight_bytes;     // of one row
  bool counted;              // whether the count and the step of the last update follow the time
};

struct TableView {
  RowsView rows;
  const SegmentPlan* segments;
  int32_t num_segments;
  const WeightRun* runs;     // a table of one precision has its weights without gaps
  int32_t num_runs;
  bool one_precision;        // of all segments; runs[0] has it
  int32_t dim;               // number of weights of a row
  uint64_t key;              // derived from the seed and the table's name
  bool missing_zeros;
};

// Where a slice of the pooled rows of a feature goes: output row `bag / inner`, columns from
// `column + (bag % inner) * step`. `data` is the output in a read and the gradient of the output in an update. The
// rows of a shared feature apply to the whole batch: the output repeats them `tiles` times.
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
  int32_t bags_in_row = 1;  // more than 1: `inner` is 1, because the bags of an output row follow each other like rows
};
using PartView = PartOf<float>;

// Bag b holds the occurrences offsets[b] .. offsets[b + 1] - 1.
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

// Rows in one contiguous buffer: occurrence i reads from element index[i] * stride on, or zeros if the index is
// negative. Without an index it reads row i.
template <class T>
struct FlatRows {
  T* data;
  const int64_t* index;
  int64_t stride;
};

// One occurrence whose gradient is added to the sum of its row. `source` is the number of its bag among the bags of all
// features of the table, or the occurrence itself without pooling.
struct Entry {
  int32_t row;
  uint32_t source;
};

// The weights of a row, stored as the runs of the table say.
static inline char* weights_at(const RowsView& rows, int32_t row) {
  const uint32_t r = static_cast<uint32_t>(row), in_chunk = r & ((1u << rows.shift) - 1);
  return rows.weights[r >> rows.shift] + uint64_t{in_chunk} * rows.stride;
}

static inline const int64_t* id_at(const RowsView& rows, int32_t row) {
  const uint32_t r = static_cast<uint32_t>(row);
  return rows.ids[r >> rows.shift] + (r & ((1u << rows.shift) - 1));
}

// The optimizer state of a row. The time of the last update, in seconds, follows it.
static inline float* state_at(const RowsView& rows, int32_t row) {
  const uint32_t r = static_cast<uint32_t>(row), in_chunk = r & ((1u << rows.shift) - 1);
  return reinterpret_cast<float*>(rows.states[r >> rows.shift] +
                                  uint64_t{in_chunk} * rows.state_stride);
}

// The time, and in a counted table the number of updates and the step of the last one.
static inline uint32_t* time_behind(const RowsView& rows, float* state) {
  return reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(state) + rows.state_bytes);
}

}  // namespace megalith
