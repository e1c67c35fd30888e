"""Sampling kernel for CUDA devices: programs take turns over the rows, a few passes over each row, no sorting.

A word is a token of the vocabulary; `words` is the size V of the vocabulary. Words are compared by keys, integers in
the order of their logits. The mass of a word, exp(score), is an integer in units of 2^-40, so sums of masses are exact
in any order.

Words that top_k or top_p can keep are near the best one. They are gathered into scratch memory, `STEP` nats deep at
first, and deeper while they are fewer than top_k or have less mass than top_p. All words of positive mass lie within
`DEEPEST` nats, so nothing that is left out can be drawn. Among the gathered words the kept ones are found by bisection:
the least kept key, two bits of it a pass, and the number of words with that key to keep, which are the first ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.ops.backends import NoKernelError
from megatron_ext.ops.sampling.sampling_metadata import SamplingMetadata
from megatron_ext.ops.triton.kernel_registry import config, kernel
from megatron_ext.ops.triton.launching import rows_of

UNITS = tl.constexpr(2.0**40)
"""A mass of 1; words of less than one of them never come."""
STEP, DEEPEST = tl.constexpr(10.0), tl.constexpr(30.0)
"""Nats below the best word within which words are gathered, more by each step, and at most. A mass of one unit is 27.7
nats below; what lies between it and the deepest step is more than rounding in fp32 can change."""
LOWEST = tl.constexpr(-(2**31))
"""Least key of 32 bits; that of a NaN, so all numbers are above it."""
LEAST, MOST = tl.constexpr(2.0**-126), tl.constexpr(3.4028234663852886e38)
"""Positive and normal in fp32, as a temperature is used."""


@triton.jit
def words_at(source, start, words, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Load logits [BLOCK] in fp32 and their keys of 32 - SHIFT bits; places after the last word read as logits of 0."""
    at = start + tl.arange(0, BLOCK)
    values = tl.load(source + at, mask=at < words, other=0.0).to(tl.float32)
    values = tl.where(values == 0.0, 0.0, values)  # both zeros are equal
    bits = values.to(tl.int32, bitcast=True)
    return at, values, (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


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
        amounts = tl.where(at < words, tl.where(is_mass, masses_of(values, greatest, divisor), 1), 0)
        one += tl.where(keys >= first, amounts, 0)
        two += tl.where(keys >= first + step, amounts, 0)
        three += tl.where(keys >= first + 2 * step, amounts, 0)
    return tl.sum(one, 0), tl.sum(two, 0), tl.sum(three, 0)


@triton.jit
def threshold(source, words, greatest, divisor, is_mass, goal, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the greatest key such that words of this key and better ones reach `goal` (fp64), in mass or in count."""
    BITS: tl.constexpr = 32 - SHIFT
    low = tl.zeros([], tl.int32) + (LOWEST >> SHIFT)
    step = tl.zeros([], tl.int32) + (1 << (BITS - 2))
    for _ in range(BITS // 2):
        one, two, three = shares(source, words, greatest, divisor, is_mass, low + step, step, SHIFT, BLOCK)
        passed = (one.to(tl.float64) >= goal).to(tl.int32) + (two.to(tl.float64) >= goal).to(tl.int32)
        low += (passed + (three.to(tl.float64) >= goal).to(tl.int32)) * step
        step = step // 4
    return low


@triton.jit
def best_word(source, words, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the index and the value of the row's first maximum."""
    best_keys = tl.zeros([BLOCK], tl.int32) + LOWEST
    best_values, places = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, words, BLOCK):
        at, values, keys = words_at(source, start, words, SHIFT, BLOCK)
        is_better = (keys > best_keys) & (at < words)
        best_keys = tl.where(is_better, keys, best_keys)
        best_values = tl.where(is_better, values, best_values)
        places = tl.where(is_better, at, places)
    best = tl.min(tl.where(best_keys == tl.max(best_keys, 0), places, words), 0)
    return best, tl.sum(tl.where(places == best, best_values, 0.0), 0)


@triton.jit
def total_mass(source, words, greatest, divisor, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mass of all words."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, words, BLOCK):
        at, values, _ = words_at(source, start, words, SHIFT, BLOCK)
        total += tl.where(at < words, masses_of(values, greatest, divisor), 0)
    return tl.sum(total, 0)


@triton.jit
def gather(source, scratch, words, greatest, divisor, depth, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the words that are at most `depth` nats below the best one to `scratch`, in their order.

    Returns their number, their mass and the mass of all words. Words of equal logits are all copied or all left out.
    """
    least = greatest - depth * divisor
    count = tl.zeros([], tl.int32)
    near, total = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, words, BLOCK):
        at, values, _ = words_at(source, start, words, SHIFT, BLOCK)
        masses = tl.where(at < words, masses_of(values, greatest, divisor), 0)
        is_near = (values >= least) & (at < words)
        total += masses
        near += tl.where(is_near, masses, 0)
        places = count + tl.cumsum(is_near.to(tl.int32), 0) - 1
        tl.store(scratch + places, values.to(scratch.dtype.element_ty), mask=is_near)
        count += tl.sum(is_near.to(tl.int32), 0)
    return count, tl.sum(near, 0), tl.sum(total, 0)


@triton.jit
def gather_enough(source, scratch, words, greatest, divisor, k, p, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Gather all words that top_k and top_p can keep; return their number and the mass of all words.

    top_k is off if `k` is 0, and top_p if `p` is 0; one of them is on. If there are fewer than `k` words, all others
    have no mass.
    """
    count = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int64)
    depth = tl.zeros([], tl.float32)
    is_short = depth < DEEPEST
    while is_short:
        depth += STEP
        tl.debug_barrier()  # the words of the last pass have been read
        count, near, total = gather(source, scratch, words, greatest, divisor, depth, SHIFT, BLOCK)
        tl.debug_barrier()  # all words have been written
        lacks_mass = near.to(tl.float64) < p * total.to(tl.float64)
        is_short = (depth < DEEPEST) & tl.where(k > 0, count < k, lacks_mass)
    return count, total


@triton.jit
def kept_words(scratch, count, greatest, divisor, total, k, p, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return what top_k and top_p keep of `count` gathered words: `low`, `ties`, the mass of each tie, and of all.

    Kept are words with keys above `low` and the first `ties` words with the key `low`. `total` is the mass of all words
    of the row.
    """
    low = tl.zeros([], tl.int32) + LOWEST  # below the keys of all numbers: all words are kept
    ties = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    if (k > 0) & (k <= count):
        low = threshold(scratch, count, greatest, divisor, False, k.to(tl.float64), SHIFT, BLOCK)
        better, _, _ = shares(scratch, count, greatest, divisor, False, low + 1, 0, SHIFT, BLOCK)
        ties = k - better
        above, mass = above_and_each(scratch, count, greatest, divisor, low, SHIFT, BLOCK)
        total = above + ties * mass
    if p > 0.0:
        goal = p * total.to(tl.float64)
        least = threshold(scratch, count, greatest, divisor, True, goal, SHIFT, BLOCK)
        above, mass = above_and_each(scratch, count, greatest, divisor, least, SHIFT, BLOCK)
        missing = goal - above.to(tl.float64)  # positive: words with this key are added until the goal is reached
        needed = tl.ceil(missing / tl.maximum(mass, 1).to(tl.float64)).to(tl.int64)
        ties = tl.where(least > low, needed, tl.minimum(ties, needed))
        low = least
        total = above + ties * mass
    return low, ties, mass, total


@triton.jit
def above_and_each(source, words, greatest, divisor, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mass of all words with keys above `key`, and the mass of each word with that key."""
    every, above, _ = shares(source, words, greatest, divisor, True, key, 1, SHIFT, BLOCK)
    equal, less, _ = shares(source, words, greatest, divisor, False, key, 1, SHIFT, BLOCK)
    return above, (every - above) // tl.maximum(equal - less, 1)


@triton.jit
def word_at(source, words, greatest, divisor, low, ties, mass, place, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Draw by inverse CDF: return the first kept word at which the sum of masses, by ascending id, exceeds `place`.

    Words with keys above `low` are kept, and the first `ties` words with the key `low`, of `mass` each. The result is
    `words` if `place` is not below the sum of all masses. `greatest` is the row's greatest logit, `divisor` its
    temperature. Only the block of the word is summed word by word.
    """
    found, start = words, words * 0
    before = tl.zeros([], tl.int64)
    while (start < words) & (found == words):
        at, values, keys = words_at(source, start, words, SHIFT, BLOCK)
        masses = tl.where((keys > low) & (at < words), masses_of(values, greatest, divisor), 0)
        is_equal = (keys == low) & (at < words)
        equal = tl.minimum(ties, tl.sum(is_equal.to(tl.int32), 0))
        own = tl.sum(masses, 0) + equal * mass
        if before + own > place:
            is_kept = is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= ties)
            reached = before + tl.cumsum(tl.where(is_kept, mass, masses), 0)
            found = tl.min(tl.where((reached > place) & (at < words), at, words), 0)
        before += own
        ties -= equal
        start += BLOCK
    return found


@kernel(
    pointers={"T": "logits scratch", "i64": "temperature top_k top_p uniform tokens"},
    counts="rows words",
    types=[{"T": name} for name in ("fp32", "bf16", "fp16")],
    configs=[
        config(num_warps=16, only=("fp32",), SHIFT=0, BLOCK=2048),
        config(num_warps=16, only=("bf16",), SHIFT=16, BLOCK=2048),
        config(num_warps=16, only=("fp16",), SHIFT=12, BLOCK=2048),
    ],
)
def draw_rows(
    logits, scratch, temperature, top_k, top_p, uniform, tokens, row_stride, rows, words,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sample a token of each row; the programs of the grid take turns over the rows.

    Each program has a row of `scratch`, whose rows lie `scratch_width(words)` apart. Fractions are the bits of fp64;
    `uniform` < 0 means greedy. SHIFT is the number of low bits of an fp32 logit that are constant for all numbers of
    its type and sign.
    """
    near = scratch + tl.program_id(0).to(tl.int64) * (tl.cdiv(words, 16) * 16)
    for turn in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.zeros([], tl.int64) + turn
        source = logits + row * row_stride
        u = tl.load(uniform + row).to(tl.float64, bitcast=True)
        found, greatest = best_word(source, words, SHIFT, BLOCK)
        if u >= 0.0:
            warmth = tl.load(temperature + row).to(tl.float64, bitcast=True)
            divisor = tl.minimum(tl.maximum(warmth, LEAST), MOST).to(tl.float32)
            k = tl.load(top_k + row)
            k = tl.where(k < words, k, 0)
            p = tl.load(top_p + row).to(tl.float64, bitcast=True)
            p = tl.where(p < 1.0, p, 0.0)
            count = tl.zeros([], tl.int32)
            if (k > 0) | (p > 0.0):
                count, total = gather_enough(source, near, words, greatest, divisor, k, p, SHIFT, BLOCK)
            else:
                total = total_mass(source, words, greatest, divisor, SHIFT, BLOCK)
            low, ties, mass, total = kept_words(near, count, greatest, divisor, total, k, p, SHIFT, BLOCK)
            place = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
            drawn = word_at(source, words, greatest, divisor, low, ties, mass, place, SHIFT, BLOCK)
            found = tl.where(drawn < words, drawn, found)
        tl.store(tokens + row, found.to(tl.int64))


MAX_WORDS = 1 << 22
"""Largest vocabulary: the sum of this many masses does not overflow."""
PROGRAMS = 128
"""Maximum number of programs of a launch, each with a row of scratch: as many as devices have multiprocessors, nearly,
since a program takes half of one's threads or more."""
ALIGNMENT = 16
"""Rows of scratch lie a multiple of this many elements apart."""


def launch_sample_tokens(logits: Tensor, metadata: SamplingMetadata, _: int | None = None) -> Tensor:
    if not 0 < logits.shape[1] <= MAX_WORDS:
        raise NoKernelError(f"sampling has no kernel for {logits.shape[1]} words, but for 1 to {MAX_WORDS}")
    draw_rows.require(T=logits.dtype)
    logits, words = rows_of(logits), logits.shape[1]
    programs, width = min(PROGRAMS, len(logits)), -(-words // ALIGNMENT) * ALIGNMENT
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    fractions = {name: getattr(metadata, name).contiguous() for name in ("temperature", "top_p", "uniform")}
    draw_rows.launch(
        (programs,),
        draw_rows.config_for(logits.dtype),
        logits=logits,
        scratch=logits.new_empty(programs, width),
        top_k=metadata.top_k.contiguous(),
        tokens=tokens,
        row_stride=logits.stride(0),
        rows=len(logits),
        words=words,
        **{name: column.view(torch.int64) for name, column in fractions.items()},
    )
    return tokens
