// A thread pool, and a lock for many readers or one writer.
//
// Both survive fork(): before a fork every table is locked and the pool is idle, so the child sees complete tables and
// starts its own workers when it needs them. The main thread uses torch's threads where it can; see openmp.hpp.
#pragma once

#include <pthread.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <type_traits>

#include "openmp.hpp"

namespace megalith {

// Writers and readers take turns: writers get the lock in the order in which they asked, and between two of them all
// readers that wait get it. So neither a stream of readers nor a writer that asks again and again can starve others.
class ReadWriteLock {
 public:
  void lock() {
    std::unique_lock<std::mutex> hold(mutex_);
    const uint64_t turn = writers_++;
    changed_.wait(hold, [&] { return turn == served_ && readers_ == 0; });
  }
  void unlock() {
    std::lock_guard<std::mutex> hold(mutex_);
    ++served_;
    readers_ = waiting_;
    waiting_ = 0;
    changed_.notify_all();
  }
  void lock_shared() {
    std::unique_lock<std::mutex> hold(mutex_);
    if (writers_ == served_) {
      ++readers_;
      return;
    }
    ++waiting_;
    changed_.wait(hold, [this, seen = served_] { return served_ != seen; });  // the writer has counted it
  }
  void unlock_shared() {
    std::lock_guard<std::mutex> hold(mutex_);
    if (--readers_ == 0) changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int readers_ = 0, waiting_ = 0;      // readers that hold the lock, that wait
  uint64_t writers_ = 0, served_ = 0;  // writers that asked, that are done
};

class ThreadPool {
 public:
  static constexpr int kMaxThreads = 256;
  static constexpr std::chrono::microseconds kSpin{30};

  static ThreadPool& get() {
    Holder& h = holder();
    return *h.pool.load(std::memory_order_acquire);
  }

