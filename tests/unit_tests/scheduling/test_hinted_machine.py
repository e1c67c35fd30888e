"""Random hints of random requests: results are those without, and owners, queues and runs agree after every action.

The model of the caching machines predicts matches and resume points; which leaf goes is taken from the cache, as under
`flops`. Two schedulers that are told the same evict the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import initialize

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.config.cache_hints import CacheHints
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.scheduling.plan import StepPlan
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.submission import Submission
from tests.unit_tests.scheduling.builders import commit, make_limits
from tests.unit_tests.scheduling.caching_machine import CachingMachine
from tests.unit_tests.scheduling.test_caching_machine import COMMON
from tests.unit_tests.scheduling.test_hybrid_machine import HybridMachine
from tests.unit_tests.scheduling.test_slab_machine import SlabMachine

NAMES = "abc"


def random_hints(source: random.Random) -> CacheHints | None:
    """Any hints of a few sessions."""
    if source.random() < 0.2:
        return None
    session = source.choice([*NAMES, None])
    hints: dict[str, object] = {"ended_sessions": source.choice([(), (), (), ("a",)])}
    hints["replaces"] = source.choice([None, None, *NAMES])
    if session is not None:
        end = source.choice([{}, {"ends_session": True}, {"pause_seconds": source.choice([1.0, 30.0])}])
        others = [name for name in NAMES if name != session]
        hints |= {"session": session, "turn": source.choice([None, 1, 2, 3]), **end}
        hints["parent_session"] = source.choice([None, *others])
    return CacheHints(**hints)


class _Hinted(CachingMachine):
    """Machine whose requests have hints."""

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        """Believe which leaf goes, unless unused blocks go at once."""
        super().build(data)
        self.source = random.Random(data.draw(st.integers(0, 10**6), "hints"))
        if self.world.policy is not EvictionPolicyName.REF_ZERO:
            self.world.policy = EvictionPolicyName.FLOPS

    def hints(self) -> CacheHints | None:
        """Return any hints."""
        return random_hints(self.source)


class HintedMachine(_Hinted):
    """Model without recurrent layers."""


class HintedHybridMachine(_Hinted, HybridMachine):
    """Model with snapshots."""


class HintedSlabMachine(_Hinted, SlabMachine):
    """Model whose blocks and snapshots share one memory."""


FEW = settings(max_examples=40, phases=[Phase.generate, Phase.shrink], print_blob=True, **COMMON)
for _machine in (HintedMachine, HintedHybridMachine, HintedSlabMachine):
    _machine.TestCase.settings = FEW
TestHinted = HintedMachine.TestCase
TestHintedHybrid = HintedHybridMachine.TestCase
TestHintedSlab = HintedSlabMachine.TestCase


@dataclass
class Removed:
    """Observer that notes what goes, in order."""

    removed: list[bytes] = field(default_factory=list)

    def on_blocks_stored(self, run: PublishedRun) -> None:
        """Nothing goes."""

    def on_blocks_removed(self, block_hashes: list[bytes]) -> None:
        self.removed += block_hashes

    def on_snapshot_stored(self, block_hash: bytes) -> None:
        """Nothing goes."""

    def on_snapshot_removed(self, block_hash: bytes) -> None:
        self.removed.append(block_hash)

    def on_cleared(self) -> None:
        """Nothing goes one by one."""


def test_ranks_evict_the_same():
    """MR-2: what rank 0 tells other ranks, times of submission included, decides; neither clocks nor hashes do."""
    source, log = random.Random(5), []
    schedulers = [
        Scheduler(make_limits(total_blocks=24, max_tokens=32), EvictionPolicyName.LRU, b"model", 5) for _ in range(2)
    ]
    removed = [Removed(), Removed()]
    for scheduler, one in zip(schedulers, removed, strict=True):
        scheduler.cache.add_observer(one)
    for name in range(150):
        prompt = [source.randrange(3) for _ in range(source.randint(1, 24))]
        params = RequestParams(num_tokens_to_generate=source.randint(1, 6), cache_hints=random_hints(source))
        submission = Submission(name, tuple(prompt), params, name, 0, submitted_at=3.0 * name)
        for scheduler in schedulers:
            scheduler.add(Request(submission))
        for _ in range(source.randint(0, 3)):
            plans: list[StepPlan] = []
            for scheduler in schedulers:
                plans.append(scheduler.schedule())
                commit(scheduler, plans[-1])
            log.append([[(chunk.request.request_id, chunk.start, chunk.end) for chunk in p.chunks] for p in plans])
    assert all(one == other for one, other in log)
    assert removed[0].removed == removed[1].removed
    assert len(removed[0].removed) > 100
