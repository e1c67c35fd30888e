"""MR-1: the launch scripts of several ranks. Those for one machine are run; those for two are read, and their flags."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from arguments.parser import parse_arguments
from tests.unit_tests.support.source import ROOT

SCRIPTS = ROOT / "examples/ranks"
SMALL = "--inference-dynamic-batching-block-count 64 --num-tokens-to-generate 2"
RUN = {
    "tensor_parallel": f"--prompts first second {SMALL}",
    "pipeline_parallel": f"--prompts first second {SMALL}",
    "expert_parallel": f"--prompt-file examples/ranks/ids.jsonl {SMALL}",
}
CLUSTER = ("two_nodes", "slurm")

pytestmark = pytest.mark.worlds


def run(script: str, *arguments: str, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPTS / f"{script}.sh"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_every_script_is_here():
    assert {path.stem for path in SCRIPTS.glob("*.sh")} == {*RUN, *CLUSTER}
    assert all(os.access(path, os.X_OK) for path in SCRIPTS.glob("*.sh"))


def started(script: str, folder: Path, *arguments: str) -> tuple[argparse.Namespace, list[str]]:
    """Return the command lines of a script, recorded by a stand-in for Python: torchrun's arguments, and the tool's."""
    for name, body in {
        "python": 'printf "%s\\n" "$@"',
        "srun": 'shift; exec "$@"',  # its own flag first
        "scontrol": "printf 'first\\nsecond\\n'",
    }.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    node = {"NODE": "1", "MASTER_ADDR": "first", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "2"}
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "first,second"}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = run(script, *arguments, PYTHON=str(folder / "python"), PATH=path, **node, **job)
    assert done.returncode == 0, done.stderr
    module, name, *command = done.stdout.splitlines()
    assert (module, name) == ("-m", "torch.distributed.run")
    launch = get_args_parser().parse_args(command)
    assert Path(launch.training_script) == Path("tools/run_inference.py")
    return launch, launch.training_script_args


def test_experts_under_torchrun(tmp_path):
    """The second request of each replica hits what its first one left."""
    path = tmp_path / "results.json"
    arguments = [*RUN["expert_parallel"].split(), "--output-path", str(path)]
    done = run("expert_parallel", *arguments, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    requests = [one for name, one in json.loads(path.read_text()).items() if name.isdecimal()]
    assert all(len(one["generated_tokens"]) == 2 for one in requests)
    assert done.stdout.count("prompt tokens:") == 1
    assert [one["skipped_prefill_token_count"] for one in requests] == [0, 0, 128, 128, 128, 128]


@pytest.mark.parametrize("script", [*RUN, *CLUSTER])
def test_torchrun_and_the_tool_know_all_flags(script, tmp_path):
    launch, arguments = started(script, tmp_path, "--prompts", "a text")
    settings = parse_arguments(arguments)
    ranks = int(launch.nnodes.split(":")[0]) * int(launch.nproc_per_node)
    assert ranks == settings.parallel.smallest_world == (16 if script in CLUSTER else 2)
