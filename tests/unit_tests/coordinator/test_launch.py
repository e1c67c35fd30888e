"""RP-2, RP-5: replicas that the coordinator starts: with what, where, again when they die, and never for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arguments import parse_coordinator_arguments
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.fleet import Fleet
from megatron_ext.coordinator.launch import DEVICES_VARIABLE, Launcher, LaunchPlan, visible_devices
from megatron_ext.errors import ConfigError
from megatron_ext.routing.router import Router
from tests.unit_tests.support.fleet import eventually
from tests.unit_tests.support.source import ROOT
from tools import run_coordinator

# A replica that says it is ready, and writes what it was started with.
SCRIPT = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
(place / str(os.getpid())).write_text(repr((sys.argv[2:], os.environ.get("CUDA_VISIBLE_DEVICES"))))
if "--wrong" in sys.argv:
    print("run_server.py: error: it is wrong", file=sys.stderr)
    sys.exit(2)
print(f"ready: http://127.0.0.1:{1024 + os.getpid() % 60000}", flush=True)
time.sleep(60)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "server.py").write_text(SCRIPT)
    (tmp_path / "started").mkdir()
    return tmp_path / "server.py"


def plan(script: Path, count: int = 1, *flags: str, **options: object) -> LaunchPlan:
    return LaunchPlan(script, (str(script.parent / "started"), *flags), count, **options)


class TestLauncher:
    async def test_each_has_its_devices_and_a_dead_one_is_started_again(self, script, monkeypatch, caplog, capsys):
        monkeypatch.setattr("megatron_ext.coordinator.launch.FIRST_PAUSE", 0.01)
        fleet = Fleet(Router(RoutingConfig()), 5.0)
        launcher = Launcher(plan(script, 2, "--seed", "7", devices=("4", "5", "6")))
        launcher.start(fleet)
        await launcher.all_ready()
        told = [(script.parent / "started" / str(launcher.pids[number])).read_text() for number in range(2)]
        flags = ["--seed", "7", "--host", "127.0.0.1", "--port", "0"]
        assert told == [repr((flags, "4")), repr((flags, "5"))]
        before = set(fleet.members)
        assert len(before) == 2
        dead = launcher.pids[0]
        os.kill(dead, signal.SIGKILL)
        await eventually(lambda: launcher.pids.get(0, dead) != dead and len(fleet.members) == 2)
        assert len(before & set(fleet.members)) == 1, "the dead one has left, its successor has joined"
        assert "replica 0 has ended with code -9" in caplog.text
        assert "replica 1: ready: " in capsys.readouterr().out
        pids = list(launcher.pids.values())
        await launcher.close()
        assert not fleet.members
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        await fleet.close()

    async def test_what_would_not_start_again_is_not_tried_again(self, script, capsys):
        failed = asyncio.Event()
        launcher = Launcher(plan(script, 1, "--wrong"), failed.set)
        launcher.start(Fleet(Router(RoutingConfig()), 5.0))
        await launcher.all_ready()
        assert failed.is_set()
        assert isinstance(launcher.failure, ConfigError)
        assert len(list((script.parent / "started").iterdir())) == 1
        assert "replica 0: run_server.py: error: it is wrong" in capsys.readouterr().err
        await launcher.close()

    def test_replicas_do_not_outlive_a_coordinator_that_is_killed(self, script):
        code = f"""
import asyncio, pathlib
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.fleet import Fleet
from megatron_ext.coordinator.launch import Launcher, LaunchPlan
from megatron_ext.routing.router import Router
async def main():
    script = pathlib.Path({str(script)!r})
    launcher = Launcher(LaunchPlan(script, (str(script.parent / "started"),), 1))
    launcher.start(Fleet(Router(RoutingConfig()), 5.0))
    await launcher.all_ready()
    print("pid", launcher.pids[0], flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
            pid = next(int(line.split()[1]) for line in parent.stdout if line.startswith("pid "))
            os.kill(pid, 0)
            parent.kill()
        for _ in range(500):
            state = Path(f"/proc/{pid}/stat")
            if not state.exists() or state.read_text().rpartition(") ")[2].startswith("Z"):
                return
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the replica lives")


class TestPlan:
    def test_several_ranks_are_a_world_of_their_own(self):
        command = LaunchPlan(Path("run_server.py"), ("--tensor-model-parallel-size", "2"), 3, world=2).command()
        assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        assert command[6:9] == ["run_server.py", "--tensor-model-parallel-size", "2"]

    def test_devices(self):
        assert visible_devices({DEVICES_VARIABLE: "1, 3"}) == ("1", "3")
        assert visible_devices({DEVICES_VARIABLE: ""}) == visible_devices({DEVICES_VARIABLE: "-1"}) == ()
        with pytest.raises(ConfigError, match="needs 4 GPUs, 2 for each replica, and 3 are visible"):
            LaunchPlan(Path("x"), (), 2, world=2, devices=("0", "1", "2"))
        two = LaunchPlan(Path("x"), (), 2, world=2, devices=("0", "1", "2", "3"), api_key="secret")
        assert two.environment(1)[DEVICES_VARIABLE] == "2,3"
        assert two.environment(1)["MEGATRON_EXT_API_KEY"] == "secret"
        assert "secret" not in two.command()


class TestCommandLine:
    def test_flags_of_replicas(self):
        """What is the coordinator's is not given to replicas, and what holds for both is."""
        words = "--launch 2 --port 9 --load ckpt --tensor-model-parallel-size 2 --hide-cache-counts --max-body-mb 1"
        settings = parse_coordinator_arguments([*words.split(), "--replica-timeout", "3", "--api-key", "secret"])
        assert settings.replica_world == 2
        any_port = "tcp://127.0.0.1:0"
        assert settings.replica_flags == (
            *("--load", "ckpt", "--tensor-model-parallel-size", "2", "--max-body-mb", "1.0", "--hide-cache-counts"),
            *("--kv-events-endpoint", any_port, "--kv-events-replay-endpoint", any_port),
        )
        assert (settings.coordinator.port, settings.coordinator.replica_timeout) == (9, 3.0)

    def test_policy_and_alpha_under_megatrons_names(self):
        caching = "--inference-dynamic-batching-prefix-caching"
        words = f"--replica http://a:1 --replica http://b:2 {caching}-coordinator-policy round_robin "
        settings = parse_coordinator_arguments(f"{words} {caching}-routing-alpha 0.25".split()).coordinator
        assert (settings.routing.policy, settings.routing.alpha) == ("round_robin", 0.25)
        assert settings.replica == ("http://a:1", "http://b:2")

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            ("", "there is no replica; give --replica URL, --replicas-file FILE or --launch N"),
            ("--replica http://a --load x", "unrecognized arguments: --load x"),
            ("--launch 1 --laod x", "of the replicas: unrecognized arguments: --laod x; did you mean --load?"),
            ("--launch -1", "--launch -1 must be between 0 and 1024"),
            ("--replica a:8000", "--replica 'a:8000' is no URL of a replica"),
            ("--replica http://a --replica http://a", "--replica has one URL twice"),
            ("--replica http://a --replica-timeout 0", "--replica-timeout 0.0 must be more than zero"),
            ("--replicas-file /nowhere", "/nowhere"),
            ("--replica http://a --enable-admin-routes", "--enable-admin-routes needs a key"),
        ],
    )
    def test_mistakes_are_one_line(self, capsys, words, problem):
        assert run_coordinator.main(words.split()) == run_coordinator.BAD_USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("run_coordinator.py: error: ")
        assert problem in line
