"""Request of an engine client: from its submission to its record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from megatron_ext.config import RequestParams
from megatron_ext.engine.updates import Update
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request


@dataclass(eq=False)
class EngineRequest:
    """A request on its way into the engine, in it, or out of it.

    Attributes:
        tokens: Prompt token ids.
        params: Sampling parameters.
        text: Text of the prompt, for the record.
        turn: See `EngineCore.add`.
        is_streamed: Whether updates are collected while it runs.
        notify: Called by the engine's thread after new updates and after the end.
        updates: Updates not yet taken out by the reader.
        record: Outcome: the record, or the error that left it without one.
        step_error: The error of the steps that failed in a row, where that ended the request.
        request: The engine's request, once the engine has it.
        is_abandoned: Whether its caller has left.
    """

    tokens: Sequence[int]
    params: RequestParams
    text: str | None = None
    turn: int | None = None
    is_streamed: bool = False
    notify: Callable[[], object] | None = None
    updates: deque[Update] = field(default_factory=deque)
    record: Future[RequestRecord] = field(default_factory=Future)
    step_error: Exception | None = None
    request: Request | None = None
    is_abandoned: bool = False
    delivered: int = 0  # generated tokens in updates; the engine thread's own

    def collect(self) -> bool:
        """Append an update with what is new, if the request is streamed; called by the engine's thread.

        Returns:
            Whether there was anything new.
        """
        request = self.request
        if not self.is_streamed or request is None or request.generated_count <= self.delivered:
            return False
        update = Update.of(request, self.delivered)
        self.delivered += len(update.generated_tokens)
        self.updates.append(update)
        return True
