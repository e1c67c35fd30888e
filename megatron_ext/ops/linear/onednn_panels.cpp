// Weights that oneDNN has packed in fp32, read in place: moved to large pages, and multiplied with few rows.
//
// oneDNN lays a weight [O, I] out in panels of P outputs, [O / P, I, P], zeros after the last output and input. `panels`
// sees whether it has done so; another version may choose otherwise. A single row is read more slowly by oneDNN than the
// memory allows, and so are weights in the caches.
//
// One order of sums, for any number of rows up to ROWS: blocks of BLOCK inputs, input by input, added up one by one.

#include <ATen/ops/empty.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "tensors.h"
#include "threads.h"
#include "vectors.h"

#ifndef MADV_COLLAPSE  // Linux 6.1
#define MADV_COLLAPSE 25
#endif

namespace at::native {
// Private in torch, so weak: null where a torch has others.
__attribute__((weak)) void* data_ptr_from_mkldnn(const at::Tensor& t);
__attribute__((weak)) int64_t nbytes_from_mkldnn(const at::Tensor& t);
}  // namespace at::native

namespace megatron_ext::onednn_panels {

constexpr int64_t P = 64;        // outputs of a panel
constexpr int64_t ROWS = 4;      // at most; oneDNN computes five to eight as fast
constexpr int64_t BLOCK = 128;   // inputs
constexpr int64_t WORK = 65536;  // products that are worth a thread
constexpr uintptr_t PAGE = 2 << 20;

const float* data_of(const at::Tensor& packed) {
  return static_cast<const float*>(at::native::data_ptr_from_mkldnn(packed));
}

// Inputs of a panel, zeros included, if the packed weight has the layout above; otherwise 0.
int64_t panels(const at::Tensor& packed, const at::Tensor& weight) {
  if (!packed.is_mkldnn() || !at::native::data_ptr_from_mkldnn || !at::native::nbytes_from_mkldnn) return 0;
  if (weight.scalar_type() != at::kFloat || weight.dim() != 2 || !weight.is_contiguous()) return 0;
  const int64_t outputs = weight.size(0), inputs = weight.size(1), count = (outputs + P - 1) / P;
  const int64_t bytes = at::native::nbytes_from_mkldnn(packed), size = count * P * int64_t{sizeof(float)};
  if (count == 0 || inputs == 0 || bytes % size != 0 || bytes / size < inputs) return 0;
  const float *data = data_of(packed), *from = weight.const_data_ptr<float>();
  for (const int64_t panel : {int64_t{0}, count / 2, count - 1})
    for (int64_t i = 0; i < inputs; ++i)
      for (int64_t o = panel * P; o < std::min((panel + 1) * P, outputs); ++o)
        if (std::memcmp(data + (panel * (bytes / size) + i) * P + o % P, from + o * inputs + i, sizeof(float)) != 0)
          return 0;
  return bytes / size;
}

// Moves memory that is written already to large pages, where the system has them; older systems do so in the
// background. Returns the bytes that it has asked for.
int64_t move(const at::Tensor& t) {
  if (t.is_mkldnn() && (!at::native::data_ptr_from_mkldnn || !at::native::nbytes_from_mkldnn)) return 0;
  const void* data = t.is_mkldnn() ? data_of(t) : t.const_data_ptr();
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto end = (begin + (t.is_mkldnn() ? at::native::nbytes_from_mkldnn(t) : t.nbytes())) / PAGE * PAGE;
  const auto first = (begin + PAGE - 1) / PAGE * PAGE;
  if (end <= first || madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE) != 0) return 0;
  madvise(reinterpret_cast<void*>(first), end - first, MADV_COLLAPSE);
  return end - first;
}

// Sums of V vectors of a panel's outputs over all inputs, for R rows.
template <int R, int V>
void sum_panel(const float* weight, const float* x, int64_t stride, int64_t inputs, Vec (&total)[R][V]) {
  for (int64_t done = 0; done < inputs; done += BLOCK) {
    const int64_t end = std::min(done + BLOCK, inputs);
    Vec sum[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = Vec(0.0f);
    for (int64_t i = done; i < end; ++i) {
      Vec w[V];
      for (int v = 0; v < V; ++v) w[v] = Vec::loadu(weight + i * P + v * W);
      for (int r = 0; r < R; ++r) {
        const Vec input(x[r * stride + i]);
        for (int v = 0; v < V; ++v) sum[r][v] = at::vec::fmadd(w[v], input, sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) total[r][v] = done == 0 ? sum[r][v] : total[r][v] + sum[r][v];
  }
}

struct Work {
  const float *weight, *x, *bias;
  float* out;
  int64_t inputs, padded, outputs, stride;

  template <int R>
  void compute(int64_t panel) const {
    constexpr int V = W == 16 || R <= 2 ? 4 : 2;  // sums, weights and an input fit the registers
    for (int64_t o = panel * P; o < std::min((panel + 1) * P, outputs); o += V * W) {
      Vec total[R][V];
      sum_panel<R, V>(weight + panel * padded * P + o % P, x, stride, inputs, total);
      for (int v = 0; v < V && o + v * W < outputs; ++v) {
        const int64_t place = o + v * W, count = lanes(place, outputs);
        const Vec added = bias ? load(bias + place, count) : Vec(0.0f);
        for (int r = 0; r < R; ++r) store(out + r * outputs + place, bias ? total[r][v] + added : total[r][v], count);
      }
    }
  }

  template <int R>
  void compute_all() const {
    at::parallel_for(0, (outputs + P - 1) / P, 1 + WORK / (P * inputs), [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) compute<R>(panel);
    });
  }
};

template <int... R>
void compute_rows(const Work& work, int64_t rows, std::integer_sequence<int, R...>) {
  ((rows == R + 1 ? work.compute_all<R + 1>() : void()), ...);
}

at::Tensor product(In x, In packed, int64_t padded, MaybeIn bias) {
  const int64_t outputs = packed.size(0), inputs = packed.size(1);
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() > 0 && x.size(-1) == inputs, "x is [..., ", inputs,
              "] in fp32, not ", x.sizes());
  TORCH_CHECK(!bias || bias->sizes() == at::IntArrayRef{outputs}, "the bias is [", outputs, "]");
  at::Tensor flat = x.reshape({-1, inputs});
  if (flat.stride(1) != 1 && inputs > 1) flat = flat.contiguous();
  const int64_t rows = flat.size(0);
  TORCH_CHECK(rows <= ROWS, "at most ", ROWS, " rows, not ", rows);
  const Dense added(bias);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  at::Tensor out = at::empty(shape, flat.options());
  const Work work{data_of(packed), flat.const_data_ptr<float>(), added.data(), out.mutable_data_ptr<float>(),
                  inputs, padded, outputs, flat.stride(0)};
  compute_rows(work, rows, std::make_integer_sequence<int, ROWS>());
  return out;
}

}  // namespace megatron_ext::onednn_panels

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  library.def("move_to_large_pages(Tensor t) -> int", &megatron_ext::onednn_panels::move);
  library.def("onednn_panels(Tensor packed, Tensor weight) -> int", &megatron_ext::onednn_panels::panels);
  library.def("linear_of_few_rows(Tensor x, Tensor packed, int padded, Tensor? bias) -> Tensor",
              &megatron_ext::onednn_panels::product);
}
