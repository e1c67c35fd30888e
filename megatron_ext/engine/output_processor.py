"""Output processor: scores, stop words, texts and records of requests.

All processing comes after `Scheduler.commit`, one request at a time. An error here ends only the request that it
concerns, as FAILED with the error's message: no other request's tokens, blocks or record depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_ext.engine.error_isolation import ErrorIsolation
from megatron_ext.engine.result import StepResult
from megatron_ext.engine.routing_recorder import note_rows
from megatron_ext.errors import CheckpointError, describe
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.explain_admission import note_end
from megatron_ext.scheduling.record import Outcome, RequestRecord, Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.text.detokenizer import StopWordMatcher
from megatron_ext.text.vocabulary import Vocabulary


class ScoringError(RuntimeError):
    """Error: a request's log-probs could not be computed."""


class OutputProcessor:
    """Output processor of every request, from its arrival to its record.

    Args:
        vocabulary: Vocabulary that turns tokens into text.
        error_isolation: Counts errors.
    """

    def __init__(self, vocabulary: Vocabulary, error_isolation: ErrorIsolation) -> None:
        self._vocabulary = vocabulary
        self._error_isolation = error_isolation
        # Not reported yet, each with its replica's scheduler and, if it has stop words, their matcher.
        self._requests: dict[int, tuple[Request, Scheduler, StopWordMatcher | None]] = {}
        self.ended: list[Request] = []  # since the last report
        self.reported_count = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def get(self, request_id: int) -> Request:
        """Return a request that is not reported yet.

        Raises:
            KeyError: No such request has this id.
        """
        return self._requests[request_id][0]

    def requests(self) -> list[Request]:
        """Return all requests that are not reported yet."""
        return [request for request, _, _ in self._requests.values()]

    def matcher_of(self, request: Request) -> StopWordMatcher | None:
        """Return a matcher of stop words after the output that a request continues; None without stop words."""
        if not request.params.stop_words:
            return None
        matcher = StopWordMatcher(request.params.stop_words, self._detokenize(request))
        if request.continued_tokens:
            matcher.feed(request.continued_tokens, ignore=True)
        return matcher

    def open(self, request: Request, scheduler: Scheduler, matcher: StopWordMatcher | None) -> None:
        """Begin to process the output of a request of a scheduler, with its `matcher_of`."""
        request.output.taken = len(request.continued_tokens)
        self._requests[request.request_id] = request, scheduler, matcher

    def take(self, chunks: Iterable[Chunk], result: StepResult) -> None:
        """Process the output of a step's chunks: store scores and routing rows, and match stop words."""
        for chunk in chunks:
            request, output = chunk.request, chunk.request.output
            _, scheduler, matcher = self._requests[request.request_id]
            # The commit has appended the accepted drafts as well, so there may be several new tokens.
            new = request.generated_count - output.taken if request.request_id in result.tokens else 0
            try:
                note_rows(chunk, result, scheduler.cache, scheduler.limits.block_size)
                stopped_at = None if matcher is None else _meets_stop_word(request, matcher, new)
                # Tokens after the stop word are cut below, and have no scores.
                _note_scores(request, result, new if stopped_at is None else stopped_at - output.taken)
            except Exception as error:
                if request.kept.new:  # noted by the commit, and maybe not written
                    scheduler.drop_kept_data(tuple(request.kept.new))
                self.fail(request, error)
                continue
            output.taken += new
            if stopped_at is not None:
                self._end(request, Outcome(Status.COMPLETED, "stop"))
                if stopped_at < request.generated_count:
                    request.cut(stopped_at)

    def refuse(self, request: Request, error: BaseException) -> None:
        """End a request as FAILED with its tokens so far, because its output cannot satisfy its grammar.

        Args:
            request: Living request.
            error: Error of the matcher; errors other than `ValueError` are logged, too.
        """
        if not isinstance(error, ValueError):
            self._error_isolation.note(f"the grammar of request {request.request_id}", error)
        self._end(request, Outcome(Status.FAILED, error=f"the output cannot satisfy response_format: {error}"))

    def abort(self, request: Request, finish_reason: str | None = None) -> bool:
        """End a request as ABORTED, unless it has ended, and free its memory at once; return whether it was alive."""
        if request.is_ended:
            return False
        self._end(request, Outcome(Status.ABORTED, finish_reason))
        return True

    def fail(self, request: Request, error: Exception, *, is_noted: bool = False) -> None:
        """End a request as FAILED; count and log the error unless `is_noted`."""
        if not is_noted:
            self._error_isolation.note(f"request {request.request_id}", error)
        self._end(request, _failure(error))

    def _end(self, request: Request, outcome: Outcome) -> None:
        if request.is_ended:
            request.revise(outcome)
        else:
            self._requests[request.request_id][1].end(request, outcome)
            self.ended.append(request)

    def report(self) -> list[RequestRecord]:
        """Return the records of requests that have ended since the last report, and forget them."""
        ended = self.ended[:]
        self.ended.clear()
        return [self._close(*self._requests.pop(request.request_id)) for request in ended]

    def _close(self, request: Request, scheduler: Scheduler, _: StopWordMatcher | None) -> RequestRecord:
        self.reported_count += 1
        note_end(request, scheduler.cache, scheduler.limits.block_size)
        return self._record(request)

    def give_up(self, request: Request, error: Exception) -> RequestRecord:
        """Return the record of a request that no step will compute any more; it ends as FAILED unless it has ended."""
        if not request.is_ended:
            request.end(Outcome(Status.FAILED, error=describe(error), is_fault=True))
        return self._record(request)

    def _record(self, request: Request) -> RequestRecord:
        try:
            return request.to_record(self._generated_text(request))
        except Exception as error:
            self._error_isolation.note(f"the record of request {request.request_id}", error)
            if request.status is not Status.FAILED:  # otherwise it keeps its own error
                request.revise(_failure(error))
            return request.bare_record()

    def _generated_text(self, request: Request) -> str:
        if request.output.generated_text is not None:
            return request.output.generated_text
        tokens = request.generated_tokens
        keeps_end = request.params.detokenize_stop_sequence
        has_end = bool(tokens) and tokens[-1] in request.end_ids and not keeps_end
        return self._detokenize(request)(tokens[:-1] if has_end else tokens)

    def _detokenize(self, request: Request) -> Callable[..., str]:
        return self._vocabulary.decoder(skips_special=request.params.skip_special_tokens)

    def cancel(self) -> None:
        """Forget all requests."""
        self._requests.clear()
        self.ended.clear()


