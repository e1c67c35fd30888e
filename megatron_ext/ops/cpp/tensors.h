// How kernels see tensors: inputs as rows of fp32, pools of states in their own type.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <cstdint>

namespace megatron_ext {

// What functions that Python calls are given.
using In = const at::Tensor&;
using MaybeIn = const std::optional<at::Tensor>&;

// The very tensor where it is of this type already; asked here, since `to` costs a call of the dispatcher.
inline at::Tensor as_type(const at::Tensor& t, at::ScalarType type) {
  return t.scalar_type() == type ? t : t.to(type);
}

// f(number) with a number of this type: fp32, bf16, or else fp16.
template <typename F>
void with_type(at::ScalarType type, const F& f) {
  if (type == at::kFloat) return f(float());
  if (type == at::kBFloat16) return f(c10::BFloat16());
  f(c10::Half());
}

// In fp32, the last dimension dense.
inline at::Tensor rows(const at::Tensor& t) {
  const at::Tensor wide = as_type(t, at::kFloat);
  return wide.dim() == 0 || wide.stride(-1) == 1 || wide.size(-1) == 1 ? wide : wide.contiguous();
}

// Numbers in fp32, dense; none if there is no tensor.
class Dense {
 public:
  explicit Dense(const std::optional<at::Tensor>& t) {
    if (!t) return;
    held_ = as_type(*t, at::kFloat).contiguous();
    data_ = held_.const_data_ptr<float>();
  }

  const float* data() const {
    return data_;
  }

 private:
  at::Tensor held_;
  const float* data_ = nullptr;
};

// [T, width] or [T, heads, width] in fp32, the last dimension dense. Kernels ask here and not the tensor, whose every
// answer is a call.
class Rows {
 public:
  explicit Rows(const at::Tensor& t)
      : held_(rows(t)),
        data_(held_.const_data_ptr<float>()),
        token_(held_.stride(0)),
        head_(held_.dim() > 2 ? held_.stride(1) : 1) {}

  // The row of a token, or of one of its heads; of [T, H] the number of a head.
  const float* operator()(int64_t token, int64_t head = 0) const {
    return data_ + token * token_ + head * head_;
  }

 private:
  at::Tensor held_;
  const float* data_;
  int64_t token_, head_;
};

// Integers of a dense tensor that the caller holds.
template <typename Integer = int64_t>
const Integer* integers(const at::Tensor& t) {
  TORCH_CHECK(t.is_contiguous(), "indices are dense");
  return t.const_data_ptr<Integer>();
}

// int64 numbers in any stride, held as long as this.
class Integers {
 public:
  Integers() = default;
  explicit Integers(const at::Tensor& t) : held_(t.contiguous()), data_(held_.const_data_ptr<int64_t>()) {}
  explicit Integers(const std::optional<at::Tensor>& t) {
    if (t) *this = Integers(*t);
  }

  int64_t operator[](int64_t i) const {
    return data_[i];
  }

 private:
  at::Tensor held_;
  const int64_t* data_ = nullptr;
};

// A pool [slots, ...] in its own type. A slot's states lie densely; slots may lie apart.
class Pool {
 public:
  // `slot`: the shape of one slot's states.
  Pool(const at::Tensor& pool, at::IntArrayRef slot)
      : data_(static_cast<char*>(pool.data_ptr())),
        type_(pool.scalar_type()),
        slot_stride_(pool.stride(0)),
        slots_(pool.size(0)) {
    TORCH_CHECK(pool.sizes().slice(1) == slot, "slots of ", slot, ", not of ", pool.sizes().slice(1));
    TORCH_CHECK(pool.size(0) == 0 || pool[0].is_contiguous(), "a slot's states lie densely");
    TORCH_CHECK(type_ == at::kFloat || type_ == at::kBFloat16 || type_ == at::kHalf, "states of fp32 or 16 bits");
  }

  // `count` states of a slot from `offset` on.
  void load(int64_t slot, int64_t offset, float* to, int64_t count) const {
    const int64_t first = place(slot) + offset;
    if (type_ == at::kFloat) return read<float>(first, to, count);
    return type_ == at::kBFloat16 ? read<c10::BFloat16>(first, to, count) : read<c10::Half>(first, to, count);
  }

  void store(int64_t slot, int64_t offset, const float* from, int64_t count) const {
    const int64_t first = place(slot) + offset;
    if (type_ == at::kFloat) return write<float>(first, from, count);
    return type_ == at::kBFloat16 ? write<c10::BFloat16>(first, from, count) : write<c10::Half>(first, from, count);
  }

  // States of a slot to be changed: themselves where they are fp32, otherwise read into `copy`.
  float* in_place(int64_t slot, int64_t offset, float* copy, int64_t count) const {
    if (type_ == at::kFloat) return reinterpret_cast<float*>(data_) + place(slot) + offset;
    load(slot, offset, copy, count);
    return copy;
  }

  // What `in_place` gave, changed.
  void put_back(int64_t slot, int64_t offset, const float* states, int64_t count) const {
    if (type_ != at::kFloat) store(slot, offset, states, count);
  }

 private:
  int64_t place(int64_t slot) const {
    TORCH_CHECK_INDEX(slot >= 0 && slot < slots_, "slot ", slot, " of ", slots_);
    return slot * slot_stride_;
  }

  template <typename T>
  void read(int64_t first, float* to, int64_t count) const {
    const T* from = reinterpret_cast<const T*>(data_) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]);
  }

  template <typename T>
  void write(int64_t first, const float* from, int64_t count) const {
    T* to = reinterpret_cast<T*>(data_) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
  }

  char* data_;
  at::ScalarType type_;
  int64_t slot_stride_;
  int64_t slots_;
};

// The live slots of R decoding requests: listed, or one behind the other from `first` on.
class Slots {
 public:
  Slots(const std::optional<at::Tensor>& listed, int64_t first)
      : is_listed_(listed.has_value()), listed_(listed), first_(first) {}

  int64_t operator[](int64_t request) const {
    return is_listed_ ? listed_[request] : first_ + request;
  }

 private:
  bool is_listed_;
  Integers listed_;
  int64_t first_;
};

}  // namespace megatron_ext
