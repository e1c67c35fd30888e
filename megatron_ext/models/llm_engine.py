"""LLM engine: a model and its engine as one object, for the server, offline runs, Python and Megatron's names.

Callers use its methods, and do not reach through it into context, controller or core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from typing import TypeVar

from megatron_ext.config.batching import SuspendLevel
from megatron_ext.config.in_flight import InFlight
from megatron_ext.engine.client import EngineClient
from megatron_ext.engine.statistics import EngineStatistics, StepCounts
from megatron_ext.errors import EngineClosed
from megatron_ext.mcore.adapter import InferenceEngine
from megatron_ext.models.update.writer import WeightWriter
from megatron_ext.parallel.driver import driver_of
from megatron_ext.prefix_cache.block_index import CachedPrefix
from megatron_ext.prefix_cache.observer import CacheObserver, EntryObserver

Result = TypeVar("Result")


class LLMEngine:
    """Model and engine, which steps in a thread of its own; any thread may call the methods.

    Methods that return a future do not wait for the step in flight; the others may.

    Args:
        engine: Engine of the model; no other code may call it from now on.
        weight_writer: Writer of new weights; None if they are never replaced.
        steps_itself: See `EngineClient`.
        on_close: Called once, after the engine has been closed.

    Attributes:
        client: Client through which all requests and calls reach the engine.
        inference_engine: Engine under Megatron's names; only calls through `client` may use it.
        tokenizer: Tokenizer of the model; a chat model's has `apply_chat_template`.
        vocabulary: Tokens as text, and the width of the logits.
        geometry: Numbers and sizes of blocks and snapshots.
        cache_policy: Eviction policy of the prefix cache; None if it is off.
        is_hybrid: Whether the model has recurrent layers, so that the cache keeps states.
        positions: Positions that the model has; None if no layer depends on them.
        request_state_bytes: Maximum bytes of recurrent states of a request with the longest possible prompt.
        bytes_held_twice: Bytes of weights that are held as they are and packed.
        draft_exactness: How results with drafts relate to those without; empty without drafts.
        max_running_requests: Maximum number of running requests, of all replicas together.
        error_isolation: Errors that were isolated from the steps.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        weight_writer: WeightWriter | None = None,
        *,
        steps_itself: bool = True,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        model, plan = engine.controller, engine.plan
        self.tokenizer, self.vocabulary, self.grammars = model.tokenizer, model.vocabulary, model.grammars
        self.limits, self.geometry, self.cache_policy = plan.limits, plan.world, plan.policy
        self.is_hybrid, self.positions = plan.is_hybrid, plan.positions
        self.request_state_bytes = plan.request_state_bytes
        self.operators, self.bytes_held_twice = model.chosen_operators(), model.bytes_held_twice
        self.draft_exactness = model.draft_exactness()
        self.inference_engine = engine
        self._core = core = engine.core
        self.replicas = len(core.replicas)
        self.max_running_requests = self.limits.max_requests * self.replicas
        self.error_isolation = core.error_isolation
        self.client = EngineClient(core, steps_itself=steps_itself)
        self._weight_writer = weight_writer
        if weight_writer is not None and core.workers.heartbeat is not None:
            weight_writer.tell = driver_of(core.workers).tell
        self._on_close = on_close

    def tokenize(self, prompt: str | Sequence[int], add_bos: bool = False) -> tuple[int, ...]:
        """Return the token ids of a prompt; see `InputProcessor.tokenize`."""
        return self._core.tokenize(prompt, add_bos)

    def _call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function in the engine's thread, between two steps; return its result."""
        return self.client.call(function, *arguments).result()

    # Inspection

    def current_statistics(self) -> EngineStatistics:
        """Return usage and counts; for code that the engine's thread calls, such as listeners."""
        return self._core.statistics()

    def counts(self) -> tuple[EngineStatistics, StepCounts]:
        """Return usage and all counts, read between two steps; of a closed engine those at its end."""
        with suppress(EngineClosed):
            return self._call(self._counts)
        return self._counts()

    def _counts(self) -> tuple[EngineStatistics, StepCounts]:
        return self._core.statistics(), self._core.step_counts()

    @property
    def update_error(self) -> Exception | None:
        """Error of the last update of the weights, if it left them of no version."""
        return self._core.update_error

    # Cache

    @property
    def is_caching(self) -> bool:
        """True if prefix caching is on."""
        return self._core.is_caching

    def reset_prefix_cache(self) -> None:
        """Empty the cache: blocks cached before are never matched again."""
        self._call(self._core.reset_prefix_cache)

    def hottest_prefixes(self, count: int) -> Future[list[CachedPrefix]]:
        """Search for the cached prefixes that most requests resumed from, the hottest first."""
        return self.client.call(self._core.hottest_prefixes, count)

    def observe_caches(self, observers: Sequence[CacheObserver], disk_observers: Sequence[EntryObserver] = ()) -> None:
        """Attach an observer to the cache of each replica, before there are requests; see `EngineCore`."""
        self._core.observe_caches(observers, disk_observers)

    @property
    def keeps_cache(self) -> bool:
        """True if the cache is kept on disk between processes."""
        return self._core.disk is not None

    def stop_keeping(self) -> None:
        """End the writing of the cache to disk at the next entry; for any thread, and for signal handlers."""
        if self._core.disk is not None:
            self._core.disk.stop()

    # Weights

    @property
    def weights_version(self) -> int:
        """Version of the weights that tokens are computed with: the number given last, or counted on from it; or 0."""
        return self._core.weights_version

    def change_weights(
        self,
        write: Callable[[], Result],
        in_flight: InFlight = InFlight.RECOMPUTE,
        version: int | None = None,
        *,
        is_complete: bool = True,
        are_shards: bool = False,
    ) -> Future[Result]:
        """Write new weights between two steps, or once requests in flight have finished.

        Args:
            write: Writes them; called in the engine's thread.
            in_flight: Treatment of requests in flight.
            version: Number of the new weights; one more than the last if missing.
            is_complete: Whether all weights are of that version.
            are_shards: Whether the programs of the other ranks write shards of theirs at the same time.

        Returns:
            Future of the result of `write`; for errors see `EngineCore.change_weights`.
        """

        def change() -> Result:
            with self._core.workers.handing_over() if are_shards else nullcontext():
                return self._core.change_weights(write, in_flight, version, is_complete=is_complete)

        return (self.client.call_when_idle if in_flight is InFlight.FINISH else self.client.call)(change)

    @property
    def weight_writer(self) -> WeightWriter:
        """Writer of new weights."""
        assert self._weight_writer is not None, "the engine was built with it"
        return self._weight_writer

    # Memory

    def suspend(self, level: SuspendLevel | None = None) -> SuspendLevel:
        """Stop until `resume`; return the level. Requests in flight wait and keep their tokens; new ones are refused.

        Args:
            level: "drop" frees the pools' memory, and the cache is empty; "offload" moves the pools to host memory, and
                "keep" leaves them where they are: nothing is computed again after these two. None for the level of the
                setting `kv_cache_management_mode`, which is "drop" by default.

        Raises:
            ConfigError: There is no such level, the engine is suspended at another one, or has several ranks, which do
                not offload.
        """
        return self._call(self._core.suspend, level)

    def resume(self) -> None:
        """Allocate the pools again; requests in flight recompute the KV and states that were dropped, and continue."""
        self._call(self._core.resume)

    def reset(self) -> StepCounts:
        """Abort all requests and empty the cache, between two steps; return the counts so far."""
        return self._call(self._reset)

    def _reset(self) -> StepCounts:
        self._core.abort_all()
        self._core.reset_prefix_cache()
        return self._core.step_counts()

    def close(self) -> None:
        """End requests in flight with `EngineClosed`, and free all resources. Further calls do nothing.

        An error of the end itself is raised after that.
        """
        is_first = True
        try:
            is_first = self.client.close()
        finally:
            if is_first:
                self._core.resources.free()
                self._on_close()
