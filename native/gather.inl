// Copies whole rows by index, and adds rows back by index (the gradient of the copy).

template <int Bytes>
static void gather_fixed(const char* source, const int64_t* index, int64_t n, int64_t stride, char* out) {
  constexpr int64_t kAhead = 32;
  for (int64_t i = 0; i < n; ++i, out += Bytes) {
    if (i + kAhead < n) {
      const char* p = source + index[i + kAhead] * stride;
      for (int b = 0; b < Bytes; b += 64) MEGALITH_FETCH(p + b);
      MEGALITH_FETCH(p + Bytes - 1);
    }
    __builtin_memcpy(out, source + index[i] * stride, Bytes);
  }
}

// Copies `width` bytes from `index[i] * stride` to row i of out.
static void gather(const char* source, const int64_t* index, int64_t n, int64_t stride, int64_t width,
                   char* out) {
  constexpr int64_t kAhead = 16;
  switch (width) {
    case 0: return;
    case 4: return gather_fixed<4>(source, index, n, stride, out);
    case 8: return gather_fixed<8>(source, index, n, stride, out);
    case 16: return gather_fixed<16>(source, index, n, stride, out);
    case 32: return gather_fixed<32>(source, index, n, stride, out);
    case 64: return gather_fixed<64>(source, index, n, stride, out);
    case 128: return gather_fixed<128>(source, index, n, stride, out);
    case 256: return gather_fixed<256>(source, index, n, stride, out);
    default: break;
  }
  for (int64_t i = 0; i < n; ++i, out += width) {
    if (i + kAhead < n) {
      const char* p = source + index[i + kAhead] * stride;
      for (int64_t b = 0; b < width; b += 64) MEGALITH_FETCH(p + b);
    }
    __builtin_memcpy(out, source + index[i] * stride, static_cast<size_t>(width));
  }
}

// Adds row i to the `width` elements from index[i] * stride on, those within [low, high).
template <class T>
static void scatter(const T* rows, const int64_t* index, int64_t n, int64_t stride, int64_t width,
                    int64_t low, int64_t high, T* out) {
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < n; ++i, rows += width) {
    if (i + kAhead < n) {
      const T* p = out + index[i + kAhead] * stride;
      MEGALITH_FETCH(p);
      if (width > 1) MEGALITH_FETCH(p + width - 1);
    }
    add_within(out, index[i] * stride, rows, width, low, high);
  }
}
