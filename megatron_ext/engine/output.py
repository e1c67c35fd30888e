"""From tokens to what a user gets: scores, stop words, texts, records, futures.

All of it comes after `Scheduler.commit`, one request at a time. Whatever raises here ends the request that it was for
as FAILED, with the error's words, and nothing else: no other request's tokens, blocks or record depend on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
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
        matcher = StopWordMatcher(words, self._detokenize(request)) if words else None
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
        """Whether the newest token completes one; a token that ends it comes before any."""
        matcher = self._outputs[request.request_id].stop_words
        if matcher is None or request.finish_reason == "stop":
            return False
        request.output.generated_text = matcher.feed([request.tokens[-1]], ignore=not request.may_have_stopped)
        return request.output.generated_text is not None

    def fail(self, request: Request, error: Exception) -> None:
        """Something that only this request needed has raised: it ends as FAILED."""
        self._faults.note(f"request {request.request_id}", error)
        self._end(request, Status.FAILED, error=describe(error), is_fault=True)

    def _end(
        self,
        request: Request,
        status: Status,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        is_fault: bool = False,
    ) -> None:
        if request.is_ended:
            request.revise(status, finish_reason=finish_reason, error=error, is_fault=is_fault)
        else:
            self._scheduler.end(request, status, finish_reason=finish_reason, error=error, is_fault=is_fault)
            self.ended.append(request)

    def report(self) -> list[RequestRecord]:
        """Close the books on those that have ended since the last report: their records, and their futures are done."""
        ended, self.ended = self.ended, []
        return [self._close(self._outputs.pop(request.request_id)) for request in ended]

    def _close(self, output: _Output) -> RequestRecord:
        self.reported_count += 1
        request = output.request
        try:
            record = request.to_record(self._generated_text(request))
        except Exception as error:
            self._faults.note(f"the record of request {request.request_id}", error)
            if request.status is not Status.FAILED:  # else it has its error
                request.revise(Status.FAILED, error=describe(error), is_fault=True)
            record = request.bare_record()
        with self._faults.absorbed("the future of a request"):
            if not output.future.done():
                output.future.set_result(record)
        return record

    def _generated_text(self, request: Request) -> str:
        if request.output.generated_text is not None:
            return request.output.generated_text
        tokens = request.generated_tokens
        has_end = bool(tokens) and tokens[-1] in request.submission.end_ids
        return self._detokenize(request)(tokens[:-1] if has_end else tokens)

    def _detokenize(self, request: Request) -> Callable[..., str]:
        return self._vocabulary.decoder(skips_special=request.params.skip_special_tokens)

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
        request.output.prompt_log_probs.append(score.log_prob)
        request.output.prompt_top_n.append(score.top_n)
    if name in result.generated:
        request.output.generated_log_probs.append(result.generated[name].log_prob)
        request.output.generated_top_n.append(result.generated[name].top_n)
