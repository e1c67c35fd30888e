"""Marks that whole files have, `numbers` and `base`. A pytest plugin.

`-m numbers`, `-m base` and `-m "numbers or base"` import no other files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import base, numbers

MARKS = {numbers.MARK: numbers.compares_numbers, base.MARK: base.depends_on_core}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other files where `-m` asks for nothing but these marks."""
    asked = config.option.markexpr.split(" or ")
    is_needed = not MARKS.keys() >= set(asked) or any(MARKS[mark](collection_path) for mark in asked)
    return True if collection_path.is_file() and not is_needed else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the marks before `-m` selects by them."""
    for item in items:
        for mark, has_mark in MARKS.items():
            if has_mark(item.path):
                item.add_marker(mark)
