"""Running the compiler: all sources in one go, since what they include takes most of the time."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

_LONGEST_RUN = 900.0  # seconds, on a machine that is busy with other things


class CompileError(Exception):
    """The compiler or the linker fails.

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
        sources: C++ files that can be parts of one, each with a namespace of its own.
        folder: Empty.
        name: Of the library.
        linked: What the linker is told.

    Raises:
        CompileError: It fails, or takes too long.
    """
    source, made = folder / "all.cpp", folder / "all.o"
    source.write_text("".join(f'#include "{path}"\n' for path in sources), "utf-8")
    # Names are relative to the folder: its path may be one through a handle of this process.
    _run([*command, "-c", source.name, "-o", made.name], folder)
    # No OpenMP is linked: torch has loaded one for the whole process, and a second one would count threads for itself.
    plain = [flag for flag in command if flag != "-fopenmp"]
    _run([*plain, "-shared", made.name, "-o", name, *linked], folder)
    source.unlink()
    made.unlink()


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a command; neither it nor what it started is left behind if this process is interrupted."""
    try:
        process = _start(command, folder)
    except OSError as error:
        raise CompileError(f"{shlex.join(command)}\n{error}\n") from None
    with process:
        try:
            output, _ = process.communicate(timeout=_LONGEST_RUN)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{shlex.join(command)}\nstill running after {_LONGEST_RUN:.0f} s\n") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise CompileError(f"{shlex.join(command)}\nexit code {process.returncode}\n{output}")


def _start(command: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own: compilers start others
    )
