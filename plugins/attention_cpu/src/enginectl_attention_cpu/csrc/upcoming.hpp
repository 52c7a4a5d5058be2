// Pages that attention will read soon, asked for while products are computed.
//
// With many rows a product is bound by arithmetic, and attention over their caches by memory. So a layer's attention
// names the pages of the next one's, and the products in between ask for them, a few lines at a time. What is named may
// be stale, or another engine's: asking for it costs some bandwidth and changes nothing else.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ectl {

class Upcoming {
 public:
  static constexpr int MAX_BLOCKS = 1 << 14;
  static constexpr size_t MAX_BYTES = size_t{12} << 20;  // what outer caches hold until it is read

  static Upcoming& of_process() {
    static Upcoming upcoming;
    return upcoming;
  }

  void begin(const void* keys, const void* values, size_t key_bytes, size_t value_bytes) {
    taken_.store(END, std::memory_order_relaxed);
    keys_.store(static_cast<const char*>(keys), std::memory_order_relaxed);
    values_.store(static_cast<const char*>(values), std::memory_order_relaxed);
    key_bytes_.store(key_bytes, std::memory_order_relaxed);
    value_bytes_.store(value_bytes, std::memory_order_relaxed);
    count_.store(0, std::memory_order_relaxed);
  }
  // False when there is enough.
  bool add(int32_t block) {
    const int at = count_.fetch_add(1, std::memory_order_relaxed);
    if (at >= MAX_BLOCKS) return false;
    blocks_[at].store(block, std::memory_order_relaxed);
    const size_t bytes = key_bytes_.load(std::memory_order_relaxed) + value_bytes_.load(std::memory_order_relaxed);
    return (at + 1) * bytes < MAX_BYTES;
  }
  void end() {
    num_pieces_.store(2 * std::min(count_.load(std::memory_order_relaxed), MAX_BLOCKS), std::memory_order_relaxed);
    taken_.store(0, std::memory_order_release);
  }

  // The keys or the values of one block, nobody else's; false when none is left.
  bool take(const char*& at, int& lines) {
    if (taken_.load(std::memory_order_acquire) >= num_pieces_.load(std::memory_order_relaxed)) return false;
    const int piece = taken_.fetch_add(1, std::memory_order_relaxed);
    if (piece >= num_pieces_.load(std::memory_order_relaxed)) return false;
    const size_t block = blocks_[piece / 2].load(std::memory_order_relaxed);
    const bool is_keys = piece % 2 == 0;
    const size_t bytes = (is_keys ? key_bytes_ : value_bytes_).load(std::memory_order_relaxed);
    at = (is_keys ? keys_ : values_).load(std::memory_order_relaxed) + block * bytes;
    lines = static_cast<int>((bytes + 63) / 64);
    return true;
  }

 private:
  static constexpr int END = 1 << 30;
  std::atomic<int> count_{0};
  std::atomic<const char*> keys_{nullptr}, values_{nullptr};
  std::atomic<size_t> key_bytes_{0}, value_bytes_{0};
  std::atomic<int> num_pieces_{0};
  std::atomic<int32_t> blocks_[MAX_BLOCKS];
  alignas(64) std::atomic<int> taken_{END};
};

// One thread's part of it.
class UpcomingLines {
 public:
  static UpcomingLines& of_thread() {
    static thread_local UpcomingLines lines;
    return lines;
  }

  void start() { is_dry_ = false; }

  // Ask for two lines.
  void ask() {
    if (is_dry_) return;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      if (left_ == 0 && !more()) return;
      _mm_prefetch(at_, _MM_HINT_T1);
      at_ += 64;
      --left_;
    }
  }

 private:
  [[gnu::noinline]] bool more() {
    is_dry_ = !Upcoming::of_process().take(at_, left_);
    return !is_dry_;
  }

  const char* at_ = nullptr;
  int left_ = 0;
  bool is_dry_ = true;
};

}  // namespace ectl
