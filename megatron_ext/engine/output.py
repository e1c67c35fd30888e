"""From tokens to what a user gets: scores, stop words, texts, records, futures.

All of it comes after `Scheduler.commit`, one request at a time. Whatever raises here ends the request that it was for
as FAILED, with the error's words, and nothing else: no other request's tokens, blocks or record depend on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ext.engine.faults import Faults, describe
from megatron_ext.engine.result import StepResult
from megatron_ext.scheduling.record import RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.text.stop_words import StopWordMatcher
from megatron_ext.text.vocabulary import Vocabulary


class ScoringError(RuntimeError):
    """A request's log-probs could not be computed."""


@dataclass(eq=False)
class _Output:
    """What belongs to one request beside its sequence."""

    request: Request
    future: asyncio.Future[RequestRecord]
    stop_words: StopWordMatcher | None


class OutputProcessor:
    """Follows every request from its arrival to its record.

    Args:
        scheduler: Ends those whose text says so.
        vocabulary: Makes texts.
        faults: Told what goes wrong.
    """

    def __init__(self, scheduler: Scheduler, vocabulary: Vocabulary, faults: Faults) -> None:
        self._scheduler = scheduler
        self._vocabulary = vocabulary
        self._faults = faults
        self._outputs: dict[int, _Output] = {}
        self.ended: list[Request] = []  # since the last report
        self.reported_count = 0

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._outputs

    def get(self, request_id: int) -> Request:
        """A living request, or one that has ended and is still to be reported."""
        return self._outputs[request_id].request

    def requests(self) -> list[Request]:
        """All of them."""
        return [output.request for output in self._outputs.values()]

    def open(self, request: Request, future: asyncio.Future[RequestRecord]) -> None:
        """A request has arrived."""
        words = request.params.stop_words
        matcher = StopWordMatcher(words, self._vocabulary.detokenize) if words else None
        self._outputs[request.request_id] = _Output(request, future, matcher)

    def take(self, requests: Iterable[Request], result: StepResult) -> None:
        """The requests of a step have what it computed: note scores, look for stop words."""
        for request in requests:
            try:
                _note_scores(request, result)
                has_stopped = request.request_id in result.tokens and self._meets_stop_word(request)
            except Exception as error:
                self.fail(request, error)
                continue
            if has_stopped:
                self._end(request, Status.COMPLETED, finish_reason="stop")

    def _meets_stop_word(self, request: Request) -> bool:
        """Whether the newest token completes one; the termination token comes before any."""
        matcher = self._outputs[request.request_id].stop_words
        if matcher is None or request.finish_reason == "stop":
            return False
        request.generated_text = matcher.feed([request.tokens[-1]], ignore=not request.may_have_stopped)
        return request.generated_text is not None

    def fail(self, request: Request, error: Exception) -> None:
        """Something that only this request needed has raised: it ends as FAILED."""
        self._faults.note(f"request {request.request_id}", error)
        request.is_fault = True
        self._end(request, Status.FAILED, error=describe(error))

    def _end(
        self, request: Request, status: Status, *, finish_reason: str | None = None, error: str | None = None
    ) -> None:
        if request.is_ended:
            request.revise(status, finish_reason=finish_reason, error=error)
        else:
            self._scheduler.end(request, status, finish_reason=finish_reason, error=error)
            self.ended.append(request)

    def report(self) -> list[RequestRecord]:
        """Close the books on those that have ended since the last report: their records, and their futures are done."""
        ended, self.ended = self.ended, []
        return [self._close(self._outputs.pop(request.request_id)) for request in ended]

    def _close(self, output: _Output) -> RequestRecord:
        self.reported_count += 1
        request = output.request
        try:
            record = request.to_record(self._generated_text(request), request.prompt_text)
        except Exception as error:
            self._faults.note(f"the record of request {request.request_id}", error)
            if request.status is not Status.FAILED:  # else it has its error
                request.is_fault = True
                request.revise(Status.FAILED, error=describe(error))
            record = _bare_record(request)
        with self._faults.absorbed("the future of a request"):
            if not output.future.done():
                output.future.set_result(record)
        return record

    def _generated_text(self, request: Request) -> str:
        if request.generated_text is not None:
            return request.generated_text
        tokens = request.generated_tokens
        ends_with_termination = bool(tokens) and tokens[-1] == request.termination_id
        return self._vocabulary.detokenize(tokens[:-1] if ends_with_termination else tokens)

    def cancel(self) -> None:
        """Forget all requests; their futures are cancelled."""
        for output in self._outputs.values():
            output.future.cancel()
        self._outputs.clear()
        self.ended.clear()


def _note_scores(request: Request, result: StepResult) -> None:
    name = request.request_id
    if name in result.failures:
        raise ScoringError(result.failures[name])
    for score in result.prompt.get(name, ()):
        request.prompt_log_probs.append(score.log_prob)
        request.prompt_top_n.append(score.top_n)
    if name in result.generated:
        request.generated_log_probs.append(result.generated[name].log_prob)
        request.generated_top_n.append(result.generated[name].top_n)


def _bare_record(request: Request) -> RequestRecord:
    """Of a request whose record cannot be built: its tokens and its account, without texts made of them or scores."""
    ledger = request.ledger
    assert request.status is not None, f"request {request.request_id} is still alive"
    return RequestRecord(
        request_id=request.request_id,
        status=request.status,
        prompt_text=request.prompt_text,
        prompt_tokens=request.prompt_tokens,
        generated_text="",
        generated_tokens=tuple(request.generated_tokens),
        finish_reason=request.finish_reason,
        error=request.error,
        events=tuple(request.events),
        arrival_wall_time=request.arrival_wall_time,
        latency=request.latency,
        ttft=request.ttft,
        step_count=request.step_count,
        matched_block_count=ledger.matched_blocks or 0,
        skipped_prefill_token_count=ledger.skipped,
        computed_prefill_token_count=ledger.computed,
        recomputed_token_count=ledger.recomputed,
        prefill_reasons=dict(ledger.reasons),
        prompt_log_probs=None,
        generated_log_probs=None,
        prompt_top_n_log_probs=None,
        generated_top_n_log_probs=None,
        is_fault=request.is_fault,
    )
