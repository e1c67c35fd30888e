"""Pytest plugin for the mark `kernels`: tests that take minutes under Triton's interpreter and run only on request.

`make test-kernels` asks for it, as `-m kernels` does; every other run leaves these tests out.
"""

from __future__ import annotations

import pytest

MARK = "kernels"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}: every configuration of a kernel; runs with `-m {MARK}` only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if MARK in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker(MARK)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(MARK)]
