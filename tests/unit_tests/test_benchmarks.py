"""Benchmarks: cases are found by name, goals and documents name cases that exist, and a case runs as a process."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from benchmarks.__main__ import MODULES, chosen, main, run_process
from benchmarks.cases import CASES, empty_page
from benchmarks.goals import GOALS
from benchmarks.gpu import models
from benchmarks.latency import steps
from benchmarks.throughput import ranks
from tests.unit_tests.support.source import ROOT

RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text("utf-8")
CASE = rf"(?:{'|'.join(MODULES)})\.\w+"


@pytest.fixture(scope="module", autouse=True)
def _all_cases() -> None:
    chosen(["all"])


def test_each_question_has_cases(capsys):
    assert {name.partition(".")[0] for name in CASES} == set(MODULES)
    assert main(["--list", "all"]) == 0
    listed = capsys.readouterr().out
    assert [name for name, one in CASES.items() if name not in listed and not one.needs_cuda] == []


def test_goals_name_cases_of_make_bench():
    named = {goal.case for goal in GOALS} | {goal.over for goal in GOALS if goal.over}
    assert sorted(name for name in named if name not in CASES or not CASES[name].in_bench) == []


def test_timed_functions_exist():
    """Names of timed functions are looked up when a case runs, so that a rename would break it unseen."""
    places = {**steps.HOST, "compute": steps.COMPUTE, **ranks.SENDS, **models.PHASES}
    assert [name for name, place in places.items() if not hasattr(*place)] == []


def test_documents_name_existing_cases():
    """RESULTS.md names cases in backquotes, other documents as commands."""
    in_results = re.findall(rf"`({CASE})", RESULTS)
    documents = [path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")]
    in_commands = [name for text in documents for name in re.findall(rf"-m benchmarks ({CASE})", text)]
    assert len(in_results) > 20
    assert len(in_commands) > 3
    assert sorted({*in_results, *in_commands} - set(CASES)) == []


def test_a_case_runs_as_a_process(tmp_path, capsys):
    """The cheapest case with --quick, with a setting of its own; its figures are printed and written."""
    file = tmp_path / "figures.json"
    assert main(["--quick", "simulation.host_path", "tokens=256", "--json", str(file)]) == 0, capsys.readouterr()
    rows = json.loads(file.read_text())["simulation.host_path"]["rows"]
    assert set(rows) == {"256 a block, 256 tokens"}
    assert rows["256 a block, 256 tokens"]["cold, ms"] > 0
    printed = capsys.readouterr().out
    assert "| 256 a block, 256 tokens |" in printed
    assert "host path, 131,072 tokens: cold / hashlib" in printed


@pytest.mark.parametrize(
    "arguments", [["speed"], ["latency.speed"], ["simulation.host_path", "tokns=1"], ["simulation.soak", "requests=x"]]
)
def test_unknown_names_and_settings_are_refused_in_one_line(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("benchmarks: error: ")


def test_a_failed_check_or_case_is_the_exit_code(monkeypatch, capsys):
    for page in ({"rows": {"a": {"right": False}}}, {"failed": {"case": "no"}}):
        monkeypatch.setattr("benchmarks.__main__.Runner.run_case", lambda *_, page=page: empty_page() | page)
        assert main(["--quick", "simulation.host_path"]) == 1


WRITES = "import json, sys, time; from benchmarks.cases import Run; from pathlib import Path; "
WRITES += "Run(Path(sys.argv[1])).row('a', {'b': 1}); "


@pytest.mark.parametrize(
    ("program", "seconds", "rows", "error"),
    [
        (WRITES, 60.0, {"a": {"b": 1}}, None),
        pytest.param(f"{WRITES}time.sleep(60)", 5.0, {"a": {"b": 1}}, "did not end", marks=pytest.mark.realtime),
        (f"{WRITES}sys.exit(139)", 60.0, {"a": {"b": 1}}, "exit code 139"),
        ("pass", 60.0, {}, "wrote no figures"),
    ],
)
def test_a_process_that_fails_or_hangs_keeps_its_figures(program, seconds, rows, error, tmp_path, monkeypatch):
    """CU-8: a kernel that never ends, or takes its process with it, costs only the later figures of its case."""
    monkeypatch.setattr("benchmarks.__main__.GRACE_SECONDS", 0.0)
    figures = tmp_path / "figures.json"
    page = run_process([sys.executable, "-c", program, str(figures)], figures, seconds, {"PYTHONPATH": str(ROOT)})
    assert page["rows"] == rows
    assert (error or "") in page["failed"].get("process", "")
    assert bool(page["failed"]) == bool(error)


@pytest.mark.long
def test_peers_start_without_this_package():
    """The environments of vLLM, llama.cpp and megatron-core 0.19.2 have neither rich nor megatron_ext."""
    modules = ("worker", "peers.vllm_engine", "peers.llama_cpp", "gpu.peer", "gpu.megatron_0_19.stand_ins")
    program = "import sys; sys.modules.update(dict.fromkeys(['megatron_ext', 'megatron', 'rich'])); import benchmarks."
    program += ", benchmarks.".join(modules)
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
