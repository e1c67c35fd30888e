"""The mark `realtime`: tests that depend on real time, such as processes that are killed or time-outs of sockets.

Other tests beside them could decide their result, so they come last. In `make test` tests/workers.py runs each by
itself and repeats a failed one once. A pytest plugin.
"""

from __future__ import annotations

import pytest

MARK = "realtime"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: depends on real time; runs by itself (tests/realtime.py)")


def is_realtime(item: pytest.Item) -> bool:
    """Return whether a test has the mark."""
    return item.get_closest_marker(MARK) is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=is_realtime)  # stable
