"""The C++ of the fake device, compiled once for each version of it, of torch and of the compiler.

It has to be loaded before torch is imported, since torch asks only once whether there is a device. So nothing here
imports torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = "-std=c++20 -O1 -fPIC -shared -DNDEBUG"
_LONGEST_RUN = 300.0  # seconds


def why_not() -> str | None:
    """Why there can be no fake device in this environment; None if there can."""
    if "+cpu" not in _torch_version() and _has_cuda():
        return f"torch {_torch_version()} has kernels of its own for CUDA; the pretended device is for builds without"
    if _compiler() is None:
        return "there is no C++ compiler"
    return None


def load() -> None:
    """Load it; torch is not imported yet."""
    assert "torch" not in sys.modules, "torch has asked already whether there is a device"
    ctypes.CDLL(str(compiled()))


def compiled() -> Path:
    """The library, compiled if it is not in the cache."""
    command = [*(_compiler() or ()), *_FLAGS.split()]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "megatron_ext" / "fake_cuda"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"{_key(command)}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(command, target)
    return target


def _compile(command: list[str], target: Path) -> None:
    torch = _torch_folder()
    include, libraries = torch / "include", torch / "lib"
    made = target.with_suffix(".building")
    headers = [f"-isystem{include}", f"-isystem{include / 'torch/csrc/api/include'}"]
    linked = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    whole = [*command, *headers, str(_HERE / "device.cpp"), "-o", str(made), *linked]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=_LONGEST_RUN, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(whole)}\n{done.stderr}")
    made.rename(target)


def _key(command: list[str]) -> str:
    digest = hashlib.sha256(repr((_torch_version(), str(_torch_folder()), command)).encode())
    digest.update(subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout)
    for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _compiler() -> list[str] | None:
    named = shlex.split(os.environ.get("CXX", ""))
    return next((one for one in (named, ["c++"], ["g++"], ["clang++"]) if one and shutil.which(one[0])), None)


def _torch_version() -> str:
    return importlib.metadata.version("torch")


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _has_cuda() -> bool:
    return (_torch_folder() / "lib" / "libtorch_cuda.so").exists()
