// A CUDA device whose memory is the host's: tensors say `cuda:0`, every operation is computed by the CPU's kernel on the
// same memory. For torch without CUDA, whose operators have no kernel for the device: this is their fallback.
//
// Seen here, where a device would see it: tensors of two devices in one operation, answers that the host waits for,
// copies that wait, copies from memory that is not pinned. New memory holds NaN.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <set>

#include "memory.h"
#include "notes.h"
#include "pinned.h"
#include "runtime.h"

namespace pretended {
namespace {

using at::IValue;
using at::Tensor;
using Stack = torch::jit::Stack;

constexpr size_t MAX_POISONED = 64 << 20;  // bytes; pools of gigabytes stay as they came

at::DataPtr shared_memory(const c10::Storage& storage, at::Device on) {
  const auto drop = [](void* held) { delete static_cast<Taken*>(held); };
  const int64_t counted = on.is_cuda() ? storage.nbytes() : 0;
  return {const_cast<void*>(storage.data()), new Taken(storage, counted), drop, on};
}

c10::Storage shared_storage(const c10::Storage& storage, at::Device on) {
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), shared_memory(storage, on), at::getCPUAllocator(), true};
}

void lay_out(const Tensor& tensor, const Tensor& like) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
}

// The tensors of one call, and their twins on the host.
class Call {
 public:
  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      if (tensor.defined()) host_.push_back(tensor);
      return tensor;
    }
    for (const auto& [given, twin] : pairs_)
      if (given.is_same(tensor)) return twin;
    const auto* memory = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(memory);
    if (found == storages_.end())
      found = storages_.emplace(memory, shared_storage(tensor.storage(), at::kCPU)).first;
    auto twin = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    lay_out(twin, tensor);
    pairs_.emplace_back(tensor, twin);
    return twin;
  }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) return to_host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& one : value.toTensorVector()) found.push_back(to_host(one));
      return found;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> found;
      for (const std::optional<Tensor>& one : value.toOptionalTensorList())
        found.push_back(one.has_value() ? std::make_optional(to_host(*one)) : std::nullopt);
      return found;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return at::Device(at::kCPU);
    if (value.isGenerator() && value.toGenerator().device().is_cuda())
      return static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->host;
    return value;
  }

  Tensor to_device(const Tensor& found) const {
    if (!found.defined()) return found;
    for (const auto& [given, twin] : pairs_)
      if (twin.is_same(found)) return given;
    for (const Tensor& one : host_)
      if (one.is_same(found)) return one;
    for (const auto& [given, twin] : pairs_)
      if (twin.storage().is_alias_of(found.storage())) return view_of(given, found);
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        shared_storage(found.storage(), device), c10::DispatchKeySet(c10::DispatchKey::CUDA), found.dtype());
    lay_out(made, found);
    return made;
  }

  IValue to_device(const IValue& value) const {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> found;
    for (const Tensor& one : value.toTensorVector()) found.push_back(to_device(one));
    return found;
  }

  // What an operation has resized.
  void take_over() const {
    for (const auto& [given, twin] : pairs_) {
      if (given.storage().data() != twin.storage().data()) {
        auto* memory = given.storage().unsafeGetStorageImpl();
        memory->set_data_ptr_noswap(shared_memory(twin.storage(), device));
        memory->set_nbytes(twin.storage().nbytes());
      }
      if (given.sizes() != twin.sizes() || given.strides() != twin.strides()) lay_out(given, twin);
    }
  }

  const std::vector<Tensor>& on_host() const { return host_; }

 private:
  static Tensor view_of(const Tensor& given, const Tensor& found) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(given.storage()), given.key_set(), found.dtype());
    lay_out(made, found);
    return made;
  }

  std::vector<std::pair<Tensor, Tensor>> pairs_;
  std::vector<Tensor> host_;
  std::map<const c10::StorageImpl*, c10::Storage> storages_;
};

bool begins_with(const std::string& name, const char* start) {
  return name.rfind(start, 0) == 0;
}

// Operations that take no number of the host for a tensor, though it has no dimensions.
bool takes_no_numbers(const std::string& name) {
  for (const char* start : {"index_select", "index_add", "index_copy", "gather", "scatter", "embedding", "cat", "stack",
                            "mm", "bmm", "addmm", "baddbmm", "topk", "sort", "cumsum"})
    if (name == start || name == std::string(start) + "_") return true;
  return false;
}

