"""Settings of all tests: one thread (test workers use every core already), no upstream warnings, priorities."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from megatron_ext.ops import cpp
from megatron_ext.ops.triton import INTERPRET
from tests import (
    base,
    durations,
    forked,
    limits,
    marked_files,
    numbers,
    on_device,
    on_request,
    realtime,
    worlds,
)

# Kernels run on CPU tensors then. Triton reads it when it is imported, by the conftest of a folder at the earliest.
if not torch.cuda.is_available():
    os.environ.setdefault(INTERPRET, "1")

# Libraries that are not installed, arguments that megatron-core passes to itself: nothing that we could do differently.
UPSTREAM_WARNINGS = (
    r"ignore::DeprecationWarning:torch\.jit\..*",
    r"ignore::UserWarning:megatron\.core\..*",
    r"ignore::DeprecationWarning:megatron\.core\..*",
    r"ignore::FutureWarning:megatron\.core\..*",
)

# A busy machine is no failure: hypothesis otherwise asserts on times. And what one run draws every run draws, unless
# `--hypothesis-seed=SEED` asks for other draws.
settings.register_profile(
    "same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    os.umask(0o022)  # caches are refused in folders that a group may write to, as with the umask 002 of some systems
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts what runs in its background like that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in UPSTREAM_WARNINGS:
        config.addinivalue_line("filterwarnings", line)
    config.pluginmanager.register(on_request, "on_request")
    config.pluginmanager.register(numbers, "numbers")
    config.pluginmanager.register(base, "base")
    config.pluginmanager.register(marked_files, "marked_files")
    config.pluginmanager.register(worlds, "worlds")
    config.pluginmanager.register(on_device, "on_device")
    config.pluginmanager.register(durations, "durations")
    config.pluginmanager.register(realtime, "realtime")
    config.pluginmanager.register(limits, "limits")


def pytest_sessionstart() -> None:
    """Compile the C++ operators if they are missing, before a test waits for them or reads the lines that this logs."""
    cpp.are_used()


@pytest.hookimpl(tryfirst=True)  # before the loop of tests/workers.py
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork the server of processes; exclude imported objects from collections, and loggers from visits by pytest."""
    if not session.config.option.collectonly:
        forked.start_server(session.config)
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True  # pytest adds its handlers to each logger that does not
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def parallel_state_is_there_again() -> Iterator[None]:
    """A run of a whole tool in this process shuts down what models of other tests were built with."""
    yield
    platform = sys.modules.get("megatron_ext.mcore.platform")
    if platform is not None:
        platform.initialize()
