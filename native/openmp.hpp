// The threads of torch's OpenMP library. They wait actively for some milliseconds after each operation of torch, so on a
// machine with as many cores as threads other threads would get no core in that time: a read of 26 tables between two
// matrix products took three times as long.
//
// Only the main thread of a process uses them, because the library starts threads of its own for each thread that calls
// it, and never a process that was forked without exec: the library does not work there.
#pragma once

#if defined(__linux__)
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#endif

namespace megalith {

class OpenMp {
 public:
  // Returns the library if this thread may use at least this many threads of it, otherwise null.
  static const OpenMp* get(int threads) {
#if defined(__linux__)
    static const OpenMp library;
    static thread_local const bool main_thread = syscall(SYS_gettid) == getpid();
    if (!library.parallel_ || !main_thread || getpid() != library.pid_) return nullptr;
    return library.max_threads_() >= threads ? &library : nullptr;
#else
    (void)threads;
    return nullptr;
#endif
  }

  // Calls work(data) in every thread of the library, this one included.
  void run(void (*work)(void*), void* data) const { parallel_(work, data, 0, 0); }

 private:
#if defined(__linux__)
  OpenMp() : pid_(getpid()) {
    void* torch = forked() ? nullptr : dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (!torch) return;
    // Of libraries of this kind that are loaded, this finds the one that torch uses.
    void *parallel = dlsym(torch, "GOMP_parallel"), *most = dlsym(torch, "omp_get_max_threads");
    if (!parallel || !most) return;
    std::memcpy(&parallel_, &parallel, sizeof parallel);
    std::memcpy(&max_threads_, &most, sizeof most);
  }

  // Whether this process was forked without exec: bit 6 of the ninth number of /proc/self/stat.
  static bool forked() {
    std::FILE* file = std::fopen("/proc/self/stat", "r");
    if (!file) return true;
    char text[512];
    const size_t size = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[size] = 0;
    const char* rest = std::strrchr(text, ')');  // the name before it may hold anything
    unsigned flags = 0;
    return !rest || std::sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1 || (flags & 0x40) != 0;
  }

  const pid_t pid_;
  int (*max_threads_)() = nullptr;
#endif
  void (*parallel_)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
};

}  // namespace megalith
