"""Sampling kernel for CUDA devices: one program a row, a few passes over the row, no sorting.

A word is a token of the vocabulary; `words` is the size V of the vocabulary. Words are compared by keys, integers in
the order of their logits. The mass of a word, exp(score), is an integer in
units of 2^-40, so sums of masses are exact in any order. The words kept by top_k and top_p are found by bisection: the
least kept key, two bits of it a pass, and the number of words with that key to keep, which are the first ones.
"""

import triton
import triton.language as tl

from megatron_ext.ops.triton.kernel_registry import config, kernel

UNITS = tl.constexpr(2.0**40)
"""A mass of 1; words of less than one of them never come."""
LEAST, MOST = tl.constexpr(2.0**-126), tl.constexpr(3.4028234663852886e38)
"""Positive and normal in fp32, as a temperature is used."""


@triton.jit
def words_at(source, start, words, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Load logits [BLOCK] in fp32 and their keys of 32 - SHIFT bits; after the last word keys are below all others."""
    at = start + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < words, other=0.0).to(tl.float32)
    values = tl.where(values == 0.0, 0.0, values)  # both zeros are equal
    bits = values.to(tl.int32, bitcast=True)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT
    return at, values, tl.where(at < words, keys.to(tl.int64), -(1 << 40))


@triton.jit
def masses_of(values, greatest, divisor):
    """Return the masses of words, UNITS for the best one and 0 for NaN."""
    weights = tl.exp((values - greatest) / divisor)
    return tl.where(weights == weights, weights * UNITS, 0.0).to(tl.int64)


@triton.jit
def shares(source, words, greatest, divisor, is_mass, first, step, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the masses, or the counts, of words with keys of at least first, first + step and first + 2 * step."""
    one = tl.zeros([BLOCK], tl.int64)
    two = tl.zeros([BLOCK], tl.int64)
    three = tl.zeros([BLOCK], tl.int64)
    for start in range(0, words, BLOCK):
        at, values, keys = words_at(source, start, words, SHIFT, BLOCK)
        amounts = tl.where(is_mass, masses_of(values, greatest, divisor), (at < words).to(tl.int64))
        one += tl.where(keys >= first, amounts, 0)
        two += tl.where(keys >= first + step, amounts, 0)
        three += tl.where(keys >= first + 2 * step, amounts, 0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def threshold(source, words, greatest, divisor, is_mass, goal, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the greatest key such that words of this key and better ones reach `goal` (fp64), in mass or in count."""
    BITS: tl.constexpr = 32 - SHIFT
    low = tl.zeros([], tl.int64) - (1 << (BITS - 1))
    step = tl.zeros([], tl.int64) + (1 << (BITS - 2))
    for _ in range(BITS // 2):
        one, two, three = shares(source, words, greatest, divisor, is_mass, low + step, step, SHIFT, BLOCK)
        passed = (one.to(tl.float64) >= goal).to(tl.int64) + (two.to(tl.float64) >= goal).to(tl.int64)
        low += (passed + (three.to(tl.float64) >= goal).to(tl.int64)) * step
        step = step // 4
    return low


@triton.jit
def best_word(source, words, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index and the value of the row's first maximum."""
    best_key = tl.zeros([], tl.int64) - (1 << 40)
    best, greatest = tl.zeros([], tl.int32), tl.zeros([], tl.float32)
    for start in range(0, words, BLOCK):
        at, values, keys = words_at(source, start, words, SHIFT, BLOCK)
        key = tl.max(keys, 0)
        first = tl.min(tl.where(keys == key, at, words), 0)
        value = tl.sum(tl.where(at == first, values, 0.0), 0)
        best = tl.where(key > best_key, first, best)
        greatest = tl.where(key > best_key, value, greatest)
        best_key = tl.maximum(best_key, key)
    return best, greatest


@triton.jit
def word_at(source, words, greatest, divisor, low, ties, place, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Draw by inverse CDF: return the first kept word at which the sum of masses, by ascending id, exceeds `place`.

    Words with keys above `low` are kept, and the first `ties` words with the key `low`. The result is `words` if
    `place` is not below the sum of all masses. `greatest` is the row's greatest logit, `divisor` its temperature.
    """
    found, start = words, words * 0
    before = tl.zeros([], tl.int64)
    equal = tl.zeros([], tl.int64)
    while (start < words) & (found == words):
        at, values, keys = words_at(source, start, words, SHIFT, BLOCK)
        is_equal = (keys == low).to(tl.int64)
        rank = equal + tl.cumsum(is_equal, 0)
        is_kept = (keys > low) | ((keys == low) & (rank <= ties))
        masses = tl.where(is_kept, masses_of(values, greatest, divisor), 0)
        reached = before + tl.cumsum(masses, 0)
        found = tl.min(tl.where((reached > place) & (at < words), at, words), 0)
        before += tl.sum(masses, 0)
        equal += tl.sum(is_equal, 0)
        start += BLOCK
    return found


@kernel(
    pointers={"T": "logits", "i64": "temperature top_k top_p uniform tokens"},
    strides="row_stride",
    counts="words",
    types=[{"T": name} for name in ("fp32", "bf16", "fp16")],
    configs=[
        config(num_warps=16, only=("fp32",), SHIFT=0, BLOCK=4096),
        config(num_warps=16, only=("bf16",), SHIFT=16, BLOCK=4096),
        config(num_warps=16, only=("fp16",), SHIFT=12, BLOCK=4096),
    ],
)
def draw_rows(
    logits, temperature, top_k, top_p, uniform, tokens, row_stride, words,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample a token of each row; the grid is the rows. Fractions are the bits of fp64; `uniform` < 0 means greedy.

    SHIFT is the number of low bits of an fp32 logit that are constant for all numbers of its type and sign.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * row_stride
    u = tl.load(uniform + row).to(tl.float64, bitcast=True)
    found, greatest = best_word(source, words, SHIFT, BLOCK)
    if u >= 0.0:
        warmth = tl.load(temperature + row).to(tl.float64, bitcast=True)
        divisor = tl.minimum(tl.maximum(warmth, LEAST), MOST).to(tl.float32)
        low = tl.zeros([], tl.int64) - (1 << 33)  # below all keys: all words are kept
        ties = tl.zeros([], tl.int64)
        k = tl.load(top_k + row)
        if (k > 0) & (k < words):
            low = threshold(source, words, greatest, divisor, False, k.to(tl.float64), SHIFT, BLOCK)
            better, _, _ = shares(source, words, greatest, divisor, False, low + 1, 0, SHIFT, BLOCK)
            ties = k - better
        every, above, _ = shares(source, words, greatest, divisor, True, low, 1, SHIFT, BLOCK)
        equal, less, _ = shares(source, words, greatest, divisor, False, low, 1, SHIFT, BLOCK)
        mass = (every - above) // tl.maximum(equal - less, 1)  # mass of each word with that key
        total = above + ties * mass
        p = tl.load(top_p + row).to(tl.float64, bitcast=True)
        if (p > 0.0) & (p < 1.0):
            goal = p * total.to(tl.float64)
            least = threshold(source, words, greatest, divisor, True, goal, SHIFT, BLOCK)
            every, above, _ = shares(source, words, greatest, divisor, True, least, 1, SHIFT, BLOCK)
            equal, less, _ = shares(source, words, greatest, divisor, False, least, 1, SHIFT, BLOCK)
            mass = (every - above) // tl.maximum(equal - less, 1)
            missing = goal - above.to(tl.float64)  # positive: words with this key are added until the goal is reached
            needed = tl.ceil(missing / tl.maximum(mass, 1).to(tl.float64)).to(tl.int64)
            ties = tl.where(least > low, needed, tl.minimum(ties, needed))
            low = least
            total = above + ties * mass
        place = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
        drawn = word_at(source, words, greatest, divisor, low, ties, place, SHIFT, BLOCK)
        found = tl.where(drawn < words, drawn, found)
    tl.store(tokens + row, found.to(tl.int64))
