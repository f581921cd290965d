// Runs of elements that move as a whole: rows of a ragged column, chunks of a buffer, packed offsets.
#pragma once

#include <cstdint>
#include <cstring>

namespace megalith {

// The chosen rows one after the other; `out` has room for them.
inline void take_rows(const char* values, int64_t item, const int64_t* splits, const int64_t* rows,
                      int64_t n, char* out) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t begin = splits[rows[i]], bytes = (splits[rows[i] + 1] - begin) * item;
    if (bytes) std::memcpy(out, values + begin * item, static_cast<size_t>(bytes));
    out += bytes;
  }
}

// Adds `widths[i]` elements from `from[i]` of the source to those from `to[i]` of out, in order.
template <class T>
inline void move_runs(const T* source, const int64_t* from, const int64_t* to, const int64_t* widths,
                      int64_t n, T* out) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < widths[i]; ++c) out[to[i] + c] += source[from[i] + c];
}

// Monolith's packed offsets (a list's number in the high half, an element of it in the low half)
// as elements, counted from where the lists' begins and ends are counted from. Occurrences
// [first, last) read `width` elements each. Returns the first that leads out of its list, or -1.
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

// The same for lists that are joined: list k is elements [bases[k], bases[k + 1]). Occurrences of feature f
// end at ends[f] and read widths[f] elements.
inline int64_t locate(const int64_t* packed, const int64_t* bases, int64_t lists, const int64_t* ends,
                      const int64_t* widths, int64_t features, int64_t* out) {
  int64_t first = 0, bad = -1;
  for (int64_t f = 0; f < features && bad < 0; first = ends[f++])
    bad = locate_range(packed, first, ends[f], bases, bases + 1, lists, widths[f], out);
  return bad;
}

}  // namespace megalith
