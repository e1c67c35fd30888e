// Causal attention over keys and values in blocks of a pool, read where they lie; see reference.py.
// T tokens, Hq query heads, Hkv key heads, J = Hq / Hkv, D head size, NB blocks of B tokens, R sequences, W blocks of
// the longest table.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "few_rows.h"
#include "many_rows.h"
#include "tensors.h"
#include "threads.h"

namespace megatron_ext::attention {
namespace {

// Sums are begun anew, and added up in order, at multiples of so many keys: a sequence's spans may then be computed by
// several threads, and what comes out is the same if one thread does them all.
constexpr int64_t SPAN = 32 * KEYS;
constexpr int64_t SPANS_AT_ONCE = 16;  // of each thread, whose sums are kept

constexpr double LOG2_E = 1.4426950408889634;

// Keys or values of all blocks, in their own type.
struct Cache {
  explicit Cache(const at::Tensor& cache)
      : data(static_cast<const char*>(cache.const_data_ptr())),
        type(cache.scalar_type()),
        item(cache.element_size()),
        block(cache.stride(0)),
        token(cache.stride(1)),
        head(cache.stride(2)) {
    TORCH_CHECK(cache.stride(3) == 1 || cache.size(3) == 1, "a head's numbers lie densely");
    TORCH_CHECK(type == at::kFloat || type == at::kBFloat16 || type == at::kHalf, "caches of fp32 or 16 bits");
  }

  const char* place(int64_t number, int64_t offset, int64_t which_head) const {
    return data + item * (number * block + offset * token + which_head * head);
  }

  const char* data;
  at::ScalarType type;
  int64_t item, block, token, head;
};

// One step, as every piece of work sees it.
struct Step {
  const float* queries;  // [T, Hq, D]
  int64_t query_stride, query_head_stride;
  float* out;  // [T, Hq, D], dense
  Cache keys, values;
  const int32_t* tables;   // [R, W]
  const int64_t* starts;   // [R+1]
  const int64_t* lengths;  // [R]
  int64_t width, heads, shared, head_size, block_size;  // shared: J
  float scale;  // times log2(e)
  const float* sinks;  // [Hq], or null
};

// Up to LANES rows of one sequence and key head: row i is query head i % J of query i / J.
struct Rows {
  int64_t sequence, head, first, count;
  int64_t keys;  // that the last of them sees
};

// Memory of one thread, for one piece of work at a time.
struct Room {
  static int64_t floats(int64_t head_size) {
    return (3 * LANES + 2 * KEYS) * head_size + GROUP * padded(head_size) + (KEYS + 5) * LANES;
  }

  explicit Room(int64_t head_size) {
    float* next = scratch<0>(floats(head_size));
    const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
    queries = take(LANES * head_size);
    positions = take(LANES);
    scores = take(KEYS * LANES);
    sums = take(Sums::floats(head_size, LANES));
    whole = take(Sums::floats(head_size, LANES));
    keys = take(KEYS * head_size);
    values = take(KEYS * head_size);
    turned = take(GROUP * padded(head_size));
  }

  float *queries, *positions, *scores, *sums, *whole;
  float *keys, *values;  // [KEYS, D], where they have to be made fp32
  float* turned;          // [D, GROUP], D a multiple of W
};

// Where the numbers [M, D] of so many rows lie, and how their sums are merged: the ways to attend.
template <typename T>
struct Few {
  static constexpr int64_t ROWS = FEW;

  static int64_t place(int64_t row, int64_t d, int64_t head_size) {
    return row * head_size + d;
  }

  static void merge(const Sums& all, const Sums& more, int64_t head_size) {
    attention::merge(all, more, head_size, ROWS);
  }
};

template <int NV>
struct Many {
  static constexpr int64_t ROWS = NV * W;

  static int64_t place(int64_t row, int64_t d, int64_t) {
    return d * ROWS + row;
  }

