"""Compiler runs: all sources are compiled in one go, since their includes take most of the time."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

_LONGEST_RUN = 900.0  # seconds, on a machine that is busy with other things


class CompileError(Exception):
    """Failure of the compiler or the linker.

    Attributes:
        output: The command and its output.
    """

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output


def compile_library(
    command: Sequence[str], sources: Sequence[Path], folder: Path, name: str, linked: Sequence[str]
) -> None:
    """Compile `sources` and link them to `folder / name`; leaves nothing else there.

    Args:
        command: Compiler with its flags.
        sources: C++ files that can be included in one file, each in its own namespace.
        folder: Empty folder.
        name: File name of the library.
        linked: Arguments of the linker.

    Raises:
        CompileError: The command fails, or takes too long.
    """
    source, made = folder / "all.cpp", folder / "all.o"
    source.write_text("".join(f'#include "{path}"\n' for path in sources), "utf-8")
    # Names are relative to the folder: its path may go through a handle of this process.
    _run([*command, "-c", source.name, "-o", made.name], folder)
    # OpenMP is not linked: torch has loaded one for the whole process, and a second one would count its threads
    # separately.
    plain = [flag for flag in command if flag != "-fopenmp"]
    _run([*plain, "-shared", made.name, "-o", name, *linked], folder)
    source.unlink()
    made.unlink()


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a command; its process group is killed if this process is interrupted."""
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
        start_new_session=True,  # a separate process group, since compilers start other processes
    )
