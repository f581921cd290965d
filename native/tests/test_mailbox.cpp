// Exchanges between the ranks of one host: as threads (for TSan) and as processes, with ranks that do not
// come, die, or write nonsense into their files.

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>

#include "check.hpp"
#include "mailbox.hpp"

using namespace megalith;

namespace {

constexpr double kLong = 60;
using Work = std::function<void(Mailbox&, int)>;

bool never(const std::vector<int>&) { return false; }

// A folder of its own for each test, gone afterwards.
struct Folder {
  std::string path;
  Folder() {
    char name[] = "/tmp/mailbox.XXXXXX";
    CHECK(mkdtemp(name));
    path = name;
  }
  ~Folder() { CHECK(rmdir(path.c_str()) == 0); }  // fails if a mailbox was left behind
  std::string file(int rank) const { return path + "/" + std::to_string(rank); }
  std::vector<std::string> files(int ranks) const {
    std::vector<std::string> all;
    for (int r = 0; r < ranks; ++r) all.push_back(file(r));
    return all;
  }
};

// All ranks' boxes in this process, connected.
std::vector<std::unique_ptr<Mailbox>> connected(const Folder& folder, int ranks) {
  std::vector<std::unique_ptr<Mailbox>> boxes;
  for (int r = 0; r < ranks; ++r) boxes.push_back(std::make_unique<Mailbox>(folder.file(r), r, ranks));
  for (auto& box : boxes) box->connect(folder.files(ranks));
  return boxes;
}

void as_threads(int ranks, const Work& work) {
  const Folder folder;
  const auto boxes = connected(folder, ranks);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) threads.emplace_back([&, r] { work(*boxes[static_cast<size_t>(r)], r); });
  for (std::thread& t : threads) t.join();
}

// Returns how each process ended, as waitpid tells it.
std::vector<int> as_processes(int ranks, const Work& work) {
  const Folder folder;
  int made[2], all_made[2];
  CHECK(pipe(made) == 0 && pipe(all_made) == 0);
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    children.push_back(fork());
    CHECK(children.back() >= 0);
    if (children.back() > 0) continue;
    alarm(60);
    Mailbox box(folder.file(r), r, ranks);
    char byte = 0;
    CHECK(write(made[1], &byte, 1) == 1 && read(all_made[0], &byte, 1) == 1);
    box.connect(folder.files(ranks));
    // A small exchange tells each that all are connected.
    const Mailbox::Sizes none(static_cast<size_t>(ranks), 0);
    CHECK(box.exchange(nullptr, none, nullptr, none, kLong, never).empty());
    box.unlink();
    work(box, r);
    _exit(0);
  }
  char byte = 0;
  for (int r = 0; r < ranks; ++r) CHECK(read(made[0], &byte, 1) == 1);
  for (int r = 0; r < ranks; ++r) CHECK(write(all_made[1], &byte, 1) == 1);
  for (int end : {made[0], made[1], all_made[0], all_made[1]}) close(end);
  std::vector<int> statuses(static_cast<size_t>(ranks));
  for (size_t r = 0; r < statuses.size(); ++r) CHECK(waitpid(children[r], &statuses[r], 0) == children[r]);
  return statuses;
}

void all_well(const std::vector<int>& statuses) {
  for (int status : statuses) CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

template <class Error>
std::string told(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  CHECK(!"it did not throw");
}

bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// ---- data

// What both sides of a pair can work out: the bytes that `from` sends to `to` in an exchange.
struct Plan {
  int64_t largest;
  int64_t size(int exchange, int from, int to) const {
    Random random{static_cast<uint64_t>(exchange * 1000000 + from * 1000 + to)};
    return random.below(3) == 0 ? 0 : random.below(random.below(2) ? 100 : largest);
  }
  static char byte(int exchange, int from, int to, int64_t i) {
    return static_cast<char>(exchange * 31 + from * 7 + to * 3 + i * 11 + (i >> 12));
  }
};

void exchange_all(Mailbox& box, int rank, int ranks, int exchanges, const Plan& plan) {
  for (int e = 0; e < exchanges; ++e) {
    Mailbox::Sizes out, in;
    std::vector<char> send;
    int64_t total = 0;
    for (int r = 0; r < ranks; ++r) {
      out.push_back(plan.size(e, rank, r));
      in.push_back(plan.size(e, r, rank));
      for (int64_t i = 0; i < out.back(); ++i) send.push_back(Plan::byte(e, rank, r, i));
      total += in.back();
    }
    // Of its exact size, so that the sanitizer sees a byte beyond.
    const std::unique_ptr<char[]> recv(new char[static_cast<size_t>(total)]);
    CHECK(box.exchange(send.data(), out, recv.get(), in, kLong, never).empty());
    const char* at = recv.get();
    for (int r = 0; r < ranks; ++r)
      for (int64_t i = 0; i < in[static_cast<size_t>(r)]; ++i) CHECK(*at++ == Plan::byte(e, r, rank, i));
  }
}

// Over a hundred exchanges pass the wrap of the counter.
void every_byte_arrives() {
  for (int ranks : {1, 2, 3, 5}) {
    const Work work = [&](Mailbox& box, int rank) { exchange_all(box, rank, ranks, 150, Plan{2000}); };
    as_threads(ranks, work);
    all_well(as_processes(ranks, work));
  }
}

// Parts larger than a half, and ranks with different numbers of rounds.
void large_parts_arrive() {
  const Plan large{3 * static_cast<int64_t>(mailbox::kHalfBytes)};
  const Work work = [&](Mailbox& box, int rank) { exchange_all(box, rank, 3, 3, large); };
  as_threads(3, work);
  all_well(as_processes(3, work));
}

// Around a half's size: the last byte that fits, the first that does not, and parts whose ends do not lie on
// a line.
void sizes_at_the_edge_arrive() {
  const int64_t half = static_cast<int64_t>(mailbox::kHalfBytes), line = static_cast<int64_t>(mailbox::kLine);
  const int64_t room = half - 3 * line;
  const std::pair<int64_t, int64_t> parts[] = {{0, room - 1},     {0, room},     {0, room + 1}, {0, half},
                                               {half + 1, 0},     {2 * room, 0}, {2 * room, 1},
                                               {half / 2 + 1, half / 2 - 1}};
  for (const auto& [next, after_next] : parts)
    as_threads(3, [&, next = next, after_next = after_next](Mailbox& box, int rank) {
      Mailbox::Sizes out(3), in(3);
      const size_t r = static_cast<size_t>(rank);
      out[(r + 1) % 3] = in[(r + 2) % 3] = next;
      out[(r + 2) % 3] = in[(r + 1) % 3] = after_next;
      const size_t total = static_cast<size_t>(next + after_next);
      std::vector<char> send(total, static_cast<char>(rank)), recv(total), expected;
      for (size_t from = 0; from < 3; ++from)
        expected.insert(expected.end(), static_cast<size_t>(in[from]), static_cast<char>(from));
      CHECK(box.exchange(send.data(), out, recv.data(), in, kLong, never).empty());
      CHECK(recv == expected);
    });
}

// ---- ranks that fail

void exchange_nothing(Mailbox& box, int ranks, double timeout, const std::vector<int>& missing) {
  const Mailbox::Sizes none(static_cast<size_t>(ranks), 0);
  CHECK(box.exchange(nullptr, none, nullptr, none, timeout, never) == missing);
}

void who_does_not_come_is_named() {
  const Folder folder;
  const auto boxes = connected(folder, 4);
  exchange_nothing(*boxes[3], 4, 0, {0, 1, 2});  // it came, if too early
  exchange_nothing(*boxes[1], 4, 0.05, {0, 2});
  const std::string why = told<MailboxMisuse>([&] { exchange_nothing(*boxes[1], 4, 0, {}); });
  CHECK(says(why, "make new mailboxes on all ranks"));
}

void a_killed_rank_is_named() {
  const std::vector<int> ends = as_processes(2, [](Mailbox& box, int rank) {
    if (rank == 1) raise(SIGKILL);
    exchange_nothing(box, 2, 0.2, {1});
  });
  CHECK(WIFSIGNALED(ends[1]) && WTERMSIG(ends[1]) == SIGKILL);
  all_well({ends[0]});
}

void other_sizes_than_expected_are_told() {
  as_threads(2, [](Mailbox& box, int rank) {
    const Mailbox::Sizes out = rank == 0 ? Mailbox::Sizes{0, 7} : Mailbox::Sizes{4, 0};
    const Mailbox::Sizes in = rank == 0 ? Mailbox::Sizes{0, 4} : Mailbox::Sizes{6, 0};
    char send[8] = {}, recv[8];
    const auto call = [&] { return box.exchange(send, out, recv, in, kLong, never); };
    if (rank == 0) {
      CHECK(call().empty());
      return;
    }
    CHECK(told<std::invalid_argument>(call) == "rank 0 sent 7 bytes to rank 1, which expected 6");
    told<MailboxMisuse>(call);
  });
}

void waiting_ends_when_interrupted() {
  const Folder folder;
  const auto boxes = connected(folder, 2);
  const Mailbox::Sizes none(2, 0);
  std::vector<int> awaited;
  const auto missing = boxes[0]->exchange(nullptr, none, nullptr, none, kLong, [&](const std::vector<int>& ranks) {
    awaited = ranks;
    return true;
  });
  CHECK(awaited == missing);
  CHECK(missing == std::vector<int>{1});
}

// ---- calls that make no sense

void bad_arguments_change_nothing() {
  const Folder folder;
  const auto boxes = connected(folder, 2);
  Mailbox& box = *boxes[0];
  char bytes[8] = {};
  const auto refused = [&](const Mailbox::Sizes& out, const Mailbox::Sizes& in, double timeout) {
    return told<std::invalid_argument>([&] { box.exchange(bytes, out, bytes + 4, in, timeout, never); });
  };
  CHECK(says(refused({1}, {0, 0}, 1), "send_sizes: expected one per rank, 2, got 1"));
  CHECK(says(refused({0, 0}, {0, 0, 0}, 1), "recv_sizes: expected one per rank, 2, got 3"));
  CHECK(says(refused({0, -1}, {0, 0}, 1), "negative for rank 1"));
  CHECK(says(refused({0, 0}, {0, -1}, 1), "negative for rank 1"));
  CHECK(says(refused({1, 0}, {2, 0}, 1), "rank 0 sent 1 bytes to rank 0, which expected 2"));
  CHECK(says(refused({0, 0}, {0, 0}, -1), "timeout"));
  CHECK(says(refused({0, 0}, {0, 0}, std::stod("nan")), "timeout"));
  CHECK(says(told<MailboxMisuse>([&] { box.connect(folder.files(2)); }), "already connected"));
  std::thread other([&] { exchange_nothing(*boxes[1], 2, kLong, {}); });
  exchange_nothing(box, 2, std::stod("inf"), {});
  other.join();
  for (const auto& [rank, size] : {std::pair<int, int>{2, 2}, {-1, 2}, {0, 0}, {0, 5000}})
    told<std::invalid_argument>([&, rank = rank, size = size] { Mailbox(folder.file(9), rank, size); });
}

void calls_in_the_wrong_order_are_refused() {
  const Folder folder;
  Mailbox box(folder.file(0), 0, 1);
  CHECK(says(told<MailboxMisuse>([&] { exchange_nothing(box, 1, 0, {}); }), "call connect() first"));
  CHECK(says(told<std::invalid_argument>([&] { box.connect({}); }), "paths: expected one per rank"));
  box.connect({folder.file(0)});
  box.close();
  box.close();
  CHECK(says(told<MailboxMisuse>([&] { exchange_nothing(box, 1, 0, {}); }), "closed"));
  CHECK(says(told<MailboxMisuse>([&] { box.connect({folder.file(0)}); }), "closed"));
}

void a_second_thread_is_refused() {
  const Folder folder;
  const auto boxes = connected(folder, 2);
  std::atomic<bool> waiting{false}, enough{false};
  std::thread first([&] {
    const Mailbox::Sizes none(2, 0);
    boxes[0]->exchange(nullptr, none, nullptr, none, kLong, [&](const std::vector<int>&) {
      waiting = true;
      return enough.load();
    });
  });
  while (!waiting) std::this_thread::yield();
  CHECK(says(told<MailboxMisuse>([&] { boxes[0]->close(); }), "another thread"));
  enough = true;
  first.join();
}

void a_forked_child_is_refused_and_takes_nothing_away() {
  const Folder folder;
  {
    const auto boxes = connected(folder, 1);
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);
      const std::string why = told<MailboxMisuse>([&] { exchange_nothing(*boxes[0], 1, 0, {}); });
      boxes[0]->~Mailbox();
      _exit(says(why, "forked") ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    all_well({status});
    CHECK(access(folder.file(0).c_str(), F_OK) == 0);
    exchange_nothing(*boxes[0], 1, 0, {});
  }
  CHECK(access(folder.file(0).c_str(), F_OK) != 0);
}

// ---- files

void a_file_is_new_private_and_goes_with_its_box() {
  const Folder folder;
  Mailbox box(folder.file(0), 0, 1);
  struct stat found;
  CHECK(stat(folder.file(0).c_str(), &found) == 0 && (found.st_mode & 0777) == 0600);
  CHECK(says(told<FileError>([&] { Mailbox(folder.file(0), 0, 1); }), "File exists"));
  box.unlink();
  CHECK(access(folder.file(0).c_str(), F_OK) != 0);
  Mailbox next(folder.file(0), 0, 1);
  box.unlink();  // not the file of the next
  CHECK(access(folder.file(0).c_str(), F_OK) == 0);
}

void no_room_is_an_error_not_a_signal() {
  const Folder folder;
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    signal(SIGXFSZ, SIG_IGN);
    const rlimit small{mailbox::kHalfBytes, mailbox::kHalfBytes};
    setrlimit(RLIMIT_FSIZE, &small);
    try {
      Mailbox(folder.file(0), 0, 1);
    } catch (const FileError& e) {
      _exit(e.code == EFBIG && e.path == folder.file(0) ? 0 : 1);
    }
    _exit(2);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  all_well({status});
}

// What rank 1 of 2 could write into its file, by accident or on purpose.
struct Forged {
  Folder folder;
  Mailbox box{folder.file(0), 0, 2}, victim{folder.file(1), 1, 2};
  mailbox::Outbox file{mailbox::File(folder.file(1), O_RDWR), folder.file(1), 2, PROT_READ | PROT_WRITE};

  // As it would look after one good round: ten bytes for rank 0.
  Forged() {
    const uint32_t round = mailbox::kBefore + 1, half = round % 2;
    file.header().rounds[half] = 1;
    mailbox::Slice& slice = file.slice(half, 0);
    slice.total = 10, slice.begin = 100, slice.bytes = 10;
    std::memcpy(file.half(half) + 100, "0123456789", 10);
    file.header().published = round;
  }
  mailbox::Slice& slice() { return file.slice((mailbox::kBefore + 1) % 2, 0); }

  std::vector<int> exchange(char* recv) {
    return box.exchange(nullptr, {0, 0}, recv, {0, 10}, 0.05, never);
  }
  std::string connecting() {
    return told<std::invalid_argument>([&] { box.connect(folder.files(2)); });
  }
  std::string exchanging() {
    const std::unique_ptr<char[]> recv(new char[10]);
    box.connect(folder.files(2));
    const std::string why = told<std::invalid_argument>([&] { exchange(recv.get()); });
    told<MailboxMisuse>([&] { exchange(recv.get()); });
    return why;
  }
};

void files_that_are_no_mailbox_are_refused() {
  const std::pair<const char*, std::function<void(Forged&)>> damages[] = {
      {"not a mailbox: wrong magic number", [](Forged& f) { f.file.header().magic = 0; }},
      {"its version is 9, expected 1", [](Forged& f) { f.file.header().version = 9; }},
      {"its number of ranks is 3, expected 2", [](Forged& f) { f.file.header().ranks = 3; }},
      {"its rank is 0, expected 1", [](Forged& f) { f.file.header().rank = 0; }},
      {"not a mailbox of 2 ranks", [](Forged& f) { CHECK(truncate(f.folder.file(1).c_str(), 100) == 0); }},
      {"not a mailbox of 2 ranks",
       [](Forged& f) {
         f.victim.unlink();
         CHECK(mkfifo(f.folder.file(1).c_str(), 0600) == 0);
       }},
  };
  for (const auto& [expected, damage] : damages) {
    Forged forged;
    damage(forged);
    const std::string why = forged.connecting();
    CHECK(says(why, expected) && says(why, forged.folder.file(1) + " of rank 1"));
    forged.victim.close();
    ::unlink(forged.folder.file(1).c_str());
  }
  Forged forged;
  forged.victim.unlink();
  CHECK(says(told<FileError>([&] { forged.box.connect(forged.folder.files(2)); }), "No such file"));
  CHECK(symlink(forged.folder.file(0).c_str(), forged.folder.file(1).c_str()) == 0);
  told<FileError>([&] { forged.box.connect(forged.folder.files(2)); });
  CHECK(::unlink(forged.folder.file(1).c_str()) == 0);
}

void headers_that_cannot_be_are_refused() {
  {
    Forged good;
    char recv[10];
    good.box.connect(good.folder.files(2));
    CHECK(good.exchange(recv).empty() && std::memcmp(recv, "0123456789", 10) == 0);
  }
  constexpr uint32_t kHalf = mailbox::kHalfBytes, kMost = UINT32_MAX;
  const std::pair<const char*, std::function<void(Forged&)>> damages[] = {
      {"an impossible round", [](Forged& f) { f.file.header().published = mailbox::kBefore + 3; }},
      {"an impossible round", [](Forged& f) { f.file.header().published = mailbox::kBefore - 1; }},
      {"rank 1 sent 11 bytes to rank 0, which expected 10", [](Forged& f) { f.slice().total = 11; }},
      {"a slice of impossible size", [](Forged& f) { f.slice().bytes = 11; }},
      {"a slice of impossible size", [](Forged& f) { f.slice().bytes = kMost; }},
      {"a slice of impossible size", [](Forged& f) { f.slice().begin = kHalf - 9; }},
      {"a slice of impossible size", [](Forged& f) { f.slice().begin = kMost; }},
      {"do not add up to the part", [](Forged& f) { f.slice().bytes = 9; }},
  };
  for (const auto& [expected, damage] : damages) {
    Forged forged;
    damage(forged);
    CHECK(says(forged.exchanging(), expected));
  }
}

// It wrote a round of several and then no more, as a process does that dies on the way.
void a_rank_that_stops_halfway_is_named() {
  Forged forged;
  forged.slice().bytes = 5;
  forged.file.header().rounds[(mailbox::kBefore + 1) % 2] = 2;
  forged.box.connect(forged.folder.files(2));
  char recv[10];
  CHECK(forged.exchange(recv) == std::vector<int>{1});
}

void noise_does_no_harm() {
  Random random{3};
  for (int round = 0; round < 100; ++round) {
    Forged forged;
    forged.box.connect(forged.folder.files(2));
    char* bytes = reinterpret_cast<char*>(&forged.file.header());
    for (int64_t flips = 1 + random.below(40); flips > 0; --flips)
      bytes[random.below(sizeof(mailbox::Header) + 4 * sizeof(mailbox::Slice))] =
          static_cast<char>(random.next());
    const std::unique_ptr<char[]> recv(new char[10]);
    try {
      forged.box.exchange(nullptr, {0, 0}, recv.get(), {0, 10}, 0, never);
    } catch (const std::invalid_argument&) {
    }
  }
}

}  // namespace

int main() {
  every_byte_arrives();
  large_parts_arrive();
  sizes_at_the_edge_arrive();
  who_does_not_come_is_named();
  a_killed_rank_is_named();
  other_sizes_than_expected_are_told();
  waiting_ends_when_interrupted();
  bad_arguments_change_nothing();
  calls_in_the_wrong_order_are_refused();
  a_second_thread_is_refused();
  a_forked_child_is_refused_and_takes_nothing_away();
  a_file_is_new_private_and_goes_with_its_box();
  no_room_is_an_error_not_a_signal();
  files_that_are_no_mailbox_are_refused();
  headers_that_cannot_be_are_refused();
  a_rank_that_stops_halfway_is_named();
  noise_does_no_harm();
  std::puts("mailbox ok");
}
