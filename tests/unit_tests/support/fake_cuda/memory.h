// How much of the pretended device's memory is taken; like torch's allocator it keeps what was freed until it is asked.
#pragma once
#include <ATen/ATen.h>

#include <atomic>

namespace pretended {

inline std::atomic<int64_t> total_bytes{int64_t{8} << 30}, allocated_bytes{0}, reserved_bytes{0}, peak_bytes{0};

// Memory of the host that counts as the device's.
struct Taken {
  c10::Storage storage;
  int64_t bytes;
  Taken(const c10::Storage& from, int64_t size) : storage(from), bytes(size) {
    const int64_t now = allocated_bytes += bytes;
    if (now > reserved_bytes) reserved_bytes = now;
    if (now > peak_bytes) peak_bytes = now;
  }
  ~Taken() { allocated_bytes -= bytes; }
};

// Before it is asked of the host, which may give any number of pages that are never touched.
inline void check_room(int64_t bytes) {
  TORCH_CHECK_WITH(
      OutOfMemoryError, allocated_bytes + bytes <= total_bytes, "CUDA out of memory. Tried to allocate ", bytes,
      " bytes (pretended)");
}

}  // namespace pretended
