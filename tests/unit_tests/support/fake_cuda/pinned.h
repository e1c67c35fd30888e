// Pinned memory, and asynchronous copies from and to it.
//
// A copy to the device is done at once, and its host buffer cannot be written until the copy has been waited for; one to
// the host is done when it is waited for, and until then its buffer cannot be read. The machine sees to that: the pages
// are protected, so that numpy's views and plain pointers are seen, too. A fault is noted and then let through.
#pragma once
#include <ATen/ATen.h>
#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace pretended {

struct Pending {
  int64_t number;      // copies are counted from 1
  at::Tensor buffer;   // pinned, on the host
  at::Tensor arrives;  // what will be in it; undefined for copies to the device
};

inline std::map<char*, size_t> blocks;  // bytes of each, whole pages
inline std::deque<Pending> pending;
inline int64_t last_copy = 0;
// Written by the handler of a signal.
inline volatile int64_t fault_count = 0;
inline volatile bool fault_is_write = false;
inline struct sigaction before_us;

inline std::map<char*, size_t>::iterator block_of(const void* address) {
  auto found = blocks.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (found == blocks.begin()) return blocks.end();
  --found;
  return static_cast<const char*>(address) < found->first + found->second ? found : blocks.end();
}

inline bool is_pinned(const void* address) {
  return block_of(address) != blocks.end();
}

inline void on_fault(int signal, siginfo_t* info, void* context) {
  auto found = block_of(info->si_addr);
  if (found == blocks.end()) {  // not ours: as it would have been without us
    sigaction(signal, &before_us, nullptr);
    return;
  }
  fault_count = fault_count + 1;
  fault_is_write = true;  // all that is forbidden while a copy reads the buffer
  for (const Pending& one : pending)
    if (one.arrives.defined() && block_of(one.buffer.data_ptr()) == found) fault_is_write = false;  // or either
#ifdef __x86_64__
  fault_is_write = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
#endif
  mprotect(found->first, found->second, PROT_READ | PROT_WRITE);
}

// Again with each copy: faulthandler, which libraries enable, may have taken our place.
inline void watch_faults() {
  struct sigaction now, ours;
  sigaction(SIGSEGV, nullptr, &now);
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
  std::memset(&ours, 0, sizeof(ours));
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &ours, &before_us);
}

inline void protect(const at::Tensor& buffer, int how) {
  auto found = block_of(buffer.data_ptr());
  mprotect(found->first, found->second, how);
}

inline void begin(const at::Tensor& buffer, const at::Tensor& arrives) {
  watch_faults();
  pending.push_back({++last_copy, buffer, arrives});
  protect(buffer, PROT_READ | PROT_WRITE);  // copies of one stream come one after the other: another one may be due
  if (arrives.defined()) std::memset(buffer.data_ptr(), 0xA5, buffer.nbytes());
  protect(buffer, arrives.defined() ? PROT_NONE : PROT_READ);
}

// Copies up to this number are done.
inline void complete(int64_t number) {
  while (!pending.empty() && pending.front().number <= number) {
    const Pending one = pending.front();
    pending.pop_front();
    protect(one.buffer, PROT_READ | PROT_WRITE);
    if (one.arrives.defined()) std::memcpy(one.buffer.data_ptr(), one.arrives.data_ptr(), one.buffer.nbytes());
    for (const Pending& other : pending)  // the same pages may wait for another one
      if (block_of(other.buffer.data_ptr()) == block_of(one.buffer.data_ptr()))
        protect(other.buffer, other.arrives.defined() ? PROT_NONE : PROT_READ);
  }
}

struct PinnedAllocator final : at::Allocator {
  static void release(void* address) {
    auto found = blocks.find(static_cast<char*>(address));
    munmap(found->first, found->second);
    blocks.erase(found);
  }
  at::DataPtr allocate(size_t bytes) override {
    const size_t page = sysconf(_SC_PAGESIZE), whole = (bytes / page + 1) * page;
    void* address = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "CUDA error: out of memory (pinned)");
    std::memset(address, 0xA5, whole);
    blocks[static_cast<char*>(address)] = whole;
    return {address, address, &release, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

inline PinnedAllocator pinned_allocator;

}  // namespace pretended
