"""Processes for tests, forked from a server that has imported everything and computed nothing.

Forking after OpenMP has run is unsafe, so tests do not fork themselves; and a newly started process spends five seconds
on imports. The server is a fork of the first process of a test run, made before the first test, for all workers. Its
children see one thread, the loopback interface and the modules of this tree, and write where their callers do.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection, context, forkserver, get_context, reduction, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).parents[1]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
NO_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
_PRELOAD = "tests.unit_tests.support.rank_imports"
_changing = threading.Lock()  # a process's environment is that of all its threads


class _Server(forkserver.ForkServer):
    """Fork server that is a fork of this process, which other forks of this process can use, too."""

    def start(self, config: pytest.Config) -> None:
        """Fork the server; it ends when no process is left that may use it."""
        address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        alive, self._forkserver_alive_fd = os.pipe()
        with environment({"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}):
            resource_tracker.ensure_running()  # which would say what killed processes have left
        self._forkserver_address = address
        if os.fork() == 0:
            os.close(self._forkserver_alive_fd)
            _serve(config, listener, alive)
        os.close(alive)
        listener.close()
        forkserver.ensure_running = self.ensure_running
        forkserver.connect_to_new_process = self.connect_to_new_process

    def ensure_running(self) -> None:
        """Do nothing: the base would start another server in each process that has not started this one."""


def _serve(config: pytest.Config, listener: socket.socket, alive: int) -> NoReturn:
    try:
        config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
        logging.root.handlers.clear()  # those of pytest
        os.environ.update(_variables())
        if listener in select.select([listener, alive], [], [])[0]:  # until then the imports may not be needed
            importlib.import_module(_PRELOAD)
            forkserver.main(listener.detach(), alive, [])
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def start_server(config: pytest.Config) -> None:
    """Fork the server of this process and of its forks, unless they could not use what it has."""
    torch = sys.modules.get("torch")
    may_have_cuda = torch is not None and torch.cuda.is_available()
    if len(os.listdir("/proc/self/task")) == 1 and not may_have_cuda:
        _Server().start(config)


def fork(function: Callable[..., None], *arguments: object) -> context.Process:
    """Call a function of a module in a process of its own, which has begun. It and its arguments can be pickled."""
    server = get_context("forkserver")
    with environment({}):
        server.set_forkserver_preload([_PRELOAD])
        forkserver.ensure_running()  # each process starts its own where `start_server` could not fork one
    process = server.Process(target=_call, args=(_Streams(), function, arguments), daemon=True)
    process.start()
    return process


class _Streams:
    """Standard output and error of this process, and then of the one that it is sent to."""

    def __reduce__(self) -> tuple[Callable[..., _Streams], tuple[object, ...]]:
        return _take_streams, (reduction.DupFd(1), reduction.DupFd(2))


def _take_streams(*duplicates: Any) -> _Streams:
    for stream, duplicate in enumerate(duplicates, 1):
        os.dup2(duplicate.detach(), stream)
    return _Streams()


def _call(_: _Streams, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    function(*arguments)


def spawn(function: Callable[..., None], *arguments: object, **variables: str) -> context.Process:
    """Run a function in a process that imports everything itself, with additional environment variables."""
    process = get_context("spawn").Process(target=function, args=arguments, daemon=True)
    with environment(variables):
        process.start()
    return process


def _variables() -> dict[str, str]:
    return {**ONE_THREAD, **NO_NETWORK, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


@contextlib.contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """Set the environment of processes that are started within the context."""
    changed = _variables() | more
    with _changing:
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
