// Depthwise causal convolution with SiLU over packed sequences and over one token of each request; see reference.py.
// T tokens, Cn channels, K window, S sequences, R requests, n snapshots.

#include <ATen/ops/empty.h>

#include <cmath>

#include "prefill.h"
#include "vectors.h"

namespace megatron_ext::causal_conv1d {

constexpr int64_t PIECE = 32;  // tokens that a thread takes at once

// a * b + c, rounded as `at::vec::fmadd` does.
inline float fused(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

struct Convolution {
  int64_t channels, window;
  Dense held_weight, held_bias;
  const float* weight;  // [K, Cn], or [Cn, K] for `step`
  const float* bias;    // null: none

  Convolution(In w, MaybeIn b, bool by_channel)
      : channels(w.size(0)), window(w.size(1)), held_weight(by_channel ? w : w.t()), held_bias(b),
        weight(held_weight.data()), bias(held_bias.data()) {
    TORCH_CHECK(!b || (b->dim() == 1 && b->size(0) == channels), "bias is [Cn]");
  }

  // One token; taps[k] are the channels of the input that weight[k] is for.
  void token(const float* const* taps, float* y) const {
    for (int64_t c = 0; c < channels; c += W) {
      const int64_t count = lanes(c, channels);
      Vec sum = bias ? load(bias + c, count) : Vec(0.0f);
      for (int64_t k = 0; k < window; ++k)
        sum = at::vec::fmadd(load(weight + k * channels + c, count), load(taps[k] + c, count), sum);
      store(y + c, silu(sum), count);
    }
  }

  // One token of a sequence whose state [Cn, K-1] is moved on.
  void step(float* state, const float* x, float* y) const {
    const int64_t kept = window - 1;
    for (int64_t c = 0; c < channels; ++c) {
      const float* w = weight + c * window;
      float* past = state + c * kept;
      float sum = bias ? bias[c] : 0.0f;
      for (int64_t k = 0; k < kept; ++k) sum = fused(w[k], past[k], sum);
      y[c] = fused(w[kept], x[c], sum);
      for (int64_t k = 0; k + 1 < kept; ++k) past[k] = past[k + 1];
      if (kept > 0) past[kept - 1] = x[c];
    }
    for (int64_t c = 0; c < channels; c += W) store(y + c, silu(load(y + c, lanes(c, channels))), lanes(c, channels));
  }
};

// A prefill's inputs, with each sequence's K-1 earlier ones.
struct Inputs {
  const Prefill& prefill;
  const Rows& x;  // [T, Cn]
  int64_t channels, kept;
  std::vector<float> earlier;  // [S, K-1, Cn]

  Inputs(const Prefill& all, const Rows& x_, int64_t channels_, int64_t kept_)
      : prefill(all), x(x_), channels(channels_), kept(kept_),
        earlier(all.sequences() * kept * channels) {
    for_each(all.sequences(), [&](int64_t s) {
      std::vector<float> state(channels * kept);
      all.load(s, 0, state.data(), channels * kept);
      float* to = earlier.data() + s * kept * channels;
      for (int64_t k = 0; k < kept; ++k)
        for (int64_t c = 0; c < channels; ++c) to[k * channels + c] = state[c * kept + k];
    });
  }

  // Input `t` of the packed axis, of a sequence; those before its first token are the earlier ones.
  const float* row(int64_t sequence, int64_t t) const {
    const int64_t before = t - prefill.begin(sequence);
    return before >= 0 ? x(t) : earlier.data() + ((sequence + 1) * kept + before) * channels;
  }

  // The state after the inputs before a token: [Cn, K-1], to a slot.
  void keep(int64_t sequence, const Stop& stop) const {
    std::vector<float> state(channels * kept);
    for (int64_t k = 0; k < kept; ++k) {
      const float* from = row(sequence, stop.token - kept + k);
      for (int64_t c = 0; c < channels; ++c) state[c * kept + k] = from[c];
    }
    prefill.store(stop, 0, state.data(), channels * kept);
  }
};

struct Piece {
  int64_t sequence, begin, end;
};

std::vector<Piece> cut(const Prefill& prefill) {
  std::vector<Piece> pieces;
  for (int64_t s = 0; s < prefill.sequences(); ++s)
    for (int64_t t = prefill.begin(s); t < prefill.end(s); t += PIECE)
      pieces.push_back({s, t, std::min(t + PIECE, prefill.end(s))});
  return pieces;
}

at::Tensor prefill(In x, In weight, MaybeIn bias, In starts, In slots, In has_initial, at::Tensor live,
                   MaybeIn kept_slots, MaybeIn kept_offsets, MaybeIn kept_tokens, MaybeIn snapshots) {
  const Convolution convolution(weight, bias, false);
  const Prefill sequences(starts, slots, has_initial, live, kept_slots, kept_offsets, kept_tokens, snapshots,
                          {convolution.channels, convolution.window - 1});
  const Rows wide(x);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == convolution.channels, "x is [T, Cn]");
  const Inputs inputs(sequences, wide, convolution.channels, convolution.window - 1);
  at::Tensor y = at::empty(x.sizes(), at::kFloat);
  float* out = y.mutable_data_ptr<float>();
  const int64_t channels = convolution.channels;
  const std::vector<Piece> pieces = cut(sequences);
  for_each(pieces.size(), [&](int64_t i) {
    std::vector<const float*> taps(convolution.window);
    for (int64_t t = pieces[i].begin; t < pieces[i].end; ++t) {
      for (int64_t k = 0; k <= inputs.kept; ++k) taps[k] = inputs.row(pieces[i].sequence, t - inputs.kept + k);
      convolution.token(taps.data(), out + t * channels);
    }
  });
  std::fill(out + sequences.tokens() * channels, out + y.numel(), 0.0f);
  for_each(sequences.sequences(), [&](int64_t s) {
    sequences.walk(s, sequences.tokens(), [](int64_t, int64_t) {}, [&](const Stop& stop) { inputs.keep(s, stop); });
  });
  return as_type(y, x.scalar_type());
}

at::Tensor decode(In x, In weight, MaybeIn bias, MaybeIn slots, int64_t first_slot, at::Tensor live) {
  const Convolution convolution(weight, bias, true);
  const Rows wide(x);
  TORCH_CHECK(x.dim() == 2 && x.size(1) == convolution.channels, "x is [T, Cn]");
  const int64_t channels = convolution.channels, kept = convolution.window - 1, requests = x.size(0);
  const Pool states(live, {convolution.channels, convolution.window - 1});
  const Slots where(slots, first_slot);
  at::Tensor y = at::empty(x.sizes(), at::kFloat);
  float* out = y.mutable_data_ptr<float>();
  at::parallel_for(0, requests, 1 + 16384 / (channels + 1), [&](int64_t begin, int64_t end) {
    std::vector<float> copy(channels * kept);
    for (int64_t r = begin; r < end; ++r) {
      float* state = states.in_place(where[r], 0, copy.data(), channels * kept);
      convolution.step(state, wide(r), out + r * channels);
      states.put_back(where[r], 0, state, channels * kept);
    }
  });
  return as_type(y, x.scalar_type());
}

}  // namespace megatron_ext::causal_conv1d

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  using namespace megatron_ext;
  define_recurrence(library, "conv", "Tensor x, Tensor weight, Tensor? bias", &causal_conv1d::prefill,
                    &causal_conv1d::decode);
}
