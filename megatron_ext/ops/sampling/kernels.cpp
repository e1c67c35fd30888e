// Drawing a token of each row without ordering the row; see reference.py, and __init__.py for what is promised.
//
// Every cut is a border among tokens in order of value and id: found by selecting where top_k asks for it, by the masses
// of classes of tokens where top_p does. Then the masses of blocks of tokens are summed, and the token is searched for
// in one block. V words of a row.

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tensors.h"
#include "threads.h"
#include "vectors.h"

namespace megatron_ext::sampling {
namespace {

constexpr int64_t BLOCK = 128;  // words whose masses are summed in fp32; sums of blocks are added in fp64
constexpr int64_t CLASSES = 1024;
constexpr float CLASSES_PER_OCTAVE = 32.0f;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();  // the logit of what cannot come
constexpr double LOG2_E = 1.4426950408889634;
static_assert(BLOCK % W == 0);

// Tokens are ordered by value, equal ones by id, the smaller id first; as one number: greater is better.
using Key = uint64_t;

Key key_of(float value, int64_t id) {
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);  // zero has one sign
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Key>(ordered) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}

int64_t id_of(Key key) {
  return 0xffffffffu - static_cast<uint32_t>(key);
}

float value_of(Key key) {
  const uint32_t ordered = key >> 32;
  return std::bit_cast<float>(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// One row's logits: the best of them is taken away before they are scaled, so that no temperature overflows.
struct Row {
  const float* logits;
  int64_t words;
  float best, scale;

  Row(const float* row, int64_t count, double temperature) : logits(row), words(count) {
    Vec most(NOTHING);
    for (int64_t i = 0; i < words; i += W) most = at::vec::maximum(most, values(i));
    alignas(64) float lane[W];
    most.store(lane);
    best = lane[0];
    for (const float one : lane) best = one > best || std::isnan(one) ? one : best;
    using Limits = std::numeric_limits<float>;
    scale = static_cast<float>(LOG2_E / std::clamp<double>(temperature, Limits::min(), Limits::max()));
  }

  // W words from i on; those behind the last one cannot come.
  Vec values(int64_t i) const {
    if (i + W <= words) return Vec::loadu(logits + i);
    alignas(64) float lane[W];
    for (int64_t k = 0; k < W; ++k) lane[k] = i + k < words ? logits[i + k] : NOTHING;
    return Vec::loadu(lane);
  }

  // How many octaves W words from i on weigh less than the best; those behind the last word are infinitely many.
  Vec octaves(int64_t i) const {
    return (Vec(best) - values(i)) * Vec(scale);
  }

  float weight(float value) const {
    const float octaves = (best - value) * scale;
    return octaves > 126.0f ? 0.0f : power_of_two(0.0f - octaves);
  }

  static Vec weight_of(Vec octaves) {
    return Vec::blendv(power_of_two(Vec(0.0f) - octaves), Vec(0.0f), octaves > Vec(126.0f));
  }
};

// f(i) for the lanes of a mask that are set.
template <typename F>
void for_lanes(Vec mask, int64_t first, const F& f) {
  for (unsigned hits = ~static_cast<unsigned>(mask.zero_mask()) & ((1u << W) - 1); hits; hits &= hits - 1)
    f(first + std::countr_zero(hits));
}

// The k best tokens, in no order; k < V.
std::vector<Key> best_tokens(const Row& row, int64_t k) {
  std::vector<Key> found;
  const int64_t room = std::min(row.words, 2 * k + BLOCK);
  found.reserve(room + W);
  const auto shrink = [&] {
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<>());
    found.resize(k);
    return value_of(found[k - 1]);  // a later token of this value has a greater id, so it is worse
  };
  for (int64_t i = 0; i < room; ++i) found.push_back(key_of(row.logits[i], i));
  float least = shrink();
  for (int64_t i = room; i < row.words; i += W) {
    const Vec values = row.values(i);
    for_lanes(values > Vec(least), i, [&](int64_t id) { found.push_back(key_of(row.logits[id], id)); });
    if (static_cast<int64_t>(found.size()) >= room) least = shrink();
  }
  shrink();
  return found;
}

struct Weighted {
  Key key;
  float weight;
};

// The last token, from the best on, before which less than `goal` lies, if `before` is better than all of these.
Key cut_at(std::vector<Weighted>& tokens, double before, double goal) {
  const auto is_better = [](const Weighted& a, const Weighted& b) { return a.key > b.key; };
  auto begin = tokens.begin(), end = tokens.end();
  while (end - begin > 32) {
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, is_better);
    double mass = 0;
    for (auto one = begin; one != middle; ++one) mass += one->weight;
    if (before + mass >= goal) {
      end = middle;
    } else {
      before += mass;
      begin = middle;
    }
  }
  std::sort(begin, end, is_better);
  for (auto one = begin; one != end; ++one)
    if ((before += one->weight) >= goal) return one->key;
  return std::prev(end)->key;
}

// The border of top_p among tokens that top_k has left.
Key cut_kept(const Row& row, const std::vector<Key>& kept, double top_p) {
  std::vector<Weighted> tokens;
  tokens.reserve(kept.size());
  double mass = 0;
  for (const Key key : kept) {
    tokens.push_back({key, row.weight(value_of(key))});
    mass += tokens.back().weight;
  }
  return cut_at(tokens, 0, top_p * mass);
}

Vec class_of(Vec octaves) {
  return at::vec::minimum(octaves * Vec(CLASSES_PER_OCTAVE), Vec(static_cast<float>(CLASSES - 1))).trunc();
}

// Masses of classes of tokens, the best class first.
std::vector<double> masses(const Row& row) {
  constexpr int64_t ways = 4;  // equal classes one behind the other do not wait for each other
  std::vector<double> found(ways * CLASSES, 0.0);
  alignas(64) float which[W], weight[W];
  for (int64_t i = 0; i < row.words; i += W) {
    const Vec octaves = row.octaves(i);
    class_of(octaves).store(which);
    Row::weight_of(octaves).store(weight);
    for (int64_t k = 0; k < W; ++k) found[static_cast<int64_t>(which[k]) * ways + k % ways] += weight[k];
  }
  std::vector<double> all(CLASSES);
  for (int64_t c = 0; c < CLASSES; ++c)
    for (int64_t way = 0; way < ways; ++way) all[c] += found[c * ways + way];
  return all;
}

// The border of top_p: in the class in which its share is reached, and only those tokens are looked at one by one.
Key cut_by_mass(const Row& row, double top_p) {
  const std::vector<double> classes = masses(row);
  double all = 0, before = 0;
  for (const double mass : classes) all += mass;
  int64_t border = 0;
  while (border < CLASSES - 1 && before + classes[border] < top_p * all) before += classes[border++];
  while (classes[border] == 0) --border;  // by rounding alone
  std::vector<Weighted> tokens;
  tokens.reserve(row.words);  // growing takes more; what is not written takes no memory
  for (int64_t i = 0; i < row.words; i += W) {
    const Vec octaves = row.octaves(i);
    for_lanes(class_of(octaves) == Vec(static_cast<float>(border)), i, [&](int64_t id) {
      if (id < row.words) tokens.push_back({key_of(row.logits[id], id), row.weight(row.logits[id])});
    });
  }
  return cut_at(tokens, before, top_p * all);
}

// Weights of W words from i on; those worse than the border weigh nothing.
Vec kept_weights(const Row& row, int64_t i, float value, int64_t id) {
  const Vec values = row.values(i);
  const Vec weight = Row::weight_of((Vec(row.best) - values) * Vec(row.scale));
  if (i > id) return Vec::blendv(Vec(0.0f), weight, values > Vec(value));
  if (i + W - 1 <= id) return Vec::blendv(Vec(0.0f), weight, values >= Vec(value));
  const Vec number = Vec::arange(static_cast<float>(i - id), 1.0f);
  return Vec::blendv(Vec(0.0f), weight, (values > Vec(value)) | ((values == Vec(value)) & (number <= Vec(0.0f))));
}

// The first interval that ends behind a place, given where each ends; one at the end belongs to the last with a length.
int64_t owner(const double* reached, int64_t count, double place) {
  place = std::min(place, std::nextafter(reached[count - 1], 0.0));
  return std::min<int64_t>(std::upper_bound(reached, reached + count, place) - reached, count - 1);
}

// The token at a place of the line on which the kept tokens stand in order of their ids.
int64_t draw(const Row& row, Key border, double uniform) {
  const float value = value_of(border);
  const int64_t id = id_of(border), blocks = (row.words + BLOCK - 1) / BLOCK;
  std::vector<double> reached(blocks);
  double all = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    Vec mass(0.0f);
    for (int64_t i = b * BLOCK; i < std::min((b + 1) * BLOCK, row.words); i += W)
      mass = mass + kept_weights(row, i, value, id);
    reached[b] = all += sum(mass);
  }
  const int64_t block = owner(reached.data(), blocks, uniform * all);
  alignas(64) float weight[BLOCK];
  double own[BLOCK], inside = 0;
  for (int64_t i = 0; i < BLOCK; i += W) kept_weights(row, block * BLOCK + i, value, id).store(weight + i);
  for (int64_t i = 0; i < BLOCK; ++i) own[i] = inside += weight[i];
  return block * BLOCK + owner(own, BLOCK, uniform * all - (block ? reached[block - 1] : 0.0));
}

