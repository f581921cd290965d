// The Python side of frozen.hpp: rows of an exported file.

#include <nanobind/nanobind.h>

#include <vector>

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

std::vector<StoredPart> parts_of(const TensorView& parts) {
  require(parts.ndim == 2 && parts.shape[1] == 2 && parts.shape[0] >= 1, "parts: [n, 2]");
  std::vector<StoredPart> found;
  for (int64_t p = 0; p < parts.shape[0]; ++p) {
    const int64_t kind = parts.as<int64_t>()[2 * p], dim = parts.as<int64_t>()[2 * p + 1];
    require(kind >= 0 && kind < kStoredKinds && dim >= 1 && dim <= int64_t{1} << 30, "parts: (kind, dim)");
    found.push_back({static_cast<Stored>(kind), dim});
  }
  return found;
}

// `buckets` must have passed `frozen_fits`: checking all of them here would cost more than a look-up.
// parts: int64 [n, 2], kind (a number of Stored) and columns of each part of a row.
int64_t frozen_read(handle ids, handle buckets, handle rows, handle parts, handle steps, handle queries,
                    handle skip, handle out) {
  TensorView i = borrow(ids, Kind::int64, "ids"), b = borrow(buckets, Kind::int64, "buckets"),
             r = borrow(rows, Kind::any, "rows"), p = borrow(parts, Kind::int64, "parts"),
             s = borrow(steps, Kind::float32, "steps"), q = borrow(queries, Kind::int64, "queries"),
             o = borrow(out, Kind::float32, "out");
  require(i.ndim == 1 && b.ndim == 1 && q.ndim == 1 && s.ndim == 1, "ids, buckets, queries, steps: [n]");
  const std::vector<StoredPart> stored = parts_of(p);
  int64_t dim = 0, row_bytes = 0;
  for (const StoredPart& part : stored) dim += part.dim, row_bytes += part.bytes();
  require(r.ndim == 2 && r.shape[0] == i.shape[0] && r.shape[1] * r.item_bytes == row_bytes,
          "rows: [ids, bytes of the parts]");
  require(s.shape[0] == dim, "steps: one for each column of the parts");
  require(o.ndim == 2 && o.shape[0] == q.shape[0] && o.shape[1] == dim, "out: [queries, dim]");
  const uint8_t* skipped = nullptr;
  if (!skip.is_none()) {
    TensorView k = borrow(skip, Kind::uint8, "skip");
    require(k.ndim == 1 && k.shape[0] == q.shape[0], "skip: [queries]");
    skipped = k.as<uint8_t>();
  }
  const FrozenRows frozen{i.as<int64_t>(), i.shape[0], b.as<int64_t>(), r.data,   stored.data(),
                          p.shape[0],      s.as<float>(), dim,          row_bytes, bits_of(b.shape[0])};
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
  m.def("frozen_read", frozen_read, nb::arg("ids"), nb::arg("buckets"), nb::arg("rows"), nb::arg("parts"),
        nb::arg("steps"), nb::arg("queries"), nb::arg("skip").none(), nb::arg("out"));
  m.def("frozen_fits", frozen_fits);
}

}  // namespace megalith
