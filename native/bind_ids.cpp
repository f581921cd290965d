// Python bindings of the ops on ids: owners, dedup, matching, bucketize, hashing of strings.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <limits>

#include "bind.hpp"
#include "bind_checks.hpp"
#include "dedup.hpp"
#include "strings.hpp"

namespace megalith {
namespace {

Route make_route(nb::handle rule) {
  nb::tuple t = nb::cast<nb::tuple>(rule);
  require(t.size() == 4, "route: bad rule");
  const int64_t mode = nb::cast<int64_t>(t[0]), owners = nb::cast<int64_t>(t[1]);
  const int64_t block = nb::cast<int64_t>(t[2]), first = nb::cast<int64_t>(t[3]);
  require(mode >= 0 && mode <= 2 && owners >= 1 && owners < int64_t{1} << 31 && first >= 0 && first <= 1,
          "route: bad mode or number of owners");
  require(mode != 0 || (block >= 1 && block <= std::numeric_limits<int64_t>::max() / owners),
          "route: bad block");
  return Route(static_cast<RouteMode>(mode), static_cast<uint64_t>(owners),
               static_cast<uint64_t>(block), static_cast<int32_t>(first));
}

// `rule` is (mode, owners, block, first) or an int32 owner per occurrence.
Owners make_owners(nb::handle rule, int64_t n, int64_t shards, const std::string& name) {
  if (nb::isinstance<nb::tuple>(rule)) {
    const Route route = make_route(rule);
    require(shards >= nb::cast<int64_t>(nb::cast<nb::tuple>(rule)[1]) + route.first, "route: too few shards");
    return {route, nullptr};
  }
  const int32_t* given = borrow_rows(rule, n);
  require(given != nullptr || n == 0, "owners: missing");
  check_range(given, n, 0, shards, name);
  return {Route(RouteMode::roundrobin, 1, 0, 0), given};
}

}  // namespace

void bind_ids(nb::module_& m) {
  m.def("route",
        [](handle ids, handle rule, handle owners, int threads) {
          const Ids i = borrow_ids(ids);
          int32_t* out = const_cast<int32_t*>(borrow_rows(owners, i.n));
          const Route r = make_route(rule);
          nb::gil_scoped_release release;
          in_chunks(i.n, 1 << 15, threads,
                    [&](int64_t at, int64_t n) { route(i.data + at, n, r, out + at); });
        },
        nb::arg("ids"), nb::arg("rule"), nb::arg("owners"), nb::arg("threads"));

  m.def("dedup",
        [](handle ids, handle splits, handle owners, int64_t shards, bool distinct, handle index,
           handle first, handle unique, handle counts, handle widths, handle offsets,
           const std::string& name, int threads) {
          const Ids i = borrow_ids(ids);
          const Ids s = borrow_splits(splits, "splits", i.n);
          require(shards >= 1 && shards < int64_t{1} << 31, "shards: out of range");
          const Owners o = make_owners(owners, i.n, shards, name);
          const Deduped out{borrow_int64(index, "index", i.n), borrow_int64(first, "first", i.n),
                            borrow_int64(unique, "unique", i.n),
                            borrow_int64(counts, "counts", shards * s.n),
                            offsets.is_none() ? nullptr : borrow_int64(offsets, "offsets", i.n),
                            widths.is_none() ? nullptr : borrow_int64(widths, "widths", s.n)};
          require(offsets.is_none() == widths.is_none(), "widths: missing");
          nb::gil_scoped_release release;
          return dedup(i.data, s.data, s.n, o, shards, distinct, out, threads);
        },
        nb::arg("ids"), nb::arg("splits"), nb::arg("owners"), nb::arg("shards"), nb::arg("distinct"),
        nb::arg("index"), nb::arg("first"), nb::arg("unique"), nb::arg("counts"),
        nb::arg("widths").none(), nb::arg("offsets").none(), nb::arg("name"), nb::arg("threads"));

  m.def("match",
        [](handle keys, handle queries, handle out, int threads) {
          const Ids k = borrow_ids(keys), q = borrow_ids(queries);
          int64_t* o = borrow_int64(out, "out", q.n);
          nb::gil_scoped_release release;
          match(k.data, k.n, q.data, q.n, o, threads);
        });

  m.def("bucketize",
        [](handle ids, handle splits, handle owners, int64_t shards, handle lengths, handle place,
           const std::string& name, int threads) {
          TensorView p = borrow(place, Kind::int64, "place");
          require(p.ndim == 1, "place: expected one dimension");
          const int64_t n = p.shape[0];
          const int64_t* i = ids.is_none() ? nullptr : borrow_int64(ids, "ids", n);
          require(!ids.is_none() || !nb::isinstance<nb::tuple>(owners), "ids: missing");
          const Ids s = borrow_splits(splits, "row_splits", n);
          require(shards >= 1 && shards < int64_t{1} << 31, "shards: out of range");
          const Owners o = make_owners(owners, n, shards, name);
          int64_t* l = borrow_int64(lengths, "lengths", shards * s.n);
          nb::gil_scoped_release release;
          bucketize(i, s.data, s.n, o, shards, l, p.as<int64_t>(), threads);
        },
        nb::arg("ids").none(), nb::arg("splits"), nb::arg("owners"), nb::arg("shards"),
        nb::arg("lengths"), nb::arg("place"), nb::arg("name"), nb::arg("threads"));

  m.def("hash_strings",
        [](nb::bytes data, handle offsets, uint64_t seed, handle out, int threads) {
          TensorView o = borrow(out, Kind::int64, "out");
          require(o.ndim == 1, "out: expected one dimension");
          const int64_t n = o.shape[0];
          const int64_t* at = borrow_int64(offsets, "offsets", n + 1);
          bool good = at[0] >= 0 && at[n] <= static_cast<int64_t>(data.size());
          for (int64_t i = 0; i < n; ++i) good &= at[i] <= at[i + 1];
          require(good, "offsets: must ascend within the data");
          const char* bytes = data.c_str();
          nb::gil_scoped_release release;
          in_chunks(n, 1 << 13, threads, [&](int64_t first, int64_t count) {
            hash_strings(bytes, at + first, count, seed, o.as<int64_t>() + first);
          });
        });
}

}  // namespace megalith
