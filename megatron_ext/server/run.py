"""Server start-up: load the model, build the engine, and listen. Implements `megatron-ext serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from megatron_ext.config import ServerConfig, ServerSettings, SourceConfig
from megatron_ext.config.kv_events import Endpoint, IpcEndpoint, KvEventsConfig
from megatron_ext.console.kv_cache_table import make_console, print_dry_run, print_engine
from megatron_ext.console.profiling import profiled
from megatron_ext.console.start import StartUp, check_machine, check_profile, say_start
from megatron_ext.errors import ConfigError
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.mcore import platform
from megatron_ext.mcore.parallel_state.process_groups import make_parallel_context
from megatron_ext.mcore.warm_up import Phase, unreported
from megatron_ext.memory.heap import freeze_loaded_objects
from megatron_ext.models.engine_args import EngineArgs, follow, plan_without_weights
from megatron_ext.models.generation_defaults import generation_defaults
from megatron_ext.models.identity import weights_hash
from megatron_ext.models.llm_engine import LLMEngine
from megatron_ext.models.load import LoadedModel
from megatron_ext.models.update.disk import WeightsRoot
from megatron_ext.parallel.failure import ending_together
from megatron_ext.parallel.parallel_context import ParallelContext
from megatron_ext.server.api_keys import Keys, load_keys
from megatron_ext.server.app import PendingResponses, create_app
from megatron_ext.server.http.connections import (
    ACCEPT_BATCH,
    LISTEN_BACKLOG,
    Connections,
    GuardedProtocol,
    effective_max_connections,
    handle_loop_error,
)
from megatron_ext.server.serving import Serving, WeightsUpdater
from megatron_ext.signals import ONE_WISH, Interruption
from megatron_ext.text.tokenizer import TextTokenizer

LAST_WORDS = 5  # seconds for requests that are ended to send their error
logger = logging.getLogger(__name__)


class KvEventPublishers:
    """KV event publishers, one for each replica's cache, on rank 0; empty without an endpoint.

    Binds addresses at once; `close` releases them.

    Args:
        config: Publisher settings, among them the endpoint.
        replicas: Number of data-parallel replicas.

    Raises:
        ConfigError: An address cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, replicas: int = 1) -> None:
        self.publishers: list[Publisher] = []
        self._config = config
        if config.kv_events_endpoint is None:
            return
        try:
            for rank in range(replicas):
                self.publishers.append(Publisher(config, rank))
        except BaseException:
            self.close()
            raise
        for endpoint in config.endpoints().values():
            _warn(endpoint)

    def attach(self, engine: LLMEngine) -> None:
        """Publish the blocks that an engine's replicas store from now on, those put back, and those on disk."""
        if not self.publishers:
            return
        for publisher in self.publishers:
            publisher.start(Mirror(engine.limits.block_size, has_states=engine.is_hybrid))
        changes = [publisher.changes for publisher in self.publishers]
        engine.observe_caches(changes, [one.disk for one in changes])
        for publisher in self.publishers:
            for what, channel in (("blocks", publisher.blocks), ("states", publisher.states)):
                if channel is not None:
                    replay = channel.replay_endpoint or "no address"
                    logger.info("KV events of %s at %s, replayed at %s", what, channel.endpoint, replay)
        if engine.is_hybrid and self._config.kv_events_states_endpoint is None:
            logger.info(
                "the positions at which requests can resume are not published: there is no --kv-events-states-endpoint"
            )

    def close(self) -> None:
        """Close all publishers."""
        for publisher in self.publishers:
            publisher.close()


def _warn(endpoint: Endpoint) -> None:
    """Warn about the other users and machines that can read an address."""
    address = endpoint.of_replica(0)
    if isinstance(endpoint, IpcEndpoint):
        directory = os.path.dirname(endpoint.path)
        if not os.stat(directory).st_mode & 0o077:
            return
        where, remedy = f"{address} is in a directory that other users can enter", f"chmod 700 {directory}"
    elif endpoint.is_loopback:
        where = f"every user of this machine can connect to {address}"
        remedy = "ipc:///PATH in a directory of mode 0700"
    else:
        where, remedy = f"{address} is reachable from other machines", "a loopback address, or ipc:///PATH"
    logger.warning(
        "KV events contain the token ids of all cached prompts and outputs, and %s; to keep them private: %s",
        where,
        remedy,
    )


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


