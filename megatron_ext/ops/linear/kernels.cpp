// Products with weights that stay in 16 bits or int8 in memory; sums are in fp32.
//
// A weight [O, I] lies in panels of P outputs, [O / P, I, P], zeros after the last output, so that outputs are the lanes
// of vectors, and a panel is read from its start to its end. Numbers of 16 bits or int8 are exact in fp32; they become fp32 in registers, or in the nearest cache, once
// for all tiles of rows, where there are many.
//
// One order of sums: each output of a row has one accumulator for a block of BLOCK inputs, input by input, and blocks are
// added up one after the other, times their scale if there is one. So a row's bits depend neither on the other rows, nor
// on how rows are cut into tiles, nor on threads.
//
// M rows, I inputs, O outputs, P outputs of a panel, R rows of a tile, N panels at once.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "tensors.h"
#include "threads.h"
#include "vectors.h"

namespace megatron_ext::linear {

constexpr int64_t VECTORS = 3;              // of a panel
constexpr int64_t P = VECTORS * W;          // outputs of a panel
constexpr int64_t BLOCK = 128;              // inputs of a block, and of a scale
constexpr int64_t MOST = W == 16 ? 8 : 4;   // rows of a tile: accumulators, a panel's vectors and an input fit registers
constexpr int64_t RANGE = 32 * MOST;        // rows whose inputs stay in the caches while all panels are read
constexpr int64_t WIDENED = 4;              // tiles for which a block is widened in memory
constexpr int64_t WORK = 65536;             // products that are worth a thread

// A weight in panels of T, and the scale of each block, [O / P, blocks, P]; none if they are all 1.
template <typename T>
struct Panels {
  const T* weight;
  const float* scales;
  int64_t inputs, outputs;

  int64_t count() const {
    return (outputs + P - 1) / P;
  }

  int64_t blocks() const {
    return (inputs + BLOCK - 1) / BLOCK;
  }

  const T* at(int64_t panel, int64_t input) const {
    return weight + (panel * inputs + input) * P;
  }

  const float* scale(int64_t panel, int64_t block) const {
    return scales ? scales + (panel * blocks() + block) * P : nullptr;
  }
};

// Rows of x in tiles, [I, R] each, as even as possible.
struct Tiles {
  int64_t inputs, first, rows;  // of the range
  float* data;

  int64_t count() const {
    return (rows + MOST - 1) / MOST;
  }

  int64_t begin(int64_t tile) const {
    return rows * tile / count();
  }

  const float* at(int64_t tile, int64_t input) const {
    return data + begin(tile) * inputs + input * (begin(tile + 1) - begin(tile));
  }

  template <typename X>
  void fill(const X* x, int64_t stride) const {
    at::parallel_for(0, count(), 1 + WORK / (MOST * inputs + 1), [&](int64_t from, int64_t to) {
      for (int64_t tile = from; tile < to; ++tile) {
        const int64_t row = begin(tile), size = begin(tile + 1) - row;
        const X* source = x + (first + row) * stride;
        float* here = data + row * inputs;
        for (int64_t i = 0; i < inputs; ++i)
          for (int64_t r = 0; r < size; ++r) *here++ = static_cast<float>(source[r * stride + i]);
      }
    });
  }
};

// Adds the products of a block of `count` inputs to the totals [R, N * P] of a tile; panels, and their scales, lie apart.
template <typename T, int R, int N>
void add_block(const T* weight, int64_t apart, const float* x, int64_t count, const float* scales, int64_t scales_apart,
               float* totals) {
  constexpr int V = N * VECTORS;
  Vec sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = Vec(0.0f);
  for (int64_t i = 0; i < count; ++i, x += R, weight += P) {
    Vec w[V];
    for (int v = 0; v < V; ++v) w[v] = widened(weight + (v / VECTORS) * apart + (v % VECTORS) * W);
    for (int r = 0; r < R; ++r) {
      const Vec input(x[r]);
      for (int v = 0; v < V; ++v) sum[r][v] = at::vec::fmadd(w[v], input, sum[r][v]);
    }
  }
  for (int v = 0; v < V; ++v) {
    const Vec scale = scales ? Vec::loadu(scales + (v / VECTORS) * scales_apart + (v % VECTORS) * W) : Vec(1.0f);
    for (int r = 0; r < R; ++r) {
      float* total = totals + (r * V + v) * W;
      at::vec::fmadd(sum[r][v], scale, Vec::loadu(total)).store(total);
    }
  }
}

template <typename T>
using AddBlock = void (*)(const T*, int64_t, const float*, int64_t, const float*, int64_t, float*);

template <typename T, int... R>
AddBlock<T> add_block_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr AddBlock<T> all[] = {&add_block<T, R + 1, 1>...};
  return all[rows - 1];
}

// For 1 to MOST rows of a panel, or one row of two.
template <typename T>
AddBlock<T> add_block_of(int64_t rows, int64_t panels) {
  return panels == 2 ? &add_block<T, 1, 2> : add_block_of<T>(rows, std::make_integer_sequence<int, MOST>());
}

// Outputs [M, O], rounded once to their type.
struct Output {
  void* data;
  at::ScalarType type;
  const float* bias;
  int64_t outputs;

