"""Build of the kernels as one library in the user's cache, once for each source, torch, CPU and compiler.

A build is identified by the content of all its inputs, not by their paths: equal checkouts and environments share it,
and no path of the machine gets into the library. A build happens in a separate directory that is then renamed, so a
library in the cache is always complete. Processes that build wait for each other; the system releases the lock of a
process that ends.

All accesses to the cache use one handle on its directory, which other users can neither write to nor replace
(`trusted_path`). The library of a build is loaded through the handle that was checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.trusted_path import UntrustedPathError, open_directory, open_file

OPS = Path(__file__).parents[1]
LIBRARY = "operators.so"
MAX_BUILDS = 64
"""Builds that are kept, half a megabyte each: those used last. A process keeps the library that it has loaded."""
_WORK = "building"
_RETRY_AFTER = 600.0  # seconds; processes that start together do not all retry a failed build
_LONGEST_RUN = 900.0  # seconds, on a machine that is busy with other things
_PLAIN = {"LC_ALL": "C"}  # output independent of the user's language
# Flags for `at::vec`, by the CPU capability that torch reports; any other CPU gets the portable vectors.
_VECTOR_FLAGS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c -DCPU_CAPABILITY_AVX512",
    "AVX2": "-mavx2 -mfma -mf16c -DCPU_CAPABILITY_AVX2",
}
_FLAGS = "-std=c++20 -O3 -fPIC -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=off -DNDEBUG"
_LINKED = ("-ltorch_cpu", "-lc10", "-Wl,-z,now")
Toolchain = tuple[tuple[str, ...], str]
"""Command of the compiler, as $CXX may give it, wrappers and flags included; and the output of its `--version`."""


class BuildError(Exception):
    """Build failure. The message is one line: the reason, and a remedy."""


class CompileError(Exception):
    """Failure of the compiler or the linker. The message is the command and its output."""


def cache_path() -> Path:
    """Return the directory of builds, in $XDG_CACHE_HOME or ~/.cache."""
    # XDG base directory specification: a relative path counts as unset.
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (home if home.is_absolute() else Path.home() / ".cache") / "megatron_ext" / "operators"


@dataclass(frozen=True)
class Library:
    """Open library file that passed the checks.

    Attributes:
        handle: File descriptor.
        path: Path of the file, for messages.
    """

    handle: int
    path: Path

    def load(self) -> None:
        """Load the library into this process, through the handle, which stays open.

        Raises:
            OSError: The library cannot be loaded.
        """
        # torch.ops.load_library would resolve the link in /proc and open whatever that path then names.
        ctypes.CDLL(f"/proc/self/fd/{self.handle}")

    def close(self) -> None:
        """Close the handle of a library that is not loaded."""
        os.close(self.handle)


class BuildCache:
    """Open cache directory.

    Attributes:
        path: Path of the directory, for messages.
        folder: The same directory as a path through its handle, valid in this process and until `close`.
    """

    def __init__(self, path: Path) -> None:
        """Open the directory; created if missing.

        Raises:
            UntrustedPathError: Another user may have written a part of the path.
            OSError: The directory cannot be opened or created.
        """
        self._handle = open_directory(path)
        self.path = path
        self.folder = Path(f"/proc/self/fd/{self._handle}")

    def __enter__(self) -> BuildCache:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def find(self, key: str) -> Library | None:
        """Open a build's library, which counts as a use; None if it is not in the cache.

        Raises:
            UntrustedPathError: Another user may have written the library.
            OSError: The library cannot be opened.
        """
        try:
            handle = open_file(self._handle, f"{key}/{LIBRARY}")
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # the cache may be root's, filled in advance
            os.utime(key, dir_fd=self._handle)
        return Library(handle, self.path / key / LIBRARY)

    @contextlib.contextmanager
    def lock(self, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the exclusive lock of all builds; it is released when this process ends, however it ends."""
        handle = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._handle)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another process that compiles the operators")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def build(self, key: str) -> Iterator[Path]:
        """Give an empty folder for a library, and move it into the build's place at the end; needs the lock."""
        work = self.folder / _WORK
        shutil.rmtree(work, ignore_errors=True)  # left by a killed process
        builds = [path for path in self.folder.iterdir() if path.is_dir() and path.name != key]
        builds.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for unused in builds[MAX_BUILDS - 1 :]:
            shutil.rmtree(unused, ignore_errors=True)
        work.mkdir(0o700)
        try:
            yield work
            (work / LIBRARY).chmod(0o700)  # the linker obeys the umask, which may let a group write
            # A removal that was interrupted leaves a folder without its library, which no rename replaces.
            shutil.rmtree(self.folder / key, ignore_errors=True)
            os.rename(_WORK, key, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def compiler() -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: $CXX, or the first one installed; None if there is no compiler."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [["c++"], ["g++"], ["clang++"]]
    return next((tuple(command) for command in candidates if shutil.which(command[0])), None)


def sources() -> list[Path]:
    """Return the kernels' source files, sorted by operator name."""
    return sorted(OPS.glob("*/*.cpp"))


def open_library(say: Callable[[str], None]) -> Library:
    """Open the library for this machine, compiled if it is not in the cache.

    Args:
        say: Receives a message when something takes long.

    Raises:
        BuildError: There is no compiler, it fails, the cache cannot be written, or others can write to it.
    """
    tools = toolchain()
    key = build_key(tools)
    path = cache_path()
    try:
        with BuildCache(path) as cache:
            library = cache.find(key)
            if library is None:
                with cache.lock(say):
                    library = cache.find(key)
                    if library is None:
                        _build(tools, cache, key, say)
                        library = cache.find(key)
            assert library is not None, "only a process with the lock removes builds"
            return library
    except UntrustedPathError as error:
        raise BuildError(f"{error} (set XDG_CACHE_HOME)") from None
    except OSError as error:
        named = str(error.filename or "")
        place = path if named.startswith("/proc/self/fd/") else path / named
        raise BuildError(f"{place}: {error.strerror}; set XDG_CACHE_HOME to another directory") from None


def toolchain() -> Toolchain:
    """Return the command of this machine's C++ compiler, and its output about its version.

    Raises:
        BuildError: This machine has no compiler.
    """
    command = compiler()
    if command is None:
        named = os.environ.get("CXX")
        problem = f"CXX={named} does not exist" if named else "there is no C++ compiler (c++, g++, clang++)"
        raise BuildError(f"{problem}; install one, or set CXX to one")
    version = [*command, "--version"]
    asked = subprocess.run(version, capture_output=True, text=True, check=False, env=os.environ | _PLAIN)
    if asked.returncode != 0:
        raise BuildError(f"{shlex.join(version)}: exit code {asked.returncode}")
    return command, asked.stdout


def _flags() -> tuple[str, ...]:
    """Return the flags that affect the result, for the CPU that torch reports."""
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = _VECTOR_FLAGS.get(capability, "")
    name = capability if vectors else "DEFAULT"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return (*_FLAGS.split(), *vectors.split(), f"-DCPU_CAPABILITY={name}", abi)


def _folders() -> tuple[str, ...]:
    """Return the flags that name folders, whose content the sources and torch's version determine."""
    headers = Path(torch.__file__).parent / "include"
    # __FILE__, which every TORCH_CHECK keeps, must not depend on where the package and torch are installed.
    mapped = (f"-ffile-prefix-map={OPS}=megatron_ext/ops", f"-ffile-prefix-map={headers}=torch/include")
    return (f"-isystem{headers}", f"-isystem{headers / 'torch/csrc/api/include'}", f"-I{OPS / 'cpp'}", *mapped)


def build_key(tools: Toolchain) -> str:
    """Return the digest of all build inputs: sources, torch, compiler, flags, machine; independent of folders."""
    digest = hashlib.sha256()
    for path in [*sources(), *sorted(OPS.glob("*/*.h"))]:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(OPS).as_posix()} {len(content)}\n".encode() + content)
    # A compiler is identified by its version; of a wrapper's command line, names and flags count.
    found, version = tools
    command = [word if word.startswith("-") else Path(word).name for word in found]
    lines = [line for line in version.splitlines() if not line.startswith("InstalledDir:")]  # of clang
    linked = (platform.machine(), torch.__version__, torch.version.git_version, *_LINKED)
    digest.update(repr((command, lines, _flags(), linked)).encode())
    return digest.hexdigest()[:24]


