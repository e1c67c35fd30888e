#!/usr/bin/env python
"""Check the pinned versions for each supported Python, and lock the hashes of their wheels.

constraints.txt has the pins of `make test`; tests/ray/constraints.txt has the further pins of `make test-ray`.

`check` resolves the pins of each Python without installing anything: every pin has a wheel for it, the wheels require
only pinned projects, no pin contradicts a wheel's requirements, and no pin is unused. pip alone cannot check this for a
Python other than its own, whose markers it would evaluate (`python_version < "3.11"`).
`lock` writes lock.txt, here and in tests/ray, tests/published and tools/pages: the same pins with the hashes of their
wheels.
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
PROJECT = "megatron-ext"
# Required by torch's CUDA build only, which pins them itself; an index with a CPU build has other torch wheels.
CUDA_PARTS = re.compile(r"nvidia-|cuda-|triton$")
# Projects whose wheels need a newer C library than the others.
NEWER_GLIBC = {"llguidance": "manylinux_2_31"}
GLIBC_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
HEADER = """\
# Written by `make lock`: the pins of constraints.txt with the hashes of their wheels, for Linux on {machines}.
"""
WITHOUT_TORCH = """\
# torch is not here: an index may serve a CPU build of the same version, whose hash is another one than PyPI's. Nor are
# the packages of its CUDA build. Both are pinned without hashes, torch in constraints.txt, the others by torch itself.
"""


@dataclass(frozen=True)
class PinSet:
    """Pins of one environment.

    Attributes:
        folder: Folder of its constraints.txt and lock.txt.
        extras: Extras of this project that the environment has.
        base: Pins that it has as well.
    """

    folder: Path
    extras: tuple[str, ...]
    base: PinSet | None = None

    @property
    def constraints(self) -> Path:
        """File of the pins."""
        return self.folder / "constraints.txt"

    @property
    def lock(self) -> Path:
        """File of the pins with hashes."""
        return self.folder / "lock.txt"

    def all_pins(self) -> list[Requirement]:
        """Return every pin of the environment."""
        return [*(self.base.all_pins() if self.base else ()), *read_pins(self.constraints)]


MAIN = PinSet(ROOT, ("dev", "server"))
RAY = PinSet(ROOT / "tests/ray", (*MAIN.extras, "ray"), MAIN)
PAGES = PinSet(ROOT / "tools/pages", ())  # an environment without this package
PUBLISHED = PinSet(ROOT / "tests/published", ())  # packages in addition to MAIN


@dataclass(frozen=True)
class Wheel:
    """Wheel that pip chose: version, requirements, SHA-256, and supported Pythons."""

    version: str
    requires: tuple[Requirement, ...]
    digest: str
    pythons: SpecifierSet


def pythons() -> list[str]:
    """Return the supported Pythons: "3.10", "3.11", ..."""
    (major, first), (_, end) = supported()
    return [f"{major}.{minor}" for minor in range(first, end)]


def read_pins(path: Path = ROOT / "constraints.txt") -> list[Requirement]:
    """Return every pin, with its marker."""
    lines = path.read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def environment(python: str, extra: str = "") -> dict[str, str]:
    """Return the environment in which markers are evaluated, for CPython on Linux."""
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    cpython = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    version = {"python_version": python, "python_full_version": f"{python}.0"}
    return {**default_environment(), **linux, **cpython, **version, "extra": extra}


def pins_for(python: str, pins: Iterable[Requirement]) -> list[str]:
    """Return the pins that apply to one Python, without their markers.

    Raises:
        ValueError: A project has two pins.
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
    """Return the wheels that pip would install, by project; nothing is installed.

    Args:
        python: Version of Python.
        pins: Requested versions; dependencies are not followed.
        machine: Machine type, with the oldest supported C library; None for this machine.
        tags: Platform tags of the C library.

    Raises:
        ValueError: A pin has no wheel; with pip's message.
    """
    with tempfile.TemporaryDirectory() as scratch:
        wanted, report = Path(scratch) / "wanted.txt", Path(scratch) / "report.json"
        wanted.write_text("\n".join(pins) + "\n", "utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        command += ["--only-binary=:all:", f"--python-version={python}", f"--target={scratch}/none"]
        command += ["--ignore-requires-python"]  # pip would compare with its own version; `problems` uses the right one
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


def problems(
    python: str, wheels: Mapping[str, Wheel], roots: Iterable[Requirement], extras: Sequence[str] = MAIN.extras
) -> list[str]:
    """Return all contradictions as text, a line each.

    Args:
        python: Version of Python for markers.
        wheels: Pinned wheels, by project.
        roots: Requirements of the project itself; their markers may name its extras.
        extras: Extras of the project that count.
    """
    found: list[str] = []
    todo = [(PROJECT, one) for one in roots if any(applies(one, python, extra) for extra in ("", *extras))]
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
    """Return whether a Python with an extra ("" for no extra) needs the requirement."""
    return requirement.marker is None or requirement.marker.evaluate(environment(python, extra))


def check(chosen: Sequence[str]) -> list[str]:
    """Return `problems` of each of the Pythons, on this machine, with the wheels that pip finds."""
    roots = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or ()]
    found = []
    for python in chosen:
        wheels: dict[str, Wheel] = {}
        for pin_set in (MAIN, RAY):
            try:
                wheels |= find_wheels(python, pins_for(python, read_pins(pin_set.constraints)))
                pins_for(python, pin_set.all_pins())  # no project is pinned in both files
            except ValueError as error:
                found.append(str(error))
                break
            new = problems(python, wheels, roots, pin_set.extras)
            found += new
            extras = ", ".join(pin_set.extras)
            print(f"Python {python} with {extras}: {len(wheels)} wheels, {len(new)} problems", flush=True)
    return found


def lock(pin_set: PinSet = MAIN) -> str:
    """Return the text of a lock file, from the wheels that pip finds for every supported Python and machine."""
    every = read_pins(pin_set.constraints)
    pins = [pin for pin in every if canonicalize_name(pin.name) != "torch"]
    digests: dict[str, set[str]] = {}
    for python in pythons():
        asked = pins_for(python, pins)
        for machine in MACHINES:
            print(f"{pin_set.lock.relative_to(ROOT)}: Python {python}, {machine}", flush=True)
            for name, wheel in _wheels_for(python, asked, machine).items():
                digests.setdefault(f"{name}=={wheel.version}", set()).add(wheel.digest)
    header = HEADER.format(machines=" and ".join(MACHINES)) + (WITHOUT_TORCH if len(pins) < len(every) else "")
    return header + "".join(_entry(pin, digests) for pin in pins)


def _wheels_for(python: str, asked: Sequence[str], machine: str) -> dict[str, Wheel]:
    """Return wheels for the oldest C library that each project supports."""
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
        Exit code: 0 without problems, 1 otherwise.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("check", "lock"))
    parser.add_argument(
        "--python", nargs="+", default=pythons(), choices=pythons(), help="Python versions to check; default: all"
    )
    arguments = parser.parse_args()
    if arguments.action == "lock":
        for pin_set in (MAIN, RAY, PAGES, PUBLISHED):
            pin_set.lock.write_text(lock(pin_set), "utf-8")
        return 0
    found = check(arguments.python)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