  // Totals [P] of a panel's outputs of a row.
  void write(int64_t row, int64_t panel, const float* totals) const {
    for (int64_t first = panel * P; first < std::min((panel + 1) * P, outputs); first += W, totals += W) {
      const int64_t count = lanes(first, outputs), place = row * outputs + first;
      Vec values = Vec::loadu(totals);
      if (bias) values = values + load(bias + first, count);
      if (type == at::kFloat)
        store(static_cast<float*>(data) + place, values, count);
      else if (type == at::kBFloat16)
        at::vec::convert_from_float<c10::BFloat16>(values, values)
            .store(static_cast<c10::BFloat16*>(data) + place, count);
      else
        at::vec::convert_from_float<c10::Half>(values, values).store(static_cast<c10::Half*>(data) + place, count);
    }
  }
};

// N panels of all tiles. A block becomes fp32 in memory once if enough tiles read it, otherwise in registers for each.
template <typename T>
void multiply_panels(const Panels<T>& panels, int64_t panel, int64_t count, const Tiles& x, const Output& out) {
  const bool is_widened = x.count() >= WIDENED;  // one panel at once, then
  float* totals = scratch<0>(x.rows * count * P);
  float* weight = is_widened ? scratch<1>(BLOCK * P) : nullptr;
  std::fill(totals, totals + x.rows * count * P, 0.0f);
  for (int64_t b = 0; b < panels.blocks(); ++b) {
    const int64_t i = b * BLOCK, size = std::min(BLOCK, panels.inputs - i);
    const T* from = panels.at(panel, i);
    for (int64_t w = 0; is_widened && w < size * P; w += W) widened(from + w).store(weight + w);
    for (int64_t tile = 0; tile < x.count(); ++tile) {
      const int64_t row = x.begin(tile), rows = x.begin(tile + 1) - row;
      const auto add = [&](const auto* read) {
        add_block_of<std::decay_t<decltype(*read)>>(rows, count)(read, panels.inputs * P, x.at(tile, i), size,
                                                                 panels.scale(panel, b), panels.blocks() * P,
                                                                 totals + row * count * P);
      };
      is_widened ? add(weight) : add(from);
    }
  }
  for (int64_t r = 0; r < x.rows; ++r)
    for (int64_t n = 0; n < count; ++n) out.write(x.first + r, panel + n, totals + (r * count + n) * P);
}

template <typename T>
void multiply_range(const Panels<T>& panels, const Tiles& x, const Output& out) {
  const int64_t size = x.rows == 1 ? 2 : 1;  // accumulators of one row and one panel would wait for each other
  const int64_t groups = (panels.count() + size - 1) / size;
  const auto compute = [&](int64_t g) {
    multiply_panels(panels, g * size, std::min(size, panels.count() - g * size), x, out);
  };
  if (x.count() > 1) return for_each(groups, compute);
  at::parallel_for(0, groups, 1 + WORK / (size * P * panels.inputs * x.rows + 1), [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) compute(g);
  });
}

template <typename T>
void multiply(const Panels<T>& panels, const at::Tensor& x, const Output& out) {
  const int64_t rows = x.size(0);
  const at::Tensor memory = at::empty({std::min(rows, RANGE) * panels.inputs}, at::kFloat);
  for (int64_t first = 0; first < rows; first += RANGE) {
    const Tiles tiles{panels.inputs, first, std::min(RANGE, rows - first), memory.mutable_data_ptr<float>()};
    with_type(x.scalar_type(), [&](auto number) { tiles.fill(x.const_data_ptr<decltype(number)>(), x.stride(0)); });
    multiply_range(panels, tiles, out);
  }
}

int64_t panel() {
  return P;
}

int64_t block() {
  return BLOCK;
}

at::Tensor product(In x, In weight, MaybeIn scales, int64_t outputs, MaybeIn bias) {
  TORCH_CHECK(weight.dim() == 3 && weight.is_contiguous() && weight.size(2) == P, "the weight is [O / P, I, P]");
  const int64_t inputs = weight.size(1);
  TORCH_CHECK(!scales || (scales->dim() == 3 && scales->size(0) == weight.size(0) && scales->size(2) == P &&
                          scales->size(1) == (inputs + BLOCK - 1) / BLOCK),
              "scales are [O / P, blocks, P]");
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == inputs, "x is [..., ", inputs, "], not ", x.sizes());
  TORCH_CHECK(outputs <= weight.size(0) * P, "the weight has at most ", weight.size(0) * P, " outputs");
  TORCH_CHECK(!bias || bias->sizes() == at::IntArrayRef{outputs}, "the bias is [", outputs, "]");
  at::Tensor flat = x.reshape({-1, inputs});
  if (flat.stride(1) != 1 && inputs > 1) flat = flat.contiguous();
  const Dense added(bias), scaled(scales);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  at::Tensor out = at::empty({flat.size(0), outputs}, flat.options());
  const Output to{out.mutable_data_ptr(), x.scalar_type(), added.data(), outputs};
  const auto compute = [&](const auto* data) {
    const Panels<std::decay_t<decltype(*data)>> panels{data, scaled.data(), inputs, outputs};
    multiply(panels, flat, to);
  };
  if (weight.scalar_type() == at::kBFloat16)
    compute(weight.const_data_ptr<c10::BFloat16>());
  else if (weight.scalar_type() == at::kHalf)
    compute(weight.const_data_ptr<c10::Half>());
  else
    compute(weight.const_data_ptr<int8_t>());
  return out.view(shape);
}

}  // namespace megatron_ext::linear

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  library.def("linear_panel() -> int", &megatron_ext::linear::panel);
  library.def("linear_block() -> int", &megatron_ext::linear::block);
  library.def("linear(Tensor x, Tensor weight, Tensor? scales, int outputs, Tensor? bias) -> Tensor",
              torch::dispatch(c10::kCPU, &megatron_ext::linear::product));
}
