"""Coordinator start-up: from settings to a listening coordinator. Implements the command `coordinate`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

import uvicorn

from megatron_ext.config.coordinator import CoordinatorSettings
from megatron_ext.coordinator.app import create_app
from megatron_ext.coordinator.coordination import Coordination
from megatron_ext.coordinator.launcher.launch import Launcher, plan_of
from megatron_ext.coordinator.launcher.launched import fleet_directory
from megatron_ext.server.api_keys import load_keys
from megatron_ext.server.http.connections import effective_max_connections, raise_file_limit
from megatron_ext.server.http.listening import AnnouncedServer, announce, bind, guarded, run_until_signal

logger = logging.getLogger(__name__)


def run_coordinator(settings: CoordinatorSettings) -> None:
    """Listen, launch replicas if requested, and serve until a signal arrives.

    Args:
        settings: Settings of the coordinator and its replicas.

    Raises:
        ConfigError: The user made a mistake; no request was served.
    """
    config = settings.coordinator
    coordination = Coordination(config, load_keys(config))
    raise_file_limit()  # a request has two connections, and an event source up to eight files
    effective_max_connections(config.limits)
    launcher = None
    outlives = config.launch and config.port and not config.replicas_end_with_coordinator
    with (
        bind(config.host, config.port) as listener,
        fleet_directory(config.port) if outlives else contextlib.nullcontext() as home,
    ):
        if config.launch:
            launcher = Launcher(plan_of(settings, home=home), supervisor=coordination.supervisor)
        run_until_signal(build_coordinator(coordination, announce, launcher), listener)
    if launcher is not None and launcher.failure is not None:
        raise launcher.failure


class _Server(AnnouncedServer):
    """Server that is ready once each known replica has been probed, and launched replicas are ready."""

    def __init__(
        self,
        config: uvicorn.Config,
        coordination: Coordination,
        on_ready: Callable[[str], None],
        launcher: Launcher | None,
    ) -> None:
        super().__init__(config, self._announce_later)
        self._coordination = coordination
        self._say = on_ready
        self._launcher = launcher
        self._announcing: asyncio.Task[None] | None = None
        if launcher is not None:
            launcher.on_failure = self._stop

    def _stop(self) -> None:
        self.should_exit = True

    def _announce_later(self, url: str) -> None:
        self._announcing = asyncio.get_running_loop().create_task(self._announce(url))

    async def _announce(self, url: str) -> None:
        if self._launcher is not None:
            await self._launcher.all_ready()
            if self._launcher.failure is not None:
                return
        await self._coordination.fleet.first_look()
        self._say(url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end within their grace period."""
        logger.info("shutdown begins: %d requests in flight", len(self.server_state.tasks))
        if self._announcing is not None:
            self._announcing.cancel()
        cancelling = asyncio.create_task(self._end_calls())
        await super().shutdown(sockets)
        cancelling.cancel()
        logger.info("shutdown ends")

    async def _end_calls(self) -> None:
        await asyncio.sleep(self._coordination.settings.shutdown_timeout)
        for url in list(self._coordination.fleet.members):
            self._coordination.fleet.remove(url)


def build_coordinator(
    coordination: Coordination, on_ready: Callable[[str], None], launcher: Launcher | None = None
) -> uvicorn.Server:
    """Return the server, which calls `on_ready` with its URL when it is ready."""
    settings = coordination.settings
    app = create_app(coordination, launcher)
    return _Server(guarded(app, settings.limits, settings.shutdown_timeout), coordination, on_ready, launcher)
