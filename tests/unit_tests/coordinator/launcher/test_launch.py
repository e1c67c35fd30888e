"""RP-2, RP-5: replicas that the coordinator starts: with what, where, again when they die, and never for ever."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import pytest

from arguments import parse_coordinator_arguments
from megatron_ext.commands import coordinate
from megatron_ext.config.kv_events import LONGEST_IPC_PATH, KvEventsConfig
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.launcher.launch import (
    BAD_USAGE,
    DEVICES_VARIABLE,
    SERVER,
    Launcher,
    LaunchPlan,
    plan_of,
    visible_devices,
)
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Status
from megatron_ext.errors import ConfigError
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.routing.router import Router
from tests.unit_tests.support.fleet import PATIENCE, FakeReplica, coordinator, eventually
from tests.unit_tests.support.source import ROOT

# A replica that says it is ready, and writes what it was started with.
SCRIPT = """
import os, pathlib, sys, time
place = pathlib.Path(sys.argv[1])
(place / str(os.getpid())).write_text(repr((sys.argv[2:], os.environ.get("CUDA_VISIBLE_DEVICES"))))
if "--wrong" in sys.argv:
    print("run_server.py: error: it is wrong", file=sys.stderr)
    sys.exit(2)
print(f"ready: http://127.0.0.1:{1024 + os.getpid() % 60000}", flush=True)
time.sleep(600)
"""


# A replica and a rank of its own, which both go on when they are asked to end.
STUBBORN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.fork()
if rank:
    (pathlib.Path(sys.argv[1]) / str(rank)).touch()
    print("ready: http://127.0.0.1:9", flush=True)
time.sleep(600)
"""


class Failing(Launcher):
    """Stand-in for a launcher: a replica ends with one code after the other, and then lives on."""

    codes: dict[int, list[int]]
    waits: frozenset[int] = frozenset()

    async def _run_once(self, index: int, fleet: Fleet) -> int:
        while not self.codes.get(index):
            self.waits |= {index}
            await asyncio.Event().wait()
        return self.codes[index].pop(0)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "server.py").write_text(SCRIPT)
    (tmp_path / "started").mkdir()
    return tmp_path / "server.py"


def plan(script: Path, count: int = 1, *flags: str, **options: object) -> LaunchPlan:
    return LaunchPlan((str(script),), (str(script.parent / "started"), *flags), count, **options)


