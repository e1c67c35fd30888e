"""CU-8: the script for the first hour on a GPU runs the named stages, goes on after a failure, and reports each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import on_device
from tests.unit_tests.support.source import ROOT

SCRIPT = ROOT / "tools/gpu_first_hour.sh"
# In place of python3: writes its arguments down, prints what a stage prints, and fails for one stage.
STAND_IN = r"""#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
  *"benchmarks gpu.mamba2"*)
    printf '|        | us |\n| --- | --- |\n| decode | 3 |\ncheck failed: graphs, right\n'
    exit 1
    ;;
  *tests/unit_tests/ops*) echo '2 failed, 30 passed, 4 skipped, 1 deselected in 61.20s (0:01:01)'; exit 3 ;;
  *"benchmarks gpu.kept_states"*) printf '|        | us |\n| --- | --- |\n| ssd | 3 |\n| conv | 4 |\n' ;;
esac
"""


def run(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict], str]:
    """Run the script; return the process, the lines of JSON, and the calls of Python."""
    stand_in = folder / "bin/python3"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    variables = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    command = ["bash", str(SCRIPT), "--out", str(folder / "out"), *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    lines, calls = folder / "out/stages.jsonl", folder / "calls"
    found = [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.exists() else []
    return done, found, calls.read_text("utf-8") if calls.exists() else ""


def test_each_stage_has_a_line_and_a_log_and_the_worst_exit_code_counts(tmp_path):
    done, found, calls = run(tmp_path)
    assert done.returncode == 3, done.stderr
    assert [(one["stage"], one["rc"], one["counts"]) for one in found] == [
        ("mamba2", 1, {"rows": 1, "failed": 1}),
        ("kernels", 3, {"failed": 2, "passed": 30, "skipped": 4, "deselected": 1}),
        ("kept_states", 0, {"rows": 2, "failed": 0}),
        ("engines", 0, {"rows": 0, "failed": 0}),
    ]
    assert all((tmp_path / "out" / one["log"]).exists() and one["seconds"] < 60 for one in found)
    assert [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] == found
    assert len(list((tmp_path / "out").iterdir())) <= 8
    assert calls.index("compile_kernels.py --device") < calls.index("tests/unit_tests/ops")


def test_all_folders_of_a_device_are_run(tmp_path):
    _, _, calls = run(tmp_path)
    assert [folder for folder in on_device.FOLDERS if folder.rstrip("/") not in calls.split()] == []


def test_named_stages_run_alone(tmp_path):
    done, found, calls = run(tmp_path, "--workers", "5", "--quick", "engines", "kept_states")
    assert done.returncode == 0
    assert [one["stage"] for one in found] == ["engines", "kept_states"]
    assert "--workers 5 -m not long" in calls
    assert "gpu.kept_states --quick" in calls
    assert "unit_tests/ops" not in calls


@pytest.mark.parametrize("arguments", [["speed"], ["--wheels"], ["--wheels", "no folder"]])
def test_unknown_stages_and_missing_wheels_are_refused(arguments, tmp_path):
    done, found, _ = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_first_hour.sh: error: ")
    assert found == []
