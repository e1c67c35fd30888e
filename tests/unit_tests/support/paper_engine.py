"""An engine over a simulated device, with the tokens that its requests must get."""

from __future__ import annotations

import dataclasses
import random

from megatron_ext.config import EvictionPolicyName, RequestParams
from megatron_ext.engine.core import EngineCore
from megatron_ext.engine.input_processor import InputSettings
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request_inputs import RequestInputs
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.text.vocabulary import Vocabulary
from tests.unit_tests.support.simulated_device import (
    NOTHING,
    WORDS,
    FollowingDevice,
    SimulatedDevice,
    next_token,
    state_after,
)
from tests.unit_tests.support.simulated_engine import LIMITS
from tests.unit_tests.support.tokenizers import PieceTokenizer

BLOCK, END = 4, 7
SETTINGS = {"block_size": BLOCK, "total_blocks": 200, "max_requests": 4, "max_tokens": 24, "max_sequence_length": 200}
SETTINGS |= {"enough_prefill_tokens": None, "async_states": 2}


class Paper:
    """An engine over a device on paper.

    Args:
        device: Class of the device.
        slots: For snapshots; None: the model has no states.
        policy: Eviction policy; None caches nothing.
        limits: Limits of the scheduler.
    """

    def __init__(
        self,
        device: type[SimulatedDevice] = FollowingDevice,
        slots: int | None = 50,
        policy: EvictionPolicyName | None = EvictionPolicyName.LRU,
        **limits: object,
    ) -> None:
        self.limits = dataclasses.replace(LIMITS, **(SETTINGS | limits))
        self.scheduler = Scheduler(self.limits, policy, b"ahead", slots)
        self.device = device(self.scheduler, BLOCK)
        tokenizer = PieceTokenizer(WORDS)
        input_settings = InputSettings(
            tokenizer.tokenize, Vocabulary(tokenizer, WORDS), (END,), 1, lambda word: (), lambda form: None
        )
        self.engine = EngineCore([(self.scheduler, self.device)], input_settings)
        self.records: dict[int, RequestRecord] = {}
        self.params: dict[int, RequestParams] = {}

    def add(self, request_id: int, tokens: tuple[int, ...], *, group: int | None = None, **params: object) -> None:
        self.params[request_id] = RequestParams(**({"num_tokens_to_generate": 8} | params))
        self.engine.add(request_id, RequestInputs(tokens, self.params[request_id]), group=group)

    @property
    def ahead(self) -> int:
        return self.scheduler.counters.launched_ahead

    def step(self) -> list[tuple[int, int, int]]:
        """Run a step and return the computed chunks as (request, start, end)."""
        step = self.engine.compute()
        computed = [(one.request.request_id, one.start, one.end) for one in step.chunks]
        for record in self.engine.report(step):
            assert record.request_id not in self.records
            self.records[record.request_id] = record
        self.engine.check()
        return computed

    def run(self) -> None:
        for _ in range(2_000):
            if not self.engine.is_busy:
                break
            self.step()
        assert not self.engine.is_busy, "it does not come to an end"
        assert self.scheduler.cache.available_count == self.limits.total_blocks
        assert self.scheduler.running_slots.free_count == self.limits.max_requests

    def suspend(self) -> None:
        self.engine.suspend()
        self.device.lose_pools()
        self.engine.resume()

    def check_tokens(self) -> None:
        """Check that each request got exactly the tokens of a model that sees its whole sequence."""
        for request_id, record in self.records.items():
            params, tokens = self.params[request_id], list(record.prompt_tokens)
            drawn = random.Random(params.seed)
            for i, token in enumerate(record.generated_tokens):
                state = NOTHING
                for one in tokens if self.device.has_states else ():
                    state = state_after(state, one)
                uniform = None if params.is_greedy else drawn.random()
                assert token == next_token(tokens, state, uniform), f"token {i} of request {request_id}"
                tokens.append(token)
            if record.status is Status.COMPLETED and record.finish_reason == "length":
                room = self.limits.max_model_len + 1 - len(record.prompt_tokens)
                assert len(record.generated_tokens) == min(params.num_tokens_to_generate, room)
            elif record.status is Status.COMPLETED:
                assert record.generated_tokens[-1] == END or params.stop_words
        assert self.records, "no request has ended"
