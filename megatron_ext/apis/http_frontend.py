"""HTTP server in a thread of its own, beside the other users of an engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from megatron_ext.api.engine import LoadedEngine
from megatron_ext.config import ServerConfig
from megatron_ext.config.hosts import ANY_HOST, is_loopback
from megatron_ext.config.server import from_megatrons_parsers
from megatron_ext.errors import ConfigError, RankError
from megatron_ext.server.run import announce, bind, build_server
from megatron_ext.server.serving import Serving


@dataclass
class ServeConfig:
    """Settings of `serve`; names and defaults are Megatron's.

    Attributes:
        host: Address to listen on.
        port: Port; 0 for any free one.
        parsers: Names of response parsers; by default the model's chat template says which formats are parsed.
        verbose: Whether to log each request.
        frontend_replicas: Number of frontend processes in Megatron; here one thread serves, whatever it says.
        sock: Bound socket to listen on, in place of host and port; closed with the server.
    """

    host: str = "0.0.0.0"
    port: int = 5000
    parsers: list[str] = field(default_factory=list)
    verbose: bool = False
    frontend_replicas: int = 4
    sock: socket.socket | None = None

    def server_config(self) -> ServerConfig:
        """Return the settings of this package's server."""
        parsers = from_megatrons_parsers(self.parsers)
        if self.frontend_replicas < 1:
            raise ConfigError(f"frontend_replicas {self.frontend_replicas} must be at least 1")
        # As in Megatron, an address that other machines reach admits any host name.
        hosts = () if is_loopback(self.host) else (ANY_HOST,)
        return ServerConfig(host=self.host, port=self.port, access_log=self.verbose, allowed_hosts=hosts, **parsers)


class HttpFrontend:
    """OpenAI-compatible server of a loaded engine; the constructor returns when it listens.

    Args:
        loaded: Engine, which stays open for others.
        on_lost_ranks: Called with the error if other ranks are lost.

    Raises:
        ConfigError: The address cannot be bound, or an option is not supported.
    """

    def __init__(self, loaded: LoadedEngine, config: ServeConfig, on_lost_ranks: Callable[[RankError], None]) -> None:
        settings = config.server_config()
        serving = Serving(loaded, loaded.model_name, settings, is_shared=True)
        self._listener = bind(config.host, config.port) if config.sock is None else config.sock
        self._ready: Future[str] = Future()
        self._requests = serving.requests
        self._on_lost_ranks = on_lost_ranks
        self._server = build_server(serving, self._on_ready)
        self._thread = threading.Thread(target=self._run, args=(self._listener,), name="http", daemon=True)
        self._thread.start()
        try:
            self.url = self._ready.result()
        except BaseException:
            self.stop()
            raise

    def _on_ready(self, url: str) -> None:
        announce(url)
        self._ready.set_result(url)

    def _run(self, listener: socket.socket) -> None:
        """Serve in an event loop of this thread; an error before the server listens goes to the constructor."""
        try:
            with listener:
                asyncio.run(self._server.serve(sockets=[listener]))
        except BaseException as error:  # uvicorn exits with SystemExit when it cannot start
            if self._ready.done():
                raise
            self._ready.set_exception(RuntimeError(f"the HTTP server could not start: {error!r}"))
        else:
            if not self._ready.done():
                self._ready.set_exception(RuntimeError("the HTTP server ended before it listened"))
        if self._requests.lost_ranks is not None:
            self._on_lost_ranks(self._requests.lost_ranks)

    def stop(self) -> None:
        """Stop listening, give requests in flight the time of `shutdown_timeout`, and wait for the thread."""
        self._server.should_exit = True
        self._thread.join()
