// y * SiLU(gate), alone or with an RMS norm over groups of channels behind it; see __init__.py.
// T tokens, Cn channels.

#include <ATen/ops/empty.h>

#include <cmath>

#include "tensors.h"
#include "threads.h"
#include "vectors.h"

namespace megatron_ext::gates {

constexpr int64_t GRAIN = 8192;  // elements that are worth a thread

// A row of y * SiLU(gate).
Vec gated(const float* y, const float* gate, int64_t count) {
  return load(y, count) * silu(load(gate, count));
}

void norm_group(const float* y, const float* gate, const float* weight, float* out, int64_t size, float eps) {
  Vec squares(0.0f);
  for (int64_t c = 0; c < size; c += W) {
    const Vec value = gated(y + c, gate + c, lanes(c, size));
    squares = at::vec::fmadd(value, value, squares);
    store(out + c, value, lanes(c, size));
  }
  const Vec scale(1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps));
  for (int64_t c = 0; c < size; c += W) {
    const int64_t count = lanes(c, size);
    store(out + c, load(out + c, count) * scale * load(weight + c, count), count);
  }
}

at::Tensor gated_norm(In y, In gate, In weight, int64_t group_size, double eps) {
  const Rows values(y), gates(gate);
  const Dense weights(weight);
  TORCH_CHECK(y.dim() == 2 && gate.sizes() == y.sizes(), "y and gate are [T, Cn]");
  const int64_t channels = y.size(1);
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == channels && channels % group_size == 0, "weight is [Cn], groups are whole");
  at::Tensor out = at::empty(y.sizes(), at::kFloat);
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, y.size(0), 1 + GRAIN / (channels + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      for (int64_t c = 0; c < channels; c += group_size)
        norm_group(values(t) + c, gates(t) + c, weights.data() + c, to + t * channels + c, group_size,
                   static_cast<float>(eps));
  });
  return as_type(out, gate.scalar_type());
}

at::Tensor silu_gate(In y, In gate) {
  const Rows values(y), gates(gate);
  TORCH_CHECK(y.dim() == 2 && gate.sizes() == y.sizes(), "y and gate are [T, Cn]");
  const int64_t channels = y.size(1);
  at::Tensor out = at::empty(y.sizes(), at::kFloat);
  float* to = out.mutable_data_ptr<float>();
  at::parallel_for(0, y.size(0), 1 + GRAIN / (channels + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float *from = values(t), *z = gates(t);
      for (int64_t c = 0; c < channels; c += W) {
        const int64_t count = lanes(c, channels);
        store(to + t * channels + c, gated(from + c, z + c, count), count);
      }
    }
  });
  return as_type(out, gate.scalar_type());
}

}  // namespace megatron_ext::gates

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  library.def("gated_norm(Tensor y, Tensor gate, Tensor weight, int group_size, float eps) -> Tensor",
              torch::dispatch(c10::kCPU, &megatron_ext::gates::gated_norm));
  library.def("silu_gate(Tensor y, Tensor gate) -> Tensor",
              torch::dispatch(c10::kCPU, &megatron_ext::gates::silu_gate));
}
