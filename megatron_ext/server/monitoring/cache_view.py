"""Prefix cache contents, readable while the engine steps."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.prefix_cache.block_index import CachedPrefix
from megatron_ext.prefix_cache.public_hash import public_hash
from megatron_ext.server.monitoring.metrics import Metrics
from megatron_ext.server.request_manager import RequestManager

HOTTEST_PREFIXES = 20
KEPT = 5.0  # seconds for which the hottest prefixes are reused while requests are in flight


class CacheView:
    """Description of the cache that does not wait for a step if one was made a moment ago.

    Sizes and usage are those after the last step, published by the engine's thread. The hottest prefixes need a search
    by that thread, between two steps. While requests are in flight, the result of a recent search is used again.

    Args:
        engine: Engine that owns the cache.
        requests: Manager that calls functions in the engine's thread.
        metrics: Metrics with the engine's latest state.
    """

    def __init__(self, engine: LLMEngine, requests: RequestManager, metrics: Metrics) -> None:
        self._engine = engine
        self._requests = requests
        self._metrics = metrics
        self._hottest: list[dict[str, object]] | None = None
        self._taken = 0.0  # time of the last search, by the monotonic clock
        self._search: asyncio.Task[None] | None = None  # shared by all callers that wait for it

    async def describe(self) -> dict[str, object]:
        """Return geometry, occupancy, and the hottest prefixes as public hashes, never as text."""
        is_recent = self._hottest is not None and time.monotonic() - self._taken < KEPT
        if not self._requests.living or not is_recent:  # while idle, a search waits for no step
            if self._search is None or self._search.done():
                self._search = asyncio.ensure_future(self._look())
            await asyncio.shield(self._search)
        state = self._metrics.state
        return {
            "geometry": self._engine.geometry.shown(),
            "costs": dataclasses.asdict(self._engine.limits.costs),
            "settings": self._settings(),
            "occupancy": None if state is None else state.prefix_cache(),
            "lost": None if state is None else state.prefix_cache_lost(),
            "audit_findings": [] if state is None else state.audit_findings,
            "disk": None if state is None else state.prefix_cache_disk(),
            "hottest_prefixes": self._hottest or [],  # none after a reset since the search
        }

    def _settings(self) -> dict[str, object]:
        """Return the cache settings that a simulation is compared with."""
        limits, policy = self._engine.limits, self._engine.cache_policy
        return {
            "policy": None if policy is None else policy.value,
            "mode": "align" if limits.aligned_chunks else "kernel",
            "provisional_slots": limits.opportunistic.max_slots,
            "max_requests": limits.max_requests,
            "max_tokens": limits.max_tokens,
            "max_prefills": limits.max_prefills,
            "overtake_tokens": limits.overtake_tokens,
            "max_sequence_length": limits.max_sequence_length,
        }

    async def reset(self) -> dict[str, object]:
        """Empty the cache; return its occupancy afterwards."""
        occupancy = await self._requests.reset_prefix_cache()
        self._hottest = None
        return {"occupancy": occupancy}

    async def _look(self) -> None:
        found = await asyncio.wrap_future(self._engine.hottest_prefixes(HOTTEST_PREFIXES))
        self._hottest, self._taken = [self._shown(one) for one in found], time.monotonic()

    def _shown(self, prefix: CachedPrefix) -> dict[str, object]:
        tokens = prefix.blocks * self._engine.geometry.block_size_tokens
        return {"digest": public_hash(prefix.block_hash), "tokens": tokens, "hits": prefix.hits}
