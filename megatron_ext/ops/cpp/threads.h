// Work that is shared out among torch's threads, and scratch memory of each.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace megatron_ext {

// f(i) for every i below `count`, in this order but by whichever thread is free: pieces of work may differ in length.
// What f(i) computes must not depend on which thread that is.
template <typename F>
void for_each(int64_t count, const F& f) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) f(i);
  });
}

// f(begin, end) for ranges that make up [0, count), of at least `grain` but for the last; for even work.
template <typename F>
void for_ranges(int64_t count, int64_t grain, const F& f) {
  at::parallel_for(0, count, grain, f);
}

// Memory of this thread that lives on from call to call, as long as the most that was asked for; not initialised.
// One use at a time: `which` tells apart what one function needs beside each other.
template <int which>
float* scratch(int64_t floats) {
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(floats);
  return memory.data();
}

}  // namespace megatron_ext
