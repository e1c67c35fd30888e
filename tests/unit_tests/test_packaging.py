"""What a clean clone promises before anything of it has run."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.unit_tests.support.source import ROOT


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("is_link", [True, False], ids=["link", "folder"])
def test_git_ignores_the_virtual_environment(tmp_path, is_link):
    """Also one that is a link to another place: `.venv/` would match folders only."""
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
