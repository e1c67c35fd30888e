"""Start of whole commands: seconds, and memory of their processes."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.baseline.turns import checkouts
from benchmarks.cases import Figure, Run, case

MIB = 1024.0
PROGRAM = (sys.executable, "-m", "megatron_ext")
PROMPT = ("run", "--prompts", "A list is", "--num-tokens-to-generate", "1")
Start = tuple[float, float]
"""Seconds, and the largest resident memory in MiB."""


def _started(checkout: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.Popen(words, cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def whole(checkout: Path, *words: str) -> Start:
    """Run a command to its end."""
    begun = time.perf_counter()
    process = _started(checkout, *words)
    assert process.stdout is not None
    process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with exit code {process.returncode}")
    return time.perf_counter() - begun, used.ru_maxrss / MIB


def until_ready(checkout: Path) -> Start:
    """Start a server; stop it when it accepts requests."""
    begun = time.perf_counter()
    process = _started(checkout, *PROGRAM, "serve", "--port", "0")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"ready:"):
            seconds = time.perf_counter() - begun
            lines = Path(f"/proc/{process.pid}/status").read_text("utf-8").splitlines()
            (memory,) = (int(one.split()[1]) / MIB for one in lines if one.startswith("VmHWM:"))
            process.send_signal(signal.SIGTERM)
            process.wait()
            return seconds, memory
    raise RuntimeError(f"the server ended with exit code {process.wait()}")


STARTS: dict[str, Callable[[Path], Start]] = {
    "import megatron_ext": lambda checkout: whole(checkout, sys.executable, "-c", "import megatron_ext"),
    "megatron-ext --version": lambda checkout: whole(checkout, *PROGRAM, "--version"),
    "megatron-ext run, one token": lambda checkout: whole(checkout, *PROGRAM, *PROMPT),
    "megatron-ext serve, until ready": until_ready,
}


@case("baseline", quick={"turns": 1})
def start(run: Run, turns: int = 5, others: tuple = ("",)) -> None:
    """Seconds and memory of commands with the embedded model; checkouts take turns, and a turn before warms up."""
    paths = checkouts(others)
    for name, begin in STARTS.items():
        taken: dict[str, list[Start]] = {one: [] for one in paths}
        for turn in range(turns + 1):
            for one, path in paths.items():
                found = begin(path)
                taken[one] += [found] if turn else []
        figures: dict[str, Figure] = {}
        for one, starts in taken.items():
            figures[f"{one}, s"] = statistics.median(seconds for seconds, _ in starts)
            figures[f"{one}, MiB"] = statistics.median(memory for _, memory in starts)
        run.row(name, figures)
