// Mamba-1's recurrence over packed sequences and over one token of each request; see reference.py.
// T tokens, D channels, N states of a channel, S sequences, R requests.
//
// In prefill lanes are channels, one vector of them at a time; in decode they are the states of one channel. Token by
// token, so that no result depends on where a sequence is cut.

#include <ATen/ops/empty.h>

#include "prefill.h"
#include "vectors.h"

namespace megatron_ext::selective_scan {

constexpr int64_t PIECE = 64;  // tokens
constexpr int64_t BLOCK = 32;  // channels of a request that a thread takes at once

struct Inputs {
  Rows u, delta, B, C;
  Dense A, D;
  int64_t channels, size;

  Inputs(In u_, In delta_, In A_, In B_, In C_, MaybeIn D_)
      : u(u_), delta(delta_), B(B_), C(C_), A(A_), D(D_), channels(u_.size(1)), size(B_.size(1)) {
    TORCH_CHECK(u_.dim() == 2 && delta_.sizes() == u_.sizes(), "u and delta are [T, D]");
    TORCH_CHECK(A_.dim() == 2 && A_.size(0) == channels && A_.size(1) == size, "A is [D, N]");
    TORCH_CHECK(B_.dim() == 2 && B_.size(0) == u_.size(0) && C_.sizes() == B_.sizes(), "B and C are [T, N]");
    TORCH_CHECK(!D_ || (D_->dim() == 1 && D_->size(0) == channels), "D is [D]");
  }
};

// One vector of channels, from `first` on, over a sequence. States and A are [N, W] here.
struct Block {
  const Inputs& in;
  int64_t first, count;
  Buffer state, rate;

  Block(const Inputs& inputs, int64_t channel)
      : in(inputs), first(channel), count(lanes(channel, inputs.channels)), state(in.size * W), rate(in.size * W) {
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t n = 0; n < in.size; ++n) rate[n * W + lane] = in.A.data()[(first + lane) * in.size + n];
  }

  void pass(int64_t begin, int64_t end, float* y) {
    const Vec direct = in.D.data() ? load(in.D.data() + first, count) : Vec(0.0f);
    for (int64_t t = begin; t < end; ++t) {
      const Vec delta = load(in.delta(t) + first, count), u = load(in.u(t) + first, count);
      const Vec stepped = delta * u;
      const float *b = in.B(t), *c = in.C(t);
      Vec out = u * direct;
      for (int64_t n = 0; n < in.size; ++n) {
        const Vec decay = exp(delta * Vec::loadu(rate.data() + n * W));
        const Vec h = at::vec::fmadd(Vec(b[n]), stepped, Vec::loadu(state.data() + n * W) * decay);
        h.store(state.data() + n * W);
        out = at::vec::fmadd(Vec(c[n]), h, out);
      }
      store(y + t * in.channels + first, out, count);
    }
  }
};

at::Tensor prefill(In u, In delta, In A, In B, In C, MaybeIn D, In starts, In slots, In has_initial, at::Tensor live,
                   MaybeIn kept_slots, MaybeIn kept_offsets, MaybeIn kept_tokens, MaybeIn snapshots) {
  const Inputs in(u, delta, A, B, C, D);
  const Prefill sequences(starts, slots, has_initial, live, kept_slots, kept_offsets, kept_tokens, snapshots,
                          {in.channels, in.size});
  at::Tensor y = at::empty(u.sizes(), at::kFloat);
  float* out = y.mutable_data_ptr<float>();
  const std::vector<int64_t> order = sequences.by_length();
  const int64_t blocks = (in.channels + W - 1) / W;
  for_each(sequences.sequences() * blocks, [&](int64_t i) {
    const int64_t sequence = order[i / blocks];
    Block block(in, i % blocks * W);
    sequences.load_lanes(sequence, block.first * in.size, block.count, in.size, W, block.state.data());
    sequences.walk(
        sequence, PIECE, [&](int64_t begin, int64_t end) { block.pass(begin, end, out); },
        [&](const Stop& stop) {
          sequences.store_lanes(stop, block.first * in.size, block.count, in.size, W, block.state.data());
        });
  });
  std::fill(out + sequences.tokens() * in.channels, out + y.numel(), 0.0f);
  return as_type(y, u.scalar_type());
}

// One channel's states [N], in place; returns what they give.
float step(float* state, const float* rate, const float* b, const float* c, int64_t size, float delta, float stepped) {
  Vec given(0.0f);
  for (int64_t n = 0; n < size; n += W) {
    const int64_t count = lanes(n, size);
    const Vec decay = exp(Vec(delta) * load(rate + n, count));
    const Vec h = at::vec::fmadd(load(b + n, count), Vec(stepped), load(state + n, count) * decay);
    store(state + n, h, count);
    given = at::vec::fmadd(load(c + n, count), h, given);
  }
  return sum(given);
}

at::Tensor decode(In u, In delta, In A, In B, In C, MaybeIn D, MaybeIn slots, int64_t first_slot, at::Tensor live) {
  const Inputs in(u, delta, A, B, C, D);
  const Pool pool(live, {in.channels, in.size});
  const Slots where(slots, first_slot);
  at::Tensor y = at::empty(u.sizes(), at::kFloat);
  float* out = y.mutable_data_ptr<float>();
  const int64_t blocks = (in.channels + BLOCK - 1) / BLOCK;
  at::parallel_for(0, u.size(0) * blocks, 1 + 8192 / (BLOCK * in.size), [&](int64_t begin, int64_t end) {
    std::vector<float> copy(BLOCK * in.size);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t request = i / blocks, first = i % blocks * BLOCK, count = std::min(BLOCK, in.channels - first);
      const int64_t slot = where[request], place = first * in.size;
      const float *value = in.u(request) + first, *delta_of = in.delta(request) + first;
      float* state = pool.in_place(slot, place, copy.data(), count * in.size);
      for (int64_t c = 0; c < count; ++c) {
        const float given = step(state + c * in.size, in.A.data() + place + c * in.size, in.B(request), in.C(request),
                                 in.size, delta_of[c], delta_of[c] * value[c]);
        out[request * in.channels + first + c] = (in.D.data() ? in.D.data()[first + c] * value[c] : 0.0f) + given;
      }
      pool.put_back(slot, place, state, count * in.size);
    }
  });
  return as_type(y, u.scalar_type());
}

}  // namespace megatron_ext::selective_scan

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  using namespace megatron_ext;
  define_recurrence(library, "selective", "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D",
                    &selective_scan::prefill, &selective_scan::decode);
}