def _build(tools: Toolchain, cache: BuildCache, key: str, say: Callable[[str], None]) -> None:
    """Compile in a folder of the cache, which becomes the build; the lock is held."""
    log, shown = cache.folder / f"{key}.log", cache.path / f"{key}.log"
    if log.exists() and 0 <= time.time() - log.stat().st_mtime < _RETRY_AFTER:
        raise BuildError(f"compiling the operators failed before, see {shown}; delete that file to try again")
    began = time.monotonic()
    say("compiling the operators for this CPU, once: about half a minute")
    with cache.build(key) as work:
        try:
            compile_library([*tools[0], *_flags(), *_folders()], sources(), work)
        except CompileError as error:
            log.write_text(str(error), "utf-8")
            raise BuildError(f"the operators could not be compiled, see {shown}") from None
    log.unlink(missing_ok=True)
    say(f"compiled the operators in {time.monotonic() - began:.0f} s: {cache.path / key}")


def compile_library(command: Sequence[str], files: Sequence[Path], folder: Path) -> None:
    """Compile all files in one go, since their includes take most of the time, and link the library.

    Args:
        command: Compiler with its flags.
        files: C++ files that can be included in one file, each in its own namespace.
        folder: Empty folder, in which nothing but the library is left.

    Raises:
        CompileError: The command fails, or takes too long.
    """
    source, made = folder / "all.cpp", folder / "all.o"
    source.write_text("".join(f'#include "{path}"\n' for path in files), "utf-8")
    # Names are relative to the folder: its path may go through a handle of this process.
    _run([*command, "-c", source.name, "-o", made.name], folder)
    # OpenMP is not linked: torch has loaded one for the whole process, and a second one would count its threads
    # separately.
    plain = [flag for flag in command if flag != "-fopenmp"]
    libraries = f"-L{Path(torch.__file__).parent / 'lib'}"
    _run([*plain, "-shared", made.name, "-o", LIBRARY, libraries, *_LINKED], folder)
    source.unlink()
    made.unlink()


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a command; its process group is killed if this process is interrupted."""
    shown = shlex.join(command)
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | _PLAIN,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a separate process group, since compilers start other processes
        )
    except OSError as error:
        raise CompileError(f"{shown}\n{error}\n") from None
    with process:
        try:
            output, _ = process.communicate(timeout=_LONGEST_RUN)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{shown}\nstill running after {_LONGEST_RUN:.0f} s\n") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise CompileError(f"{shown}\nexit code {process.returncode}\n{output}")
