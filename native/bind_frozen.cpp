// The Python side of frozen.hpp: rows of an exported file.

#include <nanobind/nanobind.h>

#include "bind.hpp"
#include "frozen.hpp"

namespace megalith {
namespace {

int bits_of(int64_t buckets) {
  int bits = 0;
  while (bits < 40 && (int64_t{1} << bits) + 1 < buckets) ++bits;
  require((int64_t{1} << bits) + 1 == buckets, "buckets: their number must be a power of two, and one more");
  return bits;
}

Stored stored_as(int64_t item_bytes) {
  require(item_bytes == 4 || item_bytes == 2 || item_bytes == 1, "rows: float32, float16 or int8");
  return item_bytes == 4 ? Stored::float32 : item_bytes == 2 ? Stored::float16 : Stored::int8;
}

// `buckets` must have passed `frozen_fits`: checking all of them here would cost more than a look-up.
int64_t frozen_read(handle ids, handle buckets, handle rows, handle steps, handle queries, handle skip,
                    handle out) {
  TensorView i = borrow(ids, Kind::int64, "ids"), b = borrow(buckets, Kind::int64, "buckets"),
             r = borrow(rows, Kind::any, "rows"), s = borrow(steps, Kind::float32, "steps"),
             q = borrow(queries, Kind::int64, "queries"), o = borrow(out, Kind::float32, "out");
  require(i.ndim == 1 && b.ndim == 1 && q.ndim == 1 && s.ndim == 1, "ids, buckets, queries, steps: [n]");
  require(r.ndim == 2 && r.shape[0] == i.shape[0] && s.shape[0] == r.shape[1], "rows: [ids, steps]");
  require(o.ndim == 2 && o.shape[0] == q.shape[0] && o.shape[1] == r.shape[1], "out: [queries, dim]");
  const uint8_t* skipped = nullptr;
  if (!skip.is_none()) {
    TensorView k = borrow(skip, Kind::uint8, "skip");
    require(k.ndim == 1 && k.shape[0] == q.shape[0], "skip: [queries]");
    skipped = k.as<uint8_t>();
  }
  const FrozenRows frozen{i.as<int64_t>(), b.as<int64_t>(),       r.data, s.as<float>(), r.shape[1],
                          bits_of(b.shape[0]), stored_as(r.item_bytes)};
  nb::gil_scoped_release release;
  return frozen.read(q.as<int64_t>(), q.shape[0], skipped, o.as<float>());
}

bool frozen_fits(handle buckets, int64_t n) {
  TensorView b = borrow(buckets, Kind::int64, "buckets");
  require(b.ndim == 1 && b.shape[0] >= 2, "buckets: [2 or more]");
  bits_of(b.shape[0]);
  nb::gil_scoped_release release;
  return buckets_fit(b.as<int64_t>(), b.shape[0], n);
}

}  // namespace

void bind_frozen(nb::module_& m) {
  m.def("frozen_read", frozen_read, nb::arg("ids"), nb::arg("buckets"), nb::arg("rows"), nb::arg("steps"),
        nb::arg("queries"), nb::arg("skip").none(), nb::arg("out"));
  m.def("frozen_fits", frozen_fits);
}

}  // namespace megalith
