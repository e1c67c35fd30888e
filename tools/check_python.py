#!/usr/bin/env python
"""Say whether this interpreter can have the package's dependencies, before anything is installed.

Any Python 3 can run this file, and nothing but its standard library is needed: `make setup` asks it first.
"""

import platform
import re
import sys
import sysconfig
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
# What the wheels of megatron-core 0.16.1, torch 2.13.0 and llguidance 1.9.1 are for; elsewhere pip would have to
# compile the first.
MACHINES = ("x86_64", "aarch64")
OLDEST_GLIBC = (2, 31)


def supported(pyproject=PYPROJECT):
    """The first supported Python and the first that is not: ((3, 10), (3, 14)), from `requires-python`."""
    found = re.search(r'^requires-python = ">=(\d+)\.(\d+),<(\d+)\.(\d+)"', pyproject.read_text("utf-8"), re.MULTILINE)
    first_major, first, end_major, end = map(int, found.groups())
    return (first_major, first), (end_major, end)


def python_problem(implementation, version, is_free_threaded, bounds):
    """What is wrong with an interpreter, or None.

    Args:
        implementation: "CPython" and its like.
        version: Of the language, (major, minor).
        is_free_threaded: Whether it was built without the global lock.
        bounds: As `supported` says.
    """
    first, end = bounds
    allowed = f"Python {_dotted(first)} to {end[0]}.{end[1] - 1}"
    found = f"{implementation} {_dotted(version)}"
    if implementation != "CPython" or is_free_threaded:
        kind = "a free-threaded build" if is_free_threaded else "not CPython"
        return f"this is {kind} ({found}); megatron-core has wheels for {allowed} of the usual CPython"
    if not first <= version < end:
        return f"this is {found}; megatron-core has wheels for {allowed}; choose one: make setup PYTHON=python3.12"
    return None


def platform_problem(system, machine, libc):
    """What is wrong with a machine, or None.

    Args:
        system: "Linux" and its like.
        machine: "x86_64" and its like.
        libc: Name and version of the C library, ("glibc", "2.36"); of others the name is empty.
    """
    wheels = f"Linux on {' or '.join(MACHINES)} with glibc {_dotted(OLDEST_GLIBC)} or newer"
    name, version = libc
    is_new_enough = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= OLDEST_GLIBC
    if system == "Linux" and machine in MACHINES and is_new_enough:
        return None
    found = f"{system} on {machine}" + (f" with {name or 'no glibc'} {version}".rstrip() if system == "Linux" else "")
    return f"this is {found}; megatron-core has wheels for {wheels}; make setup ANY_PLATFORM=1 lets pip compile it"


def _dotted(version):
    return ".".join(map(str, version))


def main(argv):
    """Print what is wrong, in one line.

    Args:
        argv: "--any-platform" to look at the Python alone.

    Returns:
        The exit code: 0 nothing is wrong, 1 something is.
    """
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    problem = python_problem(platform.python_implementation(), sys.version_info[:2], free_threaded, supported())
    if problem is None and "--any-platform" not in argv:
        problem = platform_problem(platform.system(), platform.machine(), platform.libc_ver())
    if problem is not None:
        sys.stderr.write(f"make setup: {problem}\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
