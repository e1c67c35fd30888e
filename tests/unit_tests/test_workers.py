"""TE-8: workers share tests, those of real time run by themselves, once more if they fail; each test has a limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import limits
from tests.unit_tests.support.source import ROOT

CONFTEST = """
from tests import limits, realtime

def pytest_configure(config):
    config.addinivalue_line("markers", "long: ...")
    config.pluginmanager.register(realtime)
    config.pluginmanager.register(limits)
"""
CUDA = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: True))
"""
REALTIME = """
import multiprocessing, os, pathlib, pytest

@pytest.mark.realtime
def test_fails_once():
    was_there = pathlib.Path("failed").exists()
    pathlib.Path("failed").touch()
    assert was_there and pathlib.Path("others").read_text() == "..."

@pytest.mark.realtime
def test_of_real_time():
    assert pathlib.Path("others").read_text() == "..."

@pytest.mark.parametrize("number", range(3))
def test_in_parallel(number):
    assert multiprocessing.parent_process() is not None
    with open("others", "a") as file: file.write(".")
"""
HANGS = """
import pytest, threading

@pytest.mark.timeout(1)
def test_hangs(): threading.Event().wait(100)
def test_short(request): assert request.node.get_closest_marker("timeout").args == (120,)
@pytest.mark.long
def test_long(request): assert request.node.get_closest_marker("timeout").args == (900,)
"""
# The first test waits for others of its half, which only the other worker can run then.
STOLEN = """
import os, pathlib, pytest, threading

@pytest.fixture(scope="module")
def process():
    yield os.getpid()
    with open("torn_down", "a") as file: file.write(f"{os.getpid()} ")

def wait_for(*names):
    while not all(pathlib.Path(name).exists() for name in names): threading.Event().wait(0.01)

@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(12))
def test_some(number, process):
    assert process == os.getpid()
    if number == 0: wait_for("ended4", "ended5")
    pathlib.Path(f"ended{number}").touch()
"""
ENDS = """
import os, sys, warnings
def test_before(): warnings.warn("something odd")
def test_ends_its_process(): os._exit(7)
def test_after(): pass
def test_prints():
    print("said " + "aloud"); os.write(2, b"said by the descriptor")
    assert False
"""
THREADS = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
def test_some(): pass
"""
NEW = """
import os, pytest
collected_by = os.getpid()
@pytest.mark.parametrize("number", range(2))
def test_some(number): assert collected_by == os.getpid()
"""
OTHERS = """
import os, pytest
@pytest.mark.parametrize("process", [os.getpid(), "no process"])
def test_some(process): pass
"""
LEAVES_A_THREAD = """
import threading
from tests import workers
workers.SECONDS_TO_END = 0.1

def test_some(): threading.Thread(target=threading.Event().wait).start()
"""


def run(folder, tests, *options):
    """Return the exit code and the output of a run over the tests, in a folder of its own."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(tests)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TEST_"))}
    plugins = "-p tests.workers -p pytest_timeout -rA"
    variables = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": plugins}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=folder, env=inherited | variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_those_of_real_time_run_alone_and_once_more_if_they_fail(tmp_path):
    code, output = run(tmp_path, REALTIME, "--workers", "2")
    assert code == 0, output
    assert "5 passed" in output
    assert "passed the second time only: test_some.py::test_fails_once\n" in output
    assert "assert was_there" in output.split("second time only")[1]


def test_a_test_that_hangs_fails(tmp_path):
    code, output = run(tmp_path, HANGS, "--workers", "1")
    assert code == 1
    assert "1 failed, 2 passed" in output
    assert "Timeout (>1.0s)" in output
    assert (limits.SECONDS, limits.LONGER["long"]) == (120, 900)


@pytest.mark.parametrize("device", ["", CUDA], ids=["forks", "for CUDA"])
def test_tests_of_a_busy_worker_are_taken_over_and_each_tears_down(tmp_path, device):
    code, output = run(tmp_path, device + STOLEN, "--workers", "2")
    assert code == 0, output
    assert "12 passed" in output
    assert len(set((tmp_path / "torn_down").read_text().split())) == 2


@pytest.mark.parametrize("device", ["", CUDA], ids=["forks", "for CUDA"])
def test_a_process_that_ends_fails_its_test_alone(tmp_path, device):
    code, output = run(tmp_path, device + ENDS, "--workers", "1")
    assert code == 1
    assert "2 failed, 2 passed, 1 warning in" in output
    assert "ended with exit code 7" in output
    assert "UserWarning: something odd" in output
    assert re.search(r"Captured stdout call -+\nsaid aloud\n-+ Captured stderr call -+\nsaid by the descriptor", output)


def test_a_process_that_does_not_end_is_killed(tmp_path):
    code, output = run(tmp_path, LEAVES_A_THREAD, "--workers", "1")
    assert code == 0
    assert "1 passed" in output
    assert "a worker was killed 0.1 s after its last test" in output


def test_nothing_follows_the_first_failure(tmp_path):
    code, output = run(tmp_path, ENDS, "--workers", "1", "-x")
    assert code == 1
    assert "1 failed, 1 passed" in output


def test_processes_of_a_device_share_no_memory_and_collect_the_same(tmp_path):
    """A fork of a process with a CUDA context cannot use the device."""
    code, output = run(tmp_path, CUDA + NEW, "--workers", "2")
    assert code == 0, output
    code, output = run(tmp_path, CUDA + OTHERS, "--workers", "2")
    assert code == 1
    assert "2 failed" in output


def test_threads_that_forks_would_lack(tmp_path):
    code, output = run(tmp_path, THREADS, "--workers", "1")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "forks would lack 1 of the threads of this process" in output
