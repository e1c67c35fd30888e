"""Running the compiler: one process a source, as many at once as this process may use CPUs."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

_LONGEST_RUN = 600.0  # seconds of one source, on a machine that is busy with other things


class CompileError(Exception):
    """A source does not compile.

    Attributes:
        output: The command, and what it wrote.
    """

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


def compile_library(
    command: Sequence[str], sources: Sequence[Path], folder: Path, name: str, linked: Sequence[str]
) -> None:
    """Compile `sources` and link them to `folder / name`; leaves nothing else there.

    Args:
        command: The compiler with its flags.
        sources: C++ files; those of one name have different folders.
        folder: Empty.
        name: Of the library.
        linked: What the linker is told.

    Raises:
        CompileError: It fails, or takes too long.
    """
    objects = [folder / f"{path.parent.name}-{path.stem}.o" for path in sources]
    waiting = [[*command, "-c", str(path), "-o", str(made)] for path, made in zip(sources, objects, strict=True)]
    _run_all(waiting, folder)
    plain = [flag for flag in command if flag != "-fopenmp"]
    _run_all([[*plain, *map(str, objects), "-o", str(folder / name), *linked]], folder)
    for made in objects:
        made.unlink()


def _run_all(commands: Sequence[Sequence[str]], folder: Path) -> None:
    """Run the commands, a few at once; none is left behind if one fails or this process is interrupted."""
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            if len(running) >= len(os.sched_getaffinity(0)):
                _finish(running[0])
                running.pop(0)
            running.append(_start(command, folder))
        for process in running:
            _finish(process)
    finally:
        for process in running:
            _end(process)


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"LC_ALL": "C"}
    try:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a group of its own: compilers start others
        )
    except OSError as error:
        raise CompileError(f"{shlex.join(command)}\n{error}\n") from None


def _finish(process: subprocess.Popen[str]) -> None:
    assert isinstance(process.args, list), "started with a list"
    shown = shlex.join(process.args)
    try:
        output, _ = process.communicate(timeout=_LONGEST_RUN)
    except subprocess.TimeoutExpired:
        raise CompileError(f"{shown}\nstill running after {_LONGEST_RUN:.0f} s\n") from None
    if process.returncode != 0:
        raise CompileError(f"{shown}\nexit code {process.returncode}\n{output}")


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout is not None, "a pipe"
    process.stdout.close()
