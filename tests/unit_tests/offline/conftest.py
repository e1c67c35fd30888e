from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from megatron_ext.config import RequestParams
from megatron_ext.scheduling.events import Event, EventType
from megatron_ext.scheduling.record import RequestRecord, Status


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
    """Serves each request in two steps, and keeps a log of what it was asked to do."""

    log: list[str] = field(default_factory=list)
    living: dict[int, int] = field(default_factory=dict)  # id -> steps left
    futures: dict[int, asyncio.Future] = field(default_factory=dict)
    aborted: set[int] = field(default_factory=set)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def add_request(
        self, request_id: int, prompt: Sequence[int], params: RequestParams, *, prompt_text: str | None, turn: int
    ) -> asyncio.Future:
        assert request_id not in self.futures
        self.log.append(f"add {request_id}")
        self.living[request_id] = 2
        self.futures[request_id] = self.loop.create_future()
        return self.futures[request_id]

    def has_unfinished_requests(self) -> bool:
        return bool(self.living)

    def idle(self) -> None:
        assert not self.living, "there is something to do"

    def abort_request(self, request_id: int) -> None:
        self.living[request_id]  # KeyError for one that does not live
        self.log.append(f"abort {request_id}")
        self.aborted.add(request_id)

    def step_modern(self) -> dict:
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
            self.futures[request_id].set_result(records[-1])
        return {"active_request_ids": list(self.living), "finished_request_records": records}

    def suspend(self) -> None:
        self.log.append("suspend")

    def resume(self) -> None:
        self.log.append("resume")


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    return make_record


@pytest.fixture
def fake_engine():
    engine = FakeEngine()
    yield engine
    engine.loop.close()
