// An all-to-all among the processes of one host, through shared memory. Linux only.
//
// Each rank owns a file and is the only writer of it; the other ranks map it read-only. An exchange runs in rounds:
//
//   1. write    a rank writes a slice of every part into one half of its own file
//   2. publish  it publishes the number of the round and wakes the ranks that sleep on it
//   3. read     it copies the slices for it from every peer that has published the round
//
// A file has two halves that alternate, so no rank waits for its readers: a rank that has published round k - 1 has
// read all of round k - 2, and round k - 1 waited for that, so the old content of the half of round k is not needed.
// Small halves stay in the cache, and an exchange of any size needs no more shared memory.
//
// Disk blocks are reserved when a file is created and are kept, so that neither a full disk nor a dead peer causes a
// bus error. The content of a peer's file is validated before it is used.
//
// States: made -> connect() -> connected -> close() -> closed. A failed exchange or a timeout leads to broken, from
// which only close() is possible.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace megalith {

// The state of a mailbox does not allow the call.
struct MailboxMisuse : std::logic_error {
  using std::logic_error::logic_error;
};

// A system call on a file failed.
struct FileError : std::runtime_error {
  FileError(int code, const std::string& what, const std::string& path)
      : std::runtime_error(what + ": " + std::strerror(code)), code(code), path(path) {}
  int code;
  std::string path;
};

