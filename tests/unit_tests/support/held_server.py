"""`tools/run_server.py` whose first requests stay in progress until they are released, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import Pipe, connection
from pathlib import Path

from tests.forked import fork
from tests.unit_tests.support.holding import PATIENCE, held_steps

TOOLS = Path(__file__).resolve().parents[3] / "tools"


def run_tool(name: str, arguments: Sequence[str], said: Path, log: Path, given: Path | None = None) -> None:
    """Run a script of tools as a user does; output and log are files, and so is the input if there is any."""
    for path, stream in ((said, sys.stdout), (log, sys.stderr)):
        stream.flush()
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream.fileno())
    if given is not None:
        sys.stdin = given.open()
    sys.argv = [str(TOOLS / name), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_held(
    requests: int | None, arguments: Sequence[str], said: Path, log: Path, parent: connection.Connection
) -> None:
    """Run the server's tool, whose steps are held until the parent sends a word."""
    from megatron_ext.server.request_manager import RequestManager

    start, holding = RequestManager.start, contextlib.ExitStack()

    def start_held(manager: RequestManager) -> None:
        start(manager)
        holding.enter_context(held_steps(manager.client, requests))

    def release() -> None:
        parent.recv()
        holding.close()

    RequestManager.start = start_held
    threading.Thread(target=release, daemon=True).start()
    run_tool("run_server.py", arguments, said, log)


class HeldServer:
    """The process, and what it has printed and logged.

    Args:
        folder: Where output and log are written.
        arguments: Arguments of the tool.
        requests: Number of requests that stops the steps, by default all; see `held_steps`.
    """

    def __init__(self, folder: Path, arguments: Sequence[str], requests: int | None = None) -> None:
        self._said, self._log = folder / "said", folder / "log"
        self._said.touch()
        self._log.touch()
        self._child, theirs = Pipe()
        self.process = fork(run_held, requests, arguments, self._said, self._log, theirs)

    def printed(self, pattern: str) -> re.Match[str]:
        """Wait until the output has the pattern."""
        return self._wait_for(self._said, pattern)

    def logged(self, pattern: str) -> re.Match[str]:
        """Wait until the log has the pattern."""
        return self._wait_for(self._log, pattern)

    def release(self) -> None:
        self._child.send("go on")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def log_of_the_end(self) -> str:
        """The whole log of a server that has ended well."""
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0
        return self._log.read_text()

    def _wait_for(self, path: Path, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(pattern, path.read_text())) is None:
            assert self.process.is_alive(), self._log.read_text()
            assert time.monotonic() < deadline, path.read_text()
            time.sleep(0.005)
        return found
