// Powers of two, for weights whose logarithms are to base 2: fewer operations than e**x.
#pragma once

#include "vectors.h"

namespace megatron_ext {

// 2**x for x <= 0, wrong by less than 2e-7 of itself; 1 for 0. Below -126 it is 2**-126. The polynomial is the best one
// of its degree for 2**r, -1/2 <= r <= 1/2; x = n + r, where adding `shift` leaves n in the lowest bits.
inline Vec power_of_two(Vec x) {
  const Vec shift(12582912.0f);  // 1.5 * 2**23
  x = at::vec::maximum(x, Vec(-126.0f));
  const Vec shifted = x + shift;
  const Vec r = x - (shifted - shift);
  Vec p(0.001326472731307149f);
  p = at::vec::fmadd(p, r, Vec(0.009671512991189957f));
  p = at::vec::fmadd(p, r, Vec(0.05550733581185341f));
  p = at::vec::fmadd(p, r, Vec(0.24022242426872253f));
  p = at::vec::fmadd(p, r, Vec(0.6931470036506653f));
  p = at::vec::fmadd(p, r, Vec(1.0f));
  using Bits = at::vec::Vectorized<int32_t>;
  const Bits n = at::vec::cast<int32_t>(shifted) << Bits(23);
  return at::vec::cast<float>(at::vec::cast<int32_t>(p) + n);
}

inline float power_of_two(float x) {
  alignas(64) float lane[W];
  power_of_two(Vec(x)).store(lane);
  return lane[0];
}

}  // namespace megatron_ext
