from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.result import StepOutput
from megatron_ext.engine.statistics import StepCounts
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request_events import Event, EventType


def make_record(request_id: int = 0, **changes) -> RequestRecord:
    """A record of a request that completed with the tokens 7 and 8."""
    values = {
        "request_id": request_id,
        "status": Status.COMPLETED,
        "prompt_text": "1 2 3",
        "prompt_tokens": (1, 2, 3),
        "generated_text": "7 8",
        "generated_tokens": (7, 8),
        "finish_reason": "length",
        "error": None,
        "events": (Event(EventType.ADD_ENGINE, 1.0), Event(EventType.FINISH, 2.0)),
        "arrival_wall_time": 1e9,
        "latency": 1.0,
        "ttft": 0.5,
        "step_count": 2,
        "matched_block_count": 0,
        "skipped_prefill_token_count": 0,
        "computed_prefill_token_count": 3,
        "recomputed_token_count": 0,
        "prefill_reasons": {"caching_off": 3},
        "prompt_log_probs": None,
        "generated_log_probs": None,
        "prompt_top_n_log_probs": None,
        "generated_top_n_log_probs": None,
    }
    return RequestRecord(**values | changes)


@dataclass
class FakeEngine:
    """An engine that serves each request in two steps, and logs its calls; it is its own client."""

    log: list[str] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)  # by id
    living: dict[int, int] = field(default_factory=dict)  # id -> steps left
    aborted: set[int] = field(default_factory=set)

    def submit(self, requests: Sequence[EngineRequest]) -> Future[None]:
        for request in requests:
            request_id = len(self.requests)
            self.log.append(f"add {request_id}")
            self.living[request_id] = 2
            self.requests.append(request)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def is_busy(self) -> bool:
        return bool(self.living)

    def abort(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            request_id = self.requests.index(request)
            self.living[request_id]  # KeyError for a request that has ended
            self.log.append(f"abort {request_id}")
            self.aborted.add(request_id)

    def step(self) -> StepOutput:
        assert self.living, "a step without requests"
        self.log.append("step")
        records = []
        for request_id in list(self.living):
            if request_id in self.aborted:
                tokens = (7, 8)[: 2 - self.living[request_id]]
                ttft = 0.5 if tokens else None
                changes = {"status": Status.ABORTED, "generated_tokens": tokens, "ttft": ttft, "finish_reason": None}
                records.append(make_record(request_id, **changes))
            else:
                self.living[request_id] -= 1
                if self.living[request_id]:
                    continue
                records.append(make_record(request_id))
            del self.living[request_id]
            self.requests[request_id].record.set_result(records[-1])
        return StepOutput([], records, 0.0)

    @property
    def client(self) -> FakeEngine:
        return self

    def counts(self) -> tuple[None, StepCounts]:
        return None, StepCounts(self.log.count("step"))

    def suspend(self) -> None:
        self.log.append("suspend")

    def resume(self) -> None:
        self.log.append("resume")


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    return make_record


@pytest.fixture
def fake_engine():
    return FakeEngine()
