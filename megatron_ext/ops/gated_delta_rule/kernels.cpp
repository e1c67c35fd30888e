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
constexpr int VECTORS = 2;         // of columns at once
constexpr int64_t LANES = VECTORS * W;
constexpr int CHAINS = 4;          // sums over K beside each other; one alone would wait for itself

struct Inputs {
  Rows q, k, v, g, beta;
  int64_t groups, heads, keys, values;
  std::vector<float> scale_q, scale_k;  // [T, G], what queries and keys are to be multiplied with

  Inputs(In q_, In k_, In v_, In g_, In beta_, bool normalize)
      : q(q_), k(k_), v(v_), g(g_), beta(beta_), groups(k_.size(1)), heads(v_.size(1)),
        keys(k_.size(2)), values(v_.size(2)), scale_q(k_.size(0) * groups), scale_k(k_.size(0) * groups) {
    TORCH_CHECK(k_.dim() == 3 && q_.sizes() == k_.sizes() && v_.dim() == 3, "q and k are [T, G, K], v is [T, H, V]");
    TORCH_CHECK(heads % groups == 0 && k_.size(0) == v_.size(0), "value heads share key heads evenly");
    TORCH_CHECK(g_.dim() == 2 && g_.size(0) == v_.size(0) && g_.size(1) == heads, "g is [T, H]");
    TORCH_CHECK(beta_.sizes() == g_.sizes(), "beta is [T, H]");
    const float root = 1.0f / std::sqrt(static_cast<float>(keys));
    at::parallel_for(0, k_.size(0) * groups, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        scale_q[i] = root * (normalize ? one_over_length(q(i / groups, i % groups)) : 1.0f);
        scale_k[i] = normalize ? one_over_length(k(i / groups, i % groups)) : 1.0f;
      }
    });
  }

  // Of columns, in a head's state.
  int64_t blocks() const {
    return (values + LANES - 1) / LANES;
  }

  float one_over_length(const float* from) const {
    Vec squares(0.0f);
    for (int64_t i = 0; i < keys; i += W) {
      const Vec value = load(from + i, lanes(i, keys));
      squares = at::vec::fmadd(value, value, squares);
    }
    return 1.0f / std::sqrt(sum(squares) + EPSILON);
  }
};

// f(key, chain) for all keys, most of them CHAINS at a time.
template <typename F>
inline void for_keys(int64_t keys, const F& f) {
  int64_t key = 0;
  for (; key + CHAINS <= keys; key += CHAINS)
#pragma GCC unroll 4
    for (int chain = 0; chain < CHAINS; ++chain) f(key + chain, chain);
  for (; key < keys; ++key) f(key, 0);
}

// Of all chains of one vector, in one order.
inline Vec total(const Vec (&chain)[CHAINS][VECTORS], int v) {
  return (chain[0][v] + chain[1][v]) + (chain[2][v] + chain[3][v]);
}

// LANES columns of one head's state, from `first` on; [K, LANES] here, zero behind V.
struct Block {
  const Inputs& in;
  int64_t head, first, count;
  float* state;

  // The block of this number; its memory is the thread's, so there is one at a time.
  Block(const Inputs& inputs, int64_t number)
      : in(inputs), head(number / inputs.blocks()), first(number % inputs.blocks() * LANES),
        count(std::min(LANES, inputs.values - first)), state(scratch<0>(inputs.keys * LANES)) {
    if (count < LANES) std::fill_n(state, in.keys * LANES, 0.0f);
  }

  int64_t place(int64_t key) const {
    return (head * in.keys + key) * in.values + first;
  }