namespace mailbox {

constexpr uint64_t kMagic = 0x6d656761626f7831;
constexpr uint32_t kVersion = 1;
constexpr int kMaxRanks = 4096;
constexpr uint64_t kHalfBytes = 2 << 20;
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kLine = 64;  // bytes of a cache line
static_assert(kHalfBytes > 2 * kLine * kMaxRanks, "slices begin on a line");
constexpr uint32_t kBefore = static_cast<uint32_t>(-100);  // so that the counter wraps early, not after weeks
constexpr std::chrono::milliseconds kSlice{100};           // sleep between checks of the clock and of signals
// How long to spin for a peer before sleeping. A wake-up takes tens of microseconds on an idle machine; on a busy
// machine the peer may need this CPU. Yielding the CPU without sleeping does not help: other processes keep it for
// milliseconds.
constexpr std::chrono::nanoseconds kLeastSpin{300};
constexpr std::chrono::microseconds kMostSpin{50};

struct Header {
  uint64_t magic;
  uint32_t version, ranks, rank;
  alignas(kLine) std::atomic<uint32_t> published;  // the last published round; other ranks sleep on it
  alignas(kLine) std::atomic<uint32_t> awaited;    // 1 + the rank that this rank sleeps on, or 0
  alignas(kLine) std::atomic<uint64_t> rounds[2];  // by half: rounds that this rank needs for the exchange
};

// The slice of a half for one rank. The header is followed by two tables of them, by half and rank.
struct Slice {
  std::atomic<uint64_t> total;         // bytes of the whole part
  std::atomic<uint32_t> begin, bytes;  // in the half
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);
static_assert(sizeof(Header) == 4 * kLine && sizeof(Slice) == 16 && sizeof(std::atomic<uint32_t>) == 4);

inline uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

inline uint64_t head_bytes(int ranks) {
  return round_up(sizeof(Header) + 2 * sizeof(Slice) * static_cast<uint64_t>(ranks), kPageBytes);
}

inline uint64_t file_bytes(int ranks) { return head_bytes(ranks) + 2 * kHalfBytes; }

inline long futex(const std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* time) {
  return syscall(SYS_futex, &word, operation, value, time, nullptr, 0);
}

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class File {
 public:
  File(const std::string& path, int flags) : number(::open(path.c_str(), flags | O_CLOEXEC, 0600)) {
    if (number < 0) throw FileError(errno, "cannot open a mailbox", path);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() { ::close(number); }

  const int number;
};

// The mapped file of one rank.
class Outbox {
 public:
  Outbox() = default;
  Outbox(const File& file, const std::string& path, int ranks, int access)
      : path_(path), ranks_(ranks) {
    void* mapped = mmap(nullptr, file_bytes(ranks), access, MAP_SHARED, file.number, 0);
    if (mapped == MAP_FAILED) throw FileError(errno, "cannot map a mailbox", path);
    data_ = static_cast<char*>(mapped);
  }
  Outbox(Outbox&& other) noexcept { *this = std::move(other); }
  Outbox& operator=(Outbox&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(ranks_, other.ranks_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Outbox() {
    if (data_) munmap(data_, file_bytes(ranks_));
  }

  const std::string& path() const { return path_; }
  Header& header() const { return *reinterpret_cast<Header*>(data_); }
  Slice& slice(uint32_t half, int rank) const {
    return reinterpret_cast<Slice*>(data_ + sizeof(Header))[half * static_cast<uint32_t>(ranks_) +
                                                            static_cast<uint32_t>(rank)];
  }
  char* half(uint32_t half) const { return data_ + head_bytes(ranks_) + half * kHalfBytes; }

 private:
  std::string path_;
  int ranks_ = 0;
  char* data_ = nullptr;
};

}  // namespace mailbox

class Mailbox {
 public:
  using Sizes = std::vector<int64_t>;

  // Creates the file, which must not exist.
  Mailbox(const std::string& path, int64_t rank, int64_t size) : path_(path), pid_(getpid()) {
    if (size < 1 || size > mailbox::kMaxRanks || rank < 0 || rank >= size)
      throw std::invalid_argument("mailbox: rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                  ": expected 0 <= rank < size <= " + std::to_string(mailbox::kMaxRanks));
    rank_ = static_cast<int>(rank), size_ = static_cast<int>(size);
    const mailbox::File file(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW);
    linked_ = true;
    try {
      reserve(file);
      own_ = mailbox::Outbox(file, path, size_, PROT_READ | PROT_WRITE);
    } catch (...) {
      remove();
      throw;
    }
    mailbox::Header& header = *new (&own_.header()) mailbox::Header{};
    header.version = mailbox::kVersion;
    header.ranks = static_cast<uint32_t>(size_), header.rank = static_cast<uint32_t>(rank_);
    header.published = number_;
    header.magic = mailbox::kMagic;
  }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;
  ~Mailbox() {
    if (getpid() == pid_) remove();
  }

  // Maps the files of all ranks, in rank order, including its own.
  void connect(const std::vector<std::string>& paths) {
    const Turn turn(*this);
    if (state_ != State::made) reject_call(state_ == State::closed ? "it is closed" : "it is already connected");
    check_count(paths.size(), "paths");
    std::vector<mailbox::Outbox> peers;
    for (int r = 0; r < size_; ++r) peers.push_back(open_peer(r, paths[static_cast<size_t>(r)]));
    peers_ = std::move(peers);
    state_ = State::ready;
  }

  // Sends part r of `send` to rank r, and receives part r of `recv` from rank r. Returns the ranks that did not
  // publish for `timeout` seconds; after that, and after an exception about another rank, the mailbox is broken.
  // Long waits regularly call `interrupted` with the ranks that they wait for; if it returns true, they end at once.
  template <class Interrupted>
  std::vector<int> exchange(const char* send, const Sizes& send_sizes, char* recv, const Sizes& recv_sizes,
                            double timeout, Interrupted&& interrupted) {
    const Turn turn(*this);
    if (state_ == State::made) reject_call("call connect() first");
    if (state_ == State::closed) reject_call("it is closed");
    if (state_ == State::broken) reject_call("an exchange failed or timed out; make new mailboxes on all ranks");
    const Clock::duration patience = duration(timeout);
    check_count(send_sizes.size(), "send_sizes");
    check_count(recv_sizes.size(), "recv_sizes");
    uint64_t rounds = plan(send, send_sizes, recv, recv_sizes);
    const uint64_t own_rounds = rounds;
    state_ = State::broken;  // until the exchange has succeeded
    for (uint64_t round = 0; round < rounds; ++round) {
      ++number_;
      write(round, own_rounds);
      publish();
      if (round == 0) copy_own();
      std::vector<int> missing = receive(rounds, Clock::now() + patience, interrupted);
      if (!missing.empty()) return missing;
    }
    for (const Incoming& in : incoming_)
      if (in.left > 0) reject_peer(in.rank, "damaged: its slices do not add up to the part");
    state_ = State::ready;
    return {};
  }

  // Unlinks the file; call it when all ranks are connected.
  void unlink() {
    const Turn turn(*this);
    remove();
  }

  void close() {
    const Turn turn(*this);
    remove();
    peers_.clear();
    own_ = mailbox::Outbox();
    state_ = State::closed;
  }

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { made, ready, broken, closed };

  struct Outgoing {
    const char* from;
    uint64_t bytes, step;  // size of the part, and bytes per round
  };
  struct Incoming {
    int rank;
    char* to;
    uint64_t bytes, left;
  };

  // Allows one call at a time, and none in a forked child.
  class Turn {
   public:
    explicit Turn(Mailbox& box) : box_(box) {
      if (getpid() != box.pid_) box.reject_call("it belongs to the process that forked this one; make another");
      if (box.busy_.exchange(true)) box.reject_call("another thread is using it");
    }
    ~Turn() { box_.busy_ = false; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Mailbox& box_;
  };

  [[noreturn]] void reject_call(const std::string& why) const {
    throw MailboxMisuse("mailbox " + path_ + " of rank " + std::to_string(rank_) + ": " + why);
  }

  [[noreturn]] static void reject_peer(int rank, const std::string& path, const std::string& why) {
    throw std::invalid_argument("mailbox " + path + " of rank " + std::to_string(rank) + ": " + why);
  }
  [[noreturn]] void reject_peer(int rank, const std::string& why) const {
    reject_peer(rank, peers_[static_cast<size_t>(rank)].path(), why);
  }

  [[noreturn]] void refuse_size(int from, uint64_t sent, uint64_t expected) const {
    throw std::invalid_argument("rank " + std::to_string(from) + " sent " + std::to_string(sent) +
                                " bytes to rank " + std::to_string(rank_) + ", which expected " +
                                std::to_string(expected));
  }

  void check_count(size_t count, const char* name) const {
    if (count != static_cast<size_t>(size_))
      throw std::invalid_argument(std::string(name) + ": expected one per rank, " + std::to_string(size_) +
                                  ", got " + std::to_string(count));
  }

  static Clock::duration duration(double seconds) {
    if (!(seconds >= 0))
      throw std::invalid_argument("timeout: expected at least 0 seconds, got " + std::to_string(seconds));
    constexpr double kLongest = 1e9;
    return std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(std::min(seconds, kLongest)));
  }

  void remove() {
    if (std::exchange(linked_, false)) ::unlink(path_.c_str());
  }

  void reserve(const mailbox::File& file) const {
    int error;
    do {
      error = posix_fallocate(file.number, 0, static_cast<off_t>(mailbox::file_bytes(size_)));
    } while (error == EINTR);
    if (error)
      throw FileError(error, "cannot reserve " + std::to_string(mailbox::file_bytes(size_)) +
                                 " bytes for a mailbox", path_);
  }

  // ---- writing

  // Lists the parts; returns the number of rounds that this rank needs to send its parts.
  uint64_t plan(const char* send, const Sizes& send_sizes, char* recv, const Sizes& recv_sizes) {
    outgoing_.clear(), incoming_.clear();
    uint64_t total = 0;
    for (int r = 0; r < size_; ++r) {
      const int64_t out = send_sizes[static_cast<size_t>(r)], in = recv_sizes[static_cast<size_t>(r)];
      if (out < 0 || in < 0)
        throw std::invalid_argument("sizes: negative for rank " + std::to_string(r));
      const uint64_t sent = static_cast<uint64_t>(out), expected = static_cast<uint64_t>(in);
      if (r == rank_ && sent != expected) refuse_size(r, sent, expected);
      outgoing_.push_back({send, sent, 0});
      incoming_.push_back({r, recv, expected, expected});
      send += sent, recv += expected;
      if (r != rank_) total += sent;
    }
    // Ranks start with different peers, so that they do not all wait for the same one.
    std::rotate(incoming_.begin(), incoming_.begin() + rank_ + 1, incoming_.end());
    own_to_ = incoming_.back().to;
    incoming_.pop_back();
    const uint64_t room = mailbox::kHalfBytes - mailbox::kLine * static_cast<uint64_t>(size_);
    const uint64_t rounds = std::max<uint64_t>(1, (total + room - 1) / room);
    for (Outgoing& out : outgoing_)
      out.step = mailbox::round_up((out.bytes + rounds - 1) / rounds, mailbox::kLine);
    return rounds;
  }

  void copy_own() const {
    const Outgoing& own = outgoing_[static_cast<size_t>(rank_)];
    if (own.bytes > 0) std::memcpy(own_to_, own.from, own.bytes);
  }

  void write(uint64_t round, uint64_t rounds) {
    const uint32_t half = number_ % 2;
    own_.header().rounds[half].store(rounds, std::memory_order_relaxed);
    uint64_t at = 0;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Outgoing& out = outgoing_[static_cast<size_t>(r)];
      const uint64_t begin = round < rounds ? std::min(out.bytes, round * out.step) : out.bytes;
      const uint64_t bytes = std::min(out.step, out.bytes - begin);
      mailbox::Slice& slice = own_.slice(half, r);
      slice.total.store(out.bytes, std::memory_order_relaxed);
      slice.begin.store(static_cast<uint32_t>(at), std::memory_order_relaxed);
      slice.bytes.store(static_cast<uint32_t>(bytes), std::memory_order_relaxed);
      if (bytes > 0) std::memcpy(own_.half(half) + at, out.from + begin, bytes);
      at += mailbox::round_up(bytes, mailbox::kLine);
    }
  }

  // Either this rank sees that a peer sleeps on it, or the peer sees the new number before it sleeps: the stores and
  // loads of both are sequentially consistent.
  void publish() {
    std::atomic<uint32_t>& published = own_.header().published;
    published.store(number_);
    for (const Incoming& in : incoming_)
      if (header_of(in.rank).awaited == static_cast<uint32_t>(rank_) + 1) {
        mailbox::futex(published, FUTEX_WAKE, INT_MAX, nullptr);
        return;
      }
  }

  // ---- reading

  mailbox::Outbox open_peer(int rank, const std::string& path) const {
    // Does not block if the file is a pipe.
    const mailbox::File file(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
    struct stat found;
    if (fstat(file.number, &found) != 0) throw FileError(errno, "cannot stat a mailbox", path);
    if (!S_ISREG(found.st_mode) || found.st_size != static_cast<off_t>(mailbox::file_bytes(size_)))
      reject_peer(rank, path, "not a mailbox of " + std::to_string(size_) + " ranks");
    if (found.st_uid != geteuid()) reject_peer(rank, path, "it belongs to another user");
    mailbox::Outbox peer(file, path, size_, PROT_READ);
    const mailbox::Header& header = peer.header();
    if (header.magic != mailbox::kMagic) reject_peer(rank, path, "not a mailbox: wrong magic number");
    check_equal(rank, path, "version", header.version, mailbox::kVersion);
    check_equal(rank, path, "number of ranks", header.ranks, static_cast<uint32_t>(size_));
    check_equal(rank, path, "rank", header.rank, static_cast<uint32_t>(rank));
    return peer;
  }

  static void check_equal(int rank, const std::string& path, const char* what, uint32_t found,
                          uint32_t expected) {
    if (found != expected)
      reject_peer(rank, path, std::string("its ") + what + " is " + std::to_string(found) + ", expected " +
                               std::to_string(expected));
  }

  const mailbox::Header& header_of(int rank) const { return peers_[static_cast<size_t>(rank)].header(); }

  // One round: copies slices in order of arrival, and waits if there is none. Raises `rounds` if a peer needs more.
  template <class Interrupted>
  std::vector<int> receive(uint64_t& rounds, Clock::time_point deadline, Interrupted& interrupted) {
    auto waiting = incoming_.end();  // the end of the slices not copied yet
    bool over = false;               // then check once more: this process may have slept longer than requested
    while (waiting != incoming_.begin()) {
      const auto before = waiting;
      waiting = std::partition(incoming_.begin(), before, [&](Incoming& in) { return !take(in, rounds); });
      if (waiting != before) continue;
      if (over) break;
      if (!await(incoming_[0].rank, deadline)) over = Clock::now() >= deadline || interrupted(ranks_until(waiting));
    }
    return ranks_until(waiting);
  }

  std::vector<int> ranks_until(std::vector<Incoming>::const_iterator end) const {
    std::vector<int> ranks;
    for (auto in = incoming_.begin(); in != end; ++in) ranks.push_back(in->rank);
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  // Copies the slice of a peer if it has been published.
  bool take(Incoming& in, uint64_t& rounds) {
    const mailbox::Outbox& peer = peers_[static_cast<size_t>(in.rank)];
    const uint32_t ahead = peer.header().published.load(std::memory_order_acquire) - number_;
    if (ahead == static_cast<uint32_t>(-1)) return false;
    // A peer is never two rounds ahead: it waits for this rank in every round.
    if (ahead > 1) reject_peer(in.rank, "damaged: an impossible round");
    const uint32_t half = number_ % 2;
    const mailbox::Slice& slice = peer.slice(half, rank_);
    const uint64_t total = slice.total.load(std::memory_order_relaxed);
    const uint32_t begin = slice.begin.load(std::memory_order_relaxed);
    const uint32_t bytes = slice.bytes.load(std::memory_order_relaxed);
    if (total != in.bytes) refuse_size(in.rank, total, in.bytes);
    if (bytes > in.left || bytes > mailbox::kHalfBytes || begin > mailbox::kHalfBytes - bytes)
      reject_peer(in.rank, "damaged: a slice of impossible size");
    if (bytes > 0) std::memcpy(in.to, peer.half(half) + begin, bytes);
    in.to += bytes, in.left -= bytes;
    rounds = std::max(rounds, peer.header().rounds[half].load(std::memory_order_relaxed));
    return true;
  }

  // Returns false if the peer has not published: the timeout or a part of it has passed, or a signal has arrived.
  bool await(int rank, Clock::time_point deadline) {
    const std::atomic<uint32_t>& published = header_of(rank).published;
    const uint32_t seen = number_ - 1;
    Clock::time_point now = Clock::now();
    for (const Clock::time_point end = now + spin_; now < end; now = Clock::now()) {
      mailbox::relax();
      if (published.load(std::memory_order_relaxed) == seen) continue;
      spin_ = std::min<Clock::duration>(2 * spin_, mailbox::kMostSpin);
      return true;
    }
    spin_ = std::max<Clock::duration>(spin_ / 4, mailbox::kLeastSpin);
    const int64_t left = std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::min<Clock::duration>(deadline - now, mailbox::kSlice)).count();
    if (left <= 0) return false;
    const timespec time{left / 1000000000, left % 1000000000};
    std::atomic<uint32_t>& awaited = own_.header().awaited;
    awaited.store(static_cast<uint32_t>(rank) + 1);
    const bool came = published != seen || mailbox::futex(published, FUTEX_WAIT, seen, &time) == 0 ||
                      errno == EAGAIN;
    awaited.store(0, std::memory_order_relaxed);
    return came;
  }

  const std::string path_;
  const pid_t pid_;
  int rank_ = 0, size_ = 0;
  mailbox::Outbox own_;
  std::vector<mailbox::Outbox> peers_;
  std::vector<Outgoing> outgoing_;  // of the exchange in progress, by rank
  std::vector<Incoming> incoming_;  // from other ranks, in any order
  char* own_to_ = nullptr;
  uint32_t number_ = mailbox::kBefore;  // number of the last round
  Clock::duration spin_ = mailbox::kMostSpin;
  State state_ = State::made;
  bool linked_ = false;
  std::atomic<bool> busy_{false};
};

}  // namespace megalith
