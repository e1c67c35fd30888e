"""Structured outputs: token masks computed beside the steps, so that a grammar slows its own request only (SE-10).

    engine's thread   commit n | report | wait a little | plan and compute n + 1 | commit ...
    mask thread                | masks of the tokens after step n ------------------- ...

A request whose mask is not ready when a step is planned is left out of that step, and the others continue. Rank 0 alone
decides which masks are ready; the schedulers of other ranks receive the masks themselves (`Scheduler.allow`).
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_ext.config.request import ResponseFormat
from megatron_ext.scheduling.request import Masks, Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.spec_decode.verification import TokensById
from megatron_ext.text.matcher import Matcher
from megatron_ext.threads import lower_priority

WAIT_SHARE = 0.25
"""Longest wait of a step for masks while other requests can run, as a share of the previous step's time."""
IDLE_WAIT = 0.05  # seconds, if no other request can run: calls between steps must not starve
_DELAY = 64  # maximum seconds that a mask may wait for cheaper ones, per second of its expected time


class Job:
    """Job of the mask thread: masks of one request's next tokens.

    Args:
        start: Matcher at the start of the output; used without `matcher`. It is not modified.
        matcher: Matcher after the output so far except `tokens`; owned by the job until it is done.
        tokens: Tokens of the output that `matcher` has not read.
        drafts: Drafts proposed after `tokens`.
        ends: Tokens that end the output.

    Attributes:
        matcher: Matcher after `tokens`.
        drafts: The first drafts, as far as the grammar allows them and a token after them.
        masks: Masks of the next token, and of the token after each of these drafts.
        error: Error that prevented the masks; None if there is no error.
    """

    def __init__(
        self,
        start: Matcher,
        matcher: Matcher | None,
        tokens: Sequence[int],
        drafts: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        self.matcher = matcher
        self.drafts = tuple(drafts)
        self.masks: Masks = ()
        self.error: BaseException | None = None
        self.is_cancelled = False
        self.is_done = False
        self.expected = (matcher or start).seconds * (1 + len(drafts))
        self._start, self._tokens, self._ends = start, tokens, ends

    def run(self) -> None:
        """Compute the masks, or store the error."""
        try:
            if not self.is_cancelled:
                self._compute()
        except BaseException as error:  # a panic of the library is not an Exception; the engine's thread reports it
            self.error = error

    def _compute(self) -> None:
        self.matcher = matcher = self.matcher or self._start.copy()
        matcher.take(self._tokens)
        masks = [matcher.allowed(self._ends)]
        probe = matcher.copy() if self.drafts else matcher
        for draft in self.drafts:
            try:
                probe.take([draft])
                masks.append(probe.allowed(self._ends))
            except ValueError:  # the grammar rejects this draft, so later drafts are useless
                break
        self.drafts, self.masks = self.drafts[: len(masks) - 1], tuple(masks)


class MaskThread:
    """Thread of low priority that computes masks, cheap grammars first; starts with the first job."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "masks", initializer=lower_priority)
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Job]] = []  # heap, ordered by due time
        self._count = itertools.count()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        due = time.monotonic() + _DELAY * job.expected
        with self._changed:
            heapq.heappush(self._waiting, (due, next(self._count), job))
        self._pool.submit(self._run_next)

    def _run_next(self) -> None:
        with self._changed:
            _, _, job = heapq.heappop(self._waiting)
        job.run()
        with self._changed:
            job.is_done = True
            self._changed.notify_all()

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> bool:
        """Wait at most `seconds` until enough jobs are done; return whether they are."""
        with self._changed:
            return self._changed.wait_for(is_enough, seconds)


@dataclass(eq=False)
class _Output:
    """State of one structured output.

    Attributes:
        request: Request of the output.
        start: Matcher at the start of the output; never modified.
        matcher: Matcher after the first `taken` generated tokens; None while a job owns it or the request waits.
        taken: Number of generated tokens that the matcher has read.
        known: Number of generated tokens after which the scheduler's masks apply.
        drafts: Drafts that these masks cover.
        job: Job that computes the masks of more tokens; None if there is no job.
    """

    request: Request
    start: Matcher
    matcher: Matcher | None = None
    taken: int = 0
    known: int = 0
    drafts: tuple[int, ...] = ()
    job: Job | None = None


class StructuredOutputManager:
    """Manager of the structured outputs of one engine; has their masks computed.

    Args:
        scheduler: Scheduler of the engine.
        start: Function that makes the matcher at the start of an output, whose mask is known.
        thread: Mask thread; engines may share one.
    """

    def __init__(self, scheduler: Scheduler, start: Callable[[ResponseFormat], Matcher], thread: MaskThread) -> None:
        self._scheduler, self._start, self._thread = scheduler, start, thread
        self._outputs: dict[int, _Output] = {}

    def add(self, request: Request) -> None:
        """Add a request of the scheduler; the mask of the first token of an output is known."""
        if request.params.response_format is not None:
            start = self._start(request.params.response_format)
            self._outputs[request.request_id] = _Output(request, start)
            if not request.generated_count:
                self._scheduler.allow(request, (start.allowed(request.end_ids),))

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop requests that have ended, and cancel their jobs."""
        if self._outputs:
            for request in requests:
                output = self._outputs.pop(request.request_id, None)
                if output is not None and output.job is not None:
                    output.job.is_cancelled = True

    def begin(self, drafts: TokensById) -> None:
        """Submit jobs for the missing masks.

        Args:
            drafts: Proposals for the next step, by request id.
        """
        for name, output in self._outputs.items():
            request, count = output.request, output.request.generated_count
            if output.job is not None or request.is_ended:
                continue
            if request.running_slot is None:  # it waits: the matcher would only take memory
                output.matcher, output.taken = None, 0
            if output.known != count:
                new = request.generated_tokens[output.taken :]
                ends = request.end_ids
                output.job = Job(output.start, output.matcher, new, drafts.get(name, ()), ends)
                output.matcher, output.taken = None, count
                self._thread.submit(output.job)

    def wait(self, step_seconds: float, *, has_other_work: bool) -> None:
        """Wait for all masks a share of a step's time, and for the first one longer if there is no other work."""
        jobs = [output.job for output in self._outputs.values() if output.job is not None]
        if not jobs:
            return
        are_done = self._thread.wait(lambda: all(job.is_done for job in jobs), WAIT_SHARE * step_seconds)
        if not are_done and not has_other_work:
            self._thread.wait(lambda: any(job.is_done for job in jobs), IDLE_WAIT)

    @property
    def has_other_work(self) -> bool:
        """True if some request of the scheduler needs no missing mask."""
        return not self._outputs or any(not request.lacks_mask for request in self._scheduler.queues)

    def take(self) -> Iterator[tuple[Request, Masks | BaseException]]:
        """Yield the masks that are ready, once each, or the error of an output that cannot be continued."""
        for output in self._outputs.values():
            job = output.job
            if job is None or not job.is_done or output.request.is_ended:
                continue
            output.job, output.matcher, output.known, output.drafts = None, job.matcher, output.taken, job.drafts
            yield output.request, job.masks if job.error is None else job.error

    def allowed_drafts(self, drafts: TokensById) -> TokensById:
        """Return the proposals, limited for structured outputs to drafts that their masks cover."""
        if not self._outputs:
            return drafts
        found = {}
        for name, tokens in drafts.items():
            output = self._outputs.get(name)
            known = tokens if output is None else output.drafts if output.job is None else ()
            if known:
                found[name] = known
        return found
