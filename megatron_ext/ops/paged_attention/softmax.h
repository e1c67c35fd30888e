// What both ways to attend share: sums so far, powers of two, numbers of 16 bits, and where a tile of keys ends.
//
// Scores are logarithms to base 2. What a row gets depends on nothing but its own query, keys and values: each sum runs
// over all its terms in order of head dimensions or of positions, whatever else is computed beside it, and a masked key
// adds exactly nothing. Both ways add the same terms in the same order, so that they give the same bits.
//
// D head size, M rows, T the type of keys and values.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace megatron_ext::attention {

constexpr int64_t KEYS = 64;  // of a tile of keys; those begin at multiples of it
constexpr float LOWEST = std::numeric_limits<float>::lowest();
static_assert(KEYS % W == 0);

// f<R>(i) for all i below `count`: R of them from i on, then fewer at once as they become less.
template <int R, typename F>
void for_some(int64_t i, int64_t count, const F& f) {
  for (; i + R <= count; i += R) f(std::integral_constant<int, R>(), i);
  if constexpr (R > 1) for_some<R == 6 ? 4 : R / 2>(i, count, f);
}

// Sums so far of rows: of weights times values, of weights, and the greatest score. Zeros, and LOWEST, to begin with.
struct Sums {
  float* values;   // [D, M] or [M, D]
  float* weights;  // [M]
  float* top;      // [M]

  static int64_t floats(int64_t head_size, int64_t rows) {
    return (head_size + 2) * rows;
  }

  static Sums in(float* memory, int64_t head_size, int64_t rows) {
    return {memory, memory + head_size * rows, memory + (head_size + 1) * rows};
  }

  void clear(int64_t head_size, int64_t rows) const {
    std::fill(values, values + (head_size + 1) * rows, 0.0f);
    std::fill(top, top + rows, LOWEST);
  }
};

}  // namespace megatron_ext::attention
