"""HTTP server in a thread of its own, beside the other users of an engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future

from megatron_ext.api.engine import LoadedEngine
from megatron_ext.apis.serve_config import ServeConfig
from megatron_ext.errors import RankError
from megatron_ext.server.run import announce, bind, build_server
from megatron_ext.server.serving import Serving


class HttpFrontend:
    """OpenAI-compatible server of a loaded engine; the constructor returns when it listens.

    Args:
        loaded: Engine, which stays open for others.
        config: Address and options.
        on_lost_ranks: Called with the error if other ranks are lost.

    Attributes:
        url: Address of the server.

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