def run_server(settings: ServerSettings, start_up: StartUp | None = None) -> None:
    """Load, listen, and serve until a signal arrives; with several ranks only the first one listens.

    Args:
        settings: Settings of the whole server.
        start_up: Reports the phases until the server listens; by default from now on.

    Raises:
        ConfigError: The user made a mistake; no request was served.
        RankError: One of several ranks has failed.
        Interrupted: A signal reached a rank other than the first during loading.
    """
    say_start(settings.start_notes)
    check_machine(settings.parallel)
    try:
        with ending_together(settings.parallel.distributed_timeout_minutes):
            platform.initialize(settings.parallel)
            if settings.server.dry_run:
                print_dry_run(plan_without_weights(settings), make_console(quiet=False))
                return
            parallel_context = make_parallel_context(settings.parallel)
            if parallel_context is None or parallel_context.is_driver:
                with start_up or StartUp() as reported:
                    _listen_and_serve(settings, parallel_context, reported)
            else:
                _follow(settings, parallel_context)
    finally:
        platform.shut_down()


def _listen_and_serve(settings: ServerSettings, parallel_context: ParallelContext | None, start_up: StartUp) -> None:
    keys = load_keys(settings.server)
    weights_root(settings.server)
    check_profile(settings.server.profile, parallel_context)
    effective_max_connections(settings.server.limits)

    def on_ready(url: str) -> None:
        start_up.ready()
        announce(url)

    with (
        bind(settings.server.host, settings.server.port) as listener,
        loaded_serving(settings, keys, parallel_context, start_up.phase) as serving,
    ):
        serve(serving, listener, on_ready)


@contextlib.contextmanager
def loaded_serving(
    settings: ServerSettings,
    keys: Keys | None = None,
    parallel_context: ParallelContext | None = None,
    phase: Phase = unreported,
) -> Iterator[Serving]:
    """Load a model for serving: its engine, its KV events and a profile, as the settings say, until the block ends.

    See `build_serving` for arguments and errors. Addresses of KV events are bound before the model is loaded.
    """
    replicas = 1 if parallel_context is None else parallel_context.replicas
    with contextlib.closing(KvEventPublishers(settings.server.kv_events, replicas)) as publishers:
        serving = build_serving(settings, keys, parallel_context, phase)
        publishers.attach(serving.engine)
        freeze_loaded_objects()
        with profiled(serving.engine, settings.server.profile) as serving.tracer:
            yield serving


def _follow(settings: ServerSettings, parallel_context: ParallelContext) -> None:
    """Run a rank other than the first, from start to end."""
    with Interruption(ignored=(signal.SIGINT,)) as interruption:
        follow(settings, parallel_context, interruption.keep_quiet)


def build_serving(
    settings: ServerSettings,
    keys: Keys | None = None,
    parallel_context: ParallelContext | None = None,
    phase: Phase = unreported,
) -> Serving:
    """Load the model and build the engine around it.

    Args:
        settings: Settings of the whole server.
        keys: API keys; by default the keys that the settings name.
        parallel_context: All ranks, of which this is the first; None for a world of one.
        phase: See `EngineArgs`.

    Raises:
        ConfigError: The settings cannot be satisfied.
    """
    root = weights_root(settings.server)
    defaults = generation_defaults(settings.source, on_server=True)
    args = EngineArgs(settings, parallel_context, phase)
    loaded, writer = args.loaded, None if root is None else args.weight_writer()
    engine = LLMEngine(args.build_engine(), writer)
    print_engine(engine, loaded.name, make_console(quiet=False))
    name = model_name(settings.source, settings.server, loaded.name)
    updater = None if root is None else WeightsUpdater(root, engine)
    found = f"random {settings.source.seed}" if loaded.directory is None else weights_hash(loaded.directory)
    logger.info("weights %s", found)
    return Serving(engine, name, settings.server, keys, readable_root(loaded), updater, defaults, found)


def weights_root(server: ServerConfig) -> WeightsRoot | None:
    """Return the directory that new weights may be read from; None if updates are off.

    Raises:
        ConfigError: The path is not a directory.
    """
    return None if server.weights_root is None else WeightsRoot.of(server.weights_root)


def readable_root(loaded: LoadedModel) -> str:
    """Return a directory with the model's tokenizer for clients on this machine, or the model's name."""
    tokenizer = loaded.tokenizer
    return str(tokenizer.path) if isinstance(tokenizer, TextTokenizer) else loaded.name


