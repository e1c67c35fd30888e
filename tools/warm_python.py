"""Interpreter that has imported modules, and runs pytest in forks of itself.

    python tools/warm_python.py MODULE...

Each line of standard input is a JSON object: `options` of pytest, additional `environment` variables, an `output` file
for both streams, and a `timeout` in seconds, or null. Each is answered by two lines: the id of the fork, which leads a
session of its own, and its exit code, null if it was killed. Importing takes most of the time of a short test. The
modules must start no threads, since a fork has only the thread that made it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
from typing import Any


def run(options: list[str], environment: dict[str, str], output: str) -> int:
    """Run pytest in this process and return its exit code."""
    os.setsid()
    for stream, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        file = os.open(path, flags)
        os.dup2(file, stream)
        os.close(file)
    os.dup2(1, 2)
    os.environ.update(environment)
    sys.argv = ["pytest", *options]
    import pytest

    return int(pytest.main(options))


def wait(child: int, timeout: float | None) -> int | None:
    """Wait for a process, kill its children, and return its exit code, or None if it had to be killed itself."""
    file = os.pidfd_open(child)
    has_ended, _, _ = select.select([file], [], [], timeout)
    os.close(file)
    os.kill(child, signal.SIGKILL)  # a process that has ended keeps its id until it is waited for
    with contextlib.suppress(ProcessLookupError):  # it has no session yet
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if has_ended else None


def main() -> None:
    """Import, and serve standard input until its end."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "forks would lack a thread"
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        timeout = asked.pop("timeout")
        child = os.fork()
        if child == 0:
            sys.exit(run(**asked))
        print(child, flush=True)
        print(json.dumps(wait(child, timeout)), flush=True)


if __name__ == "__main__":
    main()
