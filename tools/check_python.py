#!/usr/bin/env python
"""Check that the package's dependencies support this interpreter, before anything is installed.

Any Python 3 can run this file, with nothing but its standard library: `make setup` runs it first.
"""

import platform
import re
import sys
import sysconfig
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
# Platforms of the wheels of megatron-core 0.16.1 and 0.19.2, torch 2.13.0 and llguidance 1.9.1; elsewhere pip would
# have to compile the first.
MACHINES = ("x86_64", "aarch64")
OLDEST_GLIBC = (2, 31)


def supported(pyproject=PYPROJECT):
    """Return the first supported Python and the first unsupported one, ((3, 10), (3, 14)), from `requires-python`."""
    found = re.search(r'^requires-python = ">=(\d+)\.(\d+),<(\d+)\.(\d+)"', pyproject.read_text("utf-8"), re.MULTILINE)
    first_major, first, end_major, end = map(int, found.groups())
    return (first_major, first), (end_major, end)


def python_problem(implementation, version, is_free_threaded, bounds):
    """Return the reason why an interpreter is not supported, or None.

    Args:
        implementation: Name such as "CPython".
        version: Version of the language, (major, minor).
        is_free_threaded: Whether the interpreter was built without the global lock.
        bounds: Result of `supported`.
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
    """Return the reason why a machine is not supported, or None.

    Args:
        system: Name such as "Linux".
        machine: Name such as "x86_64".
        libc: Name and version of the C library, ("glibc", "2.36"); the name is empty for other libraries.
    """
    wheels = f"Linux on {' or '.join(MACHINES)} with glibc {_dotted(OLDEST_GLIBC)} or newer"
    name, version = libc
    is_new_enough = name == "glibc" and tuple(map(int, version.split(".")[:2])) >= OLDEST_GLIBC
    if system == "Linux" and machine in MACHINES and is_new_enough:
        return None
    found = f"{system} on {machine}" + (f" with {name or 'no glibc'} {version}".rstrip() if system == "Linux" else "")
    return (
        f"this is {found}; megatron-core has wheels for {wheels}; make setup ANY_PLATFORM=1 lets pip compile "
        "megatron-core"
    )


def _dotted(version):
    return ".".join(map(str, version))


def main(argv):
    """Print the problem, in one line.

    Args:
        argv: "--any-platform" to check only the Python.

    Returns:
        Exit code: 0 without a problem, 1 with one.
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
