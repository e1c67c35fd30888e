// What torch asks a CUDA build about the device: guards, hooks, generators of random numbers.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "pinned.h"

namespace pretended {

const at::Device device(at::kCUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<at::kCUDA> {
  at::Device exchangeDevice(at::Device) const override { return pretended::device; }
  at::Device getDevice() const override { return pretended::device; }
  c10::Stream getStream(at::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, pretended::device); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, pretended::device); }
};

// Random numbers of the device: another generator than the host's, with the host's algorithm.
struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  explicit Generator(uint64_t seed)
      : c10::GeneratorImpl(pretended::device, c10::DispatchKeySet(c10::DispatchKey::CUDA)), host(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a pretended generator has no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* other = new Generator(0);
    other->host = host.clone();
    return other;
  }
};

inline const at::Generator& default_generator() {
  static at::Generator found = at::make_generator<Generator>(c10::default_rng_seed_val);
  return found;
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(at::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(at::DeviceIndex) const override { return at::make_generator<Generator>(c10::default_rng_seed_val); }
  at::Device getDeviceFromPtr(void*) const override { return pretended::device; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void deviceSynchronize(at::DeviceIndex) const override { complete(last_copy); }
};

}  // namespace pretended
