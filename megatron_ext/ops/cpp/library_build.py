"""Build of the kernels as one library in the user's cache, once for each source, torch, CPU and compiler.

A build is identified by the content of all its inputs, not by their paths: equal checkouts and environments share it,
and no path of the machine gets into the library. A build happens in a separate directory that is then renamed, so a
library in the cache is always complete. Processes that need the same build wait for the first one to finish it; the
kernel holds its lock, which ends with the process.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.ops.cpp.build_cache import LIBRARY, BuildCache, Library, cache_path
from megatron_ext.ops.cpp.compilation import CompileError, compile_library
from megatron_ext.trusted_path import UntrustedPathError

OPS = Path(__file__).parents[1]
_RETRY_AFTER = 600.0  # seconds; processes that start together do not all retry a failed build
# Flags for `at::vec`, by the CPU capability that torch reports; any other CPU gets the portable vectors.
_VECTOR_FLAGS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c -DCPU_CAPABILITY_AVX512",
    "AVX2": "-mavx2 -mfma -mf16c -DCPU_CAPABILITY_AVX2",
}
_FLAGS = "-std=c++20 -O3 -fPIC -fopenmp -fno-math-errno -fno-trapping-math -ffp-contract=off -DNDEBUG"
_LINKED = ("-ltorch_cpu", "-lc10", "-Wl,-z,now")


class BuildError(Exception):
    """Build failure. The message is one line: the reason, and a remedy."""


@dataclass(frozen=True)
class Toolchain:
    """Compiler and flags that build the library.

    Attributes:
        compiler: Command of the compiler, as $CXX may give it: wrappers and flags included.
        version: Output of `--version`.
        flags: Flags that affect the result.
        folders: Flags that name folders of this machine, whose content the sources and torch's version determine.
    """

    compiler: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    folders: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """Full command of the compiler, with all flags."""
        return (*self.compiler, *self.flags, *self.folders)


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
                with cache.lock(key, say):
                    library = cache.find(key) or _build(tools, cache, key, say)
            return library
    except UntrustedPathError as error:
        raise BuildError(f"{error} (set XDG_CACHE_HOME)") from None
    except OSError as error:
        named = str(error.filename or "")
        place = path if named.startswith("/proc/self/fd/") else path / named
        raise BuildError(f"{place}: {error.strerror}; set XDG_CACHE_HOME to another directory") from None


def toolchain() -> Toolchain:
    """Return the compiler of this machine, with flags for the CPU that torch reports.

    Raises:
        BuildError: This machine has no compiler.
    """
    command = compiler()
    if command is None:
        named = os.environ.get("CXX")
        problem = f"CXX={named} does not exist" if named else "there is no C++ compiler (c++, g++, clang++)"
        raise BuildError(f"{problem}; install one, or set CXX to one")
    plain = os.environ | {"LC_ALL": "C"}  # output independent of the user's language
    asked = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False, env=plain)
    if asked.returncode != 0:
        raise BuildError(f"{shlex.join(command)} --version: exit code {asked.returncode}")
    return Toolchain(command, asked.stdout, _flags(), _folders())


def _flags() -> tuple[str, ...]:
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = _VECTOR_FLAGS.get(capability, "")
    name = capability if vectors else "DEFAULT"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return (*_FLAGS.split(), *vectors.split(), f"-DCPU_CAPABILITY={name}", abi)


def _folders() -> tuple[str, ...]:
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
    command = [word if word.startswith("-") else Path(word).name for word in tools.compiler]
    version = [line for line in tools.version.splitlines() if not line.startswith("InstalledDir:")]  # of clang
    linked = (platform.machine(), torch.__version__, torch.version.git_version, *_LINKED)
    digest.update(repr((command, version, tools.flags, linked)).encode())
    return digest.hexdigest()[:24]


def _build(tools: Toolchain, cache: BuildCache, key: str, say: Callable[[str], None]) -> Library:
    """Compile in a folder of the cache and publish the result; the build's lock is held."""
    log = f"{key}.log"
    if _has_failed_lately(cache.folder / log):
        shown = cache.path / log
        raise BuildError(f"compiling the operators failed before, see {shown}; delete that file to try again")
    began = time.monotonic()
    say("compiling the operators for this CPU, once: about half a minute")
    with cache.work_folder(key) as work:
        try:
            compile_library(tools.command, sources(), work, LIBRARY, _linked())
        except CompileError as error:
            (cache.folder / log).write_text(error.output, "utf-8")
            raise BuildError(f"the operators could not be compiled, see {cache.path / log}") from None
        cache.publish(work, key)
    (cache.folder / log).unlink(missing_ok=True)
    say(f"compiled the operators in {time.monotonic() - began:.0f} s: {cache.path / key}")
    library = cache.find(key)
    if library is None:
        raise BuildError(f"{cache.path / key} was removed right after the build; start again")
    return library


def _has_failed_lately(log: Path) -> bool:
    return log.exists() and 0 <= time.time() - log.stat().st_mtime < _RETRY_AFTER


def _linked() -> list[str]:
    return [f"-L{Path(torch.__file__).parent / 'lib'}", *_LINKED]
