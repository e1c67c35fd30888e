"""Sampling kernels for CUDA devices: a few passes over each row, no sorting.

Rows are split into parts, so that a few rows occupy the device: `best_words`, `sum_words` and `gather_words` have a
program for each part of each row, and `draw_rows` one for each row. All numbers that are merged are integers: a row's
token does not depend on its parts.

A word is a token of the vocabulary; `words` is the size V of the vocabulary. Words are compared by keys, integers in
the order of their logits. The mass of a word, exp(score), is an integer in units of 2^-40, so sums of masses are exact
in any order.

Words that top_k or top_p can keep are near the best one. They are gathered into scratch memory: those at most `NEAR`
nats below it, or `DEEPEST` if the near ones are fewer than top_k or have less mass than top_p. All words of positive
mass lie within `DEEPEST` nats, so nothing that is left out can be drawn. Among the gathered words the kept ones are
found by bisection: the least kept key, two bits of it a pass, and the number of words with that key to keep, which are
the first ones.
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
NEAR, DEEPEST = tl.constexpr(10.0), tl.constexpr(30.0)
"""Nats below the best word within which words are gathered. A mass of one unit is 27.7 nats below; what lies between it
and the deepest word is more than rounding in fp32 can change."""
BEST, MASS, NEAR_MASS, COUNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Sums of a part: its best word, masses of all and of near words, numbers of near words and, last, of deep ones."""
SUMS = tl.constexpr(5)
MAX_WORDS = 1 << 22
"""Largest vocabulary: the sum of this many masses does not overflow."""
NOTHING = tl.constexpr(-(2**63))
PART, PARTS = 1024, 256
"""Words that a program of a part loads together, and maximum number of parts of a row."""
LOWEST = tl.constexpr(-(2**31))
"""Least key of 32 bits; that of a NaN, so all numbers are above it."""
LEAST, MOST = tl.constexpr(2.0**-126), tl.constexpr(3.4028234663852886e38)
"""Positive and normal in fp32, as a temperature is used."""
SHIFTS = {"fp32": 0, "bf16": 16, "fp16": 12}
TYPES = [{"T": name} for name in SHIFTS]
OPTIONS, COUNTS = "sums temperature top_k top_p uniform", "words parts part_words"
SPLIT = [config(only=(name,), SHIFT=shift, BLOCK=PART, ROOM=PARTS) for name, shift in SHIFTS.items()]


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
def least_of(greatest, divisor, depth):
    """Return the least logit of the words at most `depth` nats below the best one, rounded alike in every kernel."""
    return tl.fma(tl.zeros([], tl.float32) - depth, divisor, greatest)


@triton.jit
def over_parts(sums, which, parts, ROOM: tl.constexpr, other=0):
    """Load one of the sums of all parts of a row: [ROOM], `other` after the last part."""
    place = tl.arange(0, ROOM)
    return tl.load(sums + which * ROOM + place, mask=place < parts, other=other)


@triton.jit
def best_of(source, sums, words, parts, ROOM: tl.constexpr):
    """Return the index and the value of the row's first maximum."""
    best = words - 1 - (tl.max(over_parts(sums, BEST, parts, ROOM, NOTHING), 0) & 0xFFFFFFFF)
    value = tl.load(source + best).to(tl.float32)
    return best, tl.where(value == 0.0, 0.0, value)


@triton.jit
def options_of(temperature, top_k, top_p, row, words):
    """Return a row's temperature, top_k and top_p; 0 for a filter that is off."""
    warmth, k = tl.load(temperature + row).to(tl.float64, bitcast=True), tl.load(top_k + row)
    p = tl.load(top_p + row).to(tl.float64, bitcast=True)
    divisor = tl.minimum(tl.maximum(warmth, LEAST), MOST).to(tl.float32)
    return divisor, tl.where(k < words, k, 0), tl.where(p < 1.0, p, 0.0)


