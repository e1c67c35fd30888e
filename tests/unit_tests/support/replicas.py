"""Engine core of several replicas whose steps compute nothing, for routing decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.executor import Executor
from megatron_ext.engine.input_processor import InputSettings
from megatron_ext.engine.result import Score, StepResult
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.step import ScheduledStep
from megatron_ext.text.vocabulary import Vocabulary
from tests.unit_tests.support.simulated_engine import LIMITS
from tests.unit_tests.support.tokenizers import PieceTokenizer

WORDS = 100_000


class Nothing(Executor):
    """Executor whose tokens are made up."""

    def execute(self, step: ScheduledStep) -> StepResult:
        """Return a token for each chunk that yields one."""
        due = [chunk for chunk in step.chunks if chunk.sampling is not None]
        scored = [chunk for chunk in step.chunks if chunk.scoring is not None]
        prompt = {one.request_id: tuple(Score(-1.0, {}) for _ in one.scoring.targets) for one in scored}
        return StepResult({chunk.request_id: WORDS - 1 for chunk in due}, {}, prompt, {})


class Replicas:
    """Engine core of several replicas.

    Args:
        count: Number of replicas.
        settings: Policy.
        slots: Slots for snapshots; None for a model without recurrent layers.
        policy: Eviction policy; None caches nothing.
        limits: Other limits of the schedulers than `LIMITS`.
    """

    def __init__(
        self,
        count: int,
        settings: RoutingConfig | None = None,
        *,
        slots: int | None = None,
        policy: EvictionPolicyName | None = EvictionPolicyName.LRU,
        **limits: object,
    ) -> None:
        self.limits = dataclasses.replace(LIMITS, **limits)
        tokenizer = PieceTokenizer(WORDS)
        input_settings = InputSettings(
            tokenizer.tokenize, Vocabulary(tokenizer, WORDS), (), 1, lambda word: (), lambda form: None
        )
        parts = [(Scheduler(self.limits, policy, b"model", slots), Nothing()) for _ in range(count)]
        self.core = EngineCore(parts, input_settings, routing=settings)
        self.records: dict[int, RequestRecord] = {}
        self._count = 0

    def add(self, tokens: Sequence[int], count: int = 4, **options: object) -> int:
        """Add a request of `count` tokens; return the number of its replica, -1 if it was refused."""
        index = options.pop("replica_index", None)
        request = self.core.add(
            self._count, RequestInputs(tuple(tokens), RequestParams(count, **options)), replica_index=index
        )
        self._count += 1
        return self.replica_of(request)

    def replica_of(self, request: Request) -> int:
        """Return the number of the replica that has a request; -1 if none has."""
        queues = [replica.scheduler.queues for replica in self.core.replicas]
        return next((i for i, queue in enumerate(queues) if request in list(queue)), -1)

    def step(self) -> list[int]:
        """Run a step; return the number of tokens that each replica computed."""
        step = self.core.compute()
        for record in self.core.report(step):
            self.records[record.request_id] = record
        self.check()
        return [sum(chunk.length for chunk in part.chunks) for part in step.parts]

    def run(self) -> None:
        """Run until no request is left."""
        for _ in range(10_000):
            if not self.core.is_busy:
                return
            self.step()
        raise AssertionError("requests never end")

    def check(self) -> None:
        """Assert that the router knows exactly what the caches hold."""
        self.core.check()
        choice = self.core._choice
        for name, replica in zip([] if choice is None else choice._names, self.core.replicas, strict=False):
            cache = replica.scheduler.cache
            if cache.is_enabled:
                member = choice._router.members[name]
                assert member.blocks.keys() == set(cache.index.block_hashes())
                assert member.states.keys() == (set() if cache.states is None else set(cache.states.visible()))

    @property
    def skipped(self) -> int:
        """Number of prompt tokens that were skipped so far."""
        return self.core.counters.skipped_tokens