int64_t draw_row(const Row& row, int64_t top_k, double top_p, double uniform) {
  if (uniform < 0 || !std::isfinite(row.best)) {  // greedy, or no distribution: the first NaN, if there is one
    const auto is_best = [&](float value) { return value == row.best || std::isnan(value); };
    return std::find_if(row.logits, row.logits + row.words, is_best) - row.logits;
  }
  const bool cuts_mass = top_p > 0 && top_p < 1;
  Key border = key_of(NOTHING, row.words);  // behind all
  if (top_k > 0 && top_k < row.words) {
    const std::vector<Key> kept = best_tokens(row, top_k);
    border = cuts_mass ? cut_kept(row, kept, top_p) : *std::min_element(kept.begin(), kept.end());
  } else if (cuts_mass) {
    border = cut_by_mass(row, top_p);
  }
  return draw(row, border, uniform);
}

at::Tensor sample(In logits, In temperature, In top_k, In top_p, In uniform) {
  const at::Tensor wide = rows(logits);
  const int64_t words = logits.size(1);
  TORCH_CHECK(words < (int64_t{1} << 31), "ids of 31 bits");
  at::Tensor tokens = at::empty({logits.size(0)}, temperature.options().dtype(at::kLong));
  int64_t* out = tokens.mutable_data_ptr<int64_t>();
  const auto numbers = [](const at::Tensor& column) { return column.const_data_ptr<double>(); };
  const double *temperatures = numbers(temperature), *shares = numbers(top_p), *places = numbers(uniform);
  const int64_t* most = integers(top_k);
  for_each(logits.size(0), [&](int64_t r) {
    const Row row(wide.const_data_ptr<float>() + r * wide.stride(0), words, temperatures[r]);
    out[r] = draw_row(row, most[r], shares[r], places[r]);
  });
  return tokens;
}

}  // namespace
}  // namespace megatron_ext::sampling

TORCH_LIBRARY_FRAGMENT(megatron_ext_cpu, library) {
  library.def("sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor uniform) -> Tensor",
              torch::dispatch(c10::kCPU, &megatron_ext::sampling::sample));
}
