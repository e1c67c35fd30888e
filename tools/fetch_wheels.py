#!/usr/bin/env python
"""Wheels for a machine that has torch and no index: what this project needs there and does not find.

On that machine: `python3 -m pip list --format=freeze > present.txt`. Here, with that file:

    python -m tools.fetch_wheels --present present.txt --python 3.12 --folder wheels

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
from tools.pins import GLIBC_TAGS, NEWER_GLIBC, PROJECT, Wheel, applies, find_wheels, pins_for, pythons, read_pins

NEVER = frozenset({"torch", "triton"})  # large, and made for the machine's driver
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
"""Folders of each library that the peer is made of."""


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
        make_peer(options.peer)
        report(options.peer)
    return 0


def present_in(text: str) -> dict[str, str]:
    """Versions by project, of lines such as `numpy==2.5.2`; other lines, of checkouts and files, say nothing."""
    lines = (line.partition("==") for line in text.splitlines() if not line.startswith(("#", "-")))
    return {canonicalize_name(name.strip()): version.strip() for name, equal, version in lines if equal}


def carried(python: str, machine: str, present: Mapping[str, str]) -> list[str]:
    """The pins of what is missing there."""
    pins = [pin for pin in pins_for(python, read_pins()) if Requirement(pin).name not in NEVER]
    wheels = find_wheels(python, pins, machine, TAGS)
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
        raise SystemExit(f"fetch_wheels.py: {folder} has wheels already, such as {others[0]}; name an empty folder")
    if pins:
        tags = [f"--platform={tag}_{machine}" for tag in TAGS]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}"]
        command += ["--only-binary=:all:", f"--python-version={python}", *tags, *pins]
        subprocess.run(command, check=True)


def make_peer(folder: Path) -> None:
    """The packages of the peer side by side.

    Raises:
        ValueError: One cannot be had, or it is another file than it was; pip's words.
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
    """Its size, and what lies in it."""
    sizes = {path: sum(one.stat().st_size for one in _files(path)) for path in sorted(folder.iterdir())}
    for path, size in sizes.items():
        print(f"{size / 2**20:7.1f} MiB  {path.name}")
    print(f"{sum(sizes.values()) / 2**20:7.1f} MiB  in {folder}")


def _files(path: Path) -> Iterable[Path]:
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]


if __name__ == "__main__":
    sys.exit(main())
