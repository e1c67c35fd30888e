"""TE-7: a run ends with its slowest tests and the tests of each package, in CPU and wall seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import SLOWEST

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 0.1
BURN = f"import time\nwhile time.process_time() < {SECONDS}: pass\n"
FILES = {
    "tests/unit_tests/engine/test_engine.py": f"""
import subprocess, sys, time

def test_computes():
    end = time.process_time() + {SECONDS}
    while time.process_time() < end: pass

def test_computes_in_a_child():
    subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
""",
    "tests/unit_tests/engine/wings/test_wings.py": f"""
import pytest, threading

@pytest.fixture
def slow():
    threading.Event().wait({SECONDS})

def test_waits(slow): pass
""",
    "tests/unit_tests/test_house.py": f"""
import pytest

@pytest.mark.parametrize("number", range({SLOWEST}))
def test_quick(number): pass
""",
    "tests/functional_tests/test_golden.py": """
import multiprocessing, os, pytest

def test_fails(): raise AssertionError

@pytest.mark.skip
def test_skipped(): pass

def test_ends_its_process():
    if multiprocessing.parent_process(): os._exit(1)
""",
}
TEST_LINE = re.compile(r"^ *(\d+\.\d\d) +(\d+\.\d\d)  (tests/\S+::\S+)$", re.MULTILINE)
PACKAGE_LINE = re.compile(r"^ *(\d+) +(\d+\.\d\d) +(\d+\.\d)% +(\d+\.\d\d)  (\S+)$", re.MULTILINE)


def run(folder: Path, *arguments: str) -> str:
    """Output of pytest over the files above, with the plugin alone."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    alone = ("-p", "no:cacheprovider", "-p", "tests.durations", "-c", os.devnull, "--rootdir", ".")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--import-mode=importlib", *alone, *arguments],
        cwd=folder,
        env=variables | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize(
    "workers",
    [pytest.param((), marks=pytest.mark.long), ("-p", "tests.workers", "--workers", "2")],
    ids=["one process", "two workers"],
)
def test_tables(tmp_path, workers):
    """The times of workers arrive; computing counts as CPU time, in child processes too, and waiting does not."""
    output = run(tmp_path, *workers)
    lines = [(float(cpu), float(wall), nodeid) for cpu, wall, nodeid in TEST_LINE.findall(output)]
    times = {nodeid.rpartition("::")[2]: (cpu, wall) for cpu, wall, nodeid in lines}
    assert len(lines) == SLOWEST
    assert [wall for _, wall, _ in lines] == sorted((wall for _, wall, _ in lines), reverse=True)
    assert times["test_computes"][0] >= SECONDS
    assert times["test_computes_in_a_child"][0] >= SECONDS
    assert times["test_waits"][0] < SECONDS <= times["test_waits"][1]

    lines = PACKAGE_LINE.findall(output)
    packages = {name: (int(tests), float(cpu), float(wall)) for tests, cpu, _, wall, name in lines}
    assert [float(share) for *_, share, _, name in lines if name == "all"] == [100.0]
    counts = {name: tests for name, (tests, _, _) in packages.items()}
    assert counts == {
        "tests/unit_tests": SLOWEST,
        "tests/unit_tests/engine": 3,
        "tests/functional_tests": 3,
        "all": SLOWEST + 6,
    }
    assert packages["tests/unit_tests/engine"][1] >= 2 * SECONDS
    assert packages["all"][1] >= packages["tests/unit_tests/engine"][1]
    assert f"{SLOWEST} slowest of {SLOWEST + 6} tests" in output


def test_this_project_reports(pytestconfig):
    """The plugin is in place, and `make test` is not so quiet that nothing is printed."""
    assert pytestconfig.pluginmanager.has_plugin("durations")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    command = makefile.partition("\nPYTEST = ")[2].partition("\n\n")[0]
    assert "-p tests.workers" in command
    assert " -q" not in command
    for target in ("test", "test-all"):
        recipe = makefile.partition(f"\n{target}: ")[2].partition("\n\n")[0]
        assert "\t$(PYTEST)" in recipe
        assert " -q" not in recipe