def _failure(error: Exception) -> Outcome:
    return Outcome(Status.FAILED, error=describe(error), is_fault=not isinstance(error, CheckpointError))


def _meets_stop_word(request: Request, matcher: StopWordMatcher, new: int) -> int | None:
    """Return which token completes a stop word, counted from the first generated one; None if none does."""
    output, known = request.output, len(request.tokens) - new
    for i, token in enumerate(request.tokens[known:], start=output.taken + 1):
        is_end = request.finish_reason == "stop" and i == request.generated_count
        text = None if is_end else matcher.feed([token], ignore=i <= request.params.min_tokens)
        if text is not None:
            output.stop_word = matcher.found
            if not request.params.detokenize_stop_sequence:
                output.generated_text = text
            return i
    return None


def _note_scores(request: Request, result: StepResult, new: int) -> None:
    """Store the scores of the prompt's tokens, and of `new` generated tokens."""
    name = request.request_id
    if name in result.failures:
        raise ScoringError(result.failures[name])
    kept = result.kept_prompt_log_probs.get(name, ())
    request.output.prompt_log_probs.extend(kept)
    request.output.prompt_top_n.extend({} for _ in kept)
    for score in result.prompt.get(name, ()):
        request.output.prompt_log_probs.append(score.log_prob)
        request.output.prompt_top_n.append(score.top_n)
    if name in result.generated:
        for score in (result.generated[name], *result.target_scores.get(name, ())[: new - 1]):
            request.output.generated_log_probs.append(score.log_prob)
            request.output.generated_top_n.append(score.top_n)
