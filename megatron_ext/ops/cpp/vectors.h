// Vectors of fp32 of whatever width this library is compiled for, and what kernels compute with them.
// W: floats of a vector. Rows may have any number of floats: tails are read and written by count.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

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

// W numbers of any type in fp32.
template <typename T>
Vec widened(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return Vec::loadu(from);
  } else {
    Vec wide;
    at::vec::load_to_float<T>(from, wide);
    return wide;
  }
}

inline Vec widened(const int8_t* from) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  alignas(64) float lane[W];
  for (int64_t i = 0; i < W; ++i) lane[i] = static_cast<float>(from[i]);
  return Vec::loadu(lane);
#endif
}

// Lanes behind `count` are zero.
template <typename T>
Vec load(const T* from, int64_t count) {
  if (count >= W) return widened(from);
  alignas(64) T lane[W] = {};
  std::copy_n(from, count, lane);
  return widened(lane);
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

// 2**x for x <= 0, with fewer operations than e**x; wrong by less than 2e-7 of itself; 1 for 0. Below -126 it is
// 2**-126. The polynomial is the best one of its degree for 2**r, -1/2 <= r <= 1/2; x = n + r, where adding `shift`
// leaves n in the lowest bits.
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
