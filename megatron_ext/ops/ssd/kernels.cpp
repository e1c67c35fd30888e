// Mamba-2's recurrence over packed sequences and over one token of each request; see reference.py.
// T tokens, H heads, G groups, J = H / G heads of a group, P head dimension, N state size, S sequences, R requests.
//
// Token by token: what a chunk's matrix products cost beside one addition more for each state, the scores and decays
// between its tokens eat up. So no result depends on where a sequence is cut into steps, chunks or pieces. Lanes are
// channels of P; a block of a few states stays in registers while a piece of the sequence passes.

#include <ATen/ops/empty.h>

#include "prefill.h"
#include "vectors.h"

namespace megatron_ext::ssd {

constexpr int64_t PIECE = 32;  // tokens
#if defined(CPU_CAPABILITY_AVX512)
constexpr int STATES = 8;  // in registers at once, of V vectors each
#else
constexpr int STATES = 4;
#endif

struct Inputs {
  Rows x, dt, B, C;
  Dense A, D;
  int64_t heads, width, groups, size;

  Inputs(In x_, In dt_, In A_, In B_, In C_, MaybeIn D_)
      : x(x_), dt(dt_), B(B_), C(C_), A(A_), D(D_),
        heads(x_.size(1)), width(x_.size(2)), groups(B_.size(1)), size(B_.size(2)) {
    TORCH_CHECK(x_.dim() == 3 && dt_.dim() == 2 && dt_.size(0) == x_.size(0) && dt_.size(1) == heads, "dt is [T, H]");
    TORCH_CHECK(B_.dim() == 3 && B_.size(0) == x_.size(0) && C_.sizes() == B_.sizes(), "B and C are [T, G, N]");
    TORCH_CHECK(heads % groups == 0 && A_.dim() == 1 && A_.size(0) == heads, "A is [H]; heads share groups evenly");
    TORCH_CHECK(!D_ || (D_->dim() == 1 && D_->size(0) == heads), "D is [H]");
  }

  float direct(int64_t head) const {
    return D.data() ? D.data()[head] : 0.0f;
  }
};

// Some tokens of one group of heads: B and C, one behind the other.
struct Piece {
  int64_t count;
  Buffer B, C;     // [PIECE, N]
  Buffer decay;    // [padded PIECE], of one head
  Buffer stepped;  // [PIECE, V * W] of one head: x * dt
  Buffer y;        // [PIECE, V * W] of one head

  Piece(int64_t size, int64_t lanes)
      : B(PIECE * size), C(PIECE * size), decay(padded(PIECE)), stepped(PIECE * lanes), y(PIECE * lanes) {}

  void take(const Inputs& in, int64_t begin, int64_t end, int64_t group) {
    count = end - begin;
    for (int64_t t = 0; t < count; ++t) {
      std::copy_n(in.B(begin + t, group), in.size, B.data() + t * in.size);
      std::copy_n(in.C(begin + t, group), in.size, C.data() + t * in.size);
    }
  }
};

// NB states of V vectors each, from `first` of N on, over the tokens of a piece: adds what they give to y.
template <int NB, int V>
void advance(const Piece& piece, int64_t size, int64_t first, float* state, float* y) {
  Vec h[NB][V];
  // Unrolled at once; otherwise the states, though in registers, are written to memory for each token, too.
#pragma GCC unroll 16
  for (int i = 0; i < NB; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) h[i][v] = Vec::loadu(state + (i * V + v) * W);
  const float *b = piece.B.data() + first, *c = piece.C.data() + first, *x = piece.stepped.data();
  const float* decay = piece.decay.data();
  for (const float* end = decay + piece.count; decay < end; ++decay, b += size, c += size, x += V * W, y += V * W) {
    const Vec kept(*decay);
    Vec in[V], out[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      in[v] = Vec::loadu(x + v * W);
      out[v] = Vec::loadu(y + v * W);
    }
#pragma GCC unroll 16
    for (int i = 0; i < NB; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        h[i][v] = at::vec::fmadd(Vec(b[i]), in[v], h[i][v] * kept);
        out[v] = at::vec::fmadd(Vec(c[i]), h[i][v], out[v]);
      }
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) out[v].store(y + v * W);
  }
#pragma GCC unroll 16
  for (int i = 0; i < NB; ++i)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) h[i][v].store(state + (i * V + v) * W);
}

// V * W channels of one head, from `channel` on; its state is [N, V * W], zero in lanes behind P.
template <int V>
struct Block {
  static constexpr int64_t LANES = V * W;
  const Inputs& in;
  int64_t head, channel;

  int64_t channels() const {
    return std::min(LANES, in.width - channel);
  }

  int64_t place() const {
    return (head * in.width + channel) * in.size;
  }

  // The tokens of a piece, the first of which is `begin`.
  void pass(Piece& piece, int64_t begin, float* state, float* y) const {
    const Vec direct(in.direct(head)), rate(in.A.data()[head]);
    for (int64_t t = 0; t < piece.count; ++t) {
      const float* x = in.x(begin + t, head) + channel;
      piece.decay[t] = *in.dt(begin + t, head);
      for (int v = 0; v < V; ++v) {
        const Vec taken = megatron_ext::load(x + v * W, std::max<int64_t>(channels() - v * W, 0));
        (taken * Vec(piece.decay[t])).store(piece.stepped.data() + (t * V + v) * W);
        (taken * direct).store(piece.y.data() + (t * V + v) * W);
      }
    }
    for (int64_t t = 0; t < piece.count; t += W)
      exp(Vec::loadu(piece.decay.data() + t) * rate).store(piece.decay.data() + t);
    int64_t n = 0;
    for (; n + STATES <= in.size; n += STATES)
      advance<STATES, V>(piece, in.size, n, state + n * LANES, piece.y.data());
    for (; n < in.size; ++n) advance<1, V>(piece, in.size, n, state + n * LANES, piece.y.data());
    for (int64_t t = 0; t < piece.count; ++t)
      std::copy_n(piece.y.data() + t * LANES, channels(), y + ((begin + t) * in.heads + head) * in.width + channel);
  }
};

