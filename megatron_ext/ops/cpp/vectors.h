// Vectors of fp32 of whatever width this library is compiled for, and what kernels compute with them.
// W: floats of a vector. Rows may have any number of floats: tails are read and written by count.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstdint>

namespace megatron_ext {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t W = Vec::size();

// The number of floats from `done` to `count` that one vector holds.
inline int64_t lanes(int64_t done, int64_t count) {
  return count - done < W ? count - done : W;
}

inline int64_t padded(int64_t count) {
  return (count + W - 1) / W * W;
}

// Lanes behind `count` are zero.
inline Vec load(const float* from, int64_t count) {
  if (count >= W) return Vec::loadu(from);
  alignas(64) float lane[W] = {};
  for (int64_t i = 0; i < count; ++i) lane[i] = from[i];
  return Vec::loadu(lane);
}

inline void store(float* to, Vec v, int64_t count) {
  if (count >= W) {
    v.store(to);
    return;
  }
  alignas(64) float lane[W];
  v.store(lane);
  for (int64_t i = 0; i < count; ++i) to[i] = lane[i];
}

inline float sum(Vec v) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, v);
}

inline float largest(Vec v) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, v);
}

// e**x, wrong by less than 2e-7 of itself; 1 for 0. Below -87 it is e**-87, above 88 it is e**88: no denormal numbers
// and no infinity. Inlined, which a library's is not. The polynomial is that of Cephes' expf, after x = n ln 2 + r.
inline Vec exp(Vec x) {
  x = at::vec::clamp(x, Vec(-87.0f), Vec(88.0f));
  const Vec n = (x * Vec(1.44269504f)).round();
  Vec r = at::vec::fmadd(n, Vec(-0.693359375f), x);
  r = at::vec::fmadd(n, Vec(2.12194440e-4f), r);
  Vec p(1.9875691500e-4f);
  p = at::vec::fmadd(p, r, Vec(1.3981999507e-3f));
  p = at::vec::fmadd(p, r, Vec(8.3334519073e-3f));
  p = at::vec::fmadd(p, r, Vec(4.1665795894e-2f));
  p = at::vec::fmadd(p, r, Vec(1.6666665459e-1f));
  p = at::vec::fmadd(p, r, Vec(5.0000001201e-1f));
  p = at::vec::fmadd(p, r * r, r + Vec(1.0f));
  const auto exponent = at::vec::convert_to_int_of_same_size(n) + at::vec::Vectorized<int32_t>(127);
  return p * at::vec::cast<float>(exponent << at::vec::Vectorized<int32_t>(23));
}

// x / (1 + e**-x)
inline Vec silu(Vec x) {
  return x / (Vec(1.0f) + exp(Vec(0.0f) - x));
}

}  // namespace megatron_ext