  // What the decayed state does not recall of a token's value is written to it; y is what it then gives the query.
  void token(int64_t t, const float* value, float* y) {
    const int64_t group = head / (in.heads / in.groups), at = t * in.groups + group;
    const float *q = in.q(t, group), *k = in.k(t, group);
    const Vec decay = exp(Vec(*in.g(t, head))), strength(*in.beta(t, head) * in.scale_k[at]);
    float* rows = state;
    Vec recalled[CHAINS][VECTORS], given[CHAINS][VECTORS], written[VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < CHAINS * VECTORS; ++i)
      recalled[i / VECTORS][i % VECTORS] = given[i / VECTORS][i % VECTORS] = Vec(0.0f);
    for_keys(in.keys, [&](int64_t key, int chain) {
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v)
        recalled[chain][v] = at::vec::fmadd(Vec(k[key]), Vec::loadu(rows + key * LANES + v * W), recalled[chain][v]);
    });
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v)
      written[v] =
          (Vec::loadu(value + v * W) - total(recalled, v) * (decay * Vec(in.scale_k[at]))) * strength;
    for_keys(in.keys, [&](int64_t key, int chain) {
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) {
        float* place = rows + key * LANES + v * W;
        const Vec row = at::vec::fmadd(Vec(k[key]), written[v], Vec::loadu(place) * decay);
        row.store(place);
        given[chain][v] = at::vec::fmadd(Vec(q[key]), row, given[chain][v]);
      }
    });
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) (total(given, v) * Vec(in.scale_q[at])).store(y + v * W);
  }

  void pass(int64_t begin, int64_t end, float* y) {
    alignas(64) float columns[LANES] = {};
    for (int64_t t = begin; t < end; ++t) {
      std::copy_n(in.v(t, head) + first, count, columns);
      alignas(64) float given[LANES];
      token(t, columns, given);
      std::copy_n(given, count, y + (t * in.heads + head) * in.values + first);
    }
  }
};

at::Tensor prefill(In q, In k, In v, In g, In beta, bool normalize, In starts, In slots, In has_initial,
                   at::Tensor live, MaybeIn kept_slots, MaybeIn kept_offsets, MaybeIn kept_tokens, MaybeIn snapshots) {
  const Inputs in(q, k, v, g, beta, normalize);
  const Prefill sequences(starts, slots, has_initial, live, kept_slots, kept_offsets, kept_tokens, snapshots,
                          {in.heads, in.keys, in.values});
  at::Tensor y = at::empty(v.sizes(), at::kFloat);
  float* out = y.mutable_data_ptr<float>();
  const std::vector<int64_t> order = sequences.by_length();
  const int64_t units = in.heads * in.blocks();
  for_each(sequences.sequences() * units, [&](int64_t i) {
    const int64_t sequence = order[i / units];
    Block block(in, i % units);
    for (int64_t key = 0; key < in.keys; ++key)
      sequences.load(sequence, block.place(key), block.state + key * LANES, block.count);
    sequences.walk(
        sequence, PIECE, [&](int64_t begin, int64_t end) { block.pass(begin, end, out); },
        [&](const Stop& stop) {
          for (int64_t key = 0; key < in.keys; ++key)
            sequences.store(stop, block.place(key), block.state + key * LANES, block.count);
        });
  });
  std::fill(out + sequences.tokens() * in.heads * in.values, out + y.numel(), 0.0f);
  return as_type(y, v.scalar_type());
}

at::Tensor decode(In q, In k, In v, In g, In beta, bool normalize, MaybeIn slots, int64_t first_slot,
                  at::Tensor live) {
  const Inputs in(q, k, v, g, beta, normalize);
  const Pool pool(live, {in.heads, in.keys, in.values});
  const Slots where(slots, first_slot);
  at::Tensor y = at::empty(v.sizes(), at::kFloat);
  float* out = y.mutable_data_ptr<float>();
  const int64_t units = in.heads * in.blocks();
  at::parallel_for(0, v.size(0) * units, 1 + 8192 / (in.keys * LANES + 1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t request = i / units, slot = where[request];
      Block block(in, i % units);
      for (int64_t key = 0; key < in.keys; ++key)
        pool.load(slot, block.place(key), block.state + key * LANES, block.count);
      block.pass(request, request + 1, out);
      for (int64_t key = 0; key < in.keys; ++key)
        pool.store(slot, block.place(key), block.state + key * LANES, block.count);
    }
  });
  return as_type(y, v.scalar_type());
}

}  // namespace megatron_ext::gated_delta_rule

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  using namespace megatron_ext;
  define_recurrence(library, "gated_delta", "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool normalize",
                    &gated_delta_rule::prefill, &gated_delta_rule::decode);
}