void check_devices(const std::string& name, const Call& call) {
  const bool is_index = begins_with(name, "index_put") || begins_with(name, "_index_put") || name == "index";
  for (const Tensor& one : call.on_host()) {
    if (is_index && at::isIntegralType(one.scalar_type(), true) && one.dim() > 0) {
      note("index from the host", name);
      continue;
    }
    TORCH_CHECK(
        one.dim() == 0 && !takes_no_numbers(name),
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (pretended: ",
        name, ")");
  }
}

bool is_mask(const IValue& value) {
  if (!value.isOptionalTensorList()) return false;
  for (const std::optional<Tensor>& one : value.toOptionalTensorList())
    if (one.has_value() && one->defined() && (one->scalar_type() == at::kBool || one->scalar_type() == at::kByte))
      return true;
  return false;
}

// Whether the host has to wait for what the device has, to go on.
bool waits(const std::string& name, const std::string& overload, const Stack& arguments) {
  static const std::set<std::string> always = {
      "_local_scalar_dense", "nonzero",     "masked_select", "unique_consecutive", "_unique2",
      "_unique",             "unique_dim",  "bincount",      "equal"};
  if (always.count(name)) return true;
  if (name == "repeat_interleave" && overload == "Tensor") return arguments.size() < 2 || arguments[1].isNone();
  if (name == "index" && arguments.size() > 1) return is_mask(arguments[1]);
  if (begins_with(name, "index_put") || begins_with(name, "_index_put"))
    return is_mask(arguments[1]) && arguments[2].toTensor().numel() != 1;
  return false;
}

void poison(const IValue& made) {
  if (!made.isTensor() || !made.toTensor().defined()) return;
  const auto& storage = made.toTensor().storage();
  if (storage.nbytes() <= MAX_POISONED) std::memset(storage.mutable_data(), 0xFF, storage.nbytes());
}

// Of a factory; strides count as if there were no gaps.
int64_t bytes_of(const c10::FunctionSchema& schema, const Stack& arguments) {
  int64_t count = 1, size = c10::elementSize(at::typeMetaToScalarType(at::get_default_dtype()));
  for (size_t i = 0; i < arguments.size(); i++) {
    if (schema.arguments()[i].name() == "size")
      for (int64_t one : arguments[i].toIntVector()) count *= one;
    if (schema.arguments()[i].name() == "dtype" && !arguments[i].isNone())
      size = c10::elementSize(arguments[i].toScalarType());
  }
  return count * size;
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string full = schema.name(), name = full.substr(full.find("::") + 2);
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  Call call;
  Stack arguments(stack->begin() + first, stack->end());
  for (IValue& one : arguments) one = call.to_host(one);
  if (!call.on_host().empty()) check_devices(name, call);
  if (waits(name, schema.overload_name(), arguments)) {
    note("waits", name);
    complete(last_copy);
  }
  if (name == "empty" || name == "empty_strided") check_room(bytes_of(schema, arguments));
  for (size_t i = 0; i < count; i++)  // a factory's
    if (schema.arguments()[i].name() == "pin_memory") arguments[i] = IValue();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(&arguments);
  }
  call.take_over();
  for (IValue& one : arguments) one = call.to_device(one);
  if (begins_with(name, "empty") || name == "new_empty")
    for (const IValue& one : arguments) poison(one);
  stack->erase(stack->begin() + first, stack->end());
  stack->insert(stack->end(), arguments.begin(), arguments.end());
}

// Kernels that are chosen by the device of a tensor inside of operations that know no devices come here first.

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  Call call;
  const Tensor target = call.to_host(self), from = call.to_host(source).expand_as(target);
  const bool to_device = self.is_cuda(), from_device = source.is_cuda();
  if ((to_device && from_device) || target.numel() == 0) {
    target.copy_(from);
    return self;
  }
  const Tensor& host = to_device ? source : self;
  const bool pinned = host.numel() > 0 && is_pinned(host.data_ptr()) && host.is_contiguous();
  const bool as_it_is = source.scalar_type() == self.scalar_type() && source.is_contiguous() && self.is_contiguous();
  if (!non_blocking || (!pinned && !to_device)) {
    note(to_device ? "copy to the device that waits" : "copy to the host that waits", host.is_pinned() ? "pinned" : "pageable");
    complete(last_copy);
    target.copy_(from);
  } else if (!pinned) {
    note("copy from memory that is not pinned", "copy_");
    target.copy_(from);
  } else if (to_device) {
    note("asynchronous copy to the device", as_it_is ? "copy_" : "copy_ by way of another tensor");
    target.copy_(from);
    begin(host, Tensor());
  } else {
    note("asynchronous copy to the host", as_it_is ? "copy_" : "copy_ by way of another tensor");
    const Tensor arrives = at::empty(host.sizes(), host.options().pinned_memory(false));
    arrives.copy_(from);
    begin(host, arrives);
  }
  return self;
}

int64_t choose_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // composed of products: the fused kernels of the CPU and of the device are others
}

std::vector<std::string> take_faults() {
  std::vector<std::string> found(fault_count, fault_is_write ? "written" : "read");
  fault_count = 0;
  return found;
}

}  // namespace
}  // namespace pretended

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, pretended::Hooks)
}  // namespace at

namespace {
pretended::Guard guard;
c10::impl::DeviceGuardImplRegistrar registrar(at::kCUDA, &guard);
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended::run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &pretended::copy);
  m.impl("_fused_sdp_choice", &pretended::choose_attention);
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&pretended::run_on_host>());
}

TORCH_LIBRARY(pretended, m) {
  m.def("note(str kind, str what) -> ()");
  m.def("last_copy() -> int", [] { return pretended::last_copy; });
  m.def("complete(int number) -> ()", [](int64_t number) { pretended::complete(number); });
  m.def("memory() -> int[]", [] {
    return std::vector<int64_t>{pretended::total_bytes, pretended::allocated_bytes, pretended::reserved_bytes, pretended::peak_bytes};
  });
  m.def("set_total(int bytes) -> ()", [](int64_t bytes) { pretended::total_bytes = bytes; });
  m.def("empty_cache() -> ()", [] { pretended::reserved_bytes = pretended::allocated_bytes.load(); });
  m.def("reset_peak() -> ()", [] { pretended::peak_bytes = pretended::allocated_bytes.load(); });
  m.def("take_faults() -> str[]", &pretended::take_faults);
}
