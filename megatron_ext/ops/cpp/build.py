"""Compiling the kernels into one library in the user's cache, once for each source, torch, CPU and compiler.

A build happens in a folder of its own and is renamed into its place, so that whoever sees a library sees a whole one.
Processes that need the same build wait for the one that makes it; its lock is the kernel's and dies with its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.ops.cpp.compilation import CompileError, compile_library

OPS = Path(__file__).parents[1]
_NAME = "operators.so"
_KEPT = 8  # builds in the cache, the ones used last
_RETRY_AFTER = 600.0  # seconds; processes that start together do not all try what has just failed
# What `at::vec` is compiled for, by what torch says of the CPU; anything else gets the portable vectors.
_VECTOR_FLAGS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c -DCPU_CAPABILITY_AVX512",
    "AVX2": "-mavx2 -mfma -mf16c -DCPU_CAPABILITY_AVX2",
}
_FLAGS = "-std=c++20 -O3 -fPIC -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=off -DNDEBUG"


class BuildError(Exception):
    """There is no library. The message is one line: why, and what would help."""


@dataclass(frozen=True)
class Toolchain:
    """What turns sources into a library.

    Attributes:
        command: The compiler with its flags.
        version: What it says of itself.
    """

    command: tuple[str, ...]
    version: str


def compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler: $CXX, or the first one there is."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [["c++"], ["g++"], ["clang++"]]
    return next((tuple(command) for command in candidates if shutil.which(command[0])), None)


def sources() -> list[Path]:
    """The kernels, in order of their operators' names."""
    return sorted(OPS.glob("*/*.cpp"))


def library_file(say: Callable[[str], None]) -> Path:
    """The library for this machine, compiled if it is not in the cache.

    Args:
        say: Told when something takes long.

    Raises:
        BuildError: There is no compiler, it fails, or the cache cannot be written.
    """
    tools = toolchain()
    key = build_key(tools)
    try:
        folder = cache_folder()
        place = folder / key
        if not (place / _NAME).exists():
            with locked(folder / f"{key}.lock", say):
                if not (place / _NAME).exists():
                    _build(tools, place, say)
        os.utime(place)  # used last: now
    except OSError as error:
        raise BuildError(f"{error.filename}: {error.strerror}; XDG_CACHE_HOME names another place for caches") from None
    return place / _NAME


def toolchain() -> Toolchain:
    """The compiler of this machine, told what torch says of the CPU.

    Raises:
        BuildError: There is none.
    """
    command = compiler()
    if command is None:
        named = os.environ.get("CXX")
        problem = f"CXX={named} is not there" if named else "there is no C++ compiler (c++, g++, clang++)"
        raise BuildError(f"{problem}; with one, operators are compiled once")
    asked = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise BuildError(f"{shlex.join(command)} --version: exit code {asked.returncode}")
    return Toolchain((*command, *_flags()), asked.stdout)


def _flags() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = _VECTOR_FLAGS.get(capability, "")
    headers = Path(torch.__file__).parent / "include"
    include = [f"-isystem{headers}", f"-isystem{headers / 'torch/csrc/api/include'}", f"-I{OPS / 'cpp'}"]
    name = capability if vectors else "DEFAULT"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [*_FLAGS.split(), *vectors.split(), f"-DCPU_CAPABILITY={name}", abi, *include]


def build_key(tools: Toolchain) -> str:
    """Of everything that a build is made of: sources, torch, compiler, flags, machine."""
    digest = hashlib.sha256()
    for path in [*sources(), *sorted(OPS.glob("*/*.h"))]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(OPS)} {len(content)}\n".encode() + content)
    about = (torch.__version__, torch.version.git_version, platform.machine(), tools.version, *tools.command)
    digest.update(repr(about).encode())
    return digest.hexdigest()[:24]


def cache_folder() -> Path:
    """Where builds are kept; made if missing.

    Raises:
        BuildError: It belongs to somebody else, or others may write there: what lies there would run as us.
    """
    # The XDG base directory specification: a path that is not absolute counts as none.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (home if home.is_absolute() else Path.home() / ".cache") / "megatron_ext" / "operators"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise BuildError(f"{folder} is not this user's alone to write; XDG_CACHE_HOME names another place for caches")
    return folder


@contextlib.contextmanager
def locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock; it is gone with this process, however that ends."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process, which compiles the operators")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _build(tools: Toolchain, place: Path, say: Callable[[str], None]) -> None:
    """Compile in a folder beside `place`, and rename it; the lock is ours."""
    log = place.with_suffix(".log")
    if log.exists() and 0 <= time.time() - log.stat().st_mtime < _RETRY_AFTER:
        raise BuildError(f"compiling the operators has failed before, see {log}; without that file it is tried again")
    for left in place.parent.glob(f"{place.name}.building-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{place.name}.building-", dir=place.parent))
    try:
        began = time.monotonic()
        say("compiling the operators for this CPU, once; half a minute or so")
        compile_library(tools.command, sources(), work, _NAME, _linked())
        _remove_oldest(place.parent)
        work.rename(place)
        log.unlink(missing_ok=True)
        say(f"compiled the operators in {time.monotonic() - began:.0f} s: {place}")
    except CompileError as error:
        log.write_text(error.output, "utf-8")
        raise BuildError(f"the operators could not be compiled, see {log}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _linked() -> list[str]:
    libraries = Path(torch.__file__).parent / "lib"
    return [f"-L{libraries}", "-ltorch_cpu", "-lc10", "-Wl,-z,now"]


def _remove_oldest(folder: Path) -> None:
    """Leave room for one more build; who has an old one loaded keeps it."""
    whole = (library for library in folder.glob(f"*/{_NAME}") if not library.parent.suffix)
    builds = sorted(whole, key=_used)
    for library in builds[: max(len(builds) - _KEPT + 1, 0)]:
        shutil.rmtree(library.parent, ignore_errors=True)
        library.parent.with_suffix(".lock").unlink(missing_ok=True)


def _used(library: Path) -> float:
    """When; long ago if another process has just removed it."""
    try:
        return library.parent.stat().st_mtime
    except FileNotFoundError:
        return 0.0
