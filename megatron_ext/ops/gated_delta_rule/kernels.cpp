// The gated delta rule over packed sequences and over one token of each request; see reference.py.
// T tokens, G key heads, H value heads, K key dimension, V value dimension, S sequences, R requests.
//
// Columns of a state [K, V] know nothing of each other: lanes are columns, a block of them at a time. Token by token in
// prefill and decode alike, so that no result depends on where a sequence is cut.

#include <ATen/ops/empty.h>

#include <cmath>

#include "prefill.h"
#include "vectors.h"

namespace megatron_ext::gated_delta_rule {

constexpr int64_t PIECE = 64;      // tokens
constexpr float EPSILON = 1e-6f;   // NORM_EPSILON of reference.py
constexpr int64_t VECTORS = 2;     // of columns at once
constexpr int64_t LANES = VECTORS * W;
constexpr int64_t CHAINS = 4;      // of additions beside each other; sums over K would wait for themselves

struct Inputs {
  at::Tensor q, k, v, g, beta;  // in fp32, only their last dimension dense
  int64_t groups, heads, keys, values;
  bool normalize;

  Inputs(const at::Tensor& q_, const at::Tensor& k_, const at::Tensor& v_, const at::Tensor& g_,
         const at::Tensor& beta_, bool normalize_)
      : q(rows(q_)), k(rows(k_)), v(rows(v_)), g(rows(g_)), beta(rows(beta_)), groups(k_.size(1)), heads(v_.size(1)),
        keys(k_.size(2)), values(v_.size(2)), normalize(normalize_) {
    TORCH_CHECK(k.dim() == 3 && q.sizes() == k.sizes() && v.dim() == 3, "q and k are [T, G, K], v is [T, H, V]");
    TORCH_CHECK(heads % groups == 0 && k.size(0) == v.size(0), "value heads share key heads evenly");
    TORCH_CHECK(g.dim() == 2 && g.size(0) == v.size(0) && g.size(1) == heads, "g is [T, H]");
    TORCH_CHECK(beta.sizes() == g.sizes(), "beta is [T, H]");
  }

  const float* head_of(const at::Tensor& t, int64_t token, int64_t head) const {
    return floats(t) + token * t.stride(0) + head * t.stride(1);
  }

  float number(const at::Tensor& t, int64_t token, int64_t head) const {
    return floats(t)[token * t.stride(0) + head];
  }
};

// What a query or key is to be multiplied with.
float scale_of(const float* from, int64_t size, bool normalize) {
  if (!normalize) return 1.0f;
  Vec squares(0.0f);
  for (int64_t i = 0; i < size; i += W) {
    const Vec value = load(from + i, lanes(i, size));
    squares = at::vec::fmadd(value, value, squares);
  }
  return 1.0f / std::sqrt(sum(squares) + EPSILON);
}

struct Columns {
  Vec lane[VECTORS];

  Columns() : Columns(0.0f) {}
  explicit Columns(float value) {
    for (auto& one : lane) one = Vec(value);
  }
  explicit Columns(const float* from) {
    for (int64_t v = 0; v < VECTORS; ++v) lane[v] = Vec::loadu(from + v * W);
  }
  void store(float* to) const {
    for (int64_t v = 0; v < VECTORS; ++v) lane[v].store(to + v * W);
  }
  // Adds a * b.
  void add(Vec a, const Columns& b) {
    for (int64_t v = 0; v < VECTORS; ++v) lane[v] = at::vec::fmadd(a, b.lane[v], lane[v]);
  }
  void scale(Vec a) {
    for (auto& one : lane) one = one * a;
  }
};

// The sum of all, in one order.
Columns total(const Columns (&chain)[CHAINS]) {
  Columns sum = chain[0];
  for (int64_t i = 1; i < CHAINS; ++i) sum.add(Vec(1.0f), chain[i]);
  return sum;
}

// LANES columns of one head's state, from `first` on; [K, LANES] here, zero behind V.
struct Block {
  const Inputs& in;
  int64_t head, first, count;
  std::vector<float> state;

  Block(const Inputs& inputs, int64_t head_, int64_t column)
      : in(inputs), head(head_), first(column), count(std::min(LANES, inputs.values - column)), state(in.keys * LANES) {}

  int64_t place(int64_t key) const {
    return (head * in.keys + key) * in.values + first;
  }

