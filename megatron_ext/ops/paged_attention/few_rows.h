// Attention of a few rows, as in decode, over keys that lie anywhere, a tile of keys at a time.
//
// Keys are the lanes of vectors when scores are computed, from a tile that is turned round in the nearest cache; head
// dimensions when values are added, which are read as vectors where they lie.
//
// D head size, M rows.
#pragma once

#include "softmax.h"

namespace megatron_ext::attention {

constexpr int64_t FEW = W / 2;  // rows at most

struct FewRows {
  int64_t head_size, count;
  const float* queries;    // [M, D], scaled
  const float* positions;  // [M], the last key that a row sees, counted from the first key of the tile
  float* turned;           // [D, KEYS]
  float* scores;           // [M, KEYS]
  Sums sums;               // [M, D]
};

// Keys [count, D] to [D, KEYS].
inline void turn(const float* const* keys, int64_t count, const FewRows& rows) {
  int64_t k = 0;
  for (; k + W <= count; k += W) {
    const int64_t stride = keys[k + 1] - keys[k];
    bool is_even = true;
    for (int64_t i = 1; i < W; ++i) is_even &= keys[k + i] - keys[k + i - 1] == stride;
    int64_t d = 0;
    for (; is_even && d + W <= rows.head_size; d += W)
      at::vec::transpose_mxn<float, W, W>(keys[k] + d, stride, rows.turned + d * KEYS + k, KEYS);
    for (; d < rows.head_size; ++d)
      for (int64_t i = 0; i < W; ++i) rows.turned[d * KEYS + k + i] = keys[k + i][d];
  }
  for (int64_t d = 0; d < rows.head_size; ++d)
    for (int64_t i = k; i < padded(count); ++i) rows.turned[d * KEYS + i] = i < count ? keys[i][d] : 0.0f;
}

// Scores of R rows from `m` on and of W keys from `k` on; unseen ones are LOWEST.
template <int R>
void score_rows(int64_t m, int64_t k, int64_t count, const FewRows& rows) {
  Vec sum[R];
  for (Vec& one : sum) one = Vec(0.0f);
  for (int64_t d = 0; d < rows.head_size; ++d) {
    const Vec key = Vec::loadu(rows.turned + d * KEYS + k);
    for (int r = 0; r < R; ++r)
      sum[r] = at::vec::fmadd(key, Vec(rows.queries[(m + r) * rows.head_size + d]), sum[r]);
  }
  const Vec number = Vec::arange(static_cast<float>(k), 1.0f);
  for (int r = 0; r < R; ++r) {
    const float last = std::min(rows.positions[m + r], static_cast<float>(count - 1));
    Vec::blendv(Vec(LOWEST), sum[r], number <= Vec(last)).store(rows.scores + (m + r) * KEYS + k);
  }
}

// Scores become weights; returns what the row's sums so far are to be multiplied with.
inline float weigh_row(int64_t m, int64_t count, const FewRows& rows) {
  float* row = rows.scores + m * KEYS;
  const float before = rows.sums.top[m];
  Vec most(before);
  for (int64_t k = 0; k < count; k += W) most = at::vec::maximum(most, Vec::loadu(row + k));
  const float top = largest(most);
  const float last = std::min(rows.positions[m], static_cast<float>(count - 1));
  for (int64_t k = 0; k < count; k += W) {
    const Vec seen = Vec::arange(static_cast<float>(k), 1.0f) <= Vec(last);
    Vec::blendv(Vec(0.0f), power_of_two(Vec::loadu(row + k) - Vec(top)), seen).store(row + k);
  }
  rows.sums.top[m] = top;
  return power_of_two(before - top);
}

// Adds weights times values for R rows from `m` on, NV vectors of head dimensions from `d` on.
template <int R, int NV>
void add_vectors(const float* const* values, int64_t count, int64_t m, int64_t d, const FewRows& rows,
                 const float* faded) {
  float* to = rows.sums.values + m * rows.head_size + d;
  Vec sum[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) sum[r][v] = Vec::loadu(to + r * rows.head_size + v * W) * Vec(faded[m + r]);
  for (int64_t k = 0; k < count; ++k) {
    Vec value[NV];
    for (int v = 0; v < NV; ++v) value[v] = Vec::loadu(values[k] + d + v * W);
    for (int r = 0; r < R; ++r) {
      const Vec weight(rows.scores[(m + r) * KEYS + k]);
      for (int v = 0; v < NV; ++v) sum[r][v] = at::vec::fmadd(value[v], weight, sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) sum[r][v].store(to + r * rows.head_size + v * W);
}

// The same for the head dimensions that no vector holds.
template <int R>
void add_rest(const float* const* values, int64_t count, int64_t m, int64_t d, const FewRows& rows,
              const float* faded) {
  for (; d < rows.head_size; d += W)
    for (int r = 0; r < R; ++r) {
      const int64_t width = lanes(d, rows.head_size);
      float* to = rows.sums.values + (m + r) * rows.head_size + d;
      Vec sum = load(to, width) * Vec(faded[m + r]);
      for (int64_t k = 0; k < count; ++k)
        sum = at::vec::fmadd(load(values[k] + d, width), Vec(rows.scores[(m + r) * KEYS + k]), sum);
      store(to, sum, width);
    }
}

template <int R>
void add_rows(const float* const* values, int64_t count, int64_t m, const FewRows& rows, const float* faded) {
  int64_t d = 0;
  for (; d + 2 * W <= rows.head_size; d += 2 * W) add_vectors<R, 2>(values, count, m, d, rows, faded);
  for (; d + W <= rows.head_size; d += W) add_vectors<R, 1>(values, count, m, d, rows, faded);
  add_rest<R>(values, count, m, d, rows, faded);
}

// Adds `count` keys, at most KEYS, to the rows' sums.
inline void attend(const float* const* keys, const float* const* values, int64_t count, const FewRows& rows) {
  turn(keys, count, rows);
  for (int64_t k = 0; k < count; k += W)
    for_some<4>(0, rows.count, [&](auto some, int64_t m) { score_rows<some>(m, k, count, rows); });
  float faded[FEW], sum[FEW];
  for (int64_t m = 0; m < rows.count; ++m) {
    faded[m] = weigh_row(m, count, rows);
    sum[m] = rows.sums.weights[m] * faded[m];
  }
  for (int64_t k = 0; k < count; ++k)
    for (int64_t m = 0; m < rows.count; ++m) sum[m] += rows.scores[m * KEYS + k];
  std::copy(sum, sum + rows.count, rows.sums.weights);
  for_some<4>(0, rows.count, [&](auto some, int64_t m) { add_rows<some>(values, count, m, rows, faded); });
}

// Adds the sums `more` over later keys to `all`.
inline void merge(const Sums& all, const Sums& more, int64_t head_size, int64_t count) {
  for (int64_t m = 0; m < count; ++m) {
    const float top = std::max(all.top[m], more.top[m]);
    const float a = power_of_two(all.top[m] - top), b = power_of_two(more.top[m] - top);
    const auto add = [&](float* to, const float* from, int64_t width) {
      store(to, at::vec::fmadd(load(from, width), Vec(b), load(to, width) * Vec(a)), width);
    };
    for (int64_t d = m * head_size; d < (m + 1) * head_size; d += W)
      add(all.values + d, more.values + d, lanes(d, (m + 1) * head_size));
    add(all.weights + m, more.weights + m, 1);
    all.top[m] = top;
  }
}

}  // namespace megatron_ext::attention
