"""The mark `realtime`: tests that depend on real time, such as processes that are killed or time-outs of sockets.

Other tests beside them could decide their result. pytest-xdist's workers therefore leave them out, and a run in one
process has them last; with `TEST_REALTIME=only` in the environment it has nothing else, and imports no other files.
With `TEST_REALTIME=too` workers run them like others. `tests/run.py`, which `make test` calls, runs them by themselves
at the end, and those that fail once more. A pytest plugin.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

MARK = "realtime"
VARIABLE, ONLY, TOO = "TEST_REALTIME", "only", "too"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: depends on real time; runs by itself (tests/realtime.py)")


def has_nothing_else() -> bool:
    """Return whether no other tests are to run."""
    return os.environ.get(VARIABLE) == ONLY


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if not (has_nothing_else() and collection_path.is_file() and collection_path.name.startswith("test_")):
        return None
    return MARK not in collection_path.read_text("utf-8") or None


def is_realtime(item: pytest.Item) -> bool:
    """Return whether a test has the mark."""
    return item.get_closest_marker(MARK) is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=is_realtime)  # stable
    if has_nothing_else():
        left_out = [item for item in items if not is_realtime(item)]
    elif hasattr(config, "workerinput") and os.environ.get(VARIABLE) != TOO:  # a worker of pytest-xdist
        left_out = [item for item in items if is_realtime(item)]
    else:
        return
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that have passed in a second run only."""
    if has_nothing_else() and config.getoption("lf"):
        for report in terminalreporter.getreports("passed"):
            terminalreporter.write_line(f"passed the second time only: {report.nodeid}", yellow=True)