  static void merge(const Sums& all, const Sums& more, int64_t head_size) {
    attention::merge<NV>(all, more, head_size);
  }
};

// f(way) with the way that suits so many rows.
template <int NV = 1, typename F>
void with_way(const Step& step, int64_t rows, const F& f) {
  if (rows <= FEW) return with_type(step.keys.type, [&](auto number) { f(Few<decltype(number)>()); });
  if constexpr (NV < MAX_VECTORS) {
    if (rows > NV * W) return with_way<NV + 1>(step, rows, f);
  }
  f(Many<NV>());
}

// f(block, offset, k, count) for each run of keys within one block: of [first, end), those from first + k on.
template <typename F>
void each_run(const Step& step, const Rows& rows, int64_t first, int64_t end, const F& f) {
  const int32_t* block = step.tables + rows.sequence * step.width + first / step.block_size;
  for (int64_t position = first, offset = first % step.block_size; position < end; offset = 0, ++block) {
    const int64_t count = std::min(step.block_size - offset, end - position);
    f(*block, offset, position - first, count);
    position += count;
  }
}

// Where the keys and values [first, end) of a sequence lie.
template <typename T>
void find_tile(const Step& step, const Rows& rows, int64_t first, int64_t end, Tile<T>& tile) {
  tile.count = end - first;
  each_run(step, rows, first, end, [&](int64_t block, int64_t offset, int64_t k, int64_t count) {
    const T* key = reinterpret_cast<const T*>(step.keys.place(block, offset, rows.head));
    const T* value = reinterpret_cast<const T*>(step.values.place(block, offset, rows.head));
    for (int64_t i = 0; i < count; ++i) {
      tile.keys[k + i] = key + i * step.keys.token;
      tile.values[k + i] = value + i * step.values.token;
    }
  });
}

// Rows of D numbers as fp32, copied to `copies` [KEYS, D].
template <typename T>
void widen_rows(const T* const* from, int64_t count, int64_t head_size, float* copies, const float** to) {
  for (int64_t k = 0; k < count; ++k, copies += head_size) {
    int64_t d = 0;
    for (; d + W <= head_size; d += W) widened(from[k] + d).store(copies + d);
    if (d < head_size) store(copies + d, load(from[k] + d, head_size - d), head_size - d);
    to[k] = copies;
  }
}

// The same as `find_tile`, in fp32.
void find_wide_tile(const Step& step, const Rows& rows, int64_t first, int64_t end, const Room& room,
                    Tile<float>& tile) {
  with_type(step.keys.type, [&](auto number) {
    using T = decltype(number);
    if constexpr (std::is_same_v<T, float>) {
      find_tile(step, rows, first, end, tile);
    } else {
      Tile<T> narrow;
      find_tile(step, rows, first, end, narrow);
      tile.count = narrow.count;
      widen_rows(narrow.keys, tile.count, step.head_size, room.keys, tile.keys);
      widen_rows(narrow.values, tile.count, step.head_size, room.values, tile.values);
    }
  });
}

// Query of a row, and its last key.
int64_t query_of(const Step& step, const Rows& rows, int64_t lane) {
  return (rows.first + lane) / step.shared;
}

int64_t last_key(const Step& step, const Rows& rows, int64_t lane) {
  const int64_t s = rows.sequence, queries = step.starts[s + 1] - step.starts[s];
  return step.lengths[s] - queries + query_of(step, rows, lane);
}

int64_t offset_of(const Step& step, const Rows& rows, int64_t lane, int64_t token_stride, int64_t head_stride) {
  const int64_t head = rows.head * step.shared + (rows.first + lane) % step.shared;
  return (step.starts[rows.sequence] + query_of(step, rows, lane)) * token_stride + head * head_stride;
}

// Scaled queries; rows that are not there are zero.
template <typename Way>
void load_queries(const Step& step, const Rows& rows, float* to) {
  for (int64_t m = 0; m < Way::ROWS; ++m) {
    const float* from = nullptr;
    if (m < rows.count) from = step.queries + offset_of(step, rows, m, step.query_stride, step.query_head_stride);
    for (int64_t d = 0; d < step.head_size; ++d)
      to[Way::place(m, d, step.head_size)] = from ? from[d] * step.scale : 0.0f;
  }
}

// Adds the keys [begin, end) to the sums of rows, a tile at a time.
template <int NV>
void attend_keys(Many<NV>, const Step& step, const Rows& rows, int64_t begin, int64_t end, const Room& room,
                 const Sums& sums) {
  Tile<float> tile;
  for (int64_t first = begin; first < end; first += KEYS) {
    const int64_t count = std::min(KEYS, end - first);
    find_wide_tile(step, rows, first, first + count, room, tile);
    const bool masked = last_key(step, rows, 0) < first + count - 1;
    for (int64_t m = 0; m < NV * W; ++m)
      room.positions[m] = static_cast<float>(last_key(step, rows, std::min(m, rows.count - 1)) - first);
    const ManyRows many{step.head_size, room.queries, room.positions, room.scores, sums};
    attend<NV>(tile.keys, tile.values, count, masked, many);
  }
}

template <typename T>
void attend_keys(Few<T>, const Step& step, const Rows& rows, int64_t begin, int64_t end, const Room& room,
                 const Sums& sums) {
  Tile<T> tiles[2];
  Tile<T>*tile = &tiles[0], *ahead = &tiles[1];
  find_tile(step, rows, begin, std::min(begin + KEYS, end), *tile);
  std::fill_n(ahead->keys, KEYS, tile->keys[0]);  // fetched where there is no next tile
  std::fill_n(ahead->values, KEYS, tile->values[0]);
  for (int64_t first = begin; first < end; first += KEYS) {
    const int64_t next = first + KEYS;
    if (next < rows.keys) find_tile(step, rows, next, std::min(next + KEYS, rows.keys), *ahead);
    for (int64_t m = 0; m < rows.count; ++m)
      room.positions[m] = static_cast<float>(last_key(step, rows, m) - first);
    attend(*tile, *ahead,
           FewRows{step.head_size, rows.count, room.queries, room.positions, room.turned, room.scores, sums});
    std::swap(tile, ahead);
  }
}

// The sums of the keys [begin, begin + SPAN) that there are, for queries that are loaded.
template <typename Way>
void attend_span(const Step& step, const Rows& rows, int64_t begin, const Room& room, const Sums& sums) {
  sums.clear(step.head_size, Way::ROWS);
  attend_keys(Way(), step, rows, begin, std::min(begin + SPAN, rows.keys), room, sums);
}

// What a row's values are to be multiplied with and divided by.
struct Faded {
  float values, weights;
};

// A sink is one more key, without a value; it may be greater than all scores.
Faded with_sink(const Step& step, const Rows& rows, int64_t lane, const Sums& sums) {
  if (step.sinks == nullptr) return {1.0f, sums.weights[lane]};
  const float sink = step.sinks[rows.head * step.shared + (rows.first + lane) % step.shared] * static_cast<float>(LOG2_E);
  const float top = std::max(sums.top[lane], sink), fade = power_of_two(sums.top[lane] - top);
  return {fade, sums.weights[lane] * fade + power_of_two(sink - top)};
}

template <typename Way>
void store_rows(const Step& step, const Rows& rows, const Sums& sums) {
  for (int64_t m = 0; m < rows.count; ++m) {
    float* to = step.out + offset_of(step, rows, m, step.heads * step.head_size, step.head_size);
    const Faded faded = with_sink(step, rows, m, sums);
    for (int64_t d = 0; d < step.head_size; ++d)
      to[d] = sums.values[Way::place(m, d, step.head_size)] * faded.values / faded.weights;
  }
}

template <typename Way>
void attend_rows(const Step& step, const Rows& rows) {
  const Room room(step.head_size);
  const Sums whole = Sums::in(room.whole, step.head_size, Way::ROWS);
  const Sums sums = Sums::in(room.sums, step.head_size, Way::ROWS);
  load_queries<Way>(step, rows, room.queries);
  attend_span<Way>(step, rows, 0, room, whole);
  for (int64_t begin = SPAN; begin < rows.keys; begin += SPAN) {
    attend_span<Way>(step, rows, begin, room, sums);
    Way::merge(whole, sums, step.head_size);
  }
  store_rows<Way>(step, rows, whole);
}

std::vector<Rows> cut(const Step& step, int64_t sequences, int64_t key_heads) {
  std::vector<Rows> pieces;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t queries = step.starts[s + 1] - step.starts[s], all = queries * step.shared;
    for (int64_t first = 0; first < all; first += LANES)
      for (int64_t head = 0; head < key_heads; ++head) {
        const int64_t count = std::min(LANES, all - first);
        const int64_t keys = step.lengths[s] - queries + (first + count - 1) / step.shared + 1;
        pieces.push_back({s, head, first, count, keys});
      }
  }
  // The longest first, so that threads end together.
  std::stable_sort(pieces.begin(), pieces.end(), [](const Rows& a, const Rows& b) { return a.keys > b.keys; });
  return pieces;
}

// Rows whose keys are too many for one thread while others have nothing to do: each span is a piece of work. A wave of
// spans is computed, then merged in order; `whole` is merged into until the row's last span. So memory depends on the
// number of threads only: it is counted in memory/activations.py.
void attend_together(const Step& step, const std::vector<Rows>& all) {
  struct Span {
    const Rows* rows;
    int64_t begin;
  };
  std::vector<Span> spans;
  int64_t most = 0;  // rows
  for (const Rows& rows : all) {
    most = std::max(most, rows.count);
    for (int64_t begin = 0; begin < rows.keys; begin += SPAN) spans.push_back({&rows, begin});
  }
  const int64_t count = spans.size(), wave = std::min(count, SPANS_AT_ONCE * at::get_num_threads());
  const int64_t each = Sums::floats(step.head_size, padded(most));
  const at::Tensor memory = at::empty({(wave + 1) * each}, at::kFloat);
  float* const whole = memory.mutable_data_ptr<float>();
  for (int64_t first = 0; first < count; first += wave) {
    const int64_t here = std::min(wave, count - first);
    for_each(here, [&](int64_t i) {
      const Span& span = spans[first + i];
      with_way(step, span.rows->count, [&](auto way) {
        using Way = decltype(way);
        const Room room(step.head_size);
        load_queries<Way>(step, *span.rows, room.queries);
        const Sums sums = Sums::in(whole + (i + 1) * each, step.head_size, Way::ROWS);
        attend_span<Way>(step, *span.rows, span.begin, room, sums);
      });
    });
    for (int64_t i = 0; i < here; ++i) {
      const Span& span = spans[first + i];
      float* const sums = whole + (i + 1) * each;
      with_way(step, span.rows->count, [&](auto way) {
        using Way = decltype(way);
        const Sums merged = Sums::in(whole, step.head_size, Way::ROWS);
        if (span.begin == 0)
          std::copy_n(sums, each, whole);
        else
          Way::merge(merged, Sums::in(sums, step.head_size, Way::ROWS), step.head_size);
        if (span.begin + SPAN >= span.rows->keys) store_rows<Way>(step, *span.rows, merged);
      });
    }
  }
}

// Floats of one thread's memory: sums of its spans of a wave, and its room.
int64_t floats_of_a_thread(int64_t head_size) {
  return (SPANS_AT_ONCE + 1) * Sums::floats(head_size, LANES) + Room::floats(head_size);
}

void attend_all(const Step& step, const std::vector<Rows>& pieces) {
  double work = 0;
  for (const Rows& rows : pieces) work += static_cast<double>(rows.keys * padded(rows.count));
  const double share = work / (4 * at::get_num_threads());  // more than that holds the others up
  std::vector<Rows> together, alone;
  for (const Rows& rows : pieces) {
    const bool is_long = rows.keys > SPAN && static_cast<double>(rows.keys * padded(rows.count)) > share;
    (is_long ? together : alone).push_back(rows);
  }
  attend_together(step, together);
  for_each(alone.size(), [&](int64_t i) {
    with_way(step, alone[i].count, [&](auto way) { attend_rows<decltype(way)>(step, alone[i]); });
  });
}

void check(const Step& step, const at::Tensor& tables, int64_t sequences, int64_t tokens, int64_t blocks) {
  TORCH_CHECK(step.starts[sequences] <= tokens, "queries of all sequences are there");
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t used = (step.lengths[s] + step.block_size - 1) / step.block_size;
    TORCH_CHECK_INDEX(used <= step.width, used, " blocks of a table of ", step.width);
    for (int64_t i = 0; i < used; ++i) {
      const int64_t block = step.tables[s * step.width + i];
      TORCH_CHECK_INDEX(block >= 0 && block < blocks, "block ", block, " of ", blocks);
    }
  }
}

