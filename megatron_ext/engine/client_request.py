"""Request of an engine client: from its submission to its record."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from megatron_ext.engine.updates import Update
from megatron_ext.scheduling.record import RequestRecord
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.request_inputs import RequestInputs


@dataclass(eq=False)
class EngineRequest:
    """Request of a client before, while and after the engine has it.

    Attributes:
        inputs: What the caller asks for.
        is_streamed: True to collect updates while the request runs.
        notify: Function that the engine's thread calls after new updates and after the end.
        updates: Updates that the reader has not taken yet.
        record: Future of the record, or of the error that prevented one.
        partial: Record of the tokens generated until an error ended the request; None before.
        step_error: Error of repeatedly failed steps, if that ended the request.
        request: Request in the engine, once it has been added.
        is_abandoned: True if its caller has left.
    """

    inputs: RequestInputs
    is_streamed: bool = False
    notify: Callable[[], object] | None = None
    updates: deque[Update] = field(default_factory=deque)
    record: Future[RequestRecord] = field(default_factory=Future)
    partial: RequestRecord | None = None
    step_error: Exception | None = None
    request: Request | None = None
    is_abandoned: bool = False
    delivered: int = 0  # generated tokens in updates; used by the engine's thread only

    def collect(self) -> bool:
        """Append an update with the new output, if the request is streamed; called by the engine's thread.

        Returns:
            True if there was new output.
        """
        request = self.request
        if not self.is_streamed or request is None or request.generated_count <= self.delivered:
            return False
        update = Update.of(request, self.delivered)
        self.delivered += len(update.generated_tokens)
        self.updates.append(update)
        return True

    def end(self, outcome: RequestRecord | Exception) -> None:
        """Set the outcome, unless the future was cancelled; called by the engine's thread."""
        if not self.record.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Exception):
            self.record.set_exception(outcome)
        else:
            self.record.set_result(outcome)
