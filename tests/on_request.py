"""Pytest plugin for marks of tests that run only where `-m` names them: `long`, `kernels` and others.

`make test` leaves out all of them, whatever else its `-m` asks for; `make test-all` adds those marked long and those
marked published, `make test-kernels`, `make test-versions`, `make test-ray`, `make test-published` and `make soak` run
the others: soak tests are campaigns, and the rest of large matrices. A test that starts several ranks (mark
`worlds`, tests/worlds.py) is long without saying so, unless it is marked soak, or a smoke test:
`@pytest.mark.worlds(smoke=True)`.

With `LONG_SEED=seed`, as in `.ci/run`, a third of the long tests of a run stay, chosen by the seed and their names.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Container, Iterable

import pytest

LONG, SOAK = "long", "soak"
MARKS = (LONG, "kernels", "versions", "ray", "published", SOAK)
SEED = "LONG_SEED"
SHARE = 1 / 3
"""Share of the long tests that run where `LONG_SEED` is set."""


def long_except(
    kept: Container[object], values: Iterable[object], long: Container[object] | None = None
) -> list[object]:
    """Return arguments of `parametrize`, tuples where it has several names.

    Args:
        kept: Values whose tests always run.
        values: All values; their tests are long unless they are kept.
        long: Values whose tests are long; those of the others are soak tests then.
    """
    return [
        value if value in kept else _marked(value, LONG if long is None or value in long else SOAK) for value in values
    ]


def _marked(value: object, mark: str) -> object:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=getattr(pytest.mark, mark))


def is_named(mark: str, expression: str) -> bool:
    """Return whether an expression of `-m` names a mark."""
    return re.search(rf"\b{mark}\b", expression) is not None


def is_long_world(item: pytest.Item) -> bool:
    """Return whether a test starts several ranks and is neither a smoke test nor a soak test."""
    mark = item.get_closest_marker("worlds")
    return mark is not None and not mark.kwargs.get("smoke", False) and item.get_closest_marker(SOAK) is None


ARE_LONG = pytest.StashKey[dict[str, bool]]()  # by the id of each test that was collected, also of those left out


def is_in_sample(item: pytest.Item) -> bool:
    """Return whether a test is not long, or in the sample of long tests, which are all of them without a seed."""
    seed = os.environ.get(SEED)
    if not seed or item.get_closest_marker(LONG) is None:
        return True
    return random.Random(f"{seed} {item.nodeid}").random() < SHARE


def pytest_report_header() -> str | None:
    """Say that long tests are left out."""
    seed = os.environ.get(SEED)
    return f"long tests: {SHARE:.0%} of them, by {SEED}={seed}" if seed else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unnamed = [mark for mark in MARKS if not is_named(mark, config.option.markexpr)]
    kept, left_out = [], []
    for item in items:
        if is_long_world(item):
            item.add_marker(LONG)
        is_kept = all(item.get_closest_marker(mark) is None for mark in unnamed) and is_in_sample(item)
        (kept if is_kept else left_out).append(item)
    config.stash[ARE_LONG] = {item.nodeid: item.get_closest_marker(LONG) is not None for item in items}
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