at::Tensor paged_attention(In q, In key_cache, In value_cache, In tables, In starts, In lengths, double scale,
                           MaybeIn sinks) {
  const at::Tensor queries = rows(q);
  at::Tensor out = at::empty(q.sizes(), queries.options());
  const int64_t sequences = lengths.size(0), heads = q.size(1), head_size = q.size(2), key_heads = key_cache.size(2);
  const Step step{queries.const_data_ptr<float>(), queries.stride(0), queries.stride(1), out.mutable_data_ptr<float>(),
                  Cache(key_cache), Cache(value_cache), integers<int32_t>(tables), integers(starts), integers(lengths),
                  tables.size(1), heads, heads / key_heads, head_size, key_cache.size(1), static_cast<float>(scale * LOG2_E),
                  sinks ? sinks->const_data_ptr<float>() : nullptr};
  TORCH_CHECK(!sinks || (sinks->numel() == heads && sinks->is_contiguous()), "a sink for each head");
  check(step, tables, sequences, q.size(0), key_cache.size(0));
  attend_all(step, cut(step, sequences, key_heads));
  std::fill(step.out + step.starts[sequences] * heads * head_size, step.out + out.numel(), 0.0f);
  return out.to(q.scalar_type());
}

}  // namespace
}  // namespace megatron_ext::attention

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  library.def("attention_floats_of_a_thread(int head_size) -> int", &megatron_ext::attention::floats_of_a_thread);
  library.def(
      "paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor tables, Tensor starts, Tensor lengths, "
      "float scale, Tensor? sinks=None) -> Tensor",
      torch::dispatch(c10::kCPU, &megatron_ext::attention::paged_attention));
}
