"""Fixtures of tests of KV events."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory of mode 0700 whose path leaves room for a socket's name; pytest's may be longer than 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)
