// Attention of a few rows, as in decode, over keys that lie anywhere, a tile of keys at a time.
//
// Keys are the lanes of vectors when scores are computed, from some of them that are turned round in the nearest cache;
// head dimensions when values are added, which are read as vectors where they lie. Such attention waits for memory:
// while a tile is computed, the next one is fetched, a little of it at each step of the loops. All of it at once would
// hold up the loops behind it.
//
// D head size, M rows, T the type of keys and values.
#pragma once

#include "softmax.h"

namespace megatron_ext::attention {

constexpr int64_t FEW = W;                  // rows at most
constexpr int VECTORS = 2;                  // of keys whose scores are computed at once
constexpr int64_t GROUP = VECTORS * W;      // such keys
constexpr int WIDEST = W >= 16 ? 4 : 2;     // vectors of a value that are added at once; what registers hold
constexpr int64_t LINE = 64;                // bytes that memory is read by
static_assert(KEYS % GROUP == 0);

// Where the keys and values of a tile lie.
template <typename T>
struct Tile {
  int64_t count;
  const T* keys[KEYS];
  const T* values[KEYS];
};

struct FewRows {
  int64_t head_size, count;
  const float* queries;    // [M, D], scaled
  const float* positions;  // [M], the last key that a row sees, counted from the first key of the tile
  float* turned;           // [D, GROUP], D a multiple of W
  float* scores;           // [M, KEYS]
  Sums sums;               // [M, D]
};

// To the second cache: of keys that lie a power of two apart, the first one holds few.
template <typename T>
void fetch(const T* from) {
  __builtin_prefetch(from, 0, 2);
}

// W keys, or the `count` that there are, to [D, W] in [D, GROUP].
template <typename T>
void turn(const T* const* keys, int64_t count, int64_t head_size, float* to) {
  alignas(64) float square[W * W];
  const int64_t stride = count > 1 ? keys[1] - keys[0] : 0;
  bool is_even = std::is_same_v<T, float> && count >= W;
  for (int64_t i = 1; is_even && i < W; ++i) is_even = keys[i] - keys[i - 1] == stride;
  for (int64_t d = 0; d < head_size; d += W) {
    const int64_t width = lanes(d, head_size);
    if constexpr (std::is_same_v<T, float>) {
      if (is_even && width == W) {
        at::vec::transpose_mxn<float, W, W>(keys[0] + d, stride, to + d * GROUP, GROUP);
        continue;
      }
    }
    for (int64_t i = 0; i < W; ++i) (i < count ? load(keys[i] + d, width) : Vec(0.0f)).store(square + i * W);
    at::vec::transpose_mxn<float, W, W>(square, W, to + d * GROUP, GROUP);
  }
}

// Scores of R rows from `m` on and of the GROUP keys from `k` on, which are turned; unseen ones are LOWEST.
template <int R, typename T>
void score_rows(int64_t m, int64_t k, int64_t count, const FewRows& rows, const T* const* ahead) {
  Vec sum[R][VECTORS];
  for (auto& row : sum)
    for (Vec& one : row) one = Vec(0.0f);
  const float* key = rows.turned;
  const float* query = rows.queries + m * rows.head_size;
  for (int64_t first = 0; first < rows.head_size; first += W) {
    const int64_t end = std::min(first + W, rows.head_size);
    const bool begins_line = first * sizeof(T) % LINE < W * sizeof(T);
    for (int64_t d = first; d < end; ++d, key += GROUP) {
      Vec own[VECTORS];
      for (int v = 0; v < VECTORS; ++v) own[v] = Vec::loadu(key + v * W);
      for (int r = 0; r < R; ++r) {
        const Vec one(query[r * rows.head_size + d]);
        for (int v = 0; v < VECTORS; ++v) sum[r][v] = at::vec::fmadd(own[v], one, sum[r][v]);
      }
      if (begins_line && m == 0)
        for (int v = 0; v < VECTORS; ++v) fetch(ahead[k + (d - first) * VECTORS + v] + first);
    }
  }
  for (int r = 0; r < R; ++r) {
    const Vec last(std::min(rows.positions[m + r], static_cast<float>(count - 1)));
    for (int v = 0; v < VECTORS; ++v) {
      const Vec number = Vec::arange(static_cast<float>(k + v * W), 1.0f);
      Vec::blendv(Vec(LOWEST), sum[r][v], number <= last).store(rows.scores + (m + r) * KEYS + k + v * W);
    }
  }
}

// Scores become weights; `faded` [W] is what the rows' sums so far are to be multiplied with.
inline void weigh(int64_t count, const FewRows& rows, float* faded) {
  alignas(64) float before[W] = {}, top[W] = {};
  for (int64_t m = 0; m < rows.count; ++m) {
    const float* row = rows.scores + m * KEYS;
    before[m] = rows.sums.top[m];
    Vec most(before[m]);
    for (int64_t k = 0; k < count; k += W) most = at::vec::maximum(most, Vec::loadu(row + k));
    rows.sums.top[m] = top[m] = largest(most);
  }
  power_of_two(Vec::loadu(before) - Vec::loadu(top)).store(faded);
  for (int64_t m = 0; m < rows.count; ++m) {
    float* row = rows.scores + m * KEYS;
    const Vec last(std::min(rows.positions[m], static_cast<float>(count - 1)));
    for (int64_t k = 0; k < count; k += W) {
      const Vec seen = Vec::arange(static_cast<float>(k), 1.0f) <= last;
      Vec::blendv(Vec(0.0f), power_of_two(Vec::loadu(row + k) - Vec(top[m])), seen).store(row + k);
    }
  }
}

// Adds weights times values for R rows from `m` on, NV vectors of head dimensions from `d` on; with the first of them
// the weights, too.
template <int R, int NV, bool is_first, typename T>
void add_vectors(const Tile<T>& tile, const T* const* ahead, int64_t m, int64_t d, const FewRows& rows,
                 const float* faded) {
  float* to = rows.sums.values + m * rows.head_size + d;
  const float* weights = rows.scores + m * KEYS;
  Vec sum[R][NV];
  float total[R];
  for (int r = 0; r < R; ++r) {
    total[r] = rows.sums.weights[m + r] * faded[m + r];
    for (int v = 0; v < NV; ++v) sum[r][v] = Vec::loadu(to + r * rows.head_size + v * W) * Vec(faded[m + r]);
  }
  for (int64_t k = 0; k < tile.count; ++k) {
    Vec value[NV];
    for (int v = 0; v < NV; ++v) value[v] = widened(tile.values[k] + d + v * W);
    for (int r = 0; r < R; ++r) {
      const Vec weight(weights[r * KEYS + k]);
      for (int v = 0; v < NV; ++v) sum[r][v] = at::vec::fmadd(value[v], weight, sum[r][v]);
      if constexpr (is_first) total[r] += weights[r * KEYS + k];
    }
    for (int64_t i = 0; i < NV * W; i += LINE / sizeof(T)) fetch(ahead[k] + d + i);
  }
  for (int r = 0; r < R; ++r) {
    if constexpr (is_first) rows.sums.weights[m + r] = total[r];
    for (int v = 0; v < NV; ++v) sum[r][v].store(to + r * rows.head_size + v * W);
  }
}

// The same for the head dimensions from `d` on, too few for a vector.
template <int R, typename T>
void add_rest(const Tile<T>& tile, const T* const* ahead, int64_t m, int64_t d, const FewRows& rows,
              const float* faded) {
  const int64_t width = rows.head_size - d;
  for (int r = 0; r < R; ++r) {
    float* to = rows.sums.values + (m + r) * rows.head_size + d;
    const float* weights = rows.scores + (m + r) * KEYS;
    Vec sum = load(to, width) * Vec(faded[m + r]);
    float total = rows.sums.weights[m + r] * faded[m + r];
    for (int64_t k = 0; k < tile.count; ++k) {
      sum = at::vec::fmadd(load(tile.values[k] + d, width), Vec(weights[k]), sum);
      total += weights[k];
      if (r == 0) fetch(ahead[k] + d);
    }
    if (d == 0) rows.sums.weights[m + r] = total;
    store(to, sum, width);
  }
}

template <int R, typename T>
void add_rows(const Tile<T>& tile, const T* const* ahead, int64_t m, const FewRows& rows, const float* faded) {
  constexpr int64_t WIDE = WIDEST * W;
  int64_t d = 0;
  if (rows.head_size >= WIDE) {
    add_vectors<R, WIDEST, true>(tile, ahead, m, d, rows, faded);
    for (d = WIDE; d + WIDE <= rows.head_size; d += WIDE)
      add_vectors<R, WIDEST, false>(tile, ahead, m, d, rows, faded);
  } else if (rows.head_size >= W) {
    add_vectors<R, 1, true>(tile, ahead, m, d, rows, faded);
    d = W;
  }
  for (; d + W <= rows.head_size; d += W) add_vectors<R, 1, false>(tile, ahead, m, d, rows, faded);
  if (d < rows.head_size) add_rest<R>(tile, ahead, m, d, rows, faded);
}

// Adds the keys of a tile to the rows' sums; those of `ahead` are fetched meanwhile.
template <typename T>
void attend(const Tile<T>& tile, const Tile<T>& ahead, const FewRows& rows) {
  for (int64_t k = 0; k < tile.count; k += GROUP) {
    for (int64_t i = 0; i < GROUP; i += W)
      turn(tile.keys + k + i, tile.count - k - i, rows.head_size, rows.turned + i);
    for_some<4>(0, rows.count, [&](auto some, int64_t m) { score_rows<some>(m, k, tile.count, rows, ahead.keys); });
  }
  alignas(64) float faded[W];
  weigh(tile.count, rows, faded);
  for_some<4>(0, rows.count, [&](auto some, int64_t m) { add_rows<some>(tile, ahead.values, m, rows, faded); });
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
