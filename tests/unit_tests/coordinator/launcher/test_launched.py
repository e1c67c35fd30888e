"""RP-4, RP-5, RP-10: launched replicas outlive a coordinator that is killed, and the next one finds them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from arguments import parse_coordinator_arguments
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.launcher.launch import Launcher, LaunchPlan
from megatron_ext.coordinator.launcher.launched import LaunchRecord, find_replicas, fleet_directory, start_of
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.errors import ConfigError
from megatron_ext.routing.router import Router
from tests.unit_tests.coordinator.launcher.test_launch import SCRIPT, has_ended
from tests.unit_tests.support.fleet import LAUNCH_PATIENCE, eventually
from tests.unit_tests.support.source import ROOT

# A coordinator that launches replicas, says which, and lives on.
COORDINATOR = """
import asyncio, pathlib
from megatron_ext.config.routing import RoutingConfig
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.launcher.launch import Launcher, LaunchPlan
from megatron_ext.routing.router import Router
async def main():
    script, home = pathlib.Path({script!r}), pathlib.Path({home!r})
    plan = LaunchPlan((str(script),), (str(script.parent / "started"),), {count}, has_private_events=True, home=home)
    launcher = Launcher(plan)
    launcher.start(Fleet(Router(RoutingConfig()), 5.0))
    await launcher.all_ready()
    print("pids", *launcher.pids.values(), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "server.py").write_text(SCRIPT)
    (tmp_path / "started").mkdir()
    return tmp_path / "server.py"


@contextlib.contextmanager
def killed_coordinator(script: Path, home: Path, count: int) -> Iterator[list[int]]:
    """Process ids of the replicas that a coordinator launched before it was killed."""
    code = COORDINATOR.format(script=str(script), home=str(home), count=count)
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pids = next([int(pid) for pid in line.split()[1:]] for line in parent.stdout if line.startswith("pids "))
        parent.kill()
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def plan(script: Path, home: Path, count: int, *flags: str) -> LaunchPlan:
    return LaunchPlan(
        (str(script),), (str(script.parent / "started"), *flags), count, has_private_events=True, home=home
    )


class TestTakingOver:
    async def test_replicas_of_a_killed_coordinator_are_kept(self, script, home, monkeypatch, caplog):
        """Found replicas join with their directories, are started again if they die, and end with the coordinator."""
        monkeypatch.setattr("megatron_ext.coordinator.launcher.launch.FIRST_PAUSE", 0.01)
        with killed_coordinator(script, home, 2) as pids:
            assert not any(has_ended(pid) for pid in pids)
            fleet, launcher = Fleet(Router(RoutingConfig()), 5.0), Launcher(plan(script, home, 2))
            launcher.start(fleet)
            await launcher.all_ready()
            assert sorted(launcher.pids.values()) == sorted(pids)
            assert len(fleet.members) == 2
            directories = {member.sockets for member in fleet.members.values()}
            assert all(one.parent == home for one in directories)
            dead = launcher.pids[0]
            os.kill(dead, signal.SIGKILL)
            await eventually(lambda: launcher.pids.get(0, dead) != dead and len(fleet.members) == 2)
            assert launcher.pids[1] in pids
            assert "which an earlier coordinator launched, has ended" in caplog.text
            await launcher.close()
            await eventually(lambda: all(has_ended(pid) for pid in pids))
            assert not list(home.iterdir())
            assert not fleet.members
            await fleet.close()

    @pytest.mark.parametrize(("count", "flags"), [(1, ("--seed", "8")), (0, ())], ids=["other flags", "fewer"])
    async def test_replicas_with_other_settings_are_ended(self, script, home, count, flags):
        with killed_coordinator(script, home, 1) as (pid,):
            fleet, launcher = Fleet(Router(RoutingConfig()), 5.0), Launcher(plan(script, home, count, *flags))
            launcher.start(fleet)
            await eventually(lambda: has_ended(pid))
            await launcher.all_ready()
            assert len(fleet.members) == count
            assert pid not in launcher.pids.values()
            await launcher.close()
            await fleet.close()

    async def test_a_replica_that_was_not_ready_is_ended(self, script, home):
        """A replica without a URL in its record cannot be reached."""
        with killed_coordinator(script, home, 1) as (pid,):
            (found,) = find_replicas(home)
            record = found.record
            LaunchRecord(record.index, record.pid, record.started, record.plan).write(found.directory)
            fleet, launcher = Fleet(Router(RoutingConfig()), 5.0), Launcher(plan(script, home, 1))
            launcher.start(fleet)
            await launcher.all_ready()
            assert has_ended(pid)
            assert launcher.pids[0] != pid
            await launcher.close()
            await fleet.close()


