// Copies of runs of elements: rows of a ragged column, chunks of a buffer; packed offsets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace megalith {

// Computes where each of the chosen rows begins when they are concatenated: new_splits [n + 1]. Returns the
// number of values.
inline int64_t take_splits(const int64_t* splits, const int64_t* rows, int64_t n, int64_t* new_splits) {
  int64_t total = new_splits[0] = 0;
  for (int64_t i = 0; i < n; ++i) new_splits[i + 1] = total += splits[rows[i] + 1] - splits[rows[i]];
  return total;
}

// The bounds of the memory of `take_rows`: the number of values, and the new splits.
struct TakeRoom {
  int64_t size;
  const int64_t* new_splits;
};

template <class Item>
inline bool take_items(const Item* values, const int64_t* splits, const int64_t* rows, int64_t n, Item* out,
                       const TakeRoom* room) {
  constexpr int64_t kAhead = 16, kShort = 8;
  const int64_t* to = room ? room->new_splits : nullptr;
  // Short rows are copied at full length while there is room after them in both buffers: the next row
  // overwrites the excess, and no branch depends on a length.
  const int64_t last_from = room ? room->size - kShort : -1;
  const Item* last_out = room && to[n] - to[0] >= kShort ? out + (to[n] - to[0] - kShort) : nullptr;
  for (int64_t i = 0; i < n; ++i) {
    if (i + 2 * kAhead < n) __builtin_prefetch(splits + rows[i + 2 * kAhead]);
    if (i + kAhead < n) {
      const Item* later = values + splits[rows[i + kAhead]];
      __builtin_prefetch(later);
      __builtin_prefetch(later + kShort - 1);
    }
    const int64_t begin = splits[rows[i]], count = splits[rows[i] + 1] - begin;
    if (to && to[i + 1] - to[i] != count) return false;
    if (count <= kShort && begin <= last_from && last_out && out <= last_out)
      std::memcpy(out, values + begin, kShort * sizeof(Item));
    else if (count > 0)
      std::memcpy(out, values + begin, static_cast<size_t>(count) * sizeof(Item));
    out += count;
  }
  return true;
}

// Concatenates the chosen rows into `out`, which is large enough. With `room` it is faster, and it stops and
// returns false at a row whose length differs from the new splits.
inline bool take_rows(const char* values, int64_t item, const int64_t* splits, const int64_t* rows,
                      int64_t n, char* out, const TakeRoom* room = nullptr) {
  const auto as = [&](auto one) {
    using Item = decltype(one);
    return take_items(reinterpret_cast<const Item*>(values), splits, rows, n, reinterpret_cast<Item*>(out),
                      room);
  };
  switch (item) {
    case 8: return as(int64_t{});
    case 4: return as(int32_t{});
    case 2: return as(int16_t{});
    case 1: return as(int8_t{});
    default: break;
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = splits[rows[i]], count = splits[rows[i] + 1] - begin;
    if (room && room->new_splits[i + 1] - room->new_splits[i] != count) return false;
    if (count) std::memcpy(out, values + begin * item, static_cast<size_t>(count * item));
    out += count * item;
  }
  return true;
}

// Writes memory from front to back. Output larger than the cache bypasses it: a cache line that is
// written completely need not be read first.
class Writer {
 public:
  Writer(char* out, int64_t total, int64_t unit) : out_(out) {
#if defined(__SSE2__)
    past_ = total >= kLarge && unit % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0;
#else
    (void)total, (void)unit;
#endif
  }
  ~Writer() {
#if defined(__SSE2__)
    if (past_) _mm_sfence();
#endif
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  void copy(const char* from, int64_t bytes) {
#if defined(__SSE2__)
    if (past_) {
      for (int64_t b = 0; b < bytes; b += 16)
        stream(b, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + b)));
      out_ += bytes;
      return;
    }
#endif
    if (bytes) std::memcpy(out_, from, static_cast<size_t>(bytes));
    out_ += bytes;
  }

  void zeros(int64_t bytes) {
#if defined(__SSE2__)
    if (past_) {
      for (int64_t b = 0; b < bytes; b += 16) stream(b, _mm_setzero_si128());
      out_ += bytes;
      return;
    }
#endif
    if (bytes) std::memset(out_, 0, static_cast<size_t>(bytes));
    out_ += bytes;
  }

 private:
  static constexpr int64_t kLarge = int64_t{16} << 20;
#if defined(__SSE2__)
  void stream(int64_t at, __m128i x) { _mm_stream_si128(reinterpret_cast<__m128i*>(out_ + at), x); }
  bool past_ = false;
