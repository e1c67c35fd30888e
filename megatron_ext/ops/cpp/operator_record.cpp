// Operator calls of a function as they were observed once, and their repetition without Python.
//
// A call is repeated with the arguments that it had: numbers are constants, tensors from outside are the very tensors,
// and tensors that earlier calls made are found by their storage, which takes over the memory of each repetition's
// output. So views need no call at all, and memory that no later call reads is given back at once.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace megatron_ext::operator_record {

using c10::IValue;

// Where a call leaves new memory: the output's place among its results, and the tensor that calls after it read.
struct Output {
  size_t place;
  at::Tensor tensor;
};

struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  std::vector<Output> outputs;
  std::vector<size_t> last_uses;  // storages, by number, that no later call reads
};

// A tensor from outside that views were made of, and its memory at that time.
struct Base {
  at::Tensor tensor;
  c10::StorageImpl* storage;
};

c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

std::string geometry_of(const at::Tensor& t) {
  std::ostringstream text;
  text << t.scalar_type() << t.sizes();
  if (t.has_storage()) text << t.strides() << t.storage_offset();
  return text.str();
}

bool is_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.storage_offset() == b.storage_offset() &&
         a.storage().nbytes() == b.storage().nbytes();
}

// The memory of a tensor that a call has made: taken, or copied if something else has kept the tensor, as a profiler may.
at::DataPtr memory_of(const at::Tensor& made) {
  const c10::Storage& storage = made.storage();
  if (made.use_count() == 1 && storage.use_count() == 1)
    return std::move(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
  at::DataPtr copy = c10::GetAllocator(at::kCPU)->allocate(storage.nbytes());
  std::memcpy(copy.get(), storage.data(), storage.nbytes());
  return copy;
}

// A storage of so many bytes.
c10::Storage storage_with(size_t bytes, at::DataPtr memory) {
  const c10::StorageImpl::use_byte_size_t tag;
  return c10::make_intrusive<c10::StorageImpl>(tag, bytes, std::move(memory), nullptr, false);
}

// The bytes of a Python number's tensor, as text; `item` would be an operator call.
std::string number_in(const at::Tensor& t) {
  std::ostringstream text;
  const auto* bytes = static_cast<const unsigned char*>(t.const_data_ptr());
  for (size_t i = 0; i < t.itemsize(); ++i) text << static_cast<int>(bytes[i]) << '.';
  return text.str();
}

template <typename F>
void for_tensors(const IValue& value, const F& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const IValue& one : value.toListRef()) for_tensors(one, f);
  }
}

bool indexes_by_mask(const std::vector<IValue>& arguments) {
  bool found = false;
  for (const IValue& one : arguments) {
    if (!one.isList()) continue;
    for_tensors(one, [&](const at::Tensor& t) {
      found |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
    });
  }
  return found;
}

class Record : public torch::CustomClassHolder {
 public:
  ~Record() override {
    stop();
  }

