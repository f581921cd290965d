// A small pool of sleeping workers, and a lock for many readers or one writer.
//
// Both survive fork(): before a fork every table is locked and the pool is idle, so the
// child sees whole tables and starts workers of its own when it needs them. No OpenMP, whose
// pool does not come back in a forked child.
#pragma once

#include <pthread.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <type_traits>

namespace megalith {

// Writers go first: a stream of readers cannot keep a writer waiting for ever.
class ReadWriteLock {
 public:
  void lock() {
    std::unique_lock<std::mutex> hold(mutex_);
    ++waiting_;
    changed_.wait(hold, [&] { return readers_ == 0 && !writing_; });
    --waiting_;
    writing_ = true;
  }
  void unlock() {
    std::lock_guard<std::mutex> hold(mutex_);
    writing_ = false;
    changed_.notify_all();
  }
  void lock_shared() {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [&] { return !writing_ && waiting_ == 0; });
    ++readers_;
  }
  void unlock_shared() {
    std::lock_guard<std::mutex> hold(mutex_);
    if (--readers_ == 0) changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int readers_ = 0, waiting_ = 0;
  bool writing_ = false;
};

class ThreadPool {
 public:
  static constexpr int kMaxThreads = 256;

  static ThreadPool& get() {
    Holder& h = holder();
    return *h.pool.load(std::memory_order_acquire);
  }

  // Calls work(task, worker) for every task below `tasks`, worker below `threads`. Tasks start in
  // order but may end in any; an exception of one is thrown here after all have stopped. A
  // pool that is busy with another call leaves the whole work to the caller.
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
    {
      std::lock_guard<std::mutex> hold(mutex_);
      while (workers_ < threads - 1) {
        try {
          std::thread([this, index = workers_ + 1] { serve(index); }).detach();
        } catch (...) {
          break;  // no thread to be had: fewer helpers, the same work
        }
        ++workers_;
      }
      job.helpers = workers_ < threads - 1 ? workers_ : threads - 1;
      job_ = &job;
      ++generation_;
    }
    wake_.notify_all();
    job.work_off(0);
    std::unique_lock<std::mutex> hold(mutex_);
    job_ = nullptr;
    done_.wait(hold, [&] { return job.active == 0; });
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  // The caller's way with tiny numbers (flush to zero or not) is a flag of its CPU; helpers must
  // compute as the caller would.
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
    int active = 0;  // guarded by the pool's mutex
    std::atomic<int64_t> next{0};
    void* context = nullptr;
    void (*call)(void*, int64_t, int) = nullptr;
    std::mutex error_mutex;
    std::exception_ptr error;

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

  void serve(int index) {
    std::unique_lock<std::mutex> hold(mutex_);
    uint64_t seen = 0;
    for (;;) {
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
  // The workers did not come along; neither may their half-used mutexes.
  static void after_fork_child() { holder().pool.store(new ThreadPool); }

  std::mutex turn_;  // held by the call that uses the workers
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  int workers_ = 0;
};

// A lock that fork() waits for and that a child gets back open.
class ForkSafeLock {
 public:
  ForkSafeLock() : lock_(new ReadWriteLock) {
    ThreadPool::get();  // its handlers run inside ours: tables first, then the pool
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
