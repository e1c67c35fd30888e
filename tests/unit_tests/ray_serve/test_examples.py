"""RP-6: the examples of Ray Serve. Their settings are read; Ray and clusters are not needed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from megatron_ext.ray_serve.settings import AppSettings, read_app_settings
from tests.unit_tests.support.source import ROOT
from tools import pins

FOLDER = ROOT / "examples/ray_serve"
SCRIPTS = ("one_machine", "two_nodes", "slurm")
MANIFEST = FOLDER / "rayservice.yaml"


def test_every_example_is_here():
    assert {path.name for path in FOLDER.iterdir()} == {*(f"{name}.sh" for name in SCRIPTS), MANIFEST.name}
    assert all(os.access(path, os.X_OK) for path in FOLDER.glob("*.sh"))


def calls(script: str, folder: Path, *arguments: str, **environment: str) -> list[list[str]]:
    """Return the commands of `ray` and `serve` that a script runs, recorded by stand-ins.

    Where there is a head, `serve` waits until it has been started, and a socket accepts connections in its place.
    """
    waiting = f"until grep -qs -- --head '{folder}/calls'; do sleep 0.05; done" if script != "one_machine" else ":"
    for name, body in {
        "ray": f'printf "%s\\n" "ray $*" >> "{folder}/calls"',
        "serve": f'{waiting}; printf "%s\\n" "serve $*" >> "{folder}/calls"',
        "srun": 'shift; SLURM_NODEID=0 "$@"; SLURM_NODEID=1 "$@"',  # its own flag first
        "scontrol": "printf '127.0.0.1\\nsecond\\n'",
    }.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "first,second"}
    path = {"BIN": str(folder), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(FOLDER / f"{script}.sh"), *arguments]
    with socket.create_server(("127.0.0.1", 0)) as head:
        place = {"HEAD": "127.0.0.1", "PORT": str(head.getsockname()[1])}
        env = os.environ | job | path | place | environment
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in (folder / "calls").read_text("utf-8").splitlines()]


def settings_of(commands: list[list[str]]) -> AppSettings:
    """Return the settings of the one `serve run`, as Ray hands them over."""
    (arguments,) = [one[2:] for one in commands if one[:2] == ["serve", "run"]]
    assert_is_our_app(arguments[0])
    return read_app_settings(dict(one.split("=", 1) for one in arguments[1:]))


def is_joining(command: list[str]) -> bool:
    """Return whether a machine joins the head."""
    return command[:3] == ["ray", "start", "--address"] and command[3].startswith("127.0.0.1:")


def assert_is_our_app(path: str) -> None:
    module, _, name = path.partition(":")
    assert callable(getattr(import_module(module), name))


def test_one_machine(tmp_path: Path):
    """Settings of the caller replace those of the script."""
    found = settings_of(calls("one_machine", tmp_path))
    assert (found.deployment.num_replicas, found.routes_by_prefix, found.server.source.load) == (2, True, None)
    (tmp_path / "calls").unlink()
    assert settings_of(calls("one_machine", tmp_path, "num_replicas=3")).deployment.num_replicas == 3


def test_two_nodes(tmp_path: Path):
    """The first machine has the head and serves to others; the second one joins it."""
    commands = calls("two_nodes", tmp_path, NODE="0")
    assert settings_of(commands).deployment.num_replicas == 2
    assert sorted(one[:3] for one in commands) == [
        ["ray", "start", "--head"],
        ["serve", "run", "megatron_ext.ray_serve:app"],
        ["serve", "start", "--http-host"],
    ]
    (tmp_path / "calls").unlink()
    (joining,) = calls("two_nodes", tmp_path, NODE="1")
    assert is_joining(joining)


def test_slurm(tmp_path: Path):
    """Each node is one of the two machines, with a replica for each."""
    commands = calls("slurm", tmp_path, "num_gpus=1")
    assert settings_of(commands).deployment.num_gpus == 1
    assert sum(is_joining(one) for one in commands) == 1
    assert sum(one[:3] == ["ray", "start", "--head"] for one in commands) == 1


@pytest.mark.parametrize("name", ["one_machine.sh", "two_nodes.sh", MANIFEST.name])
def test_proxies_load_the_middleware(name: str):
    """Each node starts with the variable by which Ray finds it."""
    text = (FOLDER / name).read_text("utf-8")
    paths = re.findall(r"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH(?:=|\s+value: )(\S+)", text)
    assert len(paths) == (text.count("image:") or 1)
    for path in paths:
        module, _, function = path.rpartition(".")
        assert getattr(import_module(module), function)()


class TestRayService:
    """The manifest for KubeRay's operator."""

    MANIFEST = yaml.safe_load(MANIFEST.read_text("utf-8"))
    CLUSTER = MANIFEST["spec"]["rayClusterConfig"]

    def test_its_application_is_accepted(self):
        (application,) = yaml.safe_load(self.MANIFEST["spec"]["serveConfigV2"])["applications"]
        assert_is_our_app(application["import_path"])
        found = read_app_settings(application["args"])
        assert found.routes_by_prefix
        assert f"{self.MANIFEST['metadata']['name']}-serve-svc" in found.server.server.allowed_hosts
        (workers,) = self.CLUSTER["workerGroupSpecs"]
        (container,) = workers["template"]["spec"]["containers"]
        room = workers["replicas"] * int(container["resources"]["limits"]["cpu"])
        assert room >= found.deployment.num_replicas * found.deployment.num_cpus

    def test_its_ray_is_the_one_of_the_tests(self):
        assert f"ray=={self.CLUSTER['rayVersion']}" in pins.pins_for("3.11", pins.RAY.all_pins())
        groups = [self.CLUSTER["headGroupSpec"], *self.CLUSTER["workerGroupSpecs"]]
        images = {one["image"] for group in groups for one in group["template"]["spec"]["containers"]}
        assert len(images) == 1
