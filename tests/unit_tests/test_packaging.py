"""Promises of a clean clone before any of its code has run."""

from __future__ import annotations

import ast
import glob
import os
import re
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.unit_tests.support.source import PACKAGE, ROOT, imported_modules, parse
from tools import pins
from tools.check_python import OLDEST_GLIBC, platform_problem, python_problem, supported
from tools.pins import Wheel

PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("is_link", [True, False], ids=["link", "folder"])
def test_git_ignores_the_virtual_environment(tmp_path, is_link):
    """A link to another place is ignored too: `.venv/` would match folders only."""
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    venv = tmp_path / ".venv"
    venv.symlink_to("elsewhere") if is_link else venv.mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    shown = subprocess.run(
        ["git", "status", "--porcelain"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert shown.splitlines() == ["?? .gitignore", "?? elsewhere/"]


def test_data_files_are_part_of_the_package():
    """A wheel has every file that is beside the sources: pages, styles, weights, C++."""
    (patterns,) = re.findall(r'^\[tool.setuptools.package-data\]\n"\*" = \[(.*)\]$', PROJECT, re.MULTILINE)
    known = [pattern.strip(' "') for pattern in patterns.split(",")]
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert len(files) > 10
    packed = {name for one in known for name in glob.glob(str(PACKAGE / "**" / one), recursive=True)}
    assert [path.name for path in files if str(path) not in packed] == [], "`*` leaves out names that begin with a dot"


IMPORTED_BY_OTHERS = {
    "einops": "megatron-core's layers, which do not require it",
    "sentencepiece": "tokenizers of megatron-core and transformers",
    "tiktoken": "the same",
    "transformer-engine": "megatron.core.extensions.transformer_engine",
}
"""Distribution -> what imports it in place of our code."""
MODULES = {"megatron-core": "megatron", "pyyaml": "yaml", "pyzmq": "zmq"}
"""Distribution -> its module, where the names differ by more than dashes."""
TOOLS = {"mypy", "pytest-asyncio", "pytest-timeout", "ruff"}
"""Distributions of the extra `dev` that are run, not imported."""
OWN = {"arguments", "benchmarks", "examples", "megatron_ext", "tests", "tools"}
EXTRAS = re.findall(r"^([a-z]+) = \[", PROJECT.partition("optional-dependencies]")[2].partition("\n[")[0], re.MULTILINE)


def imported(*folders: str) -> set[str]:
    """Top-level modules that the code of folders imports."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        found.update(imported_modules(parse(path)))
    return {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names) - OWN


def listed(name: str) -> dict[str, str]:
    """Module -> distribution, of the project's dependencies or of an extra."""
    (text,) = re.findall(rf"^{name} = (\[.*?\])(?: #[^\n]*)?$", PROJECT, re.MULTILINE | re.DOTALL)
    found = [Requirement(one).name for one in ast.literal_eval(text)]
    return {MODULES.get(one, one.replace("-", "_")): one for one in found}


def test_every_import_is_listed_and_nothing_else():
    """`pyproject.toml` has what the wheel's code imports, and what packages that it imports need without saying so."""
    used = imported("megatron_ext", "arguments")
    modules = {
        module: one for name in ("dependencies", *EXTRAS) if name != "dev" for module, one in listed(name).items()
    }
    assert used - set(modules) == set()
    assert {one for module, one in modules.items() if module not in used} == set(IMPORTED_BY_OTHERS)


def test_extras_of_tests_are_imported():
    files = [file for name in OWN for file in (ROOT / name).rglob("*.py")]
    found = {name for file in files for name in re.findall(r"\b(?:import|from) (\w+)", file.read_text("utf-8"))}
    assert {one for module, one in listed("dev").items() if module not in found} == TOOLS | {"tiktoken"}


class TestInterpreter:
    """Which Pythons and machines there are wheels for, known before anything is installed."""

    BOUNDS = ((3, 10), (3, 14))
    GLIBC = ("glibc", "2.31")

    def test_the_bounds_are_those_of_the_project(self):
        assert supported() == self.BOUNDS
        assert pins.pythons() == ["3.10", "3.11", "3.12", "3.13"]

    def test_documents_name_the_same_c_library(self):
        """`make` installs the extra `grammar`, whose wheels need more than the package does."""
        needed = ".".join(map(str, OLDEST_GLIBC))
        package = re.search(r"glibc ([\d.]+) or newer", PROJECT)
        assert f"glibc {needed} or newer" in (ROOT / "README.md").read_text("utf-8")
        expected = f"glibc {package[1]} or newer; {needed} with the extra `grammar`"
        assert expected in (ROOT / "docs/install.md").read_text("utf-8")

    @pytest.mark.parametrize(
        ("implementation", "version", "is_free_threaded", "expected"),
        [
            ("CPython", (3, 9), False, "this is CPython 3.9; megatron-core has wheels for Python 3.10 to 3.13; choose"),
            ("CPython", (3, 14), False, "this is CPython 3.14; megatron-core has wheels for Python 3.10 to 3.13;"),
            ("PyPy", (3, 11), False, "not CPython (PyPy 3.11)"),
            ("CPython", (3, 13), True, "a free-threaded build (CPython 3.13)"),
        ],
    )
    def test_other_interpreters(self, implementation, version, is_free_threaded, expected):
        assert expected in python_problem(implementation, version, is_free_threaded, self.BOUNDS)

    @pytest.mark.parametrize(
        ("system", "machine", "libc", "found"),
        [
            ("Darwin", "arm64", ("", ""), "this is Darwin on arm64; megatron-core has wheels for Linux on x86_64 or"),
            ("Linux", "riscv64", GLIBC, "this is Linux on riscv64 with glibc 2.31;"),
            ("Linux", "x86_64", ("", ""), "this is Linux on x86_64 with no glibc;"),
            ("Linux", "x86_64", ("glibc", "2.9"), "with glibc 2.9; megatron-core"),
        ],
    )
    def test_other_machines(self, system, machine, libc, found):
        assert found in platform_problem(system, machine, libc)

    @pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
    @pytest.mark.parametrize("locked", ["", "LOCKED=1"])
    def test_make_asks_before_it_installs(self, tmp_path, locked):
        """Make prints one line and creates no .venv in a copy whose project is for another Python."""
        for name in ("Makefile", "constraints.txt", "lock.txt"):
            shutil.copy(ROOT / name, tmp_path)
        (tmp_path / "tools").mkdir()
        shutil.copy(ROOT / "tools/check_python.py", tmp_path / "tools")
        project = (ROOT / "pyproject.toml").read_text("utf-8").replace('">=3.10,<3.14"', '">=3.90,<3.92"')
        (tmp_path / "pyproject.toml").write_text(project, "utf-8")
        command = ["make", "setup", f"PYTHON={sys.executable}", *locked.split()]
        # `make test` hands its own level and flags on to the make that a test calls.
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "LOCKED"))}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "megatron-core has wheels for Python 3.90 to 3.91; choose one" in done.stderr.splitlines()[0]
        assert not (tmp_path / ".venv").exists()


