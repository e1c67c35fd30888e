#!/usr/bin/env python
"""Fetch wheels for a machine that has torch and no package index: this project's missing requirements.

On that machine: `python3 -m pip list --format=freeze > present.txt`. Here, with that file:

    python -m tools.fetch_wheels --present present.txt --python 3.12 --folder wheels

and there, next to a checkout of this project:

    python3 -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=$PWD:site python3 -m benchmarks gpu

or, if they were fetched with `--tests`, `tools/gpu_first_hour.sh --wheels wheels`, which installs them and runs tests.

Versions come from constraints.txt; packages of the machine are kept if their versions are sufficient. torch is never
fetched. `--peer DIR` makes a folder with megatron-core 0.19.2 and the Triton kernels of mamba-ssm and causal-conv1d,
for `MEGATRON_0_19=DIR python -m benchmarks gpu`; nothing of it is installed, compiled or run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.check_python import MACHINES
from tools.oracles import LIBRARIES, Library, unpack
from tools.oracles import download as fetch
from tools.pins import GLIBC_TAGS, MAIN, NEWER_GLIBC, PROJECT, Wheel, applies, find_wheels, pins_for, pythons, read_pins

NEVER = frozenset({"torch", "triton"})  # large, and specific to the machine's driver
LINTERS = frozenset({"mypy", "ruff"})  # large, and no test of a device runs them
TAGS = (*GLIBC_TAGS, *NEWER_GLIBC.values())
ALSO = Library(
    "causal-conv1d",
    "1.7.0",
    "3202758494eaa7b597ce1c282dfa188889506bfcb92cad3c407d26736bfcd32b",
    ("--no-binary=:all:", "--no-build-isolation"),
    "causal_conv1d-1.7.0",
)
PEER: dict[str, tuple[str, ...]] = {
    "megatron-core": ("megatron", "megatron_core-0.19.2.dist-info"),
    "mamba-ssm": ("mamba_ssm",),
    "causal-conv1d": ("causal_conv1d",),
}
"""Library of the peer -> its folders."""


def main() -> int:
    """Download, and print the result.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--present", type=Path, help="output of `pip list --format=freeze` on the target machine; default: torch only"
    )
    parser.add_argument("--tests", action="store_true", help="also fetch what tests need: the extras dev and server")
    parser.add_argument("--python", default="3.12", choices=pythons())
    parser.add_argument("--machine", default=MACHINES[0], choices=MACHINES)
    parser.add_argument("--folder", type=Path, help="folder to write wheels to")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="folder to unpack megatron-core 0.19.2 to")
    options = parser.parse_args()
    if options.folder is None and options.peer is None:
        parser.error("give --folder, --peer or both")
    if options.folder is not None:
        text = "" if options.present is None else options.present.read_text("utf-8")
        extras = MAIN.extras if options.tests else ()
        wanted = carried(options.python, options.machine, present_in(text), extras)
        download(wanted, options.python, options.machine, options.folder)
        report(options.folder)
    if options.peer is not None:
        make_peer(options.peer)
        report(options.peer)
    return 0


def present_in(text: str) -> dict[str, str]:
    """Return versions by project, from lines such as `numpy==2.5.2`; lines of checkouts and files are ignored."""
    lines = (line.partition("==") for line in text.splitlines() if not line.startswith(("#", "-")))
    return {canonicalize_name(name.strip()): version.strip() for name, equal, version in lines if equal}


def carried(python: str, machine: str, present: Mapping[str, str], extras: Sequence[str] = ()) -> list[str]:
    """Return the pins of the packages that this project with `extras` needs and that are missing on the machine."""
    pins = [pin for pin in pins_for(python, read_pins()) if Requirement(pin).name not in NEVER]
    wheels = find_wheels(python, pins, machine, TAGS)
    roots = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or ()]
    return [f"{name}=={wheels[name].version}" for name in missing(python, wheels, roots, present, extras)]


def missing(
    python: str,
    wheels: Mapping[str, Wheel],
    roots: Iterable[Requirement],
    present: Mapping[str, str],
    extras: Sequence[str] = (),
) -> list[str]:
    """Return the needed projects whose version on the machine is missing or insufficient.

    Packages on the machine are assumed to have their requirements.

    Args:
        python: Version of Python for markers.
        wheels: Wheels that can be fetched, by project.
        roots: Requirements of this project.
        present: Versions of the packages on the machine.
        extras: Extras of this project that are needed; linters are not.

    Raises:
        ValueError: A requirement is neither on the machine nor pinned.
    """
    todo = [one for one in roots if any(applies(one, python, extra) for extra in ("", *extras))]
    todo, found = [one for one in todo if one.name not in LINTERS], set()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        there = present.get(name)
        if name in found or name in NEVER or (there is not None and one.specifier.contains(there, prereleases=True)):
            continue
        if name not in wheels:
            raise ValueError(f"{one} is needed on the target machine, and constraints.txt does not pin it")
        found.add(name)
        todo += [child for child in wheels[name].requires if applies(child, python, "")]
    return sorted(found)


def download(pins: Sequence[str], python: str, machine: str, folder: Path) -> None:
    """Download the wheels into a folder without other wheels: two versions of a project break an installation."""
    folder.mkdir(parents=True, exist_ok=True)
    if others := sorted(path.name for path in folder.glob("*.whl")):
        raise SystemExit(f"fetch_wheels.py: {folder} has wheels already, such as {others[0]}; name an empty folder")
    if pins:
        tags = [f"--platform={tag}_{machine}" for tag in TAGS]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}"]
        command += ["--only-binary=:all:", f"--python-version={python}", *tags, *pins]
        subprocess.run(command, check=True)


def make_peer(folder: Path) -> None:
    """Make the folder of the peer's packages.

    Raises:
        ValueError: A file cannot be downloaded, or its hash has changed; with pip's message.
    """
    for library in (*LIBRARIES, ALSO):
        with tempfile.TemporaryDirectory() as scratch:
            downloads, unpacked = Path(scratch) / "downloads", Path(scratch) / "unpacked"
            downloads.mkdir()
            if library.name in PEER:
                unpack(fetch(library, downloads), unpacked)
            for package in PEER.get(library.name, ()):
                shutil.copytree(unpacked / library.top / package, folder / package, dirs_exist_ok=True)


def report(folder: Path) -> None:
    """Print the size of the folder, and its contents."""
    sizes = {path: sum(one.stat().st_size for one in _files(path)) for path in sorted(folder.iterdir())}
    for path, size in sizes.items():
        print(f"{size / 2**20:7.1f} MiB  {path.name}")
    print(f"{sum(sizes.values()) / 2**20:7.1f} MiB  in {folder}")


def _files(path: Path) -> Iterable[Path]:
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]


if __name__ == "__main__":
    sys.exit(main())
