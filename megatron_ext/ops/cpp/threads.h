// Work that is shared out among torch's threads, and scratch memory of each.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace megatron_ext {

// f(i) for every i below `count`, in this order but by whichever thread is free: pieces of work may differ in length.
// What f(i) computes must not depend on which thread that is. Even work is for `at::parallel_for`.
template <typename F>
void for_each(int64_t count, const F& f) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) f(i);
  });
}

// Floats, zero at first, that begin with a cache line: vectors of them never lie across two.
class Buffer {
 public:
  explicit Buffer(int64_t count) : held_(count + LINE), data_(aligned(held_.data())) {}
  Buffer(Buffer&&) = default;
  Buffer& operator=(Buffer&&) = default;

  float* data() {
    return data_;
  }

  const float* data() const {
    return data_;
  }

  float& operator[](int64_t i) {
    return data_[i];
  }

 private:
  static constexpr int64_t LINE = 64 / sizeof(float);

  static float* aligned(float* place) {
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(place) + 63) / 64 * 64);
  }

  std::vector<float> held_;
  float* data_;
};

// Memory of this thread that lives on from call to call, as long as the most that was asked for; it holds anything. One
// use at a time: `which` tells apart what one function needs beside each other.
template <int which>
float* scratch(int64_t count) {
  static thread_local Buffer memory(0);
  static thread_local int64_t size = 0;
  if (size < count) {
    memory = Buffer(count);
    size = count;
  }
  return memory.data();
}

}  // namespace megatron_ext
