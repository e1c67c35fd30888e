"""CU-8: tests that `make test-gpu` leaves out exist, and no other test of engines and operators is left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import on_device
from tests.unit_tests.support.source import ROOT

UNIT = ROOT / "tests/unit_tests"


def item(name: str, function: str = "test_something", marks: tuple[str, ...] = ()) -> SimpleNamespace:
    facts = {"path": UNIT / name, "name": function, "originalname": function}
    return SimpleNamespace(**facts, get_closest_marker=lambda mark: mark if mark in marks else None)


@pytest.mark.parametrize("name", on_device.HOST)
def test_excluded_tests_exist(name):
    file, _, function = name.partition("::")
    assert f"def {function}" in (UNIT / file).read_text("utf-8")
    assert on_device.why_not(item(file, function or "test_something")) == on_device.HOST[name]


def test_others_run():
    assert on_device.why_not(item("runner/test_structured_output.py")) is None
    assert on_device.why_not(item("ops/test_scans.py")) is None
    assert on_device.why_not(item("parallel/test_worlds.py")) is not None
    assert on_device.why_not(item("mcore/test_ends.py", marks=("worlds",))) == "several ranks need a device each"
