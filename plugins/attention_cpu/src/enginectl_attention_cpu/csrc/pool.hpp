// A team of threads that meets often and briefly.
//
// The calling thread leads: it opens a phase of `num_chunks` pieces of work, takes part in it, and returns when all of
// them are done. Each thread has its own range of chunks and takes from its front; one that is through takes from the
// back of another's. So weights stream in order, and a thread whose core is taken away holds up one chunk, not its
// share. Waiting spins for some microseconds and then sleeps in a futex: a leader that sleeps leaves its core to the
// worker that was descheduled in the middle of a chunk.
//
// Which thread runs a chunk is not determined, so a chunk's result may depend on its number only.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <mutex>
#include <new>
#include <thread>

namespace ectl {

constexpr int MAX_THREADS = 128;
constexpr int MAX_CHUNKS = 4095;

class Pool {
 public:
  // One team for the process, like its cores. A child of fork() starts with an empty one.
  static Pool& of_process() {
    static Pool* pool = [] {
      pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });
      return current() = new Pool;
    }();
    (void)pool;
    return *current();
  }

  // fn(thread, chunk) for every chunk in [0, num_chunks). A team that is busy with another engine's step is not waited
  // for: the caller then does the work alone.
  template <class Fn>
  void run(int num_threads, int num_chunks, Fn&& fn) {
    if (num_chunks <= 0) return;
    num_threads = num_threads < num_chunks ? num_threads : num_chunks;
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    std::unique_lock<std::mutex> lead(leading_, std::defer_lock);
    if (num_threads <= 1 || !lead.try_lock()) {
      for (int chunk = 0; chunk < num_chunks; ++chunk) fn(0, chunk);
      return;
    }
    grow(num_threads);
    using Body = std::remove_reference_t<Fn>;
    call_.store([](void* body, int thread, int chunk) { (*static_cast<Body*>(body))(thread, chunk); },
                std::memory_order_relaxed);
    body_.store(const_cast<void*>(static_cast<const void*>(&fn)), std::memory_order_relaxed);
    open(num_threads, num_chunks);
    work(0);
    wait_done();
    if (failed_.exchange(false, std::memory_order_relaxed)) throw std::bad_alloc();
  }

 private:
  using Call = void (*)(void*, int, int);

  // A thread's range in one word, so that owner and thieves agree: phase number, first chunk, end.
  struct alignas(64) Range {
    std::atomic<uint64_t> word{0};
  };
  static uint64_t pack(uint64_t phase, uint64_t first, uint64_t end) { return phase << 24 | first << 12 | end; }

  static Pool*& current() {
    static Pool* pool = nullptr;
    return pool;
  }

  void grow(int num_threads) {
    for (; num_started_ < num_threads - 1; ++num_started_)
      std::thread([this, thread = num_started_ + 1] { serve(thread); }).detach();
  }

  void open(int num_threads, int num_chunks) {
    ++phase_;
    remaining_.store(static_cast<uint32_t>(num_chunks), std::memory_order_relaxed);
    num_ranges_.store(num_threads, std::memory_order_relaxed);
    for (int t = 0; t < num_threads; ++t) {
      const uint64_t first = static_cast<uint64_t>(t) * num_chunks / num_threads;
      const uint64_t end = static_cast<uint64_t>(t + 1) * num_chunks / num_threads;
      ranges_[t].word.store(pack(phase_, first, end), std::memory_order_release);
    }
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) futex(&epoch_, FUTEX_WAKE_PRIVATE, INT_MAX);
  }

  // Take a chunk from the front (own range) or the back. The word is unchanged between load and exchange only while its
  // phase is open, so what was read of the phase in between belongs to it.
  bool take(Range& range, bool front, int thread) {
    uint64_t word = range.word.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t first = word >> 12 & 0xfff, end = word & 0xfff;
      if (first >= end) return false;
      const Call call = call_.load(std::memory_order_relaxed);
      void* body = body_.load(std::memory_order_relaxed);
      if (thread >= num_ranges_.load(std::memory_order_relaxed)) return false;  // not in this phase's team
      const uint64_t next = front ? word + (1 << 12) : word - 1;
      if (range.word.compare_exchange_weak(word, next, std::memory_order_acq_rel, std::memory_order_acquire)) {
        try {
          call(body, thread, static_cast<int>(front ? first : end - 1));
        } catch (const std::bad_alloc&) {  // all that chunks throw; the leader throws it again when all are done
          failed_.store(true, std::memory_order_relaxed);
        }
        finish();
        return true;
      }
    }
  }

  void work(int thread) {
    while (take(ranges_[thread], true, thread)) {
    }
    for (bool found = true; found;) {
      found = false;
      const int n = num_ranges_.load(std::memory_order_relaxed);
      for (int i = 1; i < n; ++i) found |= take(ranges_[(thread + i) % n], false, thread);
    }
  }

  void finish() {
    if (remaining_.fetch_sub(1, std::memory_order_seq_cst) == 1 && leader_asleep_.load(std::memory_order_seq_cst))
      futex(&remaining_, FUTEX_WAKE_PRIVATE, 1);
  }

  void wait_done() {
    for (int i = 0; i < LEADER_SPINS; ++i) {
      if (remaining_.load(std::memory_order_acquire) == 0) return;
      _mm_pause();
    }
    leader_asleep_.store(1, std::memory_order_seq_cst);
    for (uint32_t left; (left = remaining_.load(std::memory_order_seq_cst)) != 0;)
      futex(&remaining_, FUTEX_WAIT_PRIVATE, left);
    leader_asleep_.store(0, std::memory_order_relaxed);
  }

  void serve(int thread) {
    for (;;) {
      const uint32_t seen = epoch_.load(std::memory_order_seq_cst);
      work(thread);
      int spins = 0;
      while (epoch_.load(std::memory_order_acquire) == seen && spins < WORKER_SPINS) {
        _mm_pause();
        ++spins;
      }
      if (spins < WORKER_SPINS) continue;
      num_asleep_.fetch_add(1, std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_seq_cst) == seen) futex(&epoch_, FUTEX_WAIT_PRIVATE, seen);
      num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  static void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, nullptr, nullptr, 0);
  }

  // A pause takes about 15 ns here and up to 45 elsewhere: some 30 µs for the leader, 100 for workers, which also
  // covers the host's work between two calls.
  static constexpr int LEADER_SPINS = 2000;
  static constexpr int WORKER_SPINS = 6000;

  std::mutex leading_;
  int num_started_ = 0;
  uint64_t phase_ = 0;
  std::atomic<Call> call_{nullptr};
  std::atomic<void*> body_{nullptr};
  std::atomic<int> num_ranges_{0};
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  std::atomic<int> num_asleep_{0};
  alignas(64) std::atomic<uint32_t> remaining_{0};
  std::atomic<int> leader_asleep_{0};
  Range ranges_[MAX_THREADS];
};

}  // namespace ectl
