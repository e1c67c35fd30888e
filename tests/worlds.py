"""Tests that start several ranks: first, beside one another, and one at a time. A pytest plugin.

A test, a class or a module with the mark `worlds` starts processes that each take a core. Such tests come before all
others, so that one worker gets them in one piece (tests/workers.py gives each a run of neighbours); and each holds a
lock on this file while it runs, so that two workers, or two runs in one working tree, never have two worlds at a time.
They are long, and left to `make test-all`, except smoke tests with the mark `worlds(smoke=True)` (tests/on_request.py).
"""

from __future__ import annotations

import fcntl
from collections.abc import Generator
from pathlib import Path

import pytest

MARK = "worlds"
_held: list[str] = []  # the test that holds the lock in this process


def is_held() -> bool:
    """Return whether the current test may start ranks."""
    return bool(_held)


def pytest_configure(config: pytest.Config) -> None:
    effects = "starts several ranks; runs beside no other such test, and is long unless it is a smoke test"
    config.addinivalue_line("markers", f"{MARK}(smoke=False): {effects}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker(MARK) is None)  # stable: otherwise as they were


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker(MARK) is None:
        return (yield)
    with Path(__file__).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the end of the process lets go of it, however it ends
        _held.append(item.nodeid)
        try:
            return (yield)
        finally:
            _held.clear()
