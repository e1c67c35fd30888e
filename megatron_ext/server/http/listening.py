"""Listening: a socket, guarded connections, and the announcement that the server is ready."""

from __future__ import annotations

import logging
import signal
import socket
from functools import partial

import uvicorn
from fastapi import FastAPI

from megatron_ext.config import ServerLimits
from megatron_ext.errors import ConfigError
from megatron_ext.server.http.connections import (
    ACCEPT_BATCH,
    Connections,
    GuardedProtocol,
    effective_max_connections,
)

logger = logging.getLogger(__name__)

LAST_WORDS = 5  # seconds for requests that are ended to send their error


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket, so that a taken address is reported before anything is loaded; the socket does not listen yet.

    Raises:
        ConfigError: The address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}; give others") from None
    return listener


def announce(url: str) -> None:
    """Print that the server is ready, once as Megatron's scripts expect it and once in this package's words."""
    print(f"Running on {url}\nready: {url}", flush=True)


def guarded(app: FastAPI, limits: ServerLimits) -> uvicorn.Config:
    """Return uvicorn's configuration of an application with guarded connections.

    Args:
        app: ASGI application.
        limits: Limits of connections.
    """
    connections = Connections(effective_max_connections(limits))
    if connections.limit < limits.max_connections:
        logger.warning(
            "`ulimit -n` allows %d connections, not the %d of --max-connections",
            connections.limit,
            limits.max_connections,
        )
    return uvicorn.Config(
        app,
        http=partial(GuardedProtocol, connections, limits),  # type: ignore[arg-type]  # it is only called
        ws="none",
        backlog=ACCEPT_BATCH,
        timeout_keep_alive=limits.idle_timeout,  # type: ignore[arg-type]  # asyncio takes parts of seconds
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="on",
    )


def run_until_signal(server: uvicorn.Server, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends running requests with errors. Later ones change nothing.

    Afterwards the process has nothing left but to end, so signals stay without effect.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again after it has stopped
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])