  void start() {
    TORCH_CHECK(handle_ == 0 && calls_.empty(), "a record is made once");
    outer_ = std::exchange(observing, this);
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_enter, &on_leave)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }

  void stop() {
    if (handle_ == 0) return;
    at::removeCallback(std::exchange(handle_, 0));
    observing = outer_;
  }

  // Ends the observation. `output` is what `replay` returns: a tensor that the calls made.
  void finish(const at::Tensor& output) {
    stop();
    if (problem_.empty()) close(output);
    observed_.clear();
    numbers_.clear();
    own_.clear();
  }

  std::string problem() const {
    return problem_;
  }

  std::string signature() const {
    return signature_.str();
  }

  bool is_current() const {
    return std::all_of(bases_.begin(), bases_.end(),
                       [](const Base& base) { return storage_of(base.tensor) == base.storage; });
  }

  at::Tensor replay() {
    TORCH_CHECK(output_.defined() && handle_ == 0, "no complete record");
    torch::jit::Stack stack;
    for (const Call& call : calls_) {
      stack.assign(call.arguments.begin(), call.arguments.end());
      call.op.callBoxed(stack);
      for (const Output& output : call.outputs) {
        const at::Tensor& made = stack[output.place].toTensor();
        TORCH_CHECK(is_alike(made, output.tensor), c10::toString(call.op.operator_name()),
                    ": another shape than recorded");
        storage_of(output.tensor)->set_data_ptr_noswap(memory_of(made));
      }
      for (size_t number : call.last_uses)
        storages_[number].unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
    }
    auto* kept = storage_of(output_);
    c10::Storage storage = storage_with(kept->nbytes(), std::move(kept->_mutable_data_ptr_no_checks()));
    kept->set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
    auto result = output_.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
    result->set_storage_keep_dtype(std::move(storage));
    return at::Tensor(std::move(result));
  }

 private:
  static std::unique_ptr<at::ObserverContext> on_enter(const at::RecordFunction& function) {
    if (observing != nullptr) observing->enter(function);
    return nullptr;
  }

  static void on_leave(const at::RecordFunction& function, at::ObserverContext*) {
    if (observing != nullptr) observing->leave(function);
  }

  void enter(const at::RecordFunction& function) {
    if (!function.operator_name() || depth_++ > 0) return;
    const auto inputs = function.inputs();
    arguments_.assign(inputs.begin(), inputs.end());
  }

  void leave(const at::RecordFunction& function) {
    const auto name = function.operator_name();
    if (!name || --depth_ > 0 || !problem_.empty()) return;
    const auto op = c10::Dispatcher::singleton().findSchema(*name);
    if (!op) return refuse(c10::toString(*name) + " is not registered");
    note(*op, std::move(arguments_), function.outputs());
    arguments_.clear();
  }

  void note(const c10::OperatorHandle& op, std::vector<IValue> arguments, const std::vector<IValue>& results) {
    const std::string name = c10::toString(op.operator_name());
    const auto& schema = op.schema();
    if (arguments.size() != schema.arguments().size() || results.size() != schema.returns().size())
      return refuse(name);  // not all of the call was observed
    const bool indexes = op.operator_name().name == "aten::index";
    if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::inplace_view) ||
        (indexes ? indexes_by_mask(arguments) : op.hasTag(at::Tag::dynamic_output_shape)))
      return refuse(name);
    std::vector<c10::StorageImpl*> given;
    bool has_tensors = false;
    for (const IValue& one : arguments)
      for_tensors(one, [&](const at::Tensor& t) {
        has_tensors = true;
        if (t.has_storage()) given.push_back(storage_of(t));
      });
    const auto has_tensor = [](const IValue& one) { return one.isTensor() || one.isTensorList(); };
    if (!has_tensors && !results.empty() && std::none_of(results.begin(), results.end(), has_tensor))
      return;  // a function of numbers, which arguments of later calls show
    Call call{op, {}, {}, {}};
    bool is_view = op.operator_name().name.rfind("aten::", 0) == 0 && !schema.is_mutable() && !results.empty();
    for (size_t i = 0; i < results.size(); ++i) {
      const IValue& result = results[i];
      observed_.push_back(result);
      const auto is_given = [&](const at::Tensor& t) {
        return t.has_storage() && std::find(given.begin(), given.end(), storage_of(t)) != given.end();
      };
      if (result.isTensorList()) {
        for_tensors(result, [&](const at::Tensor& t) { is_view &= is_given(t); });
        if (!is_view) return refuse(name);
        continue;
      }
      if (!result.isTensor() || !result.toTensor().has_storage()) return refuse(name);
      const at::Tensor& t = result.toTensor();
      if (is_given(t)) continue;
      is_view = false;
      if (number_of(t)) return refuse(name);
      numbers_.emplace(storage_of(t), storages_.size());
      storages_.push_back(storage_with(t.storage().nbytes(), at::DataPtr(nullptr, t.device())));
      call.outputs.push_back({i, own(t)});
    }
    for (const IValue& one : arguments) observed_.push_back(one);
    if (is_view) {
      for (const IValue& one : arguments)
        for_tensors(one, [&](const at::Tensor& t) {
          if (t.has_storage() && !number_of(t)) bases_.push_back({t, storage_of(t)});
        });
      return;
    }
    signature_ << name << '(';
    for (const IValue& one : arguments) {
      describe(one);
      call.arguments.push_back(own(one));
    }
    signature_ << ")\n";
    calls_.push_back(std::move(call));
  }

  void describe(const IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      const at::Tensor& t = value.toTensor();
      const auto number = number_of(t);
      if (number)
        signature_ << '%' << *number;
      else if (t.unsafeGetTensorImpl()->is_wrapped_number())  // a Python number; its tensor is made in each call
        signature_ << number_in(t);
      else
        signature_ << '@' << (t.has_storage() ? t.storage().data() : static_cast<const void*>(t.unsafeGetTensorImpl()));
      signature_ << geometry_of(t) << ", ";
    } else if (value.isList()) {
      signature_ << '[';
      for (const IValue& one : value.toListRef()) describe(one);
      signature_ << "], ";
    } else {
      signature_ << value << ", ";
    }
  }

  at::Tensor own(const at::Tensor& t) {
    const auto number = t.defined() ? number_of(t) : std::nullopt;
    if (!number) return t;
    const auto found = own_.find(t.unsafeGetTensorImpl());
    if (found != own_.end()) return found->second;
    auto copy = t.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true);
    copy->set_storage_keep_dtype(storages_[*number]);
    return own_.emplace(t.unsafeGetTensorImpl(), at::Tensor(std::move(copy))).first->second;
  }

  IValue own(const IValue& value) {
    if (value.isTensor()) return own(value.toTensor());
    bool has_made = false;
    for_tensors(value, [&](const at::Tensor& t) { has_made |= number_of(t).has_value(); });
    if (!has_made) return value;
    auto list = c10::impl::GenericList(value.toList().elementType());
    for (const IValue& one : value.toListRef()) list.push_back(own(one));
    return list;
  }

  void close(const at::Tensor& output) {
    if (!output.has_storage() || !number_of(output)) return refuse("the result is not made by an operator");
    output_ = own(output);
    std::vector<bool> is_used(storages_.size(), false);
    is_used[*number_of(output)] = true;
    std::unordered_map<c10::StorageImpl*, size_t> numbers;
    for (size_t i = 0; i < storages_.size(); ++i) numbers.emplace(storages_[i].unsafeGetStorageImpl(), i);
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {
      const auto use = [&](const at::Tensor& t) {
        const auto found = t.has_storage() ? numbers.find(storage_of(t)) : numbers.end();
        if (found == numbers.end() || is_used[found->second]) return;
        is_used[found->second] = true;
        call->last_uses.push_back(found->second);
      };
      for (const IValue& one : call->arguments) for_tensors(one, use);
      for (const Output& one : call->outputs) use(one.tensor);
    }
  }

  void refuse(const std::string& reason) {
    if (problem_.empty()) problem_ = reason;
  }

  std::optional<size_t> number_of(const at::Tensor& t) const {
    const auto found = numbers_.find(storage_of(t));
    return found == numbers_.end() ? std::nullopt : std::optional(found->second);
  }

  // While observing.
  static thread_local Record* observing;
  at::CallbackHandle handle_ = 0;
  Record* outer_ = nullptr;
  int64_t depth_ = 0;
  std::vector<IValue> arguments_;
  std::vector<IValue> observed_;                              // keeps every address unique
  std::unordered_map<c10::StorageImpl*, size_t> numbers_;     // storages made by calls, as observed
  std::unordered_map<c10::TensorImpl*, at::Tensor> own_;      // observed tensor -> the one that is replayed

  std::string problem_;
  std::ostringstream signature_;
  std::vector<Call> calls_;
  std::vector<Base> bases_;
  std::vector<c10::Storage> storages_;  // by number; without memory between replays
  at::Tensor output_;
};

thread_local Record* Record::observing = nullptr;

}  // namespace megatron_ext::operator_record

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  using megatron_ext::operator_record::Record;
  library.class_<Record>("OperatorRecord")
      .def(torch::init<>())
      .def("start", &Record::start)
      .def("stop", &Record::stop)
      .def("finish", &Record::finish)
      .def("problem", &Record::problem)
      .def("signature", &Record::signature)
      .def("is_current", &Record::is_current)
      .def("replay", &Record::replay);
}
