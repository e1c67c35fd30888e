"""Rows and lock files of `make test-clients`; the clients themselves run there."""

from __future__ import annotations

import json
import re

import pytest

from tests.clients import run

FOLDERS = sorted({(row.folder, row.is_node) for row in run.ROWS})


def test_each_row_has_a_script_and_a_version():
    """A row names a script beside a lock file that has the version of its client."""
    for row in run.ROWS:
        assert (run.HERE / row.script).is_file(), row
        assert re.fullmatch(r"[0-9.]+", run.version_of(row)), row


@pytest.mark.parametrize("folder", [folder for folder, is_node in FOLDERS if not is_node])
def test_python_packages_have_hashes(folder):
    text = (run.HERE / folder / "lock.txt").read_text()
    pins = re.findall(r"^[a-z].*?(?=^[a-z]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert all("==" in pin and "--hash=sha256:" in pin for pin in pins)
    assert "://" not in text


@pytest.mark.parametrize("folder", [folder for folder, is_node in FOLDERS if is_node])
def test_node_packages_have_hashes(folder):
    lock = json.loads((run.HERE / folder / "package-lock.json").read_text())
    wanted = json.loads((run.HERE / folder / "package.json").read_text())["dependencies"]
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    assert not any("resolved" in package for package in packages.values())
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted
