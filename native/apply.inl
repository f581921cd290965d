// The second half of an update: sums the entries of one part of the table (a range of rows) into one gradient
// per distinct row, in input order, and makes one optimizer step per row.

// Adds the gradient of one occurrence to the sum of its row, or writes it if it is the first one.
struct GradientReader {
  const GradientView& gradient;
  int dim;
  int view = 0;         // sources are in ascending order, so the feature number only increases
  bool simple;          // one feature with one part that covers the whole row
  const float* base;
  int64_t stride;
  const float* divisor;

  GradientReader(const GradientView& g, int d) : gradient(g), dim(d) {
    simple = true;
    base = g.flat;
    stride = g.flat_stride;
    divisor = nullptr;
    if (g.bags) {
      const BagsView& b = g.bags[0];
      simple = g.num_bags_views == 1 && b.num_parts == 1 && b.parts[0].inner == 1 &&
               b.parts[0].end - b.parts[0].start == d;
      if (simple) {
        base = b.parts[0].data + b.parts[0].column;
        stride = b.parts[0].stride;
        divisor = b.divisor;
      }
    }
  }

  __attribute__((always_inline)) void prefetch(uint32_t source) const {
    if (!simple) return;
    const char* p = reinterpret_cast<const char*>(base + stride * source);
    for (int byte = 0; byte < dim * 4; byte += 64) MEGALITH_FETCH(p + byte);
    if (reinterpret_cast<uintptr_t>(p) & 63) MEGALITH_FETCH(p + dim * 4 - 1);
  }

  static void add(float* sum, const float* g, int n, float weight, float divide, bool first) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
      Vec8 x = load8(g + i);
      if (divide != 1.0f) x = x / divide;
      if (weight != 1.0f) x = x * weight;
      store8(sum + i, first ? x : load8(sum + i) + x);
    }
    for (; i < n; ++i) {
      float x = g[i];
      if (divide != 1.0f) x = x / divide;
      if (weight != 1.0f) x = x * weight;
      sum[i] = first ? x : sum[i] + x;
    }
  }

  // `occurrence` holds the sum of the parts of one occurrence before it is added to the sum of its row.
  void gather(uint32_t source, float weight, float* sum, bool first, float* occurrence) {
    if (simple) {
      add(sum, base + stride * source, dim, weight, divisor ? divisor[source] : 1.0f, first);
      return;
    }
    while (source >= static_cast<uint64_t>(gradient.bag_base[view + 1])) ++view;
    const BagsView& bags = gradient.bags[view];
    const int64_t bag = static_cast<int64_t>(source) - gradient.bag_base[view];
    __builtin_memset(occurrence, 0, sizeof(float) * dim);
    for (int p = 0; p < bags.num_parts; ++p) {
      const PartView& part = bags.parts[p];
      add(occurrence + part.start, part_address(part, bag), part.end - part.start, weight,
          bags.divisor ? bags.divisor[bag] : 1.0f, false);
    }
    add(sum, occurrence, dim, 1.0f, 1.0f, first);
  }
};

template <int Dim>
static void add_simple(float* sum, const float* g, bool first) {
  for (int i = 0; i < Dim; i += 8)
    store8(sum + i, first ? load8(g + i) : load8(sum + i) + load8(g + i));
}

// Sums gradients per distinct row; returns the number of distinct rows.
template <int Dim>
static int64_t sum_by_row(const ApplyView& view, const Entry* entries, const float* weights,
                          int64_t n, const ApplyScratch& scratch) {
  constexpr int64_t kAhead = 24;
  const int dim = Dim ? Dim : view.table.dim;
  const uint32_t mask = (1u << view.rows_per_part_shift) - 1;
  GradientReader reader(view.gradient, dim);
  int64_t distinct = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) reader.prefetch(entries[i + kAhead].source);
    const Entry entry = entries[i];
    uint32_t& slot = scratch.slots[static_cast<uint32_t>(entry.row) & mask];
    const bool first = slot == 0;
    if (first) {
      scratch.unique[distinct] = entry.row;
      slot = static_cast<uint32_t>(++distinct);
    }
    float* sum = scratch.sums + static_cast<int64_t>(slot - 1) * dim;
    if (Dim && !weights)
      add_simple<Dim>(sum, reader.base + reader.stride * entry.source, first);
    else
      reader.gather(entry.source, weights ? weights[i] : 1.0f, sum, first, scratch.occurrence);
  }
  return distinct;
}

