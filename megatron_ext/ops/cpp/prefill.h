// What prefills of recurrences have in common: whose states are read from where, and where they are to be kept.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "tensors.h"
#include "threads.h"

namespace megatron_ext {

// Where a sequence's state is wanted: after the packed tokens before `token`, in a slot of the live pool or of snapshots.
struct Stop {
  int64_t token, slot;
  bool is_snapshot;
};

// The S sequences of a prefill, whose states have the shape `slot`. What is done for one of them reads no state of another.
class Prefill {
 public:
  Prefill(In starts, In slots, In has_initial, In live, MaybeIn kept_slots, MaybeIn kept_offsets, MaybeIn kept_tokens,
          MaybeIn snapshots, at::IntArrayRef slot)
      : starts_(starts),
        slots_(slots),
        has_initial_(has_initial.contiguous()),
        live_(live, slot),
        snapshots_(kept_slots ? *snapshots : live, slot),
        stops_(starts.size(0) - 1) {
    TORCH_CHECK(slots.size(0) == sequences() && has_initial.size(0) == sequences(), "a slot for each sequence");
    const Integers to(kept_slots), offsets(kept_offsets), after(kept_tokens);
    for (int64_t s = 0; s < sequences(); ++s) {
      for (int64_t i = kept_offsets ? offsets[s] : 0; kept_offsets && i < offsets[s + 1]; ++i)
        stops_[s].push_back({after[i], to[i], true});
      stops_[s].push_back({end(s), slots_[s], false});
    }
  }

  int64_t sequences() const {
    return static_cast<int64_t>(stops_.size());
  }

  int64_t begin(int64_t sequence) const {
    return starts_[sequence];
  }

  int64_t end(int64_t sequence) const {
    return starts_[sequence + 1];
  }

  // Of all sequences.
  int64_t tokens() const {
    return starts_[sequences()];
  }

  // Sequences in the order in which to begin with them: the longest first.
  std::vector<int64_t> by_length() const {
    std::vector<int64_t> order(sequences());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return end(a) - begin(a) > end(b) - begin(b); });
    return order;
  }

  // `count` states that a sequence begins with, from `offset` of its slot on: zeros if it has none.
  void load(int64_t sequence, int64_t offset, float* to, int64_t count) const {
    if (has_initial_.const_data_ptr<bool>()[sequence]) return live_.load(slots_[sequence], offset, to, count);
    std::fill(to, to + count, 0.0f);
  }

  void store(const Stop& stop, int64_t offset, const float* from, int64_t count) const {
    (stop.is_snapshot ? snapshots_ : live_).store(stop.slot, offset, from, count);
  }

  // `count` rows of `size` states that a sequence begins with, from `offset` of its slot on, as lanes: [size, width],
  // zero in lanes behind them.
  void load_lanes(int64_t sequence, int64_t offset, int64_t count, int64_t size, int64_t width, float* to) const {
    std::vector<float> rows(count * size);
    load(sequence, offset, rows.data(), count * size);
    std::fill_n(to, size * width, 0.0f);
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t n = 0; n < size; ++n) to[n * width + lane] = rows[lane * size + n];
  }

  void store_lanes(const Stop& stop, int64_t offset, int64_t count, int64_t size, int64_t width,
                   const float* from) const {
    std::vector<float> rows(count * size);
    for (int64_t lane = 0; lane < count; ++lane)
      for (int64_t n = 0; n < size; ++n) rows[lane * size + n] = from[n * width + lane];
    store(stop, offset, rows.data(), count * size);
  }

  // Walk over a sequence: advance(begin, end) for pieces of up to `most` tokens, keep(stop) wherever its state is wanted.
  template <typename Advance, typename Keep>
  void walk(int64_t sequence, int64_t most, const Advance& advance, const Keep& keep) const {
    int64_t token = begin(sequence);
    for (const Stop& stop : stops_[sequence]) {
      for (; token < stop.token; token = std::min(token + most, stop.token))
        advance(token, std::min(token + most, stop.token));
      keep(stop);
    }
  }

 private:
  Integers starts_, slots_;
  at::Tensor has_initial_;
  Pool live_, snapshots_;
  std::vector<std::vector<Stop>> stops_;
};

// Registers the kernels of a recurrence under its name. `inputs`: the parameters of both, before those of states.
template <typename PrefillKernel, typename DecodeKernel>
void define_recurrence(torch::Library& library, const std::string& name, const std::string& inputs,
                       PrefillKernel prefill, DecodeKernel decode) {
  const std::string places =
      "Tensor starts, Tensor slots, Tensor has_initial, Tensor(a!) live, Tensor? kept_slots, Tensor? kept_offsets, "
      "Tensor? kept_tokens, Tensor(b!)? snapshots";
  const std::string to_prefill = name + "_prefill(" + inputs + ", " + places + ") -> Tensor";
  const std::string where = "Tensor? slots, int first_slot, Tensor(a!) live";
  const std::string to_decode = name + "_decode(" + inputs + ", " + where + ") -> Tensor";
  library.def(to_prefill.c_str(), torch::dispatch(c10::kCPU, prefill));
  library.def(to_decode.c_str(), torch::dispatch(c10::kCPU, decode));
}

// How many of `count` heads or blocks a piece of work takes, so that each thread has a few of `sequences` * count.
inline int64_t heads_at_once(int64_t sequences, int64_t count) {
  const int64_t pieces = 4 * at::get_num_threads();
  return std::clamp<int64_t>(sequences * count / pieces, 1, count);
}

}  // namespace megatron_ext
