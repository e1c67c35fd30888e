"""Command recorder: rank 0 records the changes of its schedulers between steps, for the workers to repeat."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.config import EvictionPolicyName
from megatron_ext.parallel.commands import (
    Add,
    Allow,
    Command,
    DropKeptData,
    End,
    HoldPrefills,
    Propose,
    Quarantine,
    ResetPrefixCache,
    Suspend,
    WeightsChanged,
)
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.scheduling.plan import SchedulerLimits
from megatron_ext.scheduling.record import Status
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.scheduler import Scheduler
from megatron_ext.scheduling.sequence import Masks
from megatron_ext.scheduling.spec_decode.verification import TokensById


class RecordingScheduler(Scheduler):
    """Scheduler that records the commands it was given, in order.

    Effects of steps (`schedule`, `commit`) are not recorded: workers take the same steps.
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
        self.disk_loads.record = self.note

    def note(self, command: Command) -> None:
        """Record a command that is not a scheduler call."""
        self._commands.append(command)

    def take_commands(self) -> list[Command]:
        """Return and clear the recorded commands."""
        taken, self._commands = self._commands, []
        return taken

    def add(self, request: Request) -> None:
        """Add a request as `Scheduler` does, and record it."""
        super().add(request)
        self.note(Add.of(request))

    def end(
        self,
        request: Request,
        status: Status,
        *,
        finish_reason: str | None = None,
        error: str | None = None,
        is_fault: bool = False,
    ) -> None:
        """End a request as `Scheduler` does, and record it without the reason, which only rank 0 needs."""
        super().end(request, status, finish_reason=finish_reason, error=error, is_fault=is_fault)
        self.note(End(request.request_id, status))

    def propose(self, drafts: TokensById) -> None:
        """Propose drafts as `Scheduler` does, and record them."""
        super().propose(drafts)
        self.note(Propose(tuple(drafts.items())))

    def allow(self, request: Request, masks: Masks) -> None:
        """Set the token masks as `Scheduler` does, and record them."""
        super().allow(request, masks)
        self.note(Allow(request.request_id, masks))

    def hold_prefills(self, *, are_held: bool) -> None:
        """Hold or release prefills as `Scheduler` does, and record it."""
        super().hold_prefills(are_held=are_held)
        self.note(HoldPrefills(are_held))

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache as `Scheduler` does, and record it."""
        super().reset_prefix_cache()
        self.note(ResetPrefixCache())

    def drop_kept_data(self, block_hashes: Sequence[BlockHash]) -> None:
        """Drop the data kept with blocks as `Scheduler` does, and record it."""
        super().drop_kept_data(block_hashes)
        self.note(DropKeptData(tuple(block_hashes)))

    def quarantine(self, block_hash: BlockHash, *, states_only: bool) -> int:
        """Drop a wrong entry as `Scheduler` does, and record it."""
        self.note(Quarantine(block_hash, states_only))
        return super().quarantine(block_hash, states_only=states_only)

    def weights_changed(self, *, restarts: bool) -> None:
        """Note changed weights as `Scheduler` does, and record it."""
        super().weights_changed(restarts=restarts)
        self.note(WeightsChanged(restarts))

    def suspend(self) -> None:
        """Suspend as `Scheduler` does, and record it."""
        super().suspend()
        self.note(Suspend())
