#!/usr/bin/env python
"""Wheels for a machine that has torch and no index: what this project needs there and does not find.

On that machine: `python3 -m pip list --format=freeze > present.txt`. Here, with that file:

    python -m tools.carry --present present.txt --python 3.12 --folder wheels

and there, beside a checkout of this project:

    python3 -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=$PWD:site python3 -m benchmarks.gpu

Versions are those of constraints.txt; what the machine has is left as it is wherever it will do. torch is never taken
along. `--peer DIR` makes a folder with megatron-core 0.19.2 and the Triton kernels of mamba-ssm and causal-conv1d, for
`benchmarks.gpu --megatron-0-19 DIR`; nothing of it is installed, compiled or run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.check_python import MACHINES
from tools.pins import GLIBC_TAGS, PROJECT, Wheel, applies, find_wheels, pins_for, pythons, read_pins

NEVER = frozenset({"torch", "triton"})  # large, and made for the machine's driver
PEER = "megatron-core==0.19.2"
PEER_KERNELS = ("mamba-ssm==2.3.2.post1", "causal-conv1d==1.7.0")
# Their archives would compile for hours where they find a compiler; asked like this they only say who they are.
NOT_COMPILED = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}


def main() -> int:
    """Download, and say what.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--present", type=Path, help="what `pip list --format=freeze` says there; default: torch alone")
    parser.add_argument("--python", default="3.12", choices=pythons())
    parser.add_argument("--machine", default=MACHINES[0], choices=MACHINES)
    parser.add_argument("--folder", type=Path, help="where wheels go")
    parser.add_argument("--peer", type=Path, metavar="DIR", help="where megatron-core 0.19.2 goes, unpacked")
    options = parser.parse_args()
    if options.folder is None and options.peer is None:
        parser.error("give --folder, --peer or both")
    if options.folder is not None:
        text = "" if options.present is None else options.present.read_text("utf-8")
        wanted = carried(options.python, options.machine, present_in(text))
        download(wanted, options.python, options.machine, options.folder)
        report(options.folder)
    if options.peer is not None:
        make_peer(options.python, options.machine, options.peer)
        report(options.peer)
    return 0


def present_in(text: str) -> dict[str, str]:
    """Versions by project, of lines such as `numpy==2.5.2`; other lines, of checkouts and files, say nothing."""
    lines = (line.partition("==") for line in text.splitlines() if not line.startswith(("#", "-")))
    return {canonicalize_name(name.strip()): version.strip() for name, equal, version in lines if equal}


def carried(python: str, machine: str, present: Mapping[str, str]) -> list[str]:
    """The pins of what is missing there."""
    pins = [pin for pin in pins_for(python, read_pins()) if Requirement(pin).name not in NEVER]
    wheels = find_wheels(python, pins, machine, (*GLIBC_TAGS, "manylinux_2_31"))
    roots = [Requirement(line) for line in importlib.metadata.requires(PROJECT) or ()]
    return [f"{name}=={wheels[name].version}" for name in missing(python, wheels, roots, present)]


def missing(
    python: str, wheels: Mapping[str, Wheel], roots: Iterable[Requirement], present: Mapping[str, str]
) -> list[str]:
    """What is needed for a run without extras, and neither there nor there in a version that will do.

    What is there is taken to have what it needs.

    Args:
        python: Whose markers count.
        wheels: What can be carried, by project.
        roots: What this project requires.
        present: Versions of what is there.

    Raises:
        ValueError: Something is needed that nobody has.
    """
    todo, found = [one for one in roots if applies(one, python, "")], set()
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        there = present.get(name)
        if name in found or name in NEVER or (there is not None and one.specifier.contains(there, prereleases=True)):
            continue
        if name not in wheels:
            raise ValueError(f"{one} is needed there, and constraints.txt does not pin it")
        found.add(name)
        todo += [child for child in wheels[name].requires if applies(child, python, "")]
    return sorted(found)


def download(pins: Sequence[str], python: str, machine: str, folder: Path) -> None:
    """Their wheels, into a folder that has no other ones: two versions of a project would stop an installation."""
    folder.mkdir(parents=True, exist_ok=True)
    if others := sorted(path.name for path in folder.glob("*.whl")):
        raise SystemExit(f"carry.py: {folder} has wheels already, such as {others[0]}; name an empty folder")
    if pins:
        tags = [f"--platform={tag}_{machine}" for tag in (*GLIBC_TAGS, "manylinux_2_31")]
        _pip(folder, "--only-binary=:all:", f"--python-version={python}", *tags, *pins)


def make_peer(python: str, machine: str, folder: Path) -> None:
    """The packages of the peer side by side."""
    with tempfile.TemporaryDirectory() as scratch:
        there = Path(scratch)
        download([PEER], python, machine, there)
        for wheel in there.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
        _pip(there, "--no-binary=:all:", "--no-build-isolation", *PEER_KERNELS)
        for archive in there.glob("*.tar.gz"):
            extract_package(archive, folder)


def extract_package(archive: Path, folder: Path) -> None:
    """Of a source archive only the package itself: NAME-VERSION/PACKAGE/..., the Python files."""
    package = archive.name.partition("-")[0]
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            _, _, inner = member.name.partition("/")
            if member.isfile() and inner.startswith(f"{package}/") and inner.endswith(".py") and ".." not in inner:
                target = folder / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                content = source.extractfile(member)
                assert content is not None, "it is a file"
                target.write_bytes(content.read())


def report(folder: Path) -> None:
    """Its size, and what lies in it."""
    sizes = {path: sum(one.stat().st_size for one in _files(path)) for path in sorted(folder.iterdir())}
    for path, size in sizes.items():
        print(f"{size / 2**20:7.1f} MiB  {path.name}")
    print(f"{sum(sizes.values()) / 2**20:7.1f} MiB  in {folder}")


def _files(path: Path) -> Iterable[Path]:
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]


def _pip(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **NOT_COMPILED})


if __name__ == "__main__":
    sys.exit(main())
