// The hot loops, compiled once per instruction set: kernels_portable.cpp for any CPU, kernels_avx2.cpp and
// kernels_avx512.cpp for CPUs that have these. `find_kernels` selects one at run time.
//
// All produce the same bits: sums over the weights of a row have eight lanes in every build, and nothing is reassociated
// or contracted.
#pragma once

#include <cstdint>

#include "views.hpp"

namespace megalith {

// The input of an update, without its entries. `bags` is null if there is one gradient per occurrence.
struct GradientView {
  const float* flat;       // [n, dim] if bags is null
  int64_t flat_stride;     // floats from one row of `flat` to the next
  const BagsView* bags;
  int32_t num_bags_views;
  const int64_t* bag_base;  // first global bag of each view, num_bags_views + 1 long
  float scale;
  float clip_norm;  // largest L2 norm of a row's gradient after scaling; 0: no limit
};

// What the step of one segment depends on besides the row and its gradient.
struct SegmentStep {
  float lr;
  float correction;  // bias correction by the global step; 1 for optimizers without one
  int64_t step;      // the global step, from 0
};

struct ApplyView {
  TableView table;
  GradientView gradient;
  const SegmentStep* steps;     // one per segment
  uint32_t time;
  uint32_t step;
  uint64_t rounding_step;       // the global step, for the draws of stochastic rounding
  uint64_t* const* touched[kMaxConsumers];  // touched rows of each consumer
  int32_t num_touched;          // number of consumers
  uint32_t rows_per_part_shift;
};

// The memory of one worker. `slots` is zero on entry and on return.
struct ApplyScratch {
  uint32_t* slots;   // [1 << rows_per_part_shift]
  int32_t* unique;   // [largest number of distinct rows of a part]
  float* sums;       // [largest number of distinct rows of a part, dim]
  float* occurrence;  // [dim]
  float* weights;     // [dim], for rows that are not stored as float32
};

constexpr int64_t kGradientBags = 16;  // rows of scratch memory that `unpool` needs

// Kernels on rows in one contiguous buffer, for one floating-point type.
template <class T>
struct FlatKernels {
  void (*pool)(const FlatRows<T>&, const BagsOf<T>&, int64_t first_bag, int64_t last_bag);
  void (*unpool)(const FlatRows<T>&, const BagsOf<T>&, int64_t low, int64_t high, T* scratch);
  void (*scatter)(const T* rows, const int64_t* index, int64_t n, int64_t stride, int64_t width,
                  int64_t low, int64_t high, T* out);
};

struct Kernels {
  const char* name;
  int (*state_size)(const SegmentPlan&);  // number of floats that the optimizer needs; -1: any
  void (*find)(const IndexView&, const int64_t* ids, int64_t n, int32_t* rows);
  // `scratch`: memory for the weights of one row.
  void (*initialize)(const TableView&, const int32_t* rows, const int64_t* ids, int64_t n, float* scratch);
  void (*read)(const TableView&, const int32_t* rows, const int64_t* ids, int64_t n, float* out, float* scratch);
  // The table has one precision.
  void (*pool)(const TableView&, const int32_t* rows, const int64_t* ids, const BagsView&,
               int64_t first_bag, int64_t last_bag, float* scratch);
  void (*apply)(const ApplyView&, const Entry* entries, const float* weights, int64_t n,
                const ApplyScratch&);
  // Weights from and to storage, to the nearest value.
  void (*widen)(const WeightRun* runs, int32_t num_runs, const char* stored, float* weights);
  void (*narrow)(const WeightRun* runs, int32_t num_runs, const float* weights, char* stored);
  bool (*all_finite)(const float* values, int64_t rows, int64_t columns, int64_t stride);
  void (*gather)(const char* source, const int64_t* index, int64_t n, int64_t stride, int64_t width,
                 char* out);
  FlatKernels<float> flat32;
  FlatKernels<double> flat64;
};

extern const Kernels kernels_portable;
#if defined(MEGALITH_HAVE_AVX2)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

constexpr const char* kKernelNames[] = {"avx512", "avx2", "portable"};  // the best first
constexpr const char* kKernelsVariable = "MEGALITH_KERNELS";

// Returns the named kernels, null if this CPU or build does not have them. Without a name: the kernels that the
// environment variable MEGALITH_KERNELS names (throws invalid_argument if there are none), otherwise the best.
const Kernels* find_kernels(const char* name);

}  // namespace megalith