class TestLauncher:
    async def test_each_has_its_devices_and_a_dead_one_is_started_again(self, script, monkeypatch, caplog, capsys):
        monkeypatch.setattr("megatron_ext.coordinator.launcher.launch.FIRST_PAUSE", 0.01)
        fleet = Fleet(Router(RoutingConfig()), 5.0)
        launcher = Launcher(plan(script, 2, "--seed", "7", devices=("4", "5", "6")))
        with caplog.at_level("INFO"):
            launcher.start(fleet)
            await launcher.all_ready()
        assert all(f"process {pid}" in caplog.text for pid in launcher.pids.values())
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

    async def test_a_replica_that_fails_at_the_start_is_not_restarted(self, script, capsys):
        failed = asyncio.Event()
        launcher = Launcher(plan(script, 1, "--wrong"), failed.set)
        launcher.start(Fleet(Router(RoutingConfig()), 5.0))
        await launcher.all_ready()
        assert failed.is_set()
        assert isinstance(launcher.failure, ConfigError)
        assert len(list((script.parent / "started").iterdir())) == 1
        assert "replica 0: run_server.py: error: it is wrong" in capsys.readouterr().err
        await launcher.close()

    async def test_a_replica_that_cannot_start_ends_all(self, script, monkeypatch):
        """TE-6: a replica that cannot be started leaves no other one that is waited for."""
        failed = asyncio.Event()
        launcher = Failing(plan(script, 2), failed.set)
        launcher.codes = {0: [BAD_USAGE]}
        launcher.start(Fleet(Router(RoutingConfig()), 5.0))
        await asyncio.wait_for(launcher.all_ready(), PATIENCE)
        assert failed.is_set()
        await launcher.close()

    async def test_a_replica_that_was_ready_is_started_again_whatever_its_code(self, script, monkeypatch):
        """TE-6: only the first start shows whether the flags are valid."""
        monkeypatch.setattr("megatron_ext.coordinator.launcher.launch.FIRST_PAUSE", 0.01)
        launcher = Failing(plan(script, 1))
        launcher.codes = {0: [BAD_USAGE]}
        launcher._is_ready[0].set()
        launcher.start(Fleet(Router(RoutingConfig()), 5.0))
        await eventually(lambda: launcher.waits == {0})
        assert launcher.failure is None
        await launcher.close()

    async def test_pauses_grow_up_to_a_limit(self, script, monkeypatch, caplog):
        """TE-6: pauses begin anew after a replica that has lived long."""
        for name, seconds in (("FIRST_PAUSE", 0.01), ("LONGEST_PAUSE", 0.05)):
            monkeypatch.setattr(f"megatron_ext.coordinator.launcher.launch.{name}", seconds)
        for lives, pauses in ((60.0, [0.01, 0.02, 0.04, 0.05, 0.05]), (-1.0, [0.01] * 5)):
            monkeypatch.setattr("megatron_ext.coordinator.launcher.launch.LIVED_LONG", lives)
            caplog.clear()
            launcher = Failing(plan(script, 1))
            launcher.codes = {0: [1] * 5}
            launcher.start(Fleet(Router(RoutingConfig()), 5.0))
            await eventually(lambda: launcher.waits == {0})  # noqa: B023
            assert [record.args[2] for record in caplog.records if "restarting it" in record.message] == pauses
            await launcher.close()

    async def test_a_replica_that_does_not_end_is_killed_with_its_ranks(self, script, monkeypatch):
        """TE-6: the replica leads a session of its own, which a Ctrl-C for the coordinator does not reach."""
        monkeypatch.setattr("megatron_ext.coordinator.launcher.launch.LAST_SECONDS", 0.0)
        script.write_text(STUBBORN)
        fleet = Fleet(Router(RoutingConfig()), 5.0)
        launcher = Launcher(plan(script, shutdown_timeout=0.05))
        launcher.start(fleet)
        await launcher.all_ready()
        leader = launcher.pids[0]
        (rank,) = [int(path.name) for path in (script.parent / "started").iterdir()]
        try:
            assert os.getsid(leader) == os.getsid(rank) == leader != os.getsid(0)
            await asyncio.wait_for(launcher.close(), PATIENCE)
            await eventually(lambda: has_ended(leader) and has_ended(rank))
        finally:
            for process in (leader, rank):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        await fleet.close()

    def test_replicas_do_not_outlive_a_coordinator_that_is_killed(self, script):
        code = f"""
import asyncio, pathlib
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.launcher.launch import Launcher, LaunchPlan
from megatron_ext.routing.router import Router
async def main():
    script = pathlib.Path({str(script)!r})
    launcher = Launcher(LaunchPlan((str(script),), (str(script.parent / "started"),), 1))
    launcher.start(Fleet(Router(RoutingConfig()), 5.0))
    await launcher.all_ready()
    print("pid", launcher.pids[0], flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
            pid = next(int(line.split()[1]) for line in parent.stdout if line.startswith("pid "))
            os.kill(pid, 0)
            parent.kill()
        for _ in range(int(PATIENCE / 0.01)):
            if has_ended(pid):
                return
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("the replica lives")


class TestPrivateEvents:
    """SE-8: events of replicas that are started here go through a directory that no other user can enter."""

    async def test_each_process_has_a_directory_of_its_own_which_goes_with_it(self, script, monkeypatch):
        monkeypatch.setattr("megatron_ext.coordinator.launcher.launch.FIRST_PAUSE", 0.01)
        fleet = Fleet(Router(RoutingConfig()), 5.0)
        launcher = Launcher(plan(script, 2, has_private_events=True))
        before = os.umask(0)
        try:
            launcher.start(fleet)
            await launcher.all_ready()
        finally:
            os.umask(before)

        def directory(number: int) -> Path:
            flags, _ = ast.literal_eval((script.parent / "started" / str(launcher.pids[number])).read_text())
            kinds = ("", "replay-", "states-", "states-replay-")
            assert flags[-8::2] == [f"--kv-events-{kind}endpoint" for kind in kinds]
            sockets = {Path(address.removeprefix("ipc://")) for address in flags[-7::2]}
            assert len(sockets) == 4
            (parent,) = {one.parent for one in sockets}
            return parent

        first, second = directory(0), directory(1)
        assert first != second
        assert {stat.S_IMODE(one.stat().st_mode) for one in (first, second)} == {0o700}
        (first / "events").touch()  # as a process leaves it that is killed
        dead = launcher.pids[0]
        os.kill(dead, signal.SIGKILL)
        await eventually(lambda: launcher.pids.get(0, dead) != dead and len(fleet.members) == 2)
        assert not first.exists()
        third = directory(0)
        assert third.is_dir()
        await launcher.close()
        assert not second.exists()
        assert not third.exists()
        await fleet.close()

    async def test_a_directory_that_cannot_be_created_is_tried_again(self, script, monkeypatch, caplog):
        monkeypatch.setattr("megatron_ext.coordinator.launcher.launch.FIRST_PAUSE", 0.01)
        monkeypatch.setattr(tempfile, "tempdir", str(script.parent / "missing"))
        fleet = Fleet(Router(RoutingConfig()), 5.0)
        launcher = Launcher(plan(script, 1, has_private_events=True))
        launcher.start(fleet)
        await eventually(lambda: "set TMPDIR to a writable directory" in caplog.text)
        monkeypatch.setattr(tempfile, "tempdir", "/tmp")
        await launcher.all_ready()
        assert launcher.failure is None
        await launcher.close()
        await fleet.close()

    def test_a_path_that_is_too_long(self, script, tmp_path, monkeypatch):
        place = tmp_path / ("x" * LONGEST_IPC_PATH)
        place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        settings = parse_coordinator_arguments(["--launch", "1"])
        with pytest.raises(ConfigError, match=r"^TMPDIR: .* set TMPDIR to a directory with a shorter path$"):
            plan_of(settings)
        assert not list(place.iterdir())
        assert not plan_of(dataclasses.replace(settings, has_private_events=False), script).has_private_events

    def test_replicas_have_time_to_write_their_caches(self, script):
        """DC-1: the drain comes after the grace period of requests."""
        words = ["--launch", "1", "--shutdown-timeout", "3", "--prefix-cache-drain-seconds", "40"]
        assert plan_of(parse_coordinator_arguments(words), script).shutdown_timeout == 3
        assert plan_of(parse_coordinator_arguments([*words, "--prefix-cache-dir", "x"]), script).shutdown_timeout == 43

    async def test_requests_go_where_events_say_and_no_port_publishes_them(self):
        """Prompts that a launched replica was sent directly are routed to it, beside a replica without events."""
        other = await FakeReplica(name="other", beat={"block_size": 16}, status_body=b"not yet").start()
        words = ("--launch", "1", "--replica", other.url, "--inference-dynamic-batching-block-size", "16")
        settings = parse_coordinator_arguments([*words, "--no-access-log"])
        launcher = Launcher(plan_of(settings))
        async with coordinator(other, launcher=launcher) as front:
            (url,) = set(front.coordination.fleet.members) - {other.url}
            launched = front.coordination.fleet.members[url]
            other.beat |= dataclasses.asdict(launched.beat.identity) | {"weights": launched.beat.weights}
            other.status_body = None
            await front.until(other, Status.READY)
            (source,) = launched.beat.events
            ports = listening(launcher.pids[0])
            assert launched.address.port in ports
            assert not [port for port in ports if speaks_zeromq(port)]
            addresses = (source.endpoint, source.replay, source.states, source.states_replay)
            (directory,) = {Path(one.removeprefix("ipc://")).parent for one in addresses}
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700

            prompts = [[number] * 64 for number in range(3, 7)]
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
                for prompt in prompts:
                    answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
                    assert answer.status_code == 200, answer.text
            views = front.coordination.router.replicas
            await eventually(lambda: {one.name: one.states for one in views()}[url] >= len(prompts))
            await front.coordination.fleet.look_again()  # the requests above were load of another client
            assert not any(one.load for one in views())
            for prompt in prompts:
                await front.complete(prompt, max_tokens=1)
            assert not other.requests
            for number in range(7, 11):
                await front.complete([number] * 64, max_tokens=1)
            assert other.requests, "prompts that are cached nowhere go to both"
        assert not directory.exists()
        await other.stop()


def speaks_zeromq(port: int, patience: float = 1.0) -> bool:
    """Return whether a port greets like ZMTP: at once, with 0xff first. HTTP and gloo wait for the client."""
    with socket.create_connection(("127.0.0.1", port), timeout=patience) as client:
        try:
            return client.recv(1) == b"\xff"
        except TimeoutError:
            return False


def test_zeromq_is_recognized():
    one = Publisher(KvEventsConfig("tcp://127.0.0.1:0"))
    assert speaks_zeromq(int(one.blocks.endpoint.rpartition(":")[2]), PATIENCE)
    one.close()


def listening(pid: int) -> list[int]:
    """TCP ports of a process and its children."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    connections = [one for process in processes for one in process.net_connections("tcp")]
    return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]


