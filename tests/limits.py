"""Time limits of tests: a test that hangs fails, with the stacks of its threads. A pytest plugin.

A limit only has to be longer than any test takes on a busy machine, and shorter than a maintainer's patience. Marks of
long tests have longer limits; a test's own mark `timeout(SECONDS)`, of pytest-timeout, counts before these.
"""

from __future__ import annotations

import pytest

SECONDS = 120
LONGER = {"long": 900, "worlds": 900, "kernels": 3600, "versions": 3600, "ray": 3600, "published": 1800, "soak": 7200}
"""Seconds by mark."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout") is None:
            marks = [seconds for mark, seconds in LONGER.items() if item.get_closest_marker(mark)]
            item.add_marker(pytest.mark.timeout(max(marks, default=SECONDS)))