class TestPins:
    """Every supported Python gets one version of everything, and CI their hashes."""

    def test_each_python_has_one_version_of_each(self):
        found = {python: pins.pins_for(python, pins.read_pins()) for python in pins.pythons()}
        assert all("torch==2.13.0" in chosen for chosen in found.values())
        names = {python: {one.partition("==")[0] for one in chosen} for python, chosen in found.items()}
        assert names["3.11"] == names["3.12"] == names["3.13"] < names["3.10"]
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", one) for chosen in found.values() for one in chosen)

    @pytest.mark.parametrize("name", ["MAIN", "RAY", "PAGES", "PUBLISHED"])
    def test_the_lock_is_the_pins_with_hashes(self, name):
        """All but torch, whose build depends on the index; the file says so."""
        pin_set = getattr(pins, name)
        text, every = pin_set.lock.read_text("utf-8"), pins.read_pins(pin_set.constraints)
        assert ("torch is not here" in text) is any(pin.name == "torch" for pin in every)
        entries = re.findall(r"^([a-z].*?)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
        wanted = [str(pin) for pin in every if pin.name != "torch"]
        assert [str(Requirement(pin)) for pin, _ in entries] == wanted
        assert text.count("--hash=") == sum(hashes.count("--hash=") for _, hashes in entries) >= len(wanted)

    def test_the_pins_of_ray_are_beside_the_others(self):
        """RP-6: an environment with Ray has one version of everything."""
        for python in pins.pythons():
            chosen = pins.pins_for(python, pins.RAY.all_pins())
            assert "ray==2.60.0" in chosen
            assert len(chosen) == len(pins.pins_for(python, pins.read_pins())) + len(
                pins.pins_for(python, pins.read_pins(pins.RAY.constraints))
            )

    def test_two_versions_for_one_python(self):
        markers = [Requirement(f'a==1; python_version {bound} "3.12"') for bound in ("<=", ">=")]
        assert pins.pins_for("3.11", markers) == pins.pins_for("3.13", markers) == ["a==1"]
        with pytest.raises(ValueError, match=r"Python 3.12: a is pinned more than once"):
            pins.pins_for("3.12", markers)


def wheel(version: str, *requires: str, pythons: str = "") -> Wheel:
    return Wheel(version, tuple(Requirement(one) for one in requires), "0" * 64, SpecifierSet(pythons))


class TestFittingVersions:
    """The check that `make check-pins` makes of what pip found, with wheels by hand."""

    ROOTS = tuple(Requirement(one) for one in ("a>=1", 'b[fast]; extra == "dev"', 'gpu; extra == "cuda"'))
    A, B, C = wheel("1.5", 'c; python_version < "3.11"'), wheel("2", 'd; extra == "fast"'), wheel("3")

    def test_all_is_there(self):
        wheels = {"a": self.A, "b": self.B, "c": self.C, "d": wheel("4")}
        assert pins.problems("3.10", wheels, self.ROOTS) == []

    @pytest.mark.parametrize(
        ("python", "changed", "expected"),
        [
            ("3.10", {"c": None}, 'Python 3.10: a requires c; python_version < "3.11", which is not pinned'),
            ("3.11", {}, "Python 3.11: c is pinned, and nothing requires it"),
            ("3.10", {"d": None}, 'Python 3.10: b requires d; extra == "fast", which is not pinned'),
            ("3.10", {"a": wheel("0.9", "c")}, "Python 3.10: megatron-ext requires a>=1, and a==0.9 is pinned"),
            ("3.10", {"c": wheel("3", pythons=">=3.11")}, "Python 3.10: c==3 is for >=3.11"),
            ("3.10", {"c": wheel("3", "triton")}, "Python 3.10: c requires triton, which is not pinned"),
        ],
    )
    def test_one_thing_is_not(self, python, changed, expected):
        wheels = {"a": self.A, "b": self.B, "c": self.C, "d": wheel("4")} | changed
        present = {name: one for name, one in wheels.items() if one is not None}
        assert expected in pins.problems(python, present, self.ROOTS)
