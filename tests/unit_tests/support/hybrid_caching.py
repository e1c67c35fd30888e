"""A driver of hybrid models with the prefix cache on: resume points and snapshots are checked in every step.

The rules are computed by brute force on token lists; see `CacheModel`, whose contents name blocks and, here, the states
after their last token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import pytest

from megatron_ext.config import CacheConfig, EvictionPolicyName
from megatron_ext.ops.ssd import SSD
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission, Deferral, StepPlan
from megatron_ext.scheduling.request import Request
from tests.unit_tests.support.cache_model import Book, CacheModel, Contents
from tests.unit_tests.support.caching import Broken, CachingDriver
from tests.unit_tests.support.driver import Driver, assert_states_close
from tests.unit_tests.support.kv_writes import KvWrites
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.oracle import Oracle

PLENTY = 100  # slots: none is ever given up, and the model knows every snapshot


class HybridBook(Book):
    """Ledger of EX-2, with tokens that are computed though their block is cached."""

    def _reason(self, position: int) -> str:
        params = self.request.params
        reads = params.enable_prefix_caching and not params.wants_prompt_log_probs
        in_match = position < self.matched[-1] * self.block_size
        if reads and in_match and position < self.request.prompt_length - 1:
            return "no_snapshot"
        return super()._reason(position)


class HybridModel(CacheModel):
    """Reference cache model for models with recurrent layers.

    Args:
        is_exact: If true, slots and blocks suffice, so every snapshot that was ever wanted exists; otherwise each
            existing snapshot must have been wanted.
    """

    def __init__(self, driver: HybridDriver, *, is_exact: bool) -> None:
        super().__init__(driver.scheduler, driver.policy)
        self.is_exact = is_exact
        self._states = driver.scheduler.cache.states
        self._is_aligned = driver.mode == "align"
        self._of_hash: dict[BlockHash, Contents] = {}
        self._clear()

    def _clear(self) -> None:
        self.expected: set[Contents] = set()  # snapshots that were taken and should be there still
        self._optional: set[Contents] = set()  # snapshots of decode that were not consumed
        self._last_in_decode: dict[int, Contents] = {}
        self._requested: dict[int, set[int]] = {}  # leader -> positions that followers wait for
        self._of_hash.clear()

    def visible(self) -> set[Contents]:
        """Contents of which the engine has snapshots."""
        return {self._of_hash[block_hash] for block_hash in self._states._visible}

    def asked_for(self) -> set[Contents]:
        """Contents of the visible snapshots that are not opportunistic."""
        states = self._states
        return {self._of_hash[block_hash] for block_hash in states._visible if not states.is_provisional(block_hash)}

    def block_hash(self, contents: Contents) -> BlockHash:
        """The engine's name of it."""
        return next(block_hash for block_hash, known in self._of_hash.items() if known == contents)

    def forget(self, contents: Contents) -> None:
        """Drop a snapshot that is there; its block stays."""
        block_hash = self.block_hash(contents)
        assert self._states.find(block_hash) is not None, "there is no such snapshot"
        self._states.drop(block_hash)
        self.expected.discard(contents)

    # What token lists say

    def _in_use(self) -> set[Contents]:
        """A request uses what it matched from its admission on, even where it has yet to compute its states."""
        used = set()
        for request in self._batch():
            matched = self.books[request.request_id].matched[-1] * self.block_size
            used |= set(self.contents(request, max(request.computed_end, matched)))
        return used

    def _drop_unused(self) -> None:
        if self.policy is EvictionPolicyName.REF_ZERO:
            self.expected &= self._in_use()

    def check_snapshots(self) -> None:
        asked_for = self.asked_for()
        if self.is_exact:
            assert self.scheduler.cache.use().blocks_evicted == 0, "not what an exact model is for"
            self._drop_unused()
            assert asked_for == self.expected
        else:
            assert asked_for <= self.expected

    def _resume(self, length: int, matched: Sequence[Contents]) -> int:
        """The largest boundary below the end, in the matched run, that has a snapshot."""
        usable = [len(tokens) for salt, tokens in matched if (salt, tokens) in self._present and len(tokens) < length]
        return max(usable, default=0)

    def _positions(self, chunk: Chunk) -> Iterator[int]:
        """HY-4: positions of a prefill chunk's snapshots; LA-1: its end, if the mode is `align`."""
        if self._is_aligned:
            return (position for position in [chunk.end] if position % self.block_size == 0)
        length, size = len(chunk.request.tokens), self.block_size
        wanted = {self.books[chunk.request.request_id].matched[-1] * size, length - length % size}
        if length % size == 0:
            wanted.add(length - size)
        wanted |= self._requested.get(chunk.request.request_id, set())
        return (position for position in wanted if chunk.start < position <= chunk.end)

    # What the scheduler does

    def schedule(self) -> StepPlan:
        self.check_snapshots()
        self._present = self.visible()
        plan = super().schedule()
        for deferral in plan.deferrals:
            if deferral.snapshot is not None:
                self._check_requested(deferral)
        return plan

    def _check_requested(self, deferral: Deferral) -> None:
        """KV-6: the last boundary that follower and leader have in common, and that the follower can resume from."""
        follower, wanted, size = deferral.request, deferral.snapshot, self.block_size
        common = 0
        while self.contents(follower, common + size)[-1:] == self.contents(wanted.request, common + size)[-1:]:
            common += size
            if common + size > min(len(follower.tokens), len(wanted.request.tokens)):
                break
        assert wanted.position == min(common, (len(follower.tokens) - 1) // size * size)
        self._requested.setdefault(wanted.request.request_id, set()).add(wanted.position)

    def _check_admission(
        self, admission: Admission, leaders: dict[Contents, set[int]], bounds: tuple[int, int]
    ) -> None:
        """Matched is in bounds, and skipped is the rule's; see `design.md`."""
        request, matched = admission.request, len(admission.matched)
        min_blocks, max_blocks = bounds
        assert min_blocks <= matched <= max_blocks, (
            f"request {request.request_id} matched {matched}, not {min_blocks} to {max_blocks}"
        )
        run = self._wanted(request)[:matched]
        start = self._resume(len(request.tokens), run)
        skipped = admission.chunk.start
        assert skipped == start, f"request {request.request_id} skipped {skipped}, not {start}"
        assert (admission.restore is not None) == (start > 0)
        if start:
            self._optional.discard(run[start // self.block_size - 1])
            self.expected.add(run[start // self.block_size - 1])  # though it was not requested
        self._stale.discard(request.request_id)
        self._requested.pop(request.request_id, None)
        if request.params.enable_prefix_caching:
            self._note_leader(leaders, request, matched * self.block_size)
        book = self.books.setdefault(request.request_id, HybridBook(request, self.block_size))
        book.admit(start, matched)

    def advance(self, requests: Sequence[Request], ends: Sequence[int]) -> None:
        chunks = [Chunk(request, request.computed_end, end) for request, end in zip(requests, ends, strict=True)]
        self._drop_unused()
        super().advance(requests, ends)
        batch = self._batch()
        for chunk in chunks:
            if chunk.request in batch:
                self._note_snapshots(chunk)
        self.check_snapshots()

    def _note_snapshots(self, chunk: Chunk) -> None:
        request, size = chunk.request, self.block_size
        own = self.contents(request, chunk.end)
        self._of_hash |= dict(zip(request.block_hashes, own, strict=False))
        if self._states.total == 0:
            return
        if not chunk.is_decode:
            self.expected |= {own[position // size - 1] for position in self._positions(chunk)}
        elif chunk.end % size == 0 and own[-1] not in self.expected:
            before = self._last_in_decode.get(request.request_id)
            if before in self._optional and self.is_exact:
                self.expected.discard(before)
            self._optional.discard(before)
            self._last_in_decode[request.request_id] = own[-1]
            self._optional.add(own[-1])
            self.expected.add(own[-1])

    def reset(self) -> None:
        super().reset()
        self._clear()


class HybridDriver(CachingDriver):
    """See the module.

    Args:
        policy: "lru" or "ref_zero".
        slots: For snapshots.
        is_exact: True if the model knows every snapshot; by default, if there are plenty of slots, or zero.
        mode: "kernel" or "align".
        kwargs: Keywords of `Driver`.
    """

    def __init__(
        self,
        *args: object,
        policy: str = "lru",
        slots: int = PLENTY,
        is_exact: bool | None = None,
        mode: str = "kernel",
        **kwargs: object,
    ) -> None:
        self.policy = EvictionPolicyName(policy)
        self._is_exact = slots >= PLENTY or slots == 0 if is_exact is None else is_exact
        self.mode = mode
        cache = CacheConfig(eviction_policy=policy, snapshot_slots=slots, snapshot_mode=mode)
        Driver.__init__(self, *args, cache=cache, **kwargs)

    def watch_scheduler(self) -> None:
        Driver.watch_scheduler(self)
        self.model = HybridModel(self, is_exact=self._is_exact)
        self.writes = KvWrites(self.context, self.engine.scheduler, self.model.shared_blocks)

    def _run_forward(self, forward, inputs):
        """Writes of decode are watched in the tests of models without recurrent layers."""
        is_watched = self.context.plan.shape.attention_layers and not self.context.is_decode_only()
        return super()._run_forward(forward, inputs) if is_watched else forward(inputs)

    def keep_snapshots(self, *, at_chunk_ends: bool) -> None:
        """Go over to the other mode, with what is cached."""
        limits = dataclasses.replace(self.scheduler.limits, aligned_chunks=at_chunk_ends)
        self.scheduler.limits, self.model._is_aligned = limits, at_chunk_ends
        self.context.plan = dataclasses.replace(self.context.plan, limits=limits)
        rules = self.context._staging_rules
        self.context._staging_rules = dataclasses.replace(rules, snapshots_in_prefill=not at_chunk_ends)

    @property
    def states(self):
        return self.scheduler.cache.states

    def snapshots_of(self, tokens: Sequence[int], salt: str | None = None, *, opportunistic: bool = False) -> list[int]:
        """Positions in `tokens` at which there are requested snapshots, or opportunistic ones."""
        found = self.model.asked_for()
        if opportunistic:
            found = self.model.visible() - found
        return [end for end in range(1, len(tokens) + 1) if (salt, tuple(tokens[:end])) in found]

    def forget(self, tokens: Sequence[int], positions: Collection[int], salt: str | None = None) -> None:
        """Drop the snapshots at these positions; their blocks stay."""
        for position in positions:
            self.model.forget((salt, tuple(tokens[:position])))

    def sight(self, request_id: int, tokens: Sequence[int], **params: object) -> int:
        """Serve one prompt to its end: the tokens that it skipped."""
        self.add(request_id, tokens, **({"num_tokens_to_generate": 4} | params))
        self.run()
        return self.records[request_id].skipped_prefill_token_count


def build_driver(get_oracle, kind: str = "hybrid", **kwargs: object) -> HybridDriver:
    """Around the model of a kind."""
    return HybridDriver(get_oracle(kind).model, CONFIGS[kind], **kwargs)


def assert_prefill_states_equal(actual: Driver, expected: Driver, request_id: int) -> None:
    """The live states at the end of the prompt are the same in both engines, in every layer."""
    length = actual.records[request_id].prompt_token_count
    (conv, ssm), *_ = expected.seen[request_id].states[length]
    assert actual.seen[request_id].states[length]
    for own_conv, own_ssm in actual.seen[request_id].states[length]:
        assert_states_close(own_conv, conv, f"request {request_id}, convolution states after the prompt")
        assert_states_close(own_ssm, ssm, f"request {request_id}, SSM states after the prompt")


def assert_snapshots_equal_oracle(driver: HybridDriver, tokens: Sequence[int], oracle: Oracle) -> list[int]:
    """Check that every snapshot within `tokens` holds, in all layers, the states of a token-by-token recurrence.

    Returns:
        Positions of the requested snapshots.
    """
    positions, pool = driver.snapshots_of(tokens), driver.context.snapshots
    for position in [*positions, *driver.snapshots_of(tokens, opportunistic=True)]:
        slot = driver.states.find(driver.model.block_hash((None, tuple(tokens[:position]))))
        for layer, (conv, ssm) in enumerate(oracle.states(tokens[:position])):
            name = f"snapshot after {position} tokens, layer {layer}"
            assert_states_close(pool.conv[layer, slot], conv, f"{name}, convolution")
            assert_states_close(pool.ssm[layer, slot], ssm, f"{name}, SSM")
    return positions


@contextlib.contextmanager
def failing_scan(call: int = 1) -> Iterator[None]:
    """Within it the `call`-th recurrent layer raises, when those before it have written states and snapshots; once."""
    calls = itertools.count()

    def broken(operator: Callable) -> Callable:
        def run(*args: object, **kwargs: object) -> object:
            if next(calls) == call:
                raise Broken("the device is gone")
            return operator(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("prefill", "decode"):
            patch.setattr(SSD, name, broken(getattr(SSD, name)))
        yield
