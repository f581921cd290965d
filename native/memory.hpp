// Zeroed blocks of memory from the operating system, on huge pages if enabled.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

#include <sys/mman.h>

// For member functions that only prefetch: GCC treats such a function as one without side effects and removes calls to
// it, unless it was inlined before.
#define MEGALITH_PREFETCHES __attribute__((always_inline)) inline

namespace megalith {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

// Process-wide option. Huge pages make random access in large tables 1.5 to 3 times faster, but make the first write
// of a page slower on some virtual machines.
inline std::atomic<bool>& use_huge_pages() {
  static std::atomic<bool> on{true};
  return on;
}

// Requests huge pages for memory that is about to be written for the first time; only complete pages inside the
// range.
inline void prefer_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t from = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t to = (begin + bytes) / kHugePage * kHugePage;
  if (from < to && use_huge_pages()) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

// Owns a zeroed, page-aligned mapping. A page uses memory after its first write.
class Block {
 public:
  Block() = default;
  explicit Block(size_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage) {
    if (bytes_ == 0) return;
    // Large blocks start at a huge page boundary: map more, then unmap the rest.
    const size_t slack = bytes_ >= kHugePage ? kHugePage : 0;
    void* mapped =
        mmap(nullptr, bytes_ + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(mapped);
    if (slack) {
      const size_t head = -reinterpret_cast<uintptr_t>(mapped) % kHugePage;
      if (head) munmap(data_, head);
      data_ += head;
      if (slack > head) munmap(data_ + bytes_, slack - head);
    }
  }
  Block(Block&& other) noexcept { swap(other); }
  Block& operator=(Block&& other) noexcept {
    swap(other);
    return *this;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (data_) munmap(data_, bytes_);
  }

  // Requests huge pages for the block.
  void prefer_huge_pages() {
#if defined(__linux__)
    if (data_ && bytes_ >= kHugePage && use_huge_pages()) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  }

  // Frees the memory of a range, which reads as zeros afterwards. Only complete huge pages inside the range are
  // freed. Returns the end of the freed range.
  size_t release(size_t from, size_t to) {
#if defined(__linux__)
    from = (from + kHugePage - 1) / kHugePage * kHugePage;
    to = to / kHugePage * kHugePage;
    if (data_ && from < to) {
      madvise(data_ + from, to - from, MADV_DONTNEED);
      return to;
    }
#else
    (void)to;
#endif
    return from;
  }

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void swap(Block& other) noexcept {
    char* d = data_;
    data_ = other.data_;
    other.data_ = d;
    size_t b = bytes_;
    bytes_ = other.bytes_;
    other.bytes_ = b;
  }

  char* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace megalith