// Heads [first, last) of one group, over a sequence.
template <int V>
void scan(const Inputs& in, const Prefill& prefill, int64_t sequence, int64_t first, int64_t last, float* y) {
  constexpr int64_t LANES = Block<V>::LANES;
  const int64_t group = first / (in.heads / in.groups);
  std::vector<Block<V>> blocks;
  for (int64_t head = first; head < last; ++head)
    for (int64_t channel = 0; channel < in.width; channel += LANES) blocks.push_back({in, head, channel});
  const int64_t floats_each = in.size * LANES;
  float* states = scratch<0>(blocks.size() * floats_each);
  for (size_t i = 0; i < blocks.size(); ++i)
    prefill.load_lanes(sequence, blocks[i].place(), blocks[i].channels(), in.size, LANES, states + i * floats_each);
  Piece piece(in.size, LANES);
  prefill.walk(
      sequence, PIECE,
      [&](int64_t begin, int64_t end) {
        piece.take(in, begin, end, group);
        for (size_t i = 0; i < blocks.size(); ++i) blocks[i].pass(piece, begin, states + i * floats_each, y);
      },
      [&](const Stop& stop) {
        for (size_t i = 0; i < blocks.size(); ++i)
          prefill.store_lanes(stop, blocks[i].place(), blocks[i].channels(), in.size, LANES, states + i * floats_each);
      });
}

at::Tensor prefill(In x, In dt, In A, In B, In C, MaybeIn D, In starts, In slots, In has_initial, at::Tensor live,
                   MaybeIn kept_slots, MaybeIn kept_offsets, MaybeIn kept_tokens, MaybeIn snapshots) {
  const Inputs in(x, dt, A, B, C, D);
  const Prefill sequences(starts, slots, has_initial, live, kept_slots, kept_offsets, kept_tokens, snapshots,
                          {in.heads, in.width, in.size});
  at::Tensor y = at::empty(x.sizes(), at::kFloat);
  float* out = y.mutable_data_ptr<float>();
  const int64_t of_group = in.heads / in.groups, at_once = heads_at_once(sequences.sequences() * in.groups, of_group);
  const int64_t parts = (of_group + at_once - 1) / at_once, units = in.groups * parts;
  const std::vector<int64_t> order = sequences.by_length();
  for_each(sequences.sequences() * units, [&](int64_t i) {
    const int64_t group = i % units / parts, first = group * of_group + i % parts * at_once;
    const int64_t last = std::min(first + at_once, (group + 1) * of_group);
    if (in.width > W) return scan<2>(in, sequences, order[i / units], first, last, out);
    scan<1>(in, sequences, order[i / units], first, last, out);
  });
  std::fill(out + sequences.tokens() * in.heads * in.width, out + y.numel(), 0.0f);
  return as_type(y, x.scalar_type());
}

// One channel's states [N], in place; returns what they give.
float step(float* state, const float* b, const float* c, int64_t size, Vec decay, Vec stepped) {
  Vec given(0.0f);
  for (int64_t n = 0; n < size; n += W) {
    const int64_t count = lanes(n, size);
    const Vec h = at::vec::fmadd(load(b + n, count), stepped, load(state + n, count) * decay);
    store(state + n, h, count);
    given = at::vec::fmadd(load(c + n, count), h, given);
  }
  return sum(given);
}

at::Tensor decode(In x, In dt, In A, In B, In C, MaybeIn D, MaybeIn slots, int64_t first_slot, at::Tensor live) {
  const Inputs in(x, dt, A, B, C, D);
  const Pool pool(live, {in.heads, in.width, in.size});
  const Slots where(slots, first_slot);
  at::Tensor y = at::empty(x.sizes(), at::kFloat);
  float* out = y.mutable_data_ptr<float>();
  const int64_t of_head = in.width * in.size;
  at::parallel_for(0, x.size(0) * in.heads, 1 + 8192 / (of_head + 1), [&](int64_t begin, int64_t end) {
    std::vector<float> copy(of_head);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t request = i / in.heads, head = i % in.heads, slot = where[request];
      const int64_t group = head / (in.heads / in.groups);
      const float dt_of = *in.dt(request, head), direct = in.direct(head);
      const float *from = in.x(request, head), *b = in.B(request, group), *c = in.C(request, group);
      const Vec decay = exp(Vec(dt_of * in.A.data()[head]));
      float* state = pool.in_place(slot, head * of_head, copy.data(), of_head);
      for (int64_t p = 0; p < in.width; ++p) {
        const float given = step(state + p * in.size, b, c, in.size, decay, Vec(from[p] * dt_of));
        out[i * in.width + p] = direct * from[p] + given;
      }
      pool.put_back(slot, head * of_head, state, of_head);
    }
  });
  return as_type(y, x.scalar_type());
}

}  // namespace megatron_ext::ssd

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  using namespace megatron_ext;
  define_recurrence(library, "ssd", "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D",
                    &ssd::prefill, &ssd::decode);
}
