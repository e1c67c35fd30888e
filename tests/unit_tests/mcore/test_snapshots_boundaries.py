"""Every prompt length around the block boundaries, with every subset of the snapshots that there could be.

All cases of a kind run side by side in one engine, each under a salt of its own. First a case's prompt is fed in
growing pieces, which leaves a snapshot at every boundary; then the snapshots outside of its subset are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.unit_tests.support.driver import assert_equals_expected, assert_states_equal_oracle, make_prompt
from tests.unit_tests.support.hybrid_caching import HybridDriver
from tests.unit_tests.support.models import HYBRID, build_slow_decay
from tests.unit_tests.support.oracle import Oracle

SMALL = replace(HYBRID, hybrid_override_pattern="M*M", hidden_size=24, mamba_chunk_size=16)
OFFSETS = (-1, 0, 1, 2, 3)  # 3 tokens are the convolution window less one
GENERATED = 3


@dataclass(frozen=True)
class Case:
    """A prompt and the boundaries at which it finds snapshots."""

    number: int
    prompt: tuple[int, ...]
    block: int
    kept: frozenset[int]

    @property
    def salt(self) -> str:
        return f"case {self.number}"

    @property
    def boundaries(self) -> range:
        return range(self.block, len(self.prompt) + 1, self.block)

    @property
    def last(self) -> int:
        """The last boundary that leaves a token to compute."""
        return max([k for k in self.boundaries if k < len(self.prompt)], default=0)

    @property
    def skip(self) -> int:
        """Expected skip: the last snapshot below the end, since all complete blocks are cached."""
        return max([k for k in self.kept if k < len(self.prompt)], default=0)

    @property
    def left(self) -> set[int]:
        """Boundaries with a snapshot when the prompt has been computed: the end of the match, and the last below it."""
        return set(self.kept) | ({self.boundaries[-1], self.last} - {0} if self.boundaries else set())


def subsets(positions: range) -> Iterator[frozenset[int]]:
    for count in range(len(positions) + 1):
        yield from map(frozenset, itertools.combinations(positions, count))


def all_cases(block: int, blocks: range) -> list[Case]:
    prompts = [tuple(make_prompt(n * block + offset)) for n in blocks for offset in OFFSETS]
    pairs = [(p, kept) for p in prompts for kept in subsets(range(block, len(p) + 1, block))]
    return [Case(number, p, block, kept) for number, (p, kept) in enumerate(pairs)]


def warm_up(driver: HybridDriver, cases: list[Case]) -> None:
    """Leave a snapshot at every boundary of every case's prompt, then take away those that it must not find."""
    for boundary in sorted({k for case in cases for k in case.boundaries}):
        for case in cases:
            if boundary in case.boundaries:
                seed = [*case.prompt[:boundary], 5]
                request_id = 10_000 + 10 * case.number + boundary // case.block
                driver.add(request_id, seed, num_tokens_to_generate=1, cache_salt=case.salt)
        driver.run()
    for case in cases:
        assert driver.snapshots_of(case.prompt, case.salt) == list(case.boundaries)
        driver.forget(case.prompt, set(case.boundaries) - case.kept, case.salt)


def sight(driver: HybridDriver, cases: list[Case], number: int) -> None:
    for case in cases:
        driver.add(1000 * number + case.number, case.prompt, num_tokens_to_generate=GENERATED, cache_salt=case.salt)
    driver.run()


def check(driver: HybridDriver, oracle: Oracle, request_id: int, case: Case, skip: int) -> None:
    record = driver.records[request_id]
    assert record.skipped_prefill_token_count == skip, case
    assert record.matched_block_count == len(case.boundaries)
    assert driver.seen[request_id].chunks[0] == (skip, len(case.prompt))
    assert_equals_expected(driver, request_id, oracle.greedy(case.prompt, GENERATED))
    assert_states_equal_oracle(driver, request_id, oracle)


@pytest.mark.parametrize(
    ("block", "blocks"),
    [
        pytest.param(16, range(1, 4), id="one_kernel_chunk_a_block"),
        pytest.param(48, range(1, 3), id="three_kernel_chunks_a_block", marks=pytest.mark.long),
        pytest.param(16, range(4, 5), id="four_blocks", marks=pytest.mark.long),
        pytest.param(48, range(3, 4), id="three_large_blocks", marks=pytest.mark.long),
    ],
)
def test_every_length_with_every_subset_of_snapshots(block, blocks):
    """HY-3, HY-4, HY-9, KV-12: second and third sighting: skip, text, logits, states, and which snapshots are left."""
    oracle = Oracle(build_slow_decay(SMALL))
    cases = all_cases(block, blocks)
    batching = {"block_size": block, "block_count": 1500, "max_requests": len(cases), "max_tokens": 50_000}
    driver = HybridDriver(oracle.model, SMALL, slots=1000, **batching)
    warm_up(driver, cases)
    sight(driver, cases, 2)
    for case in cases:
        check(driver, oracle, 2000 + case.number, case, case.skip)
        assert driver.snapshots_of(case.prompt, case.salt) == sorted(case.left)
    sight(driver, cases, 3)
    for case in cases:
        check(driver, oracle, 3000 + case.number, case, case.last)
        assert driver.snapshots_of(case.prompt, case.salt) == sorted(case.left)
    assert {case.skip for case in cases} == {0, *range(block, blocks[-1] * block + 1, block)}
    assert driver.states.skipped == 0
