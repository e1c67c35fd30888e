"""Processes for tests, forked from a server that has imported everything and computed nothing.

Forking after OpenMP has run is unsafe, so tests do not fork themselves; and a newly started process spends five seconds
on imports. Each test process has one server, which lives as long as the process; its children see one thread, the
loopback interface and the modules of this tree.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import context, forkserver, get_context
from pathlib import Path

ROOT = Path(__file__).parents[1]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
NO_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
_PRELOAD = "tests.unit_tests.support.rank_imports"
_changing = threading.Lock()  # a process's environment is that of all its threads


def fork(function: Callable[..., None], *arguments: object) -> context.Process:
    """Call a function of a module in a process of its own, which has begun. It and its arguments can be pickled."""
    server = get_context("forkserver")
    with environment({}):
        server.set_forkserver_preload([_PRELOAD])
        forkserver.ensure_running()
    process = server.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def spawn(function: Callable[..., None], *arguments: object, **variables: str) -> context.Process:
    """Run a function in a process that imports everything itself, with additional environment variables."""
    process = get_context("spawn").Process(target=function, args=arguments, daemon=True)
    with environment(variables):
        process.start()
    return process


@contextlib.contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """Set the environment of processes that are started within the context."""
    changed = {**ONE_THREAD, **NO_NETWORK, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **more}
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
