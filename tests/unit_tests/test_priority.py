"""Selection of tests by priority: `TEST_PRIORITY`, marks, and a report of everything left out."""

from __future__ import annotations

import pytest

from tests.priority import VARIABLE, TestPriority, level_of

EACH_LEVEL = """
import pytest
from tests.priority import TestPriority

pytestmark = pytest.mark.priority(TestPriority.HIGH)

def test_high(): pass

@pytest.mark.priority(TestPriority.CRITICAL)
def test_critical(): pass

@pytest.mark.priority(TestPriority.LOW)
class TestLow:
    def test_low(self): pass

    @pytest.mark.priority(TestPriority.MEDIUM)
    def test_medium(self): pass
"""
CONFTEST = """
from tests import priority

def pytest_configure(config):
    config.pluginmanager.register(priority)
"""
UNMARKED = "def test_unmarked(): pass\n"
pytest_plugins = "pytester"


@pytest.fixture
def run(pytester, monkeypatch):
    """A function: what pytest says of two tiny files, with the plugin alone."""
    pytester.makepyfile(test_levels=EACH_LEVEL, test_unmarked=UNMARKED)
    pytester.makeconftest(CONFTEST)

    def run_pytest(level: str | None, *more: str) -> pytest.RunResult:
        set_level(monkeypatch, level)
        return pytester.runpytest_inprocess("-v", *more)

    return run_pytest


def set_level(monkeypatch: pytest.MonkeyPatch, level: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if level is not None:
        monkeypatch.setenv(VARIABLE, level)


NAMES = {"critical": 1, "high": 2, "medium": 3, "unmarked": 3, "low": 4}


@pytest.mark.parametrize(("level", "limit"), [(None, 4), ("", 4), ("high", 2), ("3", 3)], ids=str)
def test_levels_above_are_deselected(run, level, limit):
    done = run(level, "--strict-markers")
    output = done.stdout.str()
    expected = {name for name, number in NAMES.items() if number <= limit}
    assert {name for name in NAMES if f"::test_{name} PASSED" in output} == expected
    left_out = len(NAMES) - len(expected)
    assert (f"{left_out} deselected" in output) == (left_out > 0)
    assert "skipped" not in output
    assert done.ret == 0


@pytest.mark.parametrize("level", ["HUGE", "0", "5"])
def test_a_bad_value_is_one_usage_error(run, level):
    done = run(level)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in done.stderr.lines if line.strip()]
    assert lines == [
        f"ERROR: TEST_PRIORITY={level} is no priority; one of CRITICAL (1), HIGH (2), MEDIUM (3), LOW (4), "
        "or nothing for all"
    ]


def test_this_project_selects(pytestconfig, request):
    """The plugin is in place, and tests of this file have no mark."""
    assert pytestconfig.pluginmanager.has_plugin("priority")
    assert level_of(request.node) is TestPriority.MEDIUM
