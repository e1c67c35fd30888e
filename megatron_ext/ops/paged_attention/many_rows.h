// Attention of many rows over keys that lie anywhere, a tile of keys at a time.
//
// A row is a query head of a query. Rows are the lanes of vectors: keys and values are read as scalars where they lie,
// and no reduction crosses lanes.
//
// D head size, M lanes (NV vectors).
#pragma once

#include "softmax.h"

namespace megatron_ext::attention {

constexpr int MAX_VECTORS = W >= 16 ? 4 : 2;  // of a tile; what registers hold
constexpr int64_t LANES = MAX_VECTORS * W;    // rows of a tile

struct ManyRows {
  int64_t head_size;
  const float* queries;    // [D, M], scaled
  const float* positions;  // [M], the last key that a row sees, counted from the first key of the tile
  float* scores;           // [KEYS, M]
  Sums sums;               // [D, M]
};

// Keys or head dimensions that are computed at once, so that sums of them stay in registers.
template <int NV>
constexpr int at_once() {
  return W >= 16 ? (NV == 4 ? 6 : 8) : (NV == 1 ? 8 : 4);
}

// Scores of R keys from `k` on: [R, M]; `top` is the greatest so far.
template <int R, int NV, bool masked>
void score_keys(const float* const* keys, int64_t k, const ManyRows& rows, Vec (&top)[NV]) {
  Vec sum[R][NV];
  for (auto& row : sum)
    for (Vec& one : row) one = Vec(0.0f);
  for (int64_t d = 0; d < rows.head_size; ++d) {
    Vec query[NV];
    for (int v = 0; v < NV; ++v) query[v] = Vec::loadu(rows.queries + (d * NV + v) * W);
    for (int r = 0; r < R; ++r) {
      const Vec key(keys[k + r][d]);
      for (int v = 0; v < NV; ++v) sum[r][v] = at::vec::fmadd(key, query[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) {
      if constexpr (masked) {
        const Vec seen = Vec::loadu(rows.positions + v * W) >= Vec(static_cast<float>(k + r));
        sum[r][v] = Vec::blendv(Vec(LOWEST), sum[r][v], seen);
      }
      top[v] = at::vec::maximum(top[v], sum[r][v]);
      sum[r][v].store(rows.scores + ((k + r) * NV + v) * W);
    }
}

// Scores of `count` keys become weights; `faded` is what sums so far are to be multiplied with.
template <int NV, bool masked>
void weigh(int64_t count, const ManyRows& rows, const Vec (&top)[NV], Vec (&faded)[NV]) {
  for (int v = 0; v < NV; ++v) {
    float* column = rows.scores + v * W;
    const Vec position = Vec::loadu(rows.positions + v * W);
    faded[v] = power_of_two(Vec::loadu(rows.sums.top + v * W) - top[v]);
    Vec sum = Vec::loadu(rows.sums.weights + v * W) * faded[v];
    for (int64_t k = 0; k < count; ++k) {
      Vec weight = power_of_two(Vec::loadu(column + k * NV * W) - top[v]);
      if constexpr (masked) weight = Vec::blendv(Vec(0.0f), weight, position >= Vec(static_cast<float>(k)));
      sum = sum + weight;
      weight.store(column + k * NV * W);
    }
    sum.store(rows.sums.weights + v * W);
    top[v].store(rows.sums.top + v * W);
  }
}

// Adds weights times values, for R head dimensions from `d` on.
template <int R, int NV>
void add_values(const float* const* values, int64_t count, int64_t d, const ManyRows& rows, const Vec (&faded)[NV]) {
  float* to = rows.sums.values + d * NV * W;
  Vec sum[R][NV];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) sum[r][v] = Vec::loadu(to + (r * NV + v) * W) * faded[v];
  for (int64_t k = 0; k < count; ++k) {
    const float* value = values[k] + d;
    Vec weight[NV];
    for (int v = 0; v < NV; ++v) weight[v] = Vec::loadu(rows.scores + (k * NV + v) * W);
    for (int r = 0; r < R; ++r) {
      const Vec one(value[r]);
      for (int v = 0; v < NV; ++v) sum[r][v] = at::vec::fmadd(one, weight[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < NV; ++v) sum[r][v].store(to + (r * NV + v) * W);
}

template <int NV, bool masked>
void attend_many(const float* const* keys, const float* const* values, int64_t count, const ManyRows& rows) {
  constexpr int R = at_once<NV>();
  Vec top[NV], faded[NV];
  for (int v = 0; v < NV; ++v) top[v] = Vec::loadu(rows.sums.top + v * W);
  for_some<R>(0, count, [&](auto some, int64_t k) { score_keys<some, NV, masked>(keys, k, rows, top); });
  weigh<NV, masked>(count, rows, top, faded);
  for_some<R>(0, rows.head_size, [&](auto some, int64_t d) { add_values<some, NV>(values, count, d, rows, faded); });
}

// Adds `count` keys, at most KEYS, to the rows' sums; `masked` if some rows do not see some of them.
template <int NV>
void attend(const float* const* keys, const float* const* values, int64_t count, bool masked, const ManyRows& rows) {
  if (masked)
    attend_many<NV, true>(keys, values, count, rows);
  else
    attend_many<NV, false>(keys, values, count, rows);
}

// Adds the sums `more` over later keys to `all`.
template <int NV>
void merge(const Sums& all, const Sums& more, int64_t head_size) {
  for (int64_t m = 0; m < NV * W; m += W) {
    const Vec one = Vec::loadu(all.top + m), other = Vec::loadu(more.top + m), top = at::vec::maximum(one, other);
    const Vec a = power_of_two(one - top), b = power_of_two(other - top);
    const auto add = [&](float* to, const float* from) {
      at::vec::fmadd(Vec::loadu(from), b, Vec::loadu(to) * a).store(to);
    };
    for (int64_t d = 0; d < head_size; ++d) add(all.values + d * NV * W + m, more.values + d * NV * W + m);
    add(all.weights + m, more.weights + m);
    top.store(all.top + m);
  }
}

}  // namespace megatron_ext::attention
