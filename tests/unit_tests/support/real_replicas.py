"""Replicas that compute: `tools/run_server.py` in processes of their own, forked from one that has imported it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing import context
from pathlib import Path

from tests.forked import fork

PATIENCE = 60.0  # seconds for a model to be there


def serve(flags: list[str], said: str) -> None:
    """Run a server that writes its ready line into a file."""
    from megatron_ext.commands import serve

    with open(said, "w", buffering=1) as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        serve.main([*flags, "--port", "0", "--no-access-log"])


@dataclass
class RealReplica:
    """A process, and where it listens."""

    process: context.Process
    said: Path
    url: str = ""

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.url:
            text = self.said.read_text() if self.said.exists() else ""
            ready = [line for line in text.splitlines() if line.startswith("ready: ")]
            self.url = ready[0].removeprefix("ready: ") if ready else ""
            assert time.monotonic() < deadline, f"the replica does not start: {text}"
            assert self.url or self.process.is_alive(), text
            time.sleep(0.02)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def start(folder: Path, *flags: str) -> RealReplica:
    """Start a replica and return it at once, before it is ready."""
    said = folder / f"replica{len(list(folder.iterdir()))}"
    said.touch()
    return RealReplica(fork(serve, list(flags), str(said)), said)
