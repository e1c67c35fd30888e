// What this library was compiled for, and the threads that it works with.

#include <torch/library.h>

#include <string>

#include "threads.h"
#include "vectors.h"

namespace megatron_ext::about {

#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

// The capability of CPUs as torch calls it, and the floats of a vector.
std::string vectors() {
  return std::string(TEXT(CPU_CAPABILITY)) + " " + std::to_string(W);
}

// Threads that a parallel region of this library has: torch's, unless it found another OpenMP.
int64_t threads() {
  std::atomic<int64_t> count{0};
  at::parallel_for(0, 1024, 1, [&](int64_t, int64_t) { ++count; });
  return count;
}

}  // namespace megatron_ext::about

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  library.def("vectors() -> str", &megatron_ext::about::vectors);
  library.def("threads() -> int", &megatron_ext::about::threads);
}
