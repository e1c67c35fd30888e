"""What the prefix cache holds, for whoever asks while the engine steps."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass

from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.prefix_cache.public_hash import public_hash
from megatron_ext.server.monitoring.metrics import Metrics
from megatron_ext.server.request_manager import RequestManager

HOTTEST_PREFIXES = 20
KEPT = 5.0  # seconds for which the hottest prefixes are told again while requests are in flight

Prefixes = list[dict[str, object]]


@dataclass(frozen=True)
class _Hottest:
    """The hottest prefixes as they were once."""

    prefixes: Prefixes
    taken: float  # seconds that never go back


class CacheView:
    """Describes the cache without waiting for a step, where it was asked a moment ago.

    Sizes and use are those after the last step, which the engine's thread leaves behind. The hottest prefixes have to
    be looked for, by that thread: while requests are in flight, what it found for the one who asked before is told, and
    it looks again for the next one. Who polls sees what was a poll ago.

    Args:
        engine: Around the cache.
        requests: Makes the calls of the engine.
        metrics: Where its numbers are left.
    """

    def __init__(self, engine: InferenceEngine, requests: RequestManager, metrics: Metrics) -> None:
        self._engine = engine
        self._requests = requests
        self._metrics = metrics
        self._hottest: _Hottest | None = None
        self._looking: asyncio.Task[None] | None = None

    async def describe(self) -> dict[str, object]:
        """Geometry, occupancy, and the hottest prefixes as digests. Never text."""
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())
            self._looking.add_done_callback(self._looked)
        if not self._is_recent():
            await asyncio.shield(self._looking)
        assert self._hottest is not None, "somebody has looked"
        state = self._metrics.state
        return {
            "geometry": self._engine.geometry.shown(),
            "costs": dataclasses.asdict(self._engine.scheduler.limits.costs),
            "settings": self._settings(),
            "occupancy": None if state is None else state.prefix_cache(),
            "lost": None if state is None else state.prefix_cache_lost(),
            "hottest_prefixes": self._hottest.prefixes,
        }

    def _settings(self) -> dict[str, object]:
        """What a simulation is compared with."""
        cache, limits = self._engine.scheduler.cache, self._engine.scheduler.limits
        policy = None if cache.policy_name is None else cache.policy_name.value
        return {
            "policy": policy,
            "mode": "align" if limits.aligned_chunks else "kernel",
            "max_requests": limits.max_requests,
            "max_tokens": limits.max_tokens,
            "max_prefills": limits.max_prefills,
            "max_sequence_length": limits.max_sequence_length,
        }

    async def reset(self) -> dict[str, object]:
        """Empty the cache; what it holds then."""
        occupancy = await self._requests.reset_prefix_cache()
        self._hottest = None
        return {"occupancy": occupancy}

    def _is_recent(self) -> bool:
        """Whether what is known will do; where no step is waited for it will not."""
        found = self._hottest
        return self._requests.living > 0 and found is not None and time.monotonic() - found.taken < KEPT

    async def _look(self) -> None:
        self._hottest = _Hottest(await self._requests.call(self._found), time.monotonic())

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody did where the prefixes were known

    def _found(self) -> Prefixes:
        """With the engine's thread."""
        block_size = self._engine.geometry.block_size_tokens
        return [
            {"digest": public_hash(prefix.block_hash), "tokens": prefix.blocks * block_size, "hits": prefix.hits}
            for prefix in self._engine.hottest_prefixes(HOTTEST_PREFIXES)
        ]