#endif
  char* out_;
};

// Cuts or pads each split to `length` rows; missing rows are zeros. `total` is the size of out.
inline void pad_rows(const char* rows, int64_t bytes, const int64_t* splits, int64_t first, int64_t last,
                     int64_t length, char* out, int64_t total = 0) {
  Writer to(out + first * length * bytes, total, bytes);
  for (int64_t r = first; r < last; ++r) {
    const int64_t count = std::min(splits[r + 1] - splits[r], length);
    to.copy(rows + splits[r] * bytes, count * bytes);
    to.zeros((length - count) * bytes);
  }
}

// The reverse of pad_rows: rows beyond `length` become zeros.
inline void unpad_rows(const char* padded, int64_t bytes, const int64_t* splits, int64_t first, int64_t last,
                       int64_t length, char* out, int64_t total = 0) {
  Writer to(out + splits[first] * bytes, total, bytes);
  for (int64_t r = first; r < last; ++r) {
    const int64_t all = splits[r + 1] - splits[r], count = std::min(all, length);
    to.copy(padded + r * length * bytes, count * bytes);
    to.zeros((all - count) * bytes);
  }
}

template <int Bytes>
inline void place_fixed(const char* rows, const int64_t* place, int64_t n, char* out) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(out + place[i] * Bytes, rows + i * Bytes, Bytes);
}

// Copies row i, of `bytes` bytes, to row place[i] of out.
inline void place_rows(const char* rows, const int64_t* place, int64_t n, int64_t bytes, char* out) {
  switch (bytes) {
    case 0: return;
    case 4: return place_fixed<4>(rows, place, n, out);
    case 8: return place_fixed<8>(rows, place, n, out);
    default: break;
  }
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(out + place[i] * bytes, rows + i * bytes, static_cast<size_t>(bytes));
}

// Copies blocks that are stored by peer, then table, in the order by table, then peer. The blocks of peer p begin at
// begins[p]; block (p, t) has counts[p, t] items of widths[t] bytes.
inline void join_blocks(const char* from, const int64_t* begins, const int64_t* counts, const int64_t* widths,
                        int64_t peers, int64_t tables, char* out) {
  std::vector<const char*> at(static_cast<size_t>(peers));
  for (int64_t p = 0; p < peers; ++p) at[static_cast<size_t>(p)] = from + begins[p];
  for (int64_t t = 0; t < tables; ++t)
    for (int64_t p = 0; p < peers; ++p) {
      const size_t bytes = static_cast<size_t>(counts[p * tables + t] * widths[t]);
      if (bytes == 0) continue;
      std::memcpy(out, at[static_cast<size_t>(p)], bytes);
      at[static_cast<size_t>(p)] += bytes, out += bytes;
    }
}

// Adds `widths[i]` elements at `from[i]` of the source to those at `to[i]` of out, in order.
template <class T>
inline void move_runs(const T* source, const int64_t* from, const int64_t* to, const int64_t* widths,
                      int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < widths[i]; ++c) out[to[i] + c] += source[from[i] + c];
}

// Converts Monolith's packed offsets (the list in the high half, an element of it in the low half) to
// elements, relative to the same origin as `begins` and `ends`. Occurrences [first, last) read `width`
// elements each. Returns the first occurrence outside its list, or -1.
inline int64_t locate_range(const int64_t* packed, int64_t first, int64_t last, const int64_t* begins,
                            const int64_t* ends, int64_t lists, int64_t width, int64_t* out) {
  for (int64_t i = first; i < last; ++i) {
    const uint64_t p = static_cast<uint64_t>(packed[i]);
    const uint64_t list = p >> 32, element = p & 0xffffffffu;
    if (list >= static_cast<uint64_t>(lists)) return i;
    const int64_t at = begins[list] + static_cast<int64_t>(element);
    if (at + width > ends[list]) return i;
    out[i] = at;
  }
  return -1;
}

// The same for concatenated lists: list k is elements [bases[k], bases[k + 1]). Occurrences of feature f
// end at ends[f] and read widths[f] elements.
inline int64_t locate(const int64_t* packed, const int64_t* bases, int64_t lists, const int64_t* ends,
                      const int64_t* widths, int64_t features, int64_t* out) {
  int64_t first = 0, bad = -1;
  for (int64_t f = 0; f < features && bad < 0; first = ends[f++])
    bad = locate_range(packed, first, ends[f], bases, bases + 1, lists, widths[f], out);
  return bad;
}

}  // namespace megalith