class TestRecords:
    def test_files_of_ended_processes_are_deleted(self, home):
        """Another process with the id of a record is left alone."""
        for name, record in (
            ("other", LaunchRecord(0, os.getpid(), "another boot", "plan", "http://a")),
            ("gone", LaunchRecord(0, 2**22 + 1, start_of(os.getpid()), "plan", "http://a")),
        ):
            (home / name).mkdir()
            record.write(home / name)
        (home / "empty").mkdir()
        (home / "damaged").mkdir()
        (home / "damaged/replica.json").write_text('{"pid": ')
        (home / "others").mkdir()
        (home / "others/replica.json").write_text('{"unknown": 1}')
        assert find_replicas(home) == []
        assert list(home.iterdir()) == []

    def test_a_running_process_is_found(self, home):
        (home / "mine").mkdir()
        record = LaunchRecord(3, os.getpid(), start_of(os.getpid()), "plan", "http://a")
        record.write(home / "mine")
        (found,) = find_replicas(home)
        assert found.record == record
        found.forget()
        assert list(home.iterdir()) == []


class TestDirectory:
    def test_it_is_private_locked_and_goes_when_it_is_empty(self, home, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(home))
        with fleet_directory(8000) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            with pytest.raises(ConfigError, match="another coordinator keeps its replicas"), fleet_directory(8000):
                pass
            with fleet_directory(8001) as other:
                assert other != path
        assert not path.exists()
        with fleet_directory(8000) as path:
            (path / "kept").mkdir()
        assert path.exists()
        with fleet_directory(8000) as again:
            assert again == path

    def test_a_directory_that_others_may_enter_is_refused(self, home, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(home))
        with fleet_directory(8000) as path:
            path.chmod(0o755)
            (path / "kept").mkdir()
        with (
            pytest.raises(ConfigError, match="is not a directory that only this user can enter"),
            fleet_directory(8000),
        ):
            pass
        (home / "elsewhere").mkdir(mode=0o700)
        link = path.with_name(path.name.replace("8000", "9000"))
        link.symlink_to(home / "elsewhere")
        with pytest.raises(ConfigError, match="--replicas-end-with-coordinator"), fleet_directory(9000):
            pass

    def test_a_lock_of_a_killed_coordinator_is_free(self, home, monkeypatch):
        monkeypatch.setattr(tempfile, "tempdir", str(home))
        with fleet_directory(8000) as path:
            descriptor = os.open(path, os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(descriptor)

    def test_the_flag(self):
        settings = parse_coordinator_arguments(["--launch", "1", "--replicas-end-with-coordinator"])
        assert settings.coordinator.replicas_end_with_coordinator
        assert not settings.replica_flags
        assert not parse_coordinator_arguments(["--launch", "1"]).coordinator.replicas_end_with_coordinator


@pytest.mark.long
@pytest.mark.parametrize("ends", [False, True], ids=["kept", "ends with it"])
async def test_a_real_replica_answers_through_the_next_coordinator(home, ends):
    """The coordinator is killed; the replica goes on, logs into a closed pipe, and is found on the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--launch", "1", "--port", str(port), *(["--replicas-end-with-coordinator"] if ends else [])]
    environment = os.environ | {"TMPDIR": str(home)}

    async def start() -> asyncio.subprocess.Process:
        command = [sys.executable, str(ROOT / "tools/run_coordinator.py"), *flags]
        one = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True
        )
        while not (line := await asyncio.wait_for(one.stdout.readline(), LAUNCH_PATIENCE)).startswith(b"ready: "):
            assert line, "it has ended"
        return one

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LAUNCH_PATIENCE) as client:
        first = await start()
        url = next(iter((await client.get("/replicas")).json()["replicas"]))["url"]
        told = (await client.get(f"{url}/replica")).json()
        first.kill()
        await first.wait()
        body = {"prompt": [5] * 40, "max_tokens": 2}
        if ends:

            async def is_gone() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    await client.get(f"{url}/replica")
                    return False
                return True

            while not await is_gone():
                await asyncio.sleep(0.05)
        else:
            for _ in range(3):  # each writes a line to the log, which is a broken pipe now
                assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 200
        second = await start()
        (replica,) = (await client.get("/replicas")).json()["replicas"]
        assert (replica["url"] == url) is not ends
        assert replica["has_events"]
        if not ends:
            assert (await client.get(f"{url}/replica")).json()["instance"] == told["instance"]
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        second.send_signal(signal.SIGTERM)
        assert await second.wait() == 0
        with pytest.raises(httpx.TransportError):
            await client.get(f"{replica['url']}/replica")
    assert not list(home.glob("megatron_ext-fleet-*"))
