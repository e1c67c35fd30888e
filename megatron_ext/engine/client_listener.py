"""Observer of an engine client."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.engine.client_request import EngineRequest
from megatron_ext.engine.engine_step import StepOutput
from megatron_ext.errors import RankError


class ClientListener:
    """Observer of an engine client; every method is called by the engine's thread. By default it does nothing."""

    def on_step(self, output: StepOutput) -> None:
        """Handle the output of a step, before it is delivered."""

    def on_delivery(self, requests: Sequence[EngineRequest]) -> None:
        """Handle requests that have new updates or have ended."""

    def on_call(self) -> None:
        """Handle the end of a call between two steps, or of a failed step."""

    def on_failed_step(self, error: Exception) -> None:
        """Handle a failed step; its requests are retried or given up."""

    def on_lost_ranks(self, error: RankError) -> None:
        """Handle the loss of other ranks, after which nothing can be computed."""
