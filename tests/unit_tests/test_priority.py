"""Selection of tests by priority: `TEST_PRIORITY`, marks, and a report of everything left out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.priority import VARIABLE, TestPriority, parse_level

ROOT = Path(__file__).resolve().parents[2]

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
ALONE = ("-p", "tests.priority", "-c", os.devnull, "--rootdir", ".")
UNMARKED = "def test_unmarked(): pass\n"


@pytest.fixture
def run(tmp_path):
    """A function: what pytest says of two tiny files, with the plugin alone."""
    (tmp_path / "test_levels.py").write_text(EACH_LEVEL)
    (tmp_path / "test_unmarked.py").write_text(UNMARKED)

    def run_pytest(level: str | None, *more: str) -> subprocess.CompletedProcess[str]:
        return pytest_in(tmp_path, level, "-v", *ALONE, *more)

    return run_pytest


def pytest_in(folder: Path, level: str | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE} | {"PYTHONPATH": str(ROOT)}
    if folder != ROOT:
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env=environment | ({} if level is None else {VARIABLE: level}),
        capture_output=True,
        text=True,
        check=False,
    )


NAMES = {"critical": 1, "high": 2, "medium": 3, "unmarked": 3, "low": 4}


@pytest.mark.parametrize(("level", "limit"), [(None, 4), ("", 4), ("high", 2), ("3", 3)], ids=str)
def test_levels_above_are_deselected(run, level, limit):
    done = run(level, "--strict-markers")
    expected = {name for name, number in NAMES.items() if number <= limit}
    assert {name for name in NAMES if f"::test_{name} PASSED" in done.stdout} == expected
    left_out = len(NAMES) - len(expected)
    assert (f"{left_out} deselected" in done.stdout) == (left_out > 0)
    assert "skipped" not in done.stdout
    assert done.returncode == 0


def test_workers_report_deselected_tests_once(run):
    done = run("HIGH", "-p", "xdist.plugin", "-n", "2")
    assert "2 passed, 3 deselected" in done.stdout


@pytest.mark.parametrize("level", ["HUGE", "0", "5"])
def test_a_bad_value_is_one_usage_error(run, level):
    done = run(level)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines == [
        f"ERROR: TEST_PRIORITY={level} is no priority; one of CRITICAL (1), HIGH (2), MEDIUM (3), LOW (4), "
        "or nothing for all"
    ]


@pytest.mark.parametrize("argument", ["", "1", "'HIGH'", "TestPriority.HIGH, TestPriority.LOW"])
def test_a_bad_mark_is_a_usage_error(tmp_path, argument):
    """A level that is no `TestPriority` would compare with it all the same, or not at all."""
    code = f"import pytest\nfrom tests.priority import TestPriority\n@pytest.mark.priority({argument})\n{UNMARKED}"
    (tmp_path / "test_bad.py").write_text(code)
    done = pytest_in(tmp_path, None, *ALONE)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_bad.py::test_unmarked: the priority mark takes one TestPriority" in done.stderr + done.stdout


def test_this_project_selects():
    """The plugin is in place: of this file, whose tests have no mark, nothing is left."""
    this = str(Path(__file__).relative_to(ROOT))
    done = pytest_in(ROOT, "HIGH", this, "--collect-only")
    assert "priorities: CRITICAL, HIGH" in done.stdout
    assert re.search(r"\b(\d+) deselected / 0 selected", done.stdout)


def test_a_level_is_a_name_or_a_number():
    assert [parse_level(str(level.value)) for level in TestPriority] == list(TestPriority)
    assert [parse_level(level.name.lower()) for level in TestPriority] == list(TestPriority)
