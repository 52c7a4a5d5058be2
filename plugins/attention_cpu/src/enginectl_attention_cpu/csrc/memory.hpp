// Memory that kernels stream from and work in.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace ectl {

// Never given back before its owner: packed weights, laid out one after another on huge pages where the system has
// them.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const auto& [start, size] : maps_) munmap(start, size);
  }

  void* take(size_t bytes) {
    bytes = (bytes + 255) / 256 * 256;
    if (bytes > left_) map(bytes > CHUNK ? bytes : CHUNK);
    void* taken = next_;
    next_ += bytes;
    left_ -= bytes;
    return taken;
  }

 private:
  static constexpr size_t HUGE = size_t{2} << 20;
  static constexpr size_t CHUNK = size_t{64} << 20;

  void map(size_t bytes) {
    bytes = (bytes + HUGE - 1) / HUGE * HUGE + HUGE;  // room to align
    void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    madvise(start, bytes, MADV_HUGEPAGE);
    maps_.emplace_back(start, bytes);
    const size_t address = reinterpret_cast<size_t>(start);
    const size_t aligned = (address + HUGE - 1) / HUGE * HUGE;
    next_ = reinterpret_cast<char*>(aligned);
    left_ = bytes - (aligned - address);
  }

  std::vector<std::pair<void*, size_t>> maps_;
  char* next_ = nullptr;
  size_t left_ = 0;
};

// Grows, and keeps what it has for the next step.
class Scratch {
 public:
  template <class T>
  T* take(size_t count) {
    const size_t bytes = count * sizeof(T) + 64;
    if (bytes > size_) {
      size_ = bytes + bytes / 4;
      data_.reset(static_cast<char*>(std::aligned_alloc(64, (size_ + 63) / 64 * 64)));
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> data_;
  size_t size_ = 0;
};

}  // namespace ectl
