"""Rank 0 writes down what happens to its schedulers between steps, for the others to do the same."""

from __future__ import annotations

import dataclasses

from megatron_ext.config import EvictionPolicyName
from megatron_ext.parallel.commands import Add, Allow, Command, End, Propose, ResetPrefixCache, Suspend, WeightsChanged
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.sequence import Masks
from megatron_ext.scheduling.spec_decode.verification import TokensById


class RecordingScheduler(Scheduler):
    """A scheduler with a list of the commands that it was given, in order.

    What steps do to it (`schedule`, `commit`) is not in the list: whoever follows takes the same steps.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: EvictionPolicyName | None = None,
        fingerprint: bytes = b"",
        slots: int | None = None,
    ) -> None:
        super().__init__(limits, policy, fingerprint, slots)
        self._commands: list[Command] = []

    def note(self, command: Command) -> None:
        """Write down what happens beside the scheduler."""
        self._commands.append(command)

    def take_commands(self) -> list[Command]:
        """The commands since the last call."""
        taken, self._commands = self._commands, []
        return taken

    def add(self, request: Request) -> None:
        """As `Scheduler`; nobody else needs the text that the prompt was."""
        super().add(request)
        self.note(Add(dataclasses.replace(request.submission, prompt_text=None)))

    def end(
        self,
        request: Request,
        status: Status,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        is_fault: bool = False,
    ) -> None:
        """As `Scheduler`; why is rank 0's to know."""
        super().end(request, status, finish_reason=finish_reason, error=error, is_fault=is_fault)
        self.note(End(request.request_id, status))

    def propose(self, drafts: TokensById) -> None:
        """As `Scheduler`."""
        super().propose(drafts)
        self.note(Propose(tuple(drafts.items())))

    def allow(self, request: Request, masks: Masks) -> None:
        """As `Scheduler`."""
        super().allow(request, masks)
        self.note(Allow(request.request_id, masks))

    def reset_prefix_cache(self) -> None:
        """As `Scheduler`."""
        super().reset_prefix_cache()
        self.note(ResetPrefixCache())

    def weights_changed(self) -> None:
        """As `Scheduler`."""
        super().weights_changed()
        self.note(WeightsChanged())

    def suspend(self) -> None:
        """As `Scheduler`."""
        super().suspend()
        self.note(Suspend())
