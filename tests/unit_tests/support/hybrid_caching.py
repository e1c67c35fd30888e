"""A driver of hybrid models with the prefix cache on, and what it says of snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import pytest

from megatron_ext.config import CacheConfig
from megatron_ext.ops.recurrence import Recurrence
from megatron_ext.ops.ssd import SSD
from megatron_ext.prefix_cache.hash_chain import BlockHash, HashChain, packed_tokens
from megatron_ext.prefix_cache.state_index import SlotId
from megatron_ext.runner.recorded_steps import RecordedSteps
from tests.unit_tests.support.caching import Broken, CachingDriver
from tests.unit_tests.support.driver import Driver, assert_states_close
from tests.unit_tests.support.models import CONFIGS
from tests.unit_tests.support.oracle import Oracle

PLENTY = 100  # slots: none is ever given up


class HybridDriver(CachingDriver):
    """See the module.

    Args:
        policy: "lru" or "ref_zero".
        slots: For snapshots.
        mode: "kernel" or "align".
        log_probs: Whether prompt log-probs are kept with their blocks.
        kwargs: Keywords of `Driver`.
    """

    def __init__(
        self,
        *args: object,
        policy: str = "lru",
        slots: int = PLENTY,
        mode: str = "kernel",
        log_probs: bool = False,
        **kwargs: object,
    ) -> None:
        cache = CacheConfig(
            eviction_policy=policy, snapshot_slots=slots, snapshot_mode=mode, prefix_cache_log_probs=log_probs
        )
        super().__init__(*args, cache=cache, **kwargs)

    def _run_forward(self, forward):
        """Writes of decode are watched in the tests of models without recurrent layers."""
        is_watched = self.context.plan.shape.attention_layers and not self.context.is_decode_only()
        return super()._run_forward(forward) if is_watched else forward()

    def keep_snapshots(self, *, at_chunk_ends: bool) -> None:
        """Go over to the other mode, with what is cached."""
        limits = dataclasses.replace(self.scheduler.limits, aligned_chunks=at_chunk_ends)
        self.scheduler.limits = limits
        self.context.plan = dataclasses.replace(self.context.plan, limits=limits)
        rules = self.context.staging_rules
        self.context.staging_rules = dataclasses.replace(rules, snapshots_in_prefill=not at_chunk_ends)

    @property
    def states(self):
        return self.scheduler.cache.states

    def _hashes(self, tokens: Sequence[int], salt: str | None) -> Sequence[BlockHash]:
        """Block hashes of the complete blocks of `tokens`."""
        chain = HashChain(self.scheduler.root_of(salt), self.scheduler.limits.block_size)
        return chain.extend(packed_tokens(tokens))

    def slot_of(self, tokens: Sequence[int], salt: str | None = None) -> SlotId | None:
        """Slot of the snapshot after all of `tokens`, which end at a boundary."""
        return self.states.find(self._hashes(tokens, salt)[-1])

    def snapshots_of(self, tokens: Sequence[int], salt: str | None = None, *, opportunistic: bool = False) -> list[int]:
        """Positions in `tokens` at which there are requested snapshots, or opportunistic ones."""
        size = self.scheduler.limits.block_size
        return [
            index * size
            for index, block_hash in enumerate(self._hashes(tokens, salt), start=1)
            if self.states.find(block_hash) is not None and self.states.is_provisional(block_hash) == opportunistic
        ]

    def forget(self, tokens: Sequence[int], positions: Collection[int], salt: str | None = None) -> None:
        """Drop the snapshots at these positions; their blocks stay."""
        hashes = self._hashes(tokens, salt)
        for position in positions:
            block_hash = hashes[position // self.scheduler.limits.block_size - 1]
            assert self.states.find(block_hash) is not None, "there is no such snapshot"
            self.states.drop(block_hash)

    def sight(self, request_id: int, tokens: Sequence[int], **params: object) -> int:
        """Serve one prompt to its end: the tokens that it skipped."""
        self.add(request_id, tokens, **({"num_tokens_to_generate": 4} | params))
        self.run()
        return self.records[request_id].skipped_prefill_token_count


def build_driver(get_oracle, kind: str = "hybrid", **kwargs: object) -> CachingDriver:
    """Around the model of a kind; `HybridDriver` unless it has attention layers only."""
    driver = CachingDriver if kind == "attention_only" else HybridDriver
    return driver(get_oracle(kind).model, CONFIGS[kind], **kwargs)


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
    positions, pool = driver.snapshots_of(tokens), driver.context.allocated.snapshots
    for position in [*positions, *driver.snapshots_of(tokens, opportunistic=True)]:
        slot = driver.slot_of(tokens[:position])
        for layer, (conv, ssm) in enumerate(oracle.states(tokens[:position])):
            name = f"snapshot after {position} tokens, layer {layer}"
            assert_states_close(pool.conv[layer, slot], conv, f"{name}, convolution")
            assert_states_close(pool.ssm[layer, slot], ssm, f"{name}, SSM")
    return positions


@contextlib.contextmanager
def failing_scan(call: int = 1) -> Iterator[None]:
    """Within it the `call`-th recurrent layer raises, when those before it have written states and snapshots; once."""
    calls = itertools.count()

    def broken(entry: Callable) -> Callable:
        def run(operator: Recurrence, *args: object, **kwargs: object) -> object:
            if operator is SSD and next(calls) == call:
                raise Broken("the device is gone")
            return entry(operator, *args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("prefill", "decode"):
            patch.setattr(Recurrence, name, broken(getattr(Recurrence, name)))
        patch.setattr(RecordedSteps, "stage", lambda *_: None)  # the model's Python code runs
        yield
