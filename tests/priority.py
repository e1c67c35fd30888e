"""Pytest plugin that selects tests by priority: `TEST_PRIORITY` is the lowest one that runs.

`TEST_PRIORITY=HIGH` (or 2) runs CRITICAL and HIGH tests; without it all run. A test, a class or a module has a mark,
`@pytest.mark.priority(TestPriority.CRITICAL)` or `pytestmark = ...`; the closest one counts, and without any a test is
MEDIUM.
"""

from __future__ import annotations

import enum
import os

import pytest

VARIABLE = "TEST_PRIORITY"


class TestPriority(enum.IntEnum):
    """The lower the number, the more important."""

    __test__ = False  # not a class of tests, whatever pytest makes of its name

    CRITICAL = 1
    HIGH = 2
    MEDIUM = 3
    LOW = 4


DEFAULT = TestPriority.MEDIUM
KNOWN = ", ".join(f"{level.name} ({level.value})" for level in TestPriority)


def parse_level(text: str) -> TestPriority:
    """A name in any case, or a number; nothing is all.

    Raises:
        pytest.UsageError: It is neither.
    """
    text = text.strip()
    if not text:
        return max(TestPriority)
    for level in TestPriority:
        if text.upper() in (level.name, str(level.value)):
            return level
    raise pytest.UsageError(f"{VARIABLE}={text} is no priority; one of {KNOWN}, or nothing for all")


def level_of(item: pytest.Item) -> TestPriority:
    """The priority of a test.

    Raises:
        pytest.UsageError: Its mark says something else.
    """
    mark = item.get_closest_marker("priority")
    if mark is None:
        return DEFAULT
    if len(mark.args) != 1 or mark.kwargs or not isinstance(mark.args[0], TestPriority):
        raise pytest.UsageError(f"{item.nodeid}: the priority mark takes one TestPriority, as in TestPriority.HIGH")
    return mark.args[0]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "priority(level): a TestPriority; TEST_PRIORITY in the environment selects")
    parse_level(os.environ.get(VARIABLE, ""))


def pytest_report_header() -> str | None:
    limit = parse_level(os.environ.get(VARIABLE, ""))
    if limit is max(TestPriority):
        return None
    return f"priorities: {', '.join(level.name for level in TestPriority if level <= limit)} ({VARIABLE})"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    limit = parse_level(os.environ.get(VARIABLE, ""))
    levels = [level_of(item) for item in items]
    deselected = [item for item, level in zip(items, levels, strict=True) if level > limit]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item, level in zip(items, levels, strict=True) if level <= limit]
