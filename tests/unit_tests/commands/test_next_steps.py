"""PY-12: a run without flags says at once what it does, and at its end what to do next, in 80 columns."""

from __future__ import annotations

import logging
import shlex
from types import SimpleNamespace

import pytest

from arguments.parser import build_parser
from megatron_ext.commands import run
from megatron_ext.commands.main import COMMANDS


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
