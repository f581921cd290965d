// Memory for messages that is used again: the first write of a new page costs more than to fill it.
//
// A pool hands out buffers and gets them back when they are no longer used, in any order and from any thread; a buffer
// may live longer than the pool. A few free buffers are kept, the others are returned to the operating system.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace megalith {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  static constexpr size_t kMaxFree = 8;

  // Huge pages suit a pool that lives long: on some virtual machines their first write takes 30 times as long.
  explicit BufferPool(bool huge_pages = true) : huge_pages_(huge_pages) {}

  // A buffer in use. Its memory is not initialized.
  class Buffer {
   public:
    Buffer(Block block, std::shared_ptr<BufferPool> pool) : block_(std::move(block)), pool_(std::move(pool)) {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { pool_->take_back(std::move(block_)); }
    char* data() const { return block_.data(); }

   private:
    Block block_;
    std::shared_ptr<BufferPool> pool_;
  };

  // Returns the smallest free buffer that is large enough and at most twice as large, or a new one.
  std::unique_ptr<Buffer> get(size_t bytes) {
    Block block;
    {
      const Turn turn(*this);
      size_t best = free_.size();
      for (size_t i = 0; turn.own && i < free_.size(); ++i) {
        const size_t size = free_[i].bytes();
        if (size >= bytes && size <= 2 * bytes + kHugePage && (best == free_.size() || size < free_[best].bytes()))
          best = i;
      }
      if (best < free_.size()) {
        block = std::move(free_[best]);
        free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(best));
      }
    }
    if (!block.data()) {
      // Some room, because the sizes of messages vary.
      block = Block(bytes + bytes / 8);
      if (huge_pages_) block.prefer_huge_pages();
    }
    return std::make_unique<Buffer>(std::move(block), shared_from_this());
  }

  size_t num_free() {
    const Turn turn(*this);
    return free_.size();
  }

 private:
  // A child of fork() does not take turns: the mutex may be locked by a thread that it does not have.
  struct Turn {
    explicit Turn(BufferPool& pool) : own(getpid() == pool.pid_) {
      if (own) hold = std::unique_lock<std::mutex>(pool.mutex_);
    }
    const bool own;
    std::unique_lock<std::mutex> hold;
  };

  void take_back(Block block) noexcept {
    Block oldest;  // freed without the lock
    const Turn turn(*this);
    if (!turn.own) return;
    if (free_.size() >= kMaxFree) {
      oldest = std::move(free_.front());
      free_.erase(free_.begin());
    }
    free_.push_back(std::move(block));  // within the capacity
  }

  static std::vector<Block> with_room() {
    std::vector<Block> blocks;
    blocks.reserve(kMaxFree);
    return blocks;
  }

  const bool huge_pages_;
  const pid_t pid_ = getpid();
  std::mutex mutex_;
  std::vector<Block> free_ = with_room();
};

}  // namespace megalith