  // Calls work(task, worker) for every task below `tasks`; worker is below `threads`. Tasks start in order and end in
  // any order. An exception of a task is rethrown here after all tasks have stopped. If the pool is busy with another
  // call, the caller does all the work.
  template <class Work>
  void run(int64_t tasks, int threads, Work&& work) {
    if (threads > kMaxThreads) threads = kMaxThreads;
    if (threads > tasks) threads = static_cast<int>(tasks);
    std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
    if (threads <= 1 || !turn.try_lock()) {
      for (int64_t t = 0; t < tasks; ++t) work(t, 0);
      return;
    }
    Job job;
    job.tasks = tasks;
    job.context = &work;
    job.call = [](void* context, int64_t task, int worker) {
      (*static_cast<std::remove_reference_t<Work>*>(context))(task, worker);
    };
    if (const OpenMp* library = OpenMp::get(threads)) {
      job.helpers = threads - 1;
      library->run([](void* data) { static_cast<Job*>(data)->take_part(); }, &job);
      if (job.error) std::rethrow_exception(job.error);
      return;
    }
    {
      std::lock_guard<std::mutex> hold(mutex_);
      while (workers_ < threads - 1) {
        try {
          std::thread([this, index = workers_ + 1] { serve(index); }).detach();
        } catch (...) {
          break;  // the system has no thread left: continue with fewer
        }
        ++workers_;
      }
      job.helpers = workers_ < threads - 1 ? workers_ : threads - 1;
      job_ = &job;
      generation_.fetch_add(1, std::memory_order_relaxed);
    }
    wake_.notify_all();
    job.work_off(0);
    std::unique_lock<std::mutex> hold(mutex_);
    job_ = nullptr;
    if (job.active != 0) {
      hold.unlock();
      spin([&] { return job.active == 0; });
      hold.lock();
      done_.wait(hold, [&] { return job.active == 0; });
    }
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  // Whether subnormal numbers are flushed to zero is a flag of the CPU core; workers must use the flag of the caller.
  struct Rounding {
#if defined(__x86_64__)
    unsigned flags = _mm_getcsr();
    void set() const { _mm_setcsr(flags); }
#else
    void set() const {}
#endif
  };

  struct Job {
    Rounding rounding;
    int64_t tasks = 0;
    int helpers = 0;
    std::atomic<int> active{0};  // changes under the mutex of the pool
    std::atomic<int> arrived{0};  // threads of OpenMP
    std::atomic<int64_t> next{0};
    void* context = nullptr;
    void (*call)(void*, int64_t, int) = nullptr;
    std::mutex error_mutex;
    std::exception_ptr error;

    // Called by every thread of OpenMP; there may be more than this job uses.
    void take_part() {
      const int worker = arrived.fetch_add(1, std::memory_order_relaxed);
      if (worker > helpers) return;
      const Rounding before;
      rounding.set();
      work_off(worker);
      before.set();
    }

    void work_off(int worker) {
      try {
        for (int64_t t; (t = next.fetch_add(1, std::memory_order_relaxed)) < tasks;)
          call(context, t, worker);
      } catch (...) {
        next.store(tasks, std::memory_order_relaxed);
        std::lock_guard<std::mutex> hold(error_mutex);
        if (!error) error = std::current_exception();
      }
    }
  };

  struct Holder {
    std::atomic<ThreadPool*> pool;
    Holder() : pool(new ThreadPool) {
      pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    }
  };
  static Holder& holder() {
    static Holder* h = new Holder;
    return *h;
  }

  // Waits a little for a condition without giving up the core: to wake a thread that sleeps takes as long as a small
  // job, and a call over tables runs several jobs in a row.
  template <class Condition>
  static void spin(Condition&& done) {
    const auto start = std::chrono::steady_clock::now();
    while (!done() && std::chrono::steady_clock::now() - start < kSpin) {
#if defined(__x86_64__)
      for (int k = 0; k < 8; ++k) _mm_pause();
#endif
    }
  }

  void serve(int index) {
    std::unique_lock<std::mutex> hold(mutex_);
    uint64_t seen = 0;
    for (;;) {
      if (generation_ == seen) {
        hold.unlock();
        spin([&] { return generation_ != seen; });
        hold.lock();
      }
      wake_.wait(hold, [&] { return generation_ != seen; });
      seen = generation_;
      Job* job = job_;
      if (!job || index > job->helpers) continue;
      ++job->active;
      hold.unlock();
      job->rounding.set();
      job->work_off(index);
      hold.lock();
      if (--job->active == 0) done_.notify_all();
    }
  }

  static void before_fork() {
    get().turn_.lock();
    get().mutex_.lock();
  }
  static void after_fork_parent() {
    get().mutex_.unlock();
    get().turn_.unlock();
  }
  // The child has no workers, and must not use mutexes that they may have held.
  static void after_fork_child() { holder().pool.store(new ThreadPool); }

  std::mutex turn_;  // held by the call that uses the workers
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  std::atomic<uint64_t> generation_{0};  // changes under the mutex
  int workers_ = 0;
};

// A lock that fork() waits for; it is unlocked in the child.
class ForkSafeLock {
 public:
  ForkSafeLock() : lock_(new ReadWriteLock) {
    ThreadPool::get();  // registers its fork handlers first: before a fork, tables are locked before the pool
    Registry& r = registry();
    std::lock_guard<std::mutex> hold(r.mutex);
    r.locks.insert(this);
  }
  ~ForkSafeLock() {
    Registry& r = registry();
    std::lock_guard<std::mutex> hold(r.mutex);
    r.locks.erase(this);
    delete lock_;
  }
  ForkSafeLock(const ForkSafeLock&) = delete;
  ForkSafeLock& operator=(const ForkSafeLock&) = delete;

  void lock() { lock_->lock(); }
  void unlock() { lock_->unlock(); }
  void lock_shared() { lock_->lock_shared(); }
  void unlock_shared() { lock_->unlock_shared(); }

 private:
  struct Registry {
    std::mutex mutex;
    std::set<ForkSafeLock*> locks;
    Registry() { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }
  };
  static Registry& registry() {
    static Registry* r = new Registry;
    return *r;
  }
  static void before_fork() {
    registry().mutex.lock();
    for (ForkSafeLock* l : registry().locks) l->lock();
  }
  static void after_fork_parent() {
    for (ForkSafeLock* l : registry().locks) l->unlock();
    registry().mutex.unlock();
  }
  static void after_fork_child() {
    for (ForkSafeLock* l : registry().locks) l->lock_ = new ReadWriteLock;
    new (&registry().mutex) std::mutex;
  }

  ReadWriteLock* lock_;
};

}  // namespace megalith
