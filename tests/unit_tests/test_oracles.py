"""Libraries that kernels are compared with: a failed download is one line, costs no other library, leaves no folder."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from tools import bases, oracles

FIRST, SECOND = (oracles.Library(name, "1.0", digit * 64) for name, digit in (("first", "a"), ("second", "b")))


class Index:
    """Stand-in of pip that downloads a wheel with one file, or fails."""

    def __init__(self) -> None:
        self.requirements: list[str] = []
        self.commands: list[list[str]] = []
        self.broken: str | None = None

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        options = dict(part.split("=", 1) for part in command if part.startswith("--") and "=" in part)
        folder, wanted = Path(options["--dest"]), Path(options["--requirement"]).read_text()
        self.commands.append(command)
        self.requirements.append(wanted)
        name = wanted.split("==")[0]
        wheel = folder / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            file.writestr(f"{name}/__init__.py", "")
        if name == self.broken:  # what pip has fetched may be there
            return subprocess.CompletedProcess(command, 1, "", "WARNING: old\nERROR: THESE PACKAGES DO NOT MATCH\nmore")
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setattr(oracles, "FOLDER", tmp_path / "oracles")
    monkeypatch.setattr(oracles, "LIBRARIES", (FIRST, SECOND))
    monkeypatch.setattr(oracles.subprocess, "run", index.run)
    return index


def fetched() -> list[str]:
    """Everything in the folder of libraries, hidden entries included."""
    return sorted(path.relative_to(oracles.FOLDER).as_posix() for path in oracles.FOLDER.iterdir())


def test_libraries_are_fetched_once_and_by_hash(index: Index):
    assert oracles.main() == oracles.main() == 0
    assert index.requirements == [f"{one.name}==1.0 --hash=sha256:{one.digest}\n" for one in (FIRST, SECOND)]
    assert all("--require-hashes" in command and "--no-deps" in command for command in index.commands)
    assert fetched() == ["first-1.0", "second-1.0"]
    assert (FIRST.packages / "first/__init__.py").is_file()


def test_wheels_of_megatron_core_are_fetched_once(index: Index, monkeypatch: pytest.MonkeyPatch):
    """The folder goes on the path of a process, so it has the package at its top."""
    monkeypatch.setattr(bases, "WHEELS", {"1.0": "c" * 64})
    folders = [bases.fetch("1.0") for _ in range(2)]
    assert index.requirements == [f"megatron-core==1.0 --hash=sha256:{'c' * 64}\n"]
    assert folders[0] == folders[1] == oracles.FOLDER / "megatron-core-1.0"
    assert (folders[0] / "megatron-core/__init__.py").is_file()
    index.broken = "megatron-core"
    monkeypatch.setattr(bases, "WHEELS", {"2.0": "c" * 64})
    with pytest.raises(ValueError, match=r"megatron-core 2\.0: ERROR: THESE PACKAGES DO NOT MATCH"):
        bases.fetch("2.0")
