// Table: writes of rows that an optimizer outside of the table has computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "table.hpp"

namespace megalith {

// Admits and creates rows like an update of the first `reached` ids of `u`, which are distinct, then writes complete
// rows to them: `from` has one for each id that has a row then, in the order of the ids. A capacity does not remove the
// rows of the ids after them. Readers see all of it or nothing.
inline void Table::write_rows(const Update& u, int64_t reached, const RowColumns& from, int64_t rows_given,
                              int threads) {
  std::unique_lock<ForkSafeLock> hold(lock_);
  Lease lease;
  Scratch& scratch = *lease;
  int32_t* rows;
  int64_t missing, created;
  for (;; wait_for_reader(hold)) {
    rows = scratch.rows.get(u.n);
    find_rows(u.ids, u.n, rows, threads);
    if (!save_rows(rows, reached)) continue;
    int32_t* where = scratch.missing.get(u.n);
    missing = 0;
    for (int64_t i = 0; i < reached; ++i)
      if (rows[i] < 0) where[missing++] = static_cast<int32_t>(i);
    created = prepare_missing(u.ids, u.n, rows, missing, scratch, &u, threads);
    if (save_rows(victims_.data(), static_cast<int64_t>(victims_.size()))) break;
  }
  if (std::count_if(rows, rows + reached, [](int32_t row) { return row >= 0; }) != rows_given)
    throw std::logic_error("table '" + options_.name + "' changed between the read and the write of a step");
  evict_victims();
  create_missing(rows, missing, created, scratch, threads, Initial::nothing);
  latest_step_ = std::max(latest_step_, saturated(u.step));
  int64_t at = 0;
  for (int64_t i = 0; i < reached; ++i) {
    if (rows[i] < 0) continue;  // refused
    rows_.copy_in(rows[i], from, at++);
    if (rows_.counted()) {
      rows_.count_of(rows[i]) += rows_.count_of(rows[i]) != UINT32_MAX;
      rows_.step_of(rows[i]) = saturated(u.step);
    }
    written(rows[i], u.time);
  }
}

}  // namespace megalith
