"""PY-12: a run without flags says at once what it does, and at its end what to do next, in 80 columns."""

from __future__ import annotations

import io
import logging
import shlex
import sys
from types import SimpleNamespace

import pytest

from arguments.parser import build_parser
from megatron_ext.commands import run
from megatron_ext.commands.main import COMMANDS
from megatron_ext.console.kv_cache_table import make_console
from megatron_ext.console.terminal import Output
from megatron_ext.offline.console_report import _HEADINGS, _WIDTHS


@pytest.fixture
def stub_run(monkeypatch):
    """Stand-in of the heavy part: logs a line where the modules are imported, and has completed every request."""

    def imported(interruption: object) -> SimpleNamespace:
        logging.getLogger("megatron_ext.test").info("heavy modules")
        return SimpleNamespace(run_offline=lambda *arguments: True)

    monkeypatch.setattr(run, "_import_heavy", imported)
    monkeypatch.setattr(run, "limit_spinning", lambda: None)


def test_the_first_line_is_there_before_the_heavy_modules(stub_run, caplog, capsys):
    caplog.set_level(logging.INFO, "megatron_ext")
    assert run.main([]) == run.DONE
    first, second, *_ = [record.getMessage() for record in caplog.records]
    assert (first, second) == (f"start: {run.GREETING}", "heavy modules")
    assert "\nnext:\n" in capsys.readouterr().out


def test_nothing_of_it_with_flags(stub_run, caplog, capsys):
    caplog.set_level(logging.INFO, "megatron_ext")
    assert run.main(["--num-tokens-to-generate", "3"]) == run.DONE
    assert run.GREETING not in caplog.text
    assert capsys.readouterr().out == ""


def test_each_step_is_a_command_with_flags_that_exist():
    parser = build_parser()
    options = {option for action in parser._actions for option in action.option_strings}
    for step, _ in run.STEPS:
        command, *flags = shlex.split(step)
        assert command in COMMANDS
        assert [flag for flag in flags if flag.startswith("-") and flag not in options] == []


@pytest.mark.parametrize("is_on_the_path", [True, False])
def test_the_command_can_be_typed(is_on_the_path, monkeypatch, tmp_path):
    """Use the name, or the path from here, or the module if there is no script."""
    monkeypatch.setattr(run.shutil, "which", lambda name: f"/usr/bin/{name}" if is_on_the_path else None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    expected = "megatron-ext" if is_on_the_path else f"{sys.executable} -m megatron_ext"
    assert run.script_command() == expected
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "megatron-ext").touch()
    assert run.script_command() == ("megatron-ext" if is_on_the_path else "bin/megatron-ext")


def test_lines_fit_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(run, "script_command", lambda: ".venv/bin/megatron-ext")
    run.print_next_steps()
    lines = [*capsys.readouterr().out.splitlines(), f"start: {run.GREETING}"]
    assert max(map(len, lines)) <= 80
    assert make_console(quiet=False, output=Output(io.StringIO())).width <= 80
    assert sum(_WIDTHS) + len("  completed") <= 80
    assert len(_WIDTHS) == len(_HEADINGS)
