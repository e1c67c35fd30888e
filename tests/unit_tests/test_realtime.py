"""TE-8: tests of real time run by themselves at the end, once more if they fail; and each test has a limit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import limits
from tests.run import FAILED, NO_TESTS, run_both
from tests.unit_tests.support.source import ROOT

CONFTEST = """
from tests import limits, realtime

def pytest_configure(config):
    config.addinivalue_line("markers", "long: ...")
    config.pluginmanager.register(realtime)
    config.pluginmanager.register(limits)
"""
TESTS = """
import os, pathlib, pytest

@pytest.mark.realtime
def test_fails_once():
    was_there = pathlib.Path("failed").exists()
    pathlib.Path("failed").touch()
    assert was_there and "PYTEST_XDIST_WORKER" not in os.environ

@pytest.mark.realtime
def test_of_real_time():
    assert "PYTEST_XDIST_WORKER" not in os.environ

def test_in_parallel():
    assert "PYTEST_XDIST_WORKER" in os.environ
"""
HANGS = """
import pytest, threading

@pytest.mark.timeout(0.2)
def test_hangs(): threading.Event().wait(100)
def test_short(request): assert request.node.get_closest_marker("timeout").args == (120,)
@pytest.mark.long
def test_long(request): assert request.node.get_closest_marker("timeout").args == (900,)
"""


def run(folder, tests, *command):
    """Return the exit code and the output of a run over the tests, in a folder of its own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(tests)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_"))}
    plugins = "-p xdist -p pytest_timeout -W ignore -rA"
    variables = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": plugins}
    command = [sys.executable, "-m", *command]
    done = subprocess.run(command, cwd=folder, env=inherited | variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_they_run_alone_and_once_more_if_they_fail(tmp_path):
    code, output = run(tmp_path, TESTS, "tests.run", "-n", "2", "--", ".")
    assert code == 0, output
    parallel, alone, again = output.split(" test session starts ")[1:]
    assert "1 passed" in parallel
    assert "1 failed, 1 passed" in alone
    assert "1 passed" in again
    assert "passed the second time only: test_some.py::test_fails_once" in again


def test_a_test_that_hangs_fails(tmp_path):
    code, output = run(tmp_path, HANGS, "pytest")
    assert code == FAILED
    assert "1 failed, 2 passed" in output
    assert (limits.SECONDS, limits.LONGER["long"]) == (120, 900)


@pytest.mark.parametrize(
    ("codes", "expected", "count"),
    [
        ([0, 0], 0, 2),
        ([NO_TESTS, 0], 0, 2),
        ([0, NO_TESTS], 0, 2),
        ([NO_TESTS, NO_TESTS], NO_TESTS, 2),
        ([FAILED, 0], FAILED, 2),
        ([FAILED, NO_TESTS], FAILED, 2),
        ([0, FAILED, FAILED], FAILED, 3),
        ([FAILED, FAILED, 0], FAILED, 3),
        ([NO_TESTS, FAILED, 0], 0, 3),
        ([2], 2, 1),  # interrupted
    ],
    ids=str,
)
def test_exit_codes(codes, expected, count):
    left = list(codes)
    assert run_both(lambda *_, **__: left.pop(0), ["-n", "2"], []) == expected
    assert len(codes) - len(left) == count
