"""CU-8: wheels carried to a machine with torch and without an index are exactly those missing there."""

from __future__ import annotations

import tarfile
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools import fetch_wheels
from tools.pins import Wheel

PYTHON = "3.12"
ROOTS = [Requirement(line) for line in ("torch>=2.6", "a>=2", "b", 'c; extra == "dev"', 'd; python_version < "3.12"')]


def wheel(version: str, *requires: str) -> Wheel:
    return Wheel(version, tuple(map(Requirement, requires)), "", SpecifierSet())


WHEELS = {
    "a": wheel("2.5", "e", "numpy"),
    "b": wheel("1.0"),
    "c": wheel("1.0"),
    "d": wheel("1.0"),
    "e": wheel("3.0", "triton"),
    "numpy": wheel("2.4"),
}


def test_lists_missing_wheels():
    """Missing wheels include transitive dependencies, but not extras, other Pythons' packages, torch or triton."""
    assert fetch_wheels.missing(PYTHON, WHEELS, ROOTS, {"torch": "2.11.0+cu130"}) == ["a", "b", "e", "numpy"]


def test_keeps_installed_packages():
    """Packages that satisfy the requirement stay, in any version; their requirements are not looked at."""
    assert fetch_wheels.missing(PYTHON, WHEELS, ROOTS, {"a": "2.1", "b": "0.1"}) == []
    assert fetch_wheels.missing(PYTHON, WHEELS, ROOTS, {"a": "1.9", "numpy": "2.5.2", "b": "7"}) == ["a", "e"]


def test_adds_the_extras_that_tests_need():
    roots = [*ROOTS, Requirement('mypy; extra == "dev"'), Requirement('b; extra == "ray"')]
    assert fetch_wheels.missing(PYTHON, WHEELS, roots, {"a": "2.1", "b": "0.1"}, ("dev",)) == ["c"]


def test_an_unpinned_requirement_is_named():
    with pytest.raises(ValueError, match="b is needed on the target machine"):
        fetch_wheels.missing(PYTHON, {"a": WHEELS["a"], "e": WHEELS["e"]}, ROOTS, {"numpy": "2.5.2"})


def test_lists_of_pip_are_read():
    text = "# a comment\ntorch==2.11.0+cu130\nPyYAML==6.0.3\n-e git+https://example.org/x#egg=x\nlocal @ file:///y\n"
    assert fetch_wheels.present_in(text) == {"torch": "2.11.0+cu130", "pyyaml": "6.0.3"}


def test_no_two_versions_in_one_folder(tmp_path):
    """Two wheels of one project would stop the whole installation, over there."""
    (tmp_path / "a-1.0-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match="has wheels already"):
        fetch_wheels.download(["a==2.5"], PYTHON, "x86_64", tmp_path)


def test_the_peer_is_its_packages_side_by_side(tmp_path, monkeypatch):
    """Only the package folder is taken from source archives; only files that the table names are fetched."""

    def fetched(library, folder):
        path = folder / ("x.whl" if "--python-version=3.12" in library.options else "x.tar.gz")
        names = [f"{library.top}/{package}/inner.py" for package in fetch_wheels.PEER[library.name]]
        names += [f"{library.top}/csrc/kernel.cu"]
        source = tmp_path / "source.py"
        source.write_text(library.name)
        if path.suffix == ".whl":
            with zipfile.ZipFile(path, "w") as archive:
                [archive.write(source, name) for name in names]
        else:
            with tarfile.open(path, "w:gz") as archive:
                [archive.add(source, name) for name in names]
        return path

    monkeypatch.setattr(fetch_wheels, "fetch", fetched)
    folder = tmp_path / "peer"
    fetch_wheels.make_peer(folder)
    found = {path.relative_to(folder).parent.as_posix(): path.read_text() for path in folder.rglob("*.py")}
    assert found == {package: name for name, packages in fetch_wheels.PEER.items() for package in packages}
