#!/usr/bin/env python
"""The versions in constraints.txt: do they fit each supported Python, and what are the hashes of their wheels?

`check` resolves the pins of each Python without installing anything: every one has a wheel for it, the wheels require
nothing that is not pinned, no pin contradicts what a wheel requires, and none is there in vain. pip alone cannot
answer that for another Python than its own, whose markers it would read (`python_version < "3.11"`).
`lock` writes lock.txt: the same pins with the hashes of their wheels.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tools.check_python import MACHINES, supported

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "lock.txt"
PROJECT, EXTRAS = "megatron-ext", ("dev", "server")
# Only torch's CUDA build brings these, and pins them itself; an index with a CPU build has other wheels of torch.
CUDA_PARTS = re.compile(r"nvidia-|cuda-|triton$")
# Whose wheels need a newer C library than those of the others.
NEWER_GLIBC = {"llguidance": "manylinux_2_31"}
GLIBC_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
HEADER = """\
# Written by `make lock`: the pins of constraints.txt with the hashes of their wheels, for Linux on {machines}.
# torch is not here: an index may serve a CPU build of the same version, whose hash is another one than PyPI's. Nor is
# what its CUDA build brings. Both are pinned without hashes, torch in constraints.txt and the rest by torch itself.
"""


@dataclass(frozen=True)
class Wheel:
    """One file that pip chose: the version in it, what it requires, its SHA-256, and which Pythons it is for."""

    version: str
    requires: tuple[Requirement, ...]
    digest: str
    pythons: SpecifierSet


def pythons() -> list[str]:
    """The supported ones: "3.10", "3.11", ..."""
    (major, first), (_, end) = supported()
    return [f"{major}.{minor}" for minor in range(first, end)]


def read_pins(path: Path = CONSTRAINTS) -> list[Requirement]:
    """Every pin, with its marker."""
    lines = path.read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def environment(python: str, extra: str = "") -> dict[str, str]:
    """What markers are asked of, for CPython on Linux."""
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    cpython = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    version = {"python_version": python, "python_full_version": f"{python}.0"}
    return {**default_environment(), **linux, **cpython, **version, "extra": extra}


def pins_for(python: str, pins: Iterable[Requirement]) -> list[str]:
    """The pins that hold for one Python, without their markers.

    Raises:
        ValueError: Two of one project.
    """
    chosen = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment(python))]
    names = [canonicalize_name(pin.name) for pin in chosen]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"Python {python}: {name} is pinned more than once")
    return [f"{pin.name}{pin.specifier}" for pin in chosen]


def find_wheels(
    python: str, pins: Sequence[str], machine: str | None = None, tags: Sequence[str] = GLIBC_TAGS
) -> dict[str, Wheel]:
    """The wheels that pip would install, by project; nothing is installed.

    Args:
        python: For which.
        pins: What to ask for; dependencies are not followed.
        machine: For which machine with the oldest supported C library; None for this one.
        tags: That say which C library that is.

    Raises:
        ValueError: There is no wheel for one of them; pip's words.
    """
    with tempfile.TemporaryDirectory() as scratch:
        wanted, report = Path(scratch) / "wanted.txt", Path(scratch) / "report.json"
        wanted.write_text("\n".join(pins) + "\n", "utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--only-binary=:all:", f"--python-version={python}", f"--target={scratch}/none"]
        command += ["--ignore-requires-python"]  # pip would compare it with its own; `problems` does with the right one
        command += [f"--platform={tag}_{machine}" for tag in tags if machine is not None]
        command += [f"--report={report}", f"--requirement={wanted}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ValueError(f"Python {python}: {' '.join(errors) or done.stderr.strip()}")
        chosen = json.loads(report.read_text("utf-8"))["install"]
    return {canonicalize_name(one["metadata"]["name"]): _wheel(one) for one in chosen}


def _wheel(one: Mapping) -> Wheel:
    metadata, archive = one["metadata"], one["download_info"]["archive_info"]
    requires = tuple(Requirement(line) for line in metadata.get("requires_dist", ()))
    pythons = SpecifierSet(metadata.get("requires_python", ""))
    return Wheel(metadata["version"], requires, archive["hashes"]["sha256"], pythons)


def problems(python: str, wheels: Mapping[str, Wheel], roots: Iterable[Requirement]) -> list[str]:
    """What does not fit together: in words, a line each.

    Args:
        python: Whose markers count.
        wheels: What is pinned, by project.
        roots: What the project itself requires; their markers may ask for its extras.
    """
    found: list[str] = []
    todo = [(PROJECT, one) for one in roots if any(applies(one, python, extra) for extra in ("", *EXTRAS))]
    needed: set[tuple[str, str]] = set()
    while todo:
        parent, requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if parent == "torch" and CUDA_PARTS.match(name) and name not in wheels:
            continue
        wheel = wheels.get(name)
        if wheel is None:
            found.append(f"Python {python}: {parent} requires {requirement}, which is not pinned")
        elif not requirement.specifier.contains(wheel.version, prereleases=True):
            found.append(f"Python {python}: {parent} requires {requirement}, and {name}=={wheel.version} is pinned")
        else:
            new = {("", name), *((extra, name) for extra in requirement.extras)} - needed
            needed |= new
            todo += [(name, one) for extra, _ in new for one in wheel.requires if applies(one, python, extra)]
    unfit = [name for name, wheel in wheels.items() if not wheel.pythons.contains(f"{python}.0")]
    found += [f"Python {python}: {name}=={wheels[name].version} is for {wheels[name].pythons}" for name in unfit]
    surplus = sorted(set(wheels) - {name for _, name in needed})
    return found + [f"Python {python}: {name} is pinned, and nothing requires it" for name in surplus]


def applies(requirement: Requirement, python: str, extra: str) -> bool:
    """Whether a Python with an extra, "" for none, has to have it."""
    return requirement.marker is None or requirement.marker.evaluate(environment(python, extra))


def check(chosen: Sequence[str]) -> list[str]:
    """`problems` of each of the Pythons, on this machine, with what pip finds for it."""
    roots = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or ()]
    found = []
    for python in chosen:
        try:
            wheels = find_wheels(python, pins_for(python, read_pins()))
        except ValueError as error:
            found.append(str(error))
            continue
        new = problems(python, wheels, roots)
        found += new
        print(f"Python {python}: {len(wheels)} wheels, {len(new)} problems", flush=True)
    return found


def lock() -> str:
    """The text of lock.txt, from what pip finds for every supported Python and machine."""
    pins = [pin for pin in read_pins() if canonicalize_name(pin.name) != "torch"]
    digests: dict[str, set[str]] = {}
    for python in pythons():
        asked = pins_for(python, pins)
        for machine in MACHINES:
            print(f"Python {python}, {machine}", flush=True)
            for name, wheel in _wheels_for(python, asked, machine).items():
                digests.setdefault(f"{name}=={wheel.version}", set()).add(wheel.digest)
    return HEADER.format(machines=" and ".join(MACHINES)) + "".join(_entry(pin, digests) for pin in pins)


def _wheels_for(python: str, asked: Sequence[str], machine: str) -> dict[str, Wheel]:
    """Wheels for the oldest C library that each of the projects has any for."""
    wheels = find_wheels(python, [pin for pin in asked if pin.partition("==")[0] not in NEWER_GLIBC], machine)
    for name, tag in NEWER_GLIBC.items():
        newer = [pin for pin in asked if pin.partition("==")[0] == name]
        wheels |= find_wheels(python, newer, machine, (tag,)) if newer else {}
    return wheels


def _entry(pin: Requirement, digests: Mapping[str, set[str]]) -> str:
    marker = f"; {pin.marker}" if pin.marker else ""
    exact = f"{canonicalize_name(pin.name)}{pin.specifier}"
    return f"{exact}{marker}" + "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(digests[exact])) + "\n"


def main() -> int:
    """Check or lock, as the command line says.

    Returns:
        The exit code: 0 all is well, 1 it is not.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("check", "lock"))
    parser.add_argument("--python", nargs="+", default=pythons(), choices=pythons(), help="check these only")
    arguments = parser.parse_args()
    if arguments.action == "lock":
        LOCK.write_text(lock(), "utf-8")
        return 0
    found = check(arguments.python)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