// Prefetches the cache lines of n floats that will be written.
MEGALITH_PREFETCHER request(const float* p, int n) {
  for (int i = 0; i < n; i += 16) MEGALITH_FETCH(p + i);
  if (n > 0 && (reinterpret_cast<uintptr_t>(p) & 63)) MEGALITH_FETCH(p + n - 1);
}

static void apply(const ApplyView& view, const Entry* entries, const float* weights, int64_t n,
                  const ApplyScratch& scratch) {
  constexpr int64_t kAhead = 16;
  const TableView& table = view.table;
  const int dim = table.dim;
  const GradientReader reader(view.gradient, dim);
  const bool plain = reader.simple && !reader.divisor && !weights;
  int64_t distinct;
  if (plain && dim == 8) distinct = sum_by_row<8>(view, entries, weights, n, scratch);
  else if (plain && dim == 16) distinct = sum_by_row<16>(view, entries, weights, n, scratch);
  else if (plain && dim == 32) distinct = sum_by_row<32>(view, entries, weights, n, scratch);
  else if (plain && dim == 64) distinct = sum_by_row<64>(view, entries, weights, n, scratch);
  else distinct = sum_by_row<0>(view, entries, weights, n, scratch);

  const uint32_t mask = (1u << view.rows_per_part_shift) - 1;
  const uint32_t in_chunk = (1u << table.rows.shift) - 1;
  const float scale = view.gradient.scale;
  const bool wide = stored_wide(table);
  bool drawn = false;
  for (int k = 0; k < table.num_runs; ++k) drawn |= table.runs[k].stochastic;
  const StepFunction only = table.num_segments == 1 ? step_function(table.segments[0]) : nullptr;
  for (int64_t u = 0; u < distinct; ++u) {
    if (u + kAhead < distinct) {
      const int32_t ahead = scratch.unique[u + kAhead];
      request(reinterpret_cast<const float*>(weights_at(table.rows, ahead)), static_cast<int>(table.rows.weight_bytes / 4));
      if (drawn) MEGALITH_FETCH(id_at(table.rows, ahead));
      for (int c = 0; c < view.num_touched; ++c)
        MEGALITH_FETCH(view.touched[c][ahead >> table.rows.shift] + (ahead & in_chunk) / 64);
      request(state_at(table.rows, ahead), static_cast<int>(table.rows.state_bytes / 4) + (table.rows.counted ? 3 : 1));
    }
    const int32_t row = scratch.unique[u];
    float* gradient = scratch.sums + u * dim;
    if (scale != 1.0f)
      for (int i = 0; i < dim; ++i) gradient[i] = gradient[i] * scale;
    if (view.gradient.clip_norm > 0.0f) {
      const float norm = root(sum_of_squares(gradient, gradient, 0.0f, dim));
      if (norm > view.gradient.clip_norm) {
        const float shrink = view.gradient.clip_norm / norm;
        for (int i = 0; i < dim; ++i) gradient[i] = gradient[i] * shrink;
      }
    }
    char* stored = weights_at(table.rows, row);
    float* weights_here = wide ? reinterpret_cast<float*>(stored) : scratch.weights;
    if (!wide) widen(table.runs, table.num_runs, stored, weights_here);
    float* state = state_at(table.rows, row);
    if (only) {
      only(table.segments[0], view.steps[0], weights_here, state, gradient);
    } else {
      for (int k = 0; k < table.num_segments; ++k) {
        const SegmentPlan& s = table.segments[k];
        step_function(s)(s, view.steps[k], weights_here + s.offset, state + s.state_offset,
                         gradient + s.offset);
      }
    }
    if (drawn)
      store_step(table, weights_here, *id_at(table.rows, row), view.rounding_step, stored);
    else if (!wide)
      narrow(table.runs, table.num_runs, weights_here, stored);
    uint32_t* marks = time_behind(table.rows, state);
    marks[0] = view.time;
    if (table.rows.counted) {
      marks[1] += marks[1] != UINT32_MAX;
      marks[2] = view.step;
    }
    // A part has whole words of 64 rows, so no other thread writes to the word of this row.
    for (int c = 0; c < view.num_touched; ++c) touch_row(view.touched[c], table.rows.shift, row);
    scratch.slots[static_cast<uint32_t>(row) & mask] = 0;
  }
}
