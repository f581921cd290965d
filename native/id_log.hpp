// The most recent ids of a kind of event, such as evictions, until the user fetches them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace megalith {

class IdLog {
 public:
  static constexpr int64_t kMost = int64_t{1} << 20;

  // `most`: number of ids that it keeps, at least 1.
  explicit IdLog(int64_t most = kMost) : most_(static_cast<size_t>(most)) {}

  int64_t lost() const { return lost_; }  // number of ids that newer ones replaced
  size_t bytes() const { return ids_.capacity() * sizeof(int64_t); }

  // Makes room for `more` ids, so that `add` cannot fail.
  void prepare(int64_t more) {
    const size_t wanted = std::min(most_, ids_.size() + static_cast<size_t>(more));
    if (wanted > ids_.capacity()) ids_.reserve(std::min(most_, std::max(wanted, 2 * ids_.capacity())));
  }

  void add(int64_t id) {
    if (ids_.size() < most_) {
      ids_.push_back(id);
      return;
    }
    ids_[first_] = id;
    first_ = (first_ + 1) % most_;
    ++lost_;
  }

  // Returns the ids from the oldest to the newest and empties the log.
  std::vector<int64_t> take() {
    std::rotate(ids_.begin(), ids_.begin() + static_cast<std::ptrdiff_t>(first_), ids_.end());
    first_ = 0;
    std::vector<int64_t> taken;
    taken.swap(ids_);
    return taken;
  }

 private:
  size_t most_;
  std::vector<int64_t> ids_;
  size_t first_ = 0;
  int64_t lost_ = 0;
};

}  // namespace megalith
