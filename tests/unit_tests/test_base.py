"""MF-8: each process of the tests has the megatron-core that `make test BASE=VERSION` names, or the installed one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import base, marked_files
from tests.forked import fork, spawn
from tests.unit_tests.support import found_core
from tests.unit_tests.support.ranks import run_ranks
from tests.unit_tests.support.source import ROOT
from tools import bases, oracles


def expected() -> list[str]:
    """Version and folder of megatron-core in every process."""
    asked = base.asked_core()
    if asked is None:
        found = importlib.metadata.distribution("megatron-core")
        asked = found.version, Path(str(found.locate_file(""))).resolve()
    return [asked[0], str(asked[1])]


def write_core(folder: Path) -> None:
    """Write the beginning of a checkout of Megatron-LM, with its package `tools`."""
    for name, text in {
        "megatron/core/package_info.py": "__shortversion__ = '0.20.7'\n",
        "tools/__init__.py": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def imported_core() -> list[str]:
    """Version and folder of the megatron-core that this process imports, as the package does."""
    from megatron_ext.mcore.versions import VERSION  # isort: skip
    from megatron import core

    assert core.__version__.startswith(str(VERSION))
    return [str(VERSION), str(Path(core.__file__).resolve().parents[2])]


class TestEveryProcess:
    """Version and folder of megatron-core, however a test starts a process."""

    def test_this_one(self):
        assert imported_core() == found_core.found() == expected()

    @pytest.mark.parametrize("start", [fork, spawn])
    def test_multiprocessing(self, start, tmp_path: Path):
        process = start(found_core.write_found, tmp_path / "found.json")
        process.join()
        assert process.exitcode == 0
        assert json.loads((tmp_path / "found.json").read_text()) == expected()

    def test_a_command(self, tmp_path: Path):
        command = [sys.executable, "-m", found_core.__name__, str(tmp_path / "found.json")]
        subprocess.run(command, cwd=ROOT, check=True)
        assert json.loads((tmp_path / "found.json").read_text()) == expected()

    def test_a_checkout_hides_none_of_our_packages(self, tmp_path: Path):
        """Megatron-LM has packages `tools` and `tests`, too."""
        write_core(tmp_path)
        code = "import tools.bases, tests.base; print(tools.bases.__file__, tests.base.__file__)"
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [bases.__file__, base.__file__]

    @pytest.mark.worlds(smoke=True)
    def test_ranks(self):
        assert run_ranks(imported_core, 2) == [expected()] * 2


class TestTool:
    """tools/bases.py."""

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Folder of an unpacked version; a fake download makes wheels that hold their version only."""

        def download(library: oracles.Library, folder: Path) -> Path:
            path = folder / "core.whl"
            with zipfile.ZipFile(path, "w") as wheel:
                wheel.writestr("version", f"{library.version} {library.digest}")
            return path

        monkeypatch.setattr(oracles, "FOLDER", tmp_path)
        monkeypatch.setattr(oracles, "download", download)
        return tmp_path / "megatron-core-0.18.2"

    def test_a_version_is_fetched_by_its_hash_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        assert bases.fetch("0.18.2") == folder
        assert (folder / "version").read_text() == f"0.18.2 {bases.WHEELS['0.18.2']}"
        monkeypatch.delattr(oracles, "download")
        assert bases.fetch("0.18.2") == folder

    @pytest.fixture
    def called(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
        """Arguments of the call that becomes the command."""
        called: list[tuple] = []
        monkeypatch.setattr(bases.os, "execvpe", lambda *arguments: called.append(arguments))
        monkeypatch.setenv("PYTHONPATH", "before")
        return called

    def test_it_is_first_on_the_path_of_the_command(self, folder: Path, called: list[tuple]):
        bases.main(["0.18.2", "python", "-m", "pytest"])
        ((program, command, environment),) = called
        assert (program, command) == ("python", ["python", "-m", "pytest"])
        assert environment["PYTHONPATH"] == os.pathsep.join([str(folder), "before"])
        assert environment[bases.VARIABLE] == str(folder)

    def test_a_checkout_by_its_path(self, tmp_path: Path, called: list[tuple], monkeypatch: pytest.MonkeyPatch):
        write_core(tmp_path)
        bases.main([str(tmp_path), "python"])
        ((_, _, environment),) = called
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == environment[bases.VARIABLE] == str(tmp_path)
        monkeypatch.setenv(bases.VARIABLE, str(tmp_path))
        assert base.asked_core() == ("0.20.7", tmp_path)


class TestMark:
    """The mark `base`, by which `.ci/run` chooses what runs with another megatron-core."""

    @pytest.mark.parametrize(
        ("expression", "imported"),
        [
            ("base", {"base"}),
            ("numbers", {"ops"}),
            ("numbers or base", {"base", "ops"}),
            ("base or long", {"base", "ops", "config"}),
            ("", {"base", "ops", "config"}),
        ],
    )
    def test_no_other_file_is_imported_for_the_marks_alone(self, expression: str, imported: set[str]):
        """Nor for `numbers`, nor for both, which `.ci/run` asks for."""
        config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
        files = {"base": "test_base.py", "ops": "ops/test_scans.py", "config": "config/test_config.py"}
        paths = {name: ROOT / "tests/unit_tests" / path for name, path in files.items()}
        ignored = {name for name, path in paths.items() if marked_files.pytest_ignore_collect(path, config)}
        assert paths.keys() - ignored == imported
        assert not marked_files.pytest_ignore_collect(ROOT / "tests/unit_tests/server", config)
        assert base.depends_on_core(paths["base"])
        assert not base.depends_on_core(paths["config"])

    def test_another_base_than_the_one_that_is_asked_for(self, monkeypatch: pytest.MonkeyPatch):
        """Simulates a variable or a plugin that puts another folder first."""
        monkeypatch.setattr(base, "asked_core", lambda: ("0.17.1", ROOT))
        config = SimpleNamespace(addinivalue_line=lambda *_: None)
        with pytest.raises(pytest.UsageError, match=r"0\.17\.1"):
            base.pytest_configure(config)
