#!/usr/bin/env python
"""Fetch libraries whose kernels serve as references for this package's: `make oracles`, then `make test-kernels`.

Files of fixed versions and hashes, unpacked below out/oracles, a folder each. Nothing is installed: one of them is a
version of megatron-core, and the tests load them in separate processes. See also tools/bases.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "out/oracles"


@dataclass(frozen=True)
class Library:
    """Library to fetch.

    Attributes:
        name: Project name on the package index.
        version: Version that the tests need.
        digest: SHA-256 of its file.
        options: Options of pip, in addition to the common ones.
        top: Folder of the packages inside the unpacked file.
    """

    name: str
    version: str
    digest: str
    options: tuple[str, ...] = ("--only-binary=:all:",)
    top: str = "."

    @property
    def folder(self) -> Path:
        """Folder in which the library is unpacked."""
        return FOLDER / f"{self.name}-{self.version}"

    @property
    def packages(self) -> Path:
        """Folder of the library's packages, after unpacking."""
        return self.folder / self.top


# The wheel is for one Python and one kind of machine; the files used from it are not.
WHEEL_FOR = ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64")
LIBRARIES = (
    Library("megatron-core", "0.19.2", "8e3e486f13f559450415b9b9dc0ff3331a0bb83dd154553f7f350a75ff9c42b5", WHEEL_FOR),
    Library(
        "mamba-ssm",
        "2.3.2.post1",
        "104cc47e9101e5401a675fa2b784f2952b9b037f3b1dd83b5ac544394e95d028",
        ("--no-binary=:all:", "--no-build-isolation"),
        "mamba_ssm-2.3.2.post1",
    ),
    Library("fla-core", "0.6.0", "b0708b70e0b119cd58a0a5146ea56cb175cef6ed969d8ac60267e3e077ce3ebd"),
)
NOT_COMPILED = {"MAMBA_SKIP_CUDA_BUILD": "TRUE", "CAUSAL_CONV1D_SKIP_CUDA_BUILD": "TRUE"}


def download(library: Library, folder: Path) -> Path:
    """Download the library's file into `folder`, and check its hash.

    Raises:
        ValueError: pip cannot download it, or its hash differs; with pip's message.
    """
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{library.name}=={library.version} --hash=sha256:{library.digest}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", f"--dest={folder}"]
    command += [*library.options, f"--requirement={wanted}"]
    # pip builds metadata of a source archive, which searches for a CUDA compiler unless told not to.
    environment = {**os.environ, **NOT_COMPILED}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ValueError(f"{library.name} {library.version}: {' '.join(errors) or done.stderr.strip()}")
    return next(path for path in folder.iterdir() if path != wanted)


def unpack(path: Path, folder: Path) -> None:
    """Unpack a wheel or a source archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
    else:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")


def fetch(library: Library) -> None:
    """Fetch a library into its folder, completely: an interrupted fetch leaves no folder.

    Raises:
        ValueError: As `download`.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".") as scratch:
        downloads, unpacked = Path(scratch) / "downloads", Path(scratch) / "unpacked"
        downloads.mkdir()
        unpack(download(library, downloads), unpacked)
        unpacked.rename(library.folder)


def main() -> int:
    """Fetch missing libraries; the exit code is 1 if one cannot be fetched."""
    failures = 0
    for library in LIBRARIES:
        try:
            if not library.folder.exists():
                fetch(library)
        except ValueError as error:
            failures += 1
            print(f"oracles.py: error: {error}", file=sys.stderr)
        else:
            print(f"{library.name} {library.version}: {library.folder}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
