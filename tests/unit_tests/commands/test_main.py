"""PY-9: the console script finds its commands, and names itself in their messages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_ext.commands.main import main
from tests.unit_tests.support.source import ROOT

TOOLS = {
    "run_inference": "run",
    "run_server": "serve",
    "simulate_cache": "simulate",
    "prefix_cache": "prefix-cache",
}


@pytest.mark.parametrize("argv", [[], ["walk"], ["--no-such-flag"]])
def test_without_a_command_that_exists(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert capsys.readouterr().err.startswith("usage: megatron-ext ")


def test_arguments_reach_the_command(tmp_path, capsys):
    """The flags after the command's name, a flag of the same name as one of the script's own included."""
    assert main(["prefix-cache", str(tmp_path / "none"), "list"]) == 2
    assert capsys.readouterr().err.startswith("megatron-ext prefix-cache: error: ")
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--help"])
    assert capsys.readouterr().out.startswith("usage: megatron-ext simulate ")


@pytest.mark.parametrize("tool", TOOLS)
def test_a_script_of_tools_starts_its_command(tool, capsys):
    """Under its own name, and by the same code: the help differs in the name only."""
    with pytest.raises(SystemExit, match="0"):
        main([TOOLS[tool], "--help"])
    helps = {f"{tool}.py": help_of(f"tools/{tool}.py"), f"megatron-ext {TOOLS[tool]}": capsys.readouterr().out}
    shown = set()
    for name, text in helps.items():
        assert text.startswith(f"usage: {name} ")
        usage = " ".join(text.split())
        for other in helps:
            usage = usage.replace(other, "NAME")
        shown.add(usage)
    assert len(shown) == 1


def help_of(*words: str) -> str:
    """Help that a process prints."""
    command = [sys.executable, *words, "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
