"""Masks of structured outputs, computed beside the steps, so that a grammar slows its own request only (SE-10).

    engine's thread   commit n | report | wait a little | plan and compute n + 1 | commit ...
    mask thread                | masks of the tokens after step n ------------------- ...

A request whose mask is not ready when a step is planned is left out of that step, and the others go on. What is ready
is decided here, on rank 0 alone; the schedulers of other ranks are given the masks themselves (`Scheduler.allow`).
"""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megatron_ext.config.response_format import ResponseFormat
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.sequence import Masks
from megatron_ext.scheduling.spec_decode.verification import TokensById
from megatron_ext.text.grammars import Matcher

WAIT_SHARE = 0.25
"""Of the time that the step before took: the longest wait of a step for masks while other requests can go on."""
IDLE_WAIT = 0.05  # seconds, where no other request can: then calls between steps are due
_DELAY = 64  # seconds that a mask may wait for cheaper ones, per second that it is expected to take
_NICENESS = 10  # more than that of the process


class Job:
    """The masks of one request's next tokens: the part that the mask thread computes.

    Args:
        start: Of the answer; used if there is no other matcher. It is not modified.
        matcher: Of the answer so far but for `tokens`; the job's own until it is done.
        tokens: That follow.
        drafts: Proposed after these.
        ends: Tokens that end the answer.

    Attributes:
        matcher: After `tokens`.
        drafts: The first ones, as far as the grammar allows them and a token after them.
        masks: Of the next token, and after each of these drafts.
        error: Why there are none.
    """

    def __init__(
        self, start: Matcher, matcher: Matcher | None, tokens: Sequence[int], drafts: Sequence[int], ends: Sequence[int]
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
        """Compute the masks, or note why there are none."""
        try:
            if not self.is_cancelled:
                self._compute()
        except BaseException as error:  # a panic of the library is no Exception; the engine's thread reports it
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
            except ValueError:  # neither this draft nor those after it can come
                break
        self.drafts, self.masks = self.drafts[: len(masks) - 1], tuple(masks)


class MaskThread:
    """One thread of low priority that computes masks, those of cheap grammars first. It starts with the first job."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "masks", initializer=_lower_priority)
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, Job]] = []  # a heap, by when each is due
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
        """Wait until enough jobs are done, at most so long; whether they are."""
        with self._changed:
            return self._changed.wait_for(is_enough, seconds)


def _lower_priority() -> None:
    """Let this thread give way to others of the process, where the system has priorities of threads."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS  # the system cuts it at its greatest
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


@dataclass(eq=False)
class _Output:
    """A structured output.

    Attributes:
        request: Whose it is.
        start: Matcher of an empty answer, which does not change.
        matcher: After the first `taken` generated tokens; None while a job has it, and for a request that waits.
        taken: See above.
        known: Generated tokens after which the masks were given to the scheduler.
        drafts: That these masks are for, too.
        job: Computes the masks of more tokens.
    """

    request: Request
    start: Matcher
    matcher: Matcher | None = None
    taken: int = 0
    known: int = 0
    drafts: tuple[int, ...] = ()
    job: Job | None = None


@dataclass
class Ready:
    """What is known before a step is planned.

    Attributes:
        masks: Requests, and their masks.
        errors: Requests whose outputs cannot be continued, and why.
    """

    masks: list[tuple[Request, Masks]] = field(default_factory=list)
    errors: list[tuple[Request, BaseException]] = field(default_factory=list)


class StructuredOutputs:
    """Follows the structured outputs of one engine, and has their masks computed.

    Args:
        scheduler: Of the engine.
        start: Makes the matcher of an empty answer, whose mask is known.
        thread: Computes masks; engines may share it.
    """

    def __init__(
        self, scheduler: Scheduler, start: Callable[[ResponseFormat], Matcher], thread: MaskThread | None = None
    ) -> None:
        self._scheduler = scheduler
        self._start = start
        self._thread = thread or MaskThread()
        self._outputs: dict[int, _Output] = {}

    def add(self, request: Request) -> None:
        """Take in a request of the scheduler's; the mask of its first token is known."""
        if request.params.form is not None:
            start = self._start(request.params.form)
            self._outputs[request.request_id] = _Output(request, start)
            self._scheduler.allow(request, (start.allowed(request.submission.end_ids),))

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop requests that have ended; masks that are still to be computed for them are not."""
        if self._outputs:
            for request in requests:
                output = self._outputs.pop(request.request_id, None)
                if output is not None and output.job is not None:
                    output.job.is_cancelled = True

    def begin(self, drafts: TokensById) -> None:
        """Have the missing masks computed.

        Args:
            drafts: Proposals for the next step, by request id.
        """
        for name, output in self._outputs.items():
            request, count = output.request, output.request.generated_count
            if output.job is not None or request.is_ended:
                continue
            if request.sequence.running_slot is None:  # it waits: its matcher would take memory
                output.matcher, output.taken = None, 0
            if output.known != count:
                new = request.generated_tokens[output.taken :]
                ends = request.submission.end_ids
                output.job = Job(output.start, output.matcher, new, drafts.get(name, ()), ends)
                output.matcher, output.taken = None, count
                self._thread.submit(output.job)

    def wait(self, step_seconds: float, *, has_other_work: bool) -> None:
        """Wait for masks: for all of them a share of a step's time, and for one longer if there is no other work."""
        jobs = [output.job for output in self._outputs.values() if output.job is not None]
        if not jobs:
            return
        are_done = self._thread.wait(lambda: all(job.is_done for job in jobs), WAIT_SHARE * step_seconds)
        if not are_done and not has_other_work:
            self._thread.wait(lambda: any(job.is_done for job in jobs), IDLE_WAIT)

    @property
    def has_other_work(self) -> bool:
        """Whether some request of the scheduler needs no mask that is missing."""
        return not self._outputs or any(not request.lacks_mask for request in self._scheduler.queues)

    def take(self) -> Ready:
        """Collect the masks that are ready, once."""
        ready = Ready()
        for output in self._outputs.values():
            job = output.job
            if job is None or not job.is_done or output.request.is_ended:
                continue
            output.job, output.matcher, output.known, output.drafts = None, job.matcher, output.taken, job.drafts
            if job.error is None:
                ready.masks.append((output.request, job.masks))
            else:
                ready.errors.append((output.request, job.error))
        return ready

    def allowed_drafts(self, drafts: TokensById) -> TokensById:
        """Proposals, where an output is structured those that its masks are for."""
        if not self._outputs:
            return drafts
        found = {}
        for name, tokens in drafts.items():
            output = self._outputs.get(name)
            known = tokens if output is None else output.drafts if output.job is None else ()
            if known:
                found[name] = known
        return found