class TestPlan:
    def test_several_ranks_are_a_world_of_their_own(self):
        command = LaunchPlan(SERVER, ("--tensor-model-parallel-size", "2"), 3, world=2).command()
        assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        assert command[6:11] == ["-m", "megatron_ext", "serve", "--tensor-model-parallel-size", "2"]

    def test_devices(self):
        assert visible_devices({DEVICES_VARIABLE: "1, 3"}) == ("1", "3")
        assert visible_devices({DEVICES_VARIABLE: ""}) == visible_devices({DEVICES_VARIABLE: "-1"}) == ()
        with pytest.raises(ConfigError, match="needs 4 GPUs, 2 for each replica, and 3 are visible"):
            LaunchPlan(("x",), (), 2, world=2, devices=("0", "1", "2"))
        two = LaunchPlan(("x",), (), 2, world=2, devices=("0", "1", "2", "3"), api_key="secret")
        assert two.environment(1)[DEVICES_VARIABLE] == "2,3"
        assert two.environment(1)["MEGATRON_EXT_API_KEY"] == "secret"
        assert "secret" not in two.command()


class TestCommandLine:
    def test_flags_of_replicas(self):
        """Replicas do not get the coordinator's own flags, but do get those that hold for both."""
        words = "--launch 2 --port 9 --load ckpt --tensor-model-parallel-size 2 --hide-cache-counts --max-body-mb 1"
        settings = parse_coordinator_arguments([*words.split(), "--replica-timeout", "3", "--api-key", "secret"])
        assert settings.replica_world == 2
        assert settings.replica_flags == (
            *("--load", "ckpt", "--tensor-model-parallel-size", "2", "--max-body-mb", "1.0", "--hide-cache-counts"),
        )
        assert (settings.coordinator.port, settings.coordinator.replica_timeout) == (9, 3.0)

    @pytest.mark.parametrize(
        ("words", "are_private"),
        [
            ("", True),
            ("--kv-events-endpoint tcp://127.0.0.1:5557", False),
            ("--no-inference-dynamic-batching-enable-prefix-caching", False),
        ],
    )
    def test_where_replicas_publish_their_events(self, words, are_private):
        """SE-8: events go to the coordinator alone, unless an endpoint is named or caching is off."""
        settings = parse_coordinator_arguments(["--launch", "1", *words.split()])
        assert settings.has_private_events == are_private
        assert settings.replica_flags == tuple(words.split())

    def test_shared_flags_are_passed_to_replicas(self):
        """TE-6: values and switches, those that were turned off too; publishing addresses of one's own stay."""
        words = "--log-level warning --shutdown-timeout 5 --no-access-log --admin-key-file admin --enable-admin-routes"
        settings = parse_coordinator_arguments(["--launch", "1", *words.split()])
        passed = set(zip(settings.replica_flags, settings.replica_flags[1:], strict=False))
        assert {("--log-level", "warning"), ("--shutdown-timeout", "5.0"), ("--admin-key-file", "admin")} <= passed
        assert {"--no-access-log", "--enable-admin-routes"} <= set(settings.replica_flags)
        own = ("--kv-events-endpoint", "tcp://127.0.0.1:5557")
        assert parse_coordinator_arguments(["--launch", "1", *own]).replica_flags == own

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
            ("--replica a:8000", "--replica 'a:8000' is not the URL of a replica"),
            ("--replica http://a --replica http://a", "--replica has a URL twice"),
            ("--replica http://a --replica-timeout 0", "--replica-timeout 0.0 must be more than zero"),
            ("--replicas-file /nowhere", "/nowhere"),
            ("--replica http://a --enable-admin-routes", "--enable-admin-routes needs an admin key"),
        ],
    )
    def test_mistakes_are_one_line(self, capsys, words, problem):
        assert coordinate.main(words.split()) == coordinate.BAD_USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("megatron-ext coordinate: error: ")
        assert problem in line