def model_name(source: SourceConfig, server: ServerConfig, loaded: str) -> str:
    """Return the name to serve a model under: the first given one, or the last part of the checkpoint's path."""
    if server.served_model_name:
        return server.served_model_name[0]
    directory = source.load or source.load_hf
    return loaded if directory is None else Path(directory).resolve().name or loaded


class _Server(uvicorn.Server):
    """uvicorn server that announces when it listens, and gives running requests a grace period at shutdown.

    Args:
        app: Application.
        serving: State of its routes.
        on_ready: Called with the URL when it listens.
    """

    def __init__(self, app: FastAPI, serving: Serving, on_ready: Callable[[str], None]) -> None:
        limits = serving.settings.limits
        connections = Connections(effective_max_connections(limits))
        if connections.limit < limits.max_connections:
            allowed = connections.limit, limits.max_connections
            logger.warning("`ulimit -n` allows %d connections, not the %d of --max-connections", *allowed)
        config = uvicorn.Config(
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
        super().__init__(config)
        self._unbegun: PendingResponses = app.state.unbegun
        self._serving, self._on_ready = serving, on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grace_is_over = asyncio.Event()
        self._first_signal: tuple[int, float] | None = None  # and when it came
        self._cancelled = 0  # requests

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, and announce it."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(handle_loop_error)
        await super().startup(sockets)
        assert sockets, "this server is given its sockets"
        for listener in sockets:  # asyncio also accepts up to uvicorn's backlog at once
            listener.listen(LISTEN_BACKLOG)
        host, port = sockets[0].getsockname()[:2]
        self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def main_loop(self) -> None:
        """Run until a signal arrives or other ranks are lost; in the latter case no request can complete."""
        self._serving.requests.on_lost_ranks = self._end_soon
        await super().main_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to shut down; a second signal ends requests at once, and the writing of the prefix cache to disk.

        A launcher sends SIGTERM after a SIGINT of the terminal: different signals within a second are one.
        """
        now = time.monotonic()
        if self._first_signal is None:
            self._first_signal = sig, now
        if not self.should_exit:
            super().handle_exit(sig, frame)
            return
        if sig != self._first_signal[0] and now - self._first_signal[1] < ONE_WISH:
            return
        self._serving.engine.stop_keeping()
        assert self._loop is not None, "uvicorn handles signals while it runs"
        self._loop.call_soon_threadsafe(self._end_grace)

    def _end_grace(self) -> None:
        if not self._grace_is_over.is_set():
            self._grace_is_over.set()
            logger.info("a second signal: %d requests in flight are ended", len(self.server_state.tasks))

    def _end_soon(self) -> None:
        self.should_exit = True
        self._grace_is_over.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        patience, started = self._serving.settings.shutdown_timeout, time.monotonic()
        # HTTP requests, those included that the engine does not have yet.
        in_flight, connections = len(self.server_state.tasks), len(self.server_state.connections)
        logger.info(
            "shutdown begins: %d requests in flight, %d connections; %g s for them", in_flight, connections, patience
        )
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()
        seconds = time.monotonic() - started
        logger.info(
            "shutdown ends: %d requests finished, %d cancelled, %.1f s",
            max(0, in_flight - self._cancelled),
            self._cancelled,
            seconds,
        )

    async def _end_requests(self) -> None:
        """End requests in flight after the grace period with errors, then close connections without waiting."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._grace_is_over.wait(), self._serving.settings.shutdown_timeout)
        self._cancelled = len(self.server_state.tasks)
        self._serving.requests.end_all()
        self._unbegun.end()
        await asyncio.sleep(LAST_WORDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()


def build_server(serving: Serving, on_ready: Callable[[str], None]) -> uvicorn.Server:
    """Return the server, which calls `on_ready` with its URL when it listens."""
    return _Server(create_app(serving), serving, on_ready)


def serve(serving: Serving, listener: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends running requests with errors. Later ones change nothing.

    Afterwards the process has nothing left but to end, so signals stay without effect.

    Raises:
        RankError: Other ranks are lost; every request has got an error.
    """
    server = build_server(serving, on_ready)
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again after it has stopped
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])
    if serving.requests.lost_ranks is not None:
        raise serving.requests.lost_ranks
