// The gradient of pooling rows in contiguous memory: adds the gradient of each occurrence to its row.

template <class T>
static inline void add_to(T* sum, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store8(sum + i, load8(sum + i) + load8(x + i));
  for (; i < n; ++i) sum[i] = sum[i] + x[i];
}

// One bag's gradient for an occurrence of this weight: the sum of its parts in their order.
template <class T>
static inline void bag_gradient(const BagsOf<T>& bags, int64_t bag, const T* weight, int first,
                                int last, T* out) {
  for (int c = first; c < last; ++c) out[c] = T(0);
  for (int p = 0; p < bags.num_parts; ++p) {
    const PartOf<T>& part = bags.parts[p];
    const T* g = part_address(part, bag);
    for (int c = part.start; c < part.end; ++c) {
      T x = g[c - part.start];
      if (bags.divisor) x = x / bags.divisor[bag];
      if (weight) x = x * *weight;
      out[c] = out[c] + x;
    }
  }
}

// Adds x[0 .. n) to memory from element `at` on, limited to elements in [low, high).
template <class T>
static inline void add_within(T* memory, int64_t at, const T* x, int64_t n, int64_t low, int64_t high) {
  const int64_t from = at < low ? low : at, to = at + n > high ? high : at + n;
  if (from < to) add_to(memory + from, x + (from - at), to - from);
}

// The gradients of bags [first_bag, last_bag), each `width` columns from column `first` on.
template <class T>
static void bag_gradients(const BagsOf<T>& bags, int64_t first_bag, int64_t last_bag, int first,
                          int width, T* out) {
  for (int64_t c = 0; c < (last_bag - first_bag) * width; ++c) out[c] = T(0);
  for (int p = 0; p < bags.num_parts; ++p) {
    const PartOf<T> part = bags.parts[p];
    const int n = part.end - part.start;
    T* to = out + part.start - first;
    for (int64_t bag = first_bag; bag < last_bag; ++bag, to += width) {
      const T* g = part_address(part, bag);
      if (!bags.divisor) {
        add_to(to, g, n);
        continue;
      }
      const T d = bags.divisor[bag];
      int c = 0;
      for (; c + 8 <= n; c += 8) store8(to + c, load8(to + c) + load8(g + c) / d);
      for (; c < n; ++c) to[c] = to[c] + g[c] / d;
    }
  }
}

// Adds each occurrence's gradient to its row, occurrences in order; elements outside
// [low, high) belong to other tasks. `scratch` holds kGradientBags rows.
template <class T>
static void unpool_flat(const FlatRows<T>& rows, const BagsOf<T>& bags, int64_t low, int64_t high,
                        T* scratch) {
  constexpr int64_t kAhead = 24;
  int first, last;
  columns_read(bags, &first, &last);
  if (first >= last) return;
  const int width = last - first;
  const bool direct = bags.num_parts == 1 && !bags.divisor && !bags.weights;
  const int64_t end = bags.offsets[bags.num_bags];
  const auto at = [&](int64_t i) { return (rows.index ? rows.index[i] : i) * rows.stride; };
  const auto mine = [&](int64_t row) { return row >= 0 && row + first < high && row + last > low; };
  int64_t i = bags.offsets[0];
  for (int64_t bag = 0; bag < bags.num_bags;) {
    const int64_t begin = bag;
    const int64_t stop_bag = begin + kGradientBags < bags.num_bags ? begin + kGradientBags : bags.num_bags;
    for (int64_t b = stop_bag; b < stop_bag + kGradientBags && b < bags.num_bags; ++b)
      for (int p = 0; p < bags.num_parts; ++p) MEGALITH_FETCH(part_address(bags.parts[p], b));
    bool any = false;
    for (int64_t k = i; k < bags.offsets[stop_bag]; ++k) any |= mine(at(k));
    if (!any) {
      i = bags.offsets[bag = stop_bag];
      continue;
    }
    if (!direct && !bags.weights) bag_gradients(bags, begin, stop_bag, first, width, scratch);
    for (; bag < stop_bag; ++bag) {
      const T* gradient = direct ? part_address(bags.parts[0], bag) : scratch + (bag - begin) * width;
      for (const int64_t stop = bags.offsets[bag + 1]; i < stop; ++i) {
        if (rows.index && i + kAhead < end && rows.index[i + kAhead] >= 0) {
          T* p = rows.data + rows.index[i + kAhead] * rows.stride + first;
          MEGALITH_FETCH(p);
          MEGALITH_FETCH(p + width - 1);
        }
        const int64_t row = at(i);
        if (!mine(row)) continue;
        if (bags.weights) {
          bag_gradient(bags, bag, bags.weights + i, first, last, scratch);
          add_within(rows.data, row + first, scratch + first, width, low, high);
        } else {
          add_within(rows.data, row + first, gradient, width, low, high);
        }
      }
    }
  }
}