@triton.jit
def depth_of(sums, parts, k, p, ROOM: tl.constexpr):
    """Return the mass of all words, 1 if near words are not all that top_k and top_p can keep, else 0, and the depth.

    One of both filters is on. If there are fewer than `k` words of positive mass, all of them are kept.
    """
    total, near = tl.sum(over_parts(sums, MASS, parts, ROOM), 0), tl.sum(over_parts(sums, NEAR_MASS, parts, ROOM), 0)
    count = tl.sum(over_parts(sums, COUNT, parts, ROOM), 0)
    is_deep = tl.where(k > 0, count < k, near.to(tl.float64) < p * total.to(tl.float64))
    return total, is_deep.to(tl.int32), tl.where(is_deep, DEEPEST, NEAR).to(tl.float32)


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
def word_at(
    source, start, words, greatest, divisor, low, ties, mass, is_mass, least, place,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the first kept word from `start` on at which the sum of masses, by ascending id, exceeds `place`.

    Words with keys above `low` are kept, and the first `ties` words with the key `low`, of `mass` each. The result is
    `words` if `place` is not below the sum of all masses. `greatest` is the row's greatest logit, `divisor` its
    temperature. Only the block of the word is summed word by word. Unless `is_mass`, the mass of a word is 1 if its
    logit is at least `least`, else 0.
    """
    found = words
    before = tl.zeros([], tl.int64)
    while (start < words) & (found == words):
        at, values, keys = words_at(source, start, words, SHIFT, BLOCK)
        masses = tl.where(is_mass, masses_of(values, greatest, divisor), (values >= least).to(tl.int64))
        masses = tl.where((keys > low) & (at < words), masses, 0)
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


@kernel(pointers={"T": "logits", "i64": "sums"}, counts="words part_words", types=TYPES, configs=SPLIT)
def best_words(
    logits, sums, row_stride, words, part_words,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Find the first maximum of a part of a row, as a number that grows with the key and falls with the index.

    The grid is (rows, parts); `sums` is [rows, SUMS, ROOM], a part has `part_words` words. SHIFT is the number of low
    bits of an fp32 logit that are constant for all numbers of its type and sign.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * part_words
    best = tl.full([BLOCK], NOTHING, tl.int64)
    for start in range(first, tl.minimum(first + part_words, words), BLOCK):
        at, _, keys = words_at(logits + row * row_stride, start, words, SHIFT, BLOCK)
        best = tl.maximum(best, tl.where(at < words, (keys.to(tl.int64) << 32) + (words - 1 - at), NOTHING))
    tl.store(sums + (row * SUMS + BEST) * ROOM + tl.program_id(1), tl.max(best, 0))


@kernel(pointers={"T": "logits", "i64": OPTIONS}, counts=COUNTS, types=TYPES, configs=SPLIT)
def sum_words(
    logits, sums, temperature, top_k, top_p, uniform, row_stride, words, parts, part_words,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Sum a part of a row that is drawn from: masses, and numbers of near and deep words; the grid is as before."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * part_words
    if tl.load(uniform + row).to(tl.float64, bitcast=True) >= 0.0:
        source, own = logits + row * row_stride, sums + row * SUMS * ROOM
        greatest = best_of(source, own, words, parts, ROOM)[1]
        divisor = options_of(temperature, top_k, top_p, row, words)[0]
        total, near = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        count, deep = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
        for start in range(first, tl.minimum(first + part_words, words), BLOCK):
            at, values, _ = words_at(source, start, words, SHIFT, BLOCK)
            masses = tl.where(at < words, masses_of(values, greatest, divisor), 0)
            is_near = (at < words) & (values >= least_of(greatest, divisor, NEAR))
            total += masses
            near += tl.where(is_near, masses, 0)
            count += is_near.to(tl.int64)
            deep += ((at < words) & (values >= least_of(greatest, divisor, DEEPEST))).to(tl.int64)
        own += tl.program_id(1)
        tl.store(own + MASS * ROOM, tl.sum(total, 0))
        tl.store(own + NEAR_MASS * ROOM, tl.sum(near, 0))
        tl.store(own + COUNT * ROOM, tl.sum(count, 0))
        tl.store(own + (COUNT + 1) * ROOM, tl.sum(deep, 0))


@kernel(pointers={"T": "logits scratch", "i64": OPTIONS}, counts=COUNTS, types=TYPES, configs=SPLIT)
def gather_words(
    logits, scratch, sums, temperature, top_k, top_p, uniform, row_stride, width, words, parts, part_words,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Copy the words of a part that top_k and top_p can keep to `scratch` [rows, width]; a row's words lie together.

    Their order stays. Words of equal logits are all copied or all left out. The grid is as before.
    """
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * part_words
    divisor, k, p = options_of(temperature, top_k, top_p, row, words)
    if (tl.load(uniform + row).to(tl.float64, bitcast=True) >= 0.0) & ((k > 0) | (p > 0.0)):
        source, own = logits + row * row_stride, sums + row * SUMS * ROOM
        greatest = best_of(source, own, words, parts, ROOM)[1]
        _total, is_deep, depth = depth_of(own, parts, k, p, ROOM)
        least = least_of(greatest, divisor, depth)
        count = tl.sum(over_parts(own, COUNT + is_deep, tl.program_id(1), ROOM), 0).to(tl.int32)
        for start in range(first, tl.minimum(first + part_words, words), BLOCK):
            at, values, _ = words_at(source, start, words, SHIFT, BLOCK)
            is_near = (values >= least) & (at < words)
            places = count + tl.cumsum(is_near.to(tl.int32), 0) - 1
            tl.store(scratch + row * width + places, values.to(scratch.dtype.element_ty), mask=is_near)
            count += tl.sum(is_near.to(tl.int32), 0)


@kernel(
    pointers={"T": "logits scratch", "i64": f"{OPTIONS} tokens"},
    counts=COUNTS,
    types=TYPES,
    configs=[
        config(num_warps=16, registers=128, only=(name,), SHIFT=shift, BLOCK=2048, ROOM=PARTS)
        for name, shift in SHIFTS.items()
    ],
)
def draw_rows(
    logits, scratch, sums, temperature, top_k, top_p, uniform, tokens, row_stride, width, words, parts, part_words,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Sample a token of a row; it reads the words that were gathered, and one part of the row.

    Fractions are the bits of fp64; `uniform` < 0 means greedy.
    """
    row = tl.program_id(0).to(tl.int64)
    source, own, near = logits + row * row_stride, sums + row * SUMS * ROOM, scratch + row * width
    u = tl.load(uniform + row).to(tl.float64, bitcast=True)
    found, greatest = best_of(source, own, words, parts, ROOM)
    if u >= 0.0:
        divisor, k, p = options_of(temperature, top_k, top_p, row, words)
        is_filtered = (k > 0) | (p > 0.0)
        total, is_deep, depth = depth_of(own, parts, k, p, ROOM)
        least = least_of(greatest, divisor, depth)
        amounts = over_parts(own, tl.where(is_filtered, COUNT + is_deep, MASS), parts, ROOM)
        count = tl.where(is_filtered, tl.sum(amounts, 0), 0).to(tl.int32)
        low, ties, mass, total = kept_words(near, count, greatest, divisor, total, k, p, SHIFT, BLOCK)
        place = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
        if is_filtered:  # the place of a gathered word among them
            place = word_at(
                near, count * 0, count, greatest, divisor, low, ties, mass, True, least, place, SHIFT, BLOCK
            ).to(tl.int64)
        part = tl.sum((tl.cumsum(amounts, 0) <= place).to(tl.int32), 0)
        place -= tl.sum(tl.where(tl.arange(0, ROOM) < part, amounts, 0), 0)
        drawn = word_at(
            source, part * part_words, words, greatest, divisor, LOWEST, place * 0, 0, is_filtered == 0, least, place,
            SHIFT, BLOCK,
        )  # fmt: skip
        found = tl.where(drawn < words, drawn, found)
    tl.store(tokens + row, found.to(tl.int64))


MAX_ROWS = 128
"""Maximum number of rows of a launch, each with a row of scratch."""
PROGRAMS = 512
"""Programs that occupy a device, of 4 warps each: rows are split into so many parts."""
ALIGNMENT = 16
"""Rows of scratch lie a multiple of this many elements apart."""


def launch_sample_tokens(logits: Tensor, metadata: SamplingMetadata, _: int | None = None) -> Tensor:
    rows, words = logits.shape
    if not 0 < words <= MAX_WORDS:
        raise NoKernelError(f"sampling has no kernel for {words} words, but for 1 to {MAX_WORDS}")
    draw_rows.require(T=logits.dtype)
    if rows > MAX_ROWS:
        cuts = [slice(first, first + MAX_ROWS) for first in range(0, rows, MAX_ROWS)]
        return torch.cat([launch_sample_tokens(logits[cut], metadata.select(cut)) for cut in cuts])
    logits, blocks = rows_of(logits), -(-words // PART)
    part_words = -(-blocks // max(1, min(PARTS, PROGRAMS // max(1, rows)))) * PART
    width, parts = -(-words // ALIGNMENT) * ALIGNMENT, -(-words // part_words)
    fractions = {name: getattr(metadata, name).contiguous() for name in ("temperature", "top_p", "uniform")}
    given = {
        "logits": logits,
        "scratch": logits.new_empty(rows, width),
        "sums": torch.empty(rows, SUMS.value, PARTS, dtype=torch.int64, device=logits.device),
        "top_k": metadata.top_k.contiguous(),
        "tokens": torch.empty(rows, dtype=torch.int64, device=logits.device),
        "row_stride": logits.stride(0),
        "width": width,
        "words": words,
        "parts": parts,
        "part_words": part_words,
        **{name: column.view(torch.int64) for name, column in fractions.items()},
    }
    for one in (best_words, sum_words, gather_words):
        one.launch_with((rows, parts), one.config_for(logits.dtype), given)
    draw_rows.launch_with((rows,), draw_rows.config_for(logits.dtype), given)
    return given["tokens"]
