"""Run tests as `make test` does: in parallel, then those with the mark `realtime` by themselves.

    python -m tests.run -n 2 --dist worksteal -- tests/unit_tests/server -k bodies

Options before `--` are for the parallel run only. A test with the mark (tests/realtime.py) that fails runs once more;
if it passes then, the run has passed, and its name is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests import durations, realtime

FAILED, NO_TESTS = 1, 5  # exit codes of pytest


def run_both(pytest: Callable[..., int], parallel: Sequence[str], options: Sequence[str]) -> int:
    """Run both parts and return the exit code of the whole.

    Args:
        pytest: Function that runs pytest with options and environment variables, and returns its exit code.
        parallel: Options of the parallel run only.
        options: Options of both.
    """
    first = pytest(*parallel, *options)
    if first not in (0, FAILED, NO_TESTS):
        return first  # interrupted, or wrong options
    alone = {realtime.VARIABLE: realtime.ONLY}
    second = pytest(*options, **alone)
    if second == FAILED:
        second = pytest("--last-failed", "--last-failed-no-failures", "none", *options, **alone)
    if NO_TESTS in (first, second):
        return min(first, second)
    return first or second


def main() -> int:
    """Run the tests that the command line asks for."""
    middle = sys.argv.index("--")
    with tempfile.TemporaryDirectory() as folder:
        measured = {durations.VARIABLE: str(Path(folder) / "durations.json")}

        def pytest(*options: str, **variables: str) -> int:
            command = [sys.executable, "-m", "pytest", *options]
            return subprocess.call(command, env=os.environ | measured | variables)

        return run_both(pytest, sys.argv[1:middle], sys.argv[middle + 1 :])


if __name__ == "__main__":
    sys.exit(main())