  // What a state before this token, decayed, does not recall of its value; and that is written: updates the state and
  // returns what it then gives the query.
  Columns token(int64_t t, const float* value) {
    const int64_t group = head / (in.heads / in.groups);
    const float *q = in.head_of(in.q, t, group), *k = in.head_of(in.k, t, group);
    const float scale_q = scale_of(q, in.keys, in.normalize) / std::sqrt(static_cast<float>(in.keys));
    const float scale_k = scale_of(k, in.keys, in.normalize), beta = in.number(in.beta, t, head);
    const Vec decay = exp(Vec(in.number(in.g, t, head)));
    Columns recalled[CHAINS], given[CHAINS], written(value);
    for (int64_t i = 0; i < in.keys; ++i)
      recalled[i % CHAINS].add(Vec(k[i]), Columns(state.data() + i * LANES));
    written.add(decay * Vec(-scale_k), total(recalled));
    written.scale(Vec(beta * scale_k));
    for (int64_t i = 0; i < in.keys; ++i) {
      Columns row(state.data() + i * LANES);
      row.scale(decay);
      row.add(Vec(k[i]), written);
      row.store(state.data() + i * LANES);
      given[i % CHAINS].add(Vec(q[i]), row);
    }
    Columns y = total(given);
    y.scale(Vec(scale_q));
    return y;
  }

  void pass(int64_t begin, int64_t end, float* y) {
    alignas(64) float columns[LANES] = {};
    for (int64_t t = begin; t < end; ++t) {
      std::copy_n(in.head_of(in.v, t, head) + first, count, columns);
      alignas(64) float given[LANES];
      token(t, columns).store(given);
      std::copy_n(given, count, y + (t * in.heads + head) * in.values + first);
    }
  }
};

at::Tensor prefill(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                   const at::Tensor& beta, bool normalize, const at::Tensor& starts, const at::Tensor& slots,
                   const at::Tensor& has_initial, at::Tensor live, const std::optional<at::Tensor>& kept_slots,
                   const std::optional<at::Tensor>& kept_sequences, const std::optional<at::Tensor>& kept_tokens,
                   const std::optional<at::Tensor>& snapshots) {
  const Inputs in(q, k, v, g, beta, normalize);
  const Prefill sequences(starts, slots, has_initial, live, kept_slots, kept_sequences, kept_tokens, snapshots,
                          {in.heads, in.keys, in.values});
  at::Tensor y = at::empty(v.sizes(), in.v.options());
  float* out = y.mutable_data_ptr<float>();
  const std::vector<int64_t> order = sequences.by_length();
  const int64_t parts = (in.values + LANES - 1) / LANES, units = in.heads * parts;
  for_each(sequences.sequences() * units, [&](int64_t i) {
    const int64_t sequence = order[i / units];
    Block block(in, i % units / parts, i % parts * LANES);
    for (int64_t key = 0; key < in.keys; ++key)
      sequences.load(sequence, block.place(key), block.state.data() + key * LANES, block.count);
    sequences.walk(
        sequence, PIECE, [&](int64_t begin, int64_t end) { block.pass(begin, end, out); },
        [&](const Stop& stop) {
          for (int64_t key = 0; key < in.keys; ++key)
            sequences.store(stop, block.place(key), block.state.data() + key * LANES, block.count);
        });
  });
  std::fill(out + sequences.tokens() * in.heads * in.values, out + y.numel(), 0.0f);
  return y.to(v.scalar_type());
}

at::Tensor decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                  const at::Tensor& beta, bool normalize, const std::optional<at::Tensor>& slots, int64_t first_slot,
                  at::Tensor live) {
  const Inputs in(q, k, v, g, beta, normalize);
  const Pool pool(live, {in.heads, in.keys, in.values});
  const Slots where(slots, first_slot);
  at::Tensor y = at::empty(v.sizes(), in.v.options());
  float* out = y.mutable_data_ptr<float>();
  const int64_t parts = (in.values + LANES - 1) / LANES, units = in.heads * parts;
  for_ranges(v.size(0) * units, 1 + 8192 / (in.keys * LANES + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t request = i / units, slot = where[request];
      Block block(in, i % units / parts, i % parts * LANES);
      for (int64_t key = 0; key < in.keys; ++key)
        pool.load(slot, block.place(key), block.state.data() + key * LANES, block.count);
      block.pass(request, request + 1, out);
      for (int64_t key = 0; key < in.keys; ++key)
        pool.store(slot, block.place(key), block.state.data() + key * LANES, block.count);
    }
  });
  return y.to(v.scalar_type());
}

}  // namespace megatron_ext::gated_delta_rule

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  library.def(
      "gated_delta_prefill(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool normalize, Tensor starts, "
      "Tensor slots, Tensor has_initial, Tensor(a!) live, Tensor? kept_slots, Tensor? kept_sequences, "
      "Tensor? kept_tokens, Tensor(b!)? snapshots) -> Tensor");
  library.def(
      "gated_delta_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool normalize, Tensor? slots, "
      "int first_slot, Tensor(a!) live) -> Tensor");
}

TORCH_LIBRARY_IMPL(megatron_ext_cpu, CPU, library) {
  library.impl("gated_delta_prefill", &megatron_ext::gated_delta_rule::prefill);
  library.impl("gated_delta_decode", &megatron_ext::gated_delta_rule::decode);
}
