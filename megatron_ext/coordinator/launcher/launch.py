"""Launcher of local replicas: each is a separate world, restarted when it exits."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import megatron_ext
from megatron_ext.config.coordinator import CoordinatorSettings
from megatron_ext.coordinator.launcher.launched import (
    SOCKETS,
    FoundReplica,
    LaunchRecord,
    find_replicas,
    private_directory,
    start_of,
)
from megatron_ext.coordinator.membership.fleet import Fleet
from megatron_ext.coordinator.membership.member import Source
from megatron_ext.coordinator.supervision import Supervisor, within
from megatron_ext.errors import ConfigError
from megatron_ext.server.api_keys import API_KEY_VARIABLE

logger = logging.getLogger(__name__)

BAD_USAGE = 2  # exit code of invalid settings: a restart would fail as well
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart; doubled each time
LIVED_LONG = 60.0  # seconds; a longer life resets the pauses
LAST_SECONDS = 10.0  # seconds after a replica's grace period for its requests
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
SERVER = ("-m", "megatron_ext", "serve")
_GPUS = Path("/proc/driver/nvidia/gpus")
_READY = re.compile(r"^ready: (http://\S+)$")
_LONGEST_LINE = 1 << 16
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class LaunchPlan:
    """Plan of the replicas to start.

    Attributes:
        program: Arguments of the interpreter that make it a server, such as `SERVER`.
        flags: Flags of the server.
        count: Number of replicas.
        world: Ranks of each replica.
        api_key: API key of the coordinator if it is not in a file; None otherwise.
        shutdown_timeout: Seconds that a replica has to end.
        devices: GPUs of the machine, as CUDA names them; empty without GPUs.
        has_private_events: Whether each replica publishes its KV events in a directory that only this user can enter.
        home: Directory of the replicas, in which the next coordinator finds those that outlive this one; None if they
            end with this one.
    """

    program: tuple[str, ...]
    flags: tuple[str, ...]
    count: int
    world: int = 1
    api_key: str | None = None
    shutdown_timeout: float = 30.0
    devices: tuple[str, ...] = ()
    has_private_events: bool = False
    home: Path | None = None

    def __post_init__(self) -> None:
        needed = self.count * self.world
        if self.devices and needed > len(self.devices):
            raise ConfigError(
                f"--launch {self.count} needs {needed} GPUs, {self.world} for each replica, and {len(self.devices)} "
                f"are visible; launch fewer, or set {DEVICES_VARIABLE}= to compute on the CPU"
            )

    def command(self, events: Path | None = None) -> list[str]:
        """Return the command line of a replica, which publishes its KV events on sockets in `events`, if given."""
        runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.world)]
        own = ["--host", "127.0.0.1", "--port", "0"]
        if events is not None:
            own += [word for flag, name in SOCKETS.items() for word in (flag, f"ipc://{events / name}")]
        return [sys.executable, *(runner if self.world > 1 else ()), *self.program, *self.flags, *own]

    def environment(self, index: int) -> dict[str, str]:
        """Return the environment of the replica with this number, with its own devices."""
        variables = dict(os.environ)
        if self.api_key is not None:
            variables[API_KEY_VARIABLE] = self.api_key
        if self.devices:
            variables[DEVICES_VARIABLE] = ",".join(self.devices[index * self.world : (index + 1) * self.world])
        return variables

    def fingerprint(self, index: int) -> str:
        """Return a hash of the flags and the environment of the replica with this number, and of this version."""
        parts = [self.command(), self.has_private_events, megatron_ext.__version__, self.api_key]
        devices = self.environment(index).get(DEVICES_VARIABLE)
        return hashlib.sha256(json.dumps([*parts, devices]).encode()).hexdigest()


def visible_devices(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the GPUs without initializing CUDA, which would occupy one."""
    listed = (os.environ if environment is None else environment).get(DEVICES_VARIABLE)
    if listed is not None:
        return tuple(one.strip() for one in listed.split(",") if one.strip() and one.strip() != "-1")
    return tuple(str(number) for number in range(len(list(_GPUS.iterdir())))) if _GPUS.is_dir() else ()


def _end_with_parent() -> None:
    """Request SIGTERM when the parent dies; runs in the child, which would outlive a killed coordinator."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Launcher:
    """Starts replicas and restarts them when they exit.

    Args:
        plan: Replicas to start.
        on_failure: Called when the replicas cannot be started at all; `failure` has the reason.
        supervisor: Supervisor of the tasks that run the replicas.
    """

    def __init__(
        self, plan: LaunchPlan, on_failure: Callable[[], None] = lambda: None, supervisor: Supervisor | None = None
    ) -> None:
        self._plan = plan
        self.on_failure = on_failure
        self._supervisor = supervisor or Supervisor()
        self.failure: ConfigError | None = None
        self.pids: dict[int, int] = {}  # of running processes, by replica number
        self._tasks: list[asyncio.Task[None]] = []
        self._found: dict[int, list[FoundReplica]] = defaultdict(list)  # of an earlier coordinator, by number
        self._is_ready = [asyncio.Event() for _ in range(plan.count)]

    def start(self, fleet: Fleet) -> None:
        """Start the tasks that run the replicas; those of an earlier coordinator are kept if their settings fit."""
        for found in [] if self._plan.home is None else find_replicas(self._plan.home):
            self._found[found.record.index].append(found)
        start, count = self._supervisor.start, self._plan.count
        self._tasks = [
            start("launches", f"replica {index}", partial(self._keep_running, index, fleet)) for index in range(count)
        ]
        self._tasks += [
            start("launches", f"replica {index}", partial(self._take_over, index, fleet))
            for index in list(self._found)
            if index not in range(count)
        ]

    async def all_ready(self) -> None:
        """Wait until each replica has been ready once, or cannot be started."""
        await asyncio.gather(*(event.wait() for event in self._is_ready))

    async def close(self) -> None:
        """Stop all replicas; each has its grace period for its requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take_over(self, index: int, fleet: Fleet) -> None:
        """Run what an earlier coordinator launched with this number until it ends; end it if it does not fit."""
        while self._found[index]:
            found = self._found[index].pop()
            url, is_of_plan = found.record.url, index < self._plan.count
            try:
                if is_of_plan and url and found.record.plan == self._plan.fingerprint(index) and index not in self.pids:
                    logger.info("replica %d is running since before, as process %d; it is kept", index, found.pid)
                    self.pids[index] = found.pid
                    fleet.add(url, Source.LAUNCH, found.directory)
                    self._is_ready[index].set()
                    await found.wait()
                    logger.error("replica %d, which an earlier coordinator launched, has ended", index)
                else:
                    logger.warning("replica %d of an earlier coordinator has other settings; it is ended", index)
            finally:
                await self._end(found)
                found.forget()
                if self.pids.get(index) == found.pid:
                    del self.pids[index]
                if url in fleet.members:
                    fleet.remove(url)

    async def _keep_running(self, index: int, fleet: Fleet) -> None:
        await self._take_over(index, fleet)
        pause = FIRST_PAUSE
        while True:
            started = time.monotonic()
            try:
                code = await self._run_once(index, fleet)
                problem = f"has ended with code {code}"
            except ConfigError as error:  # its directory could be created when the plan was made
                code, problem = None, f"is not started: {error}"
            if code == BAD_USAGE and not self._is_ready[index].is_set():
                self._give_up(
                    ConfigError(f"replica {index} did not start: its output above has the reason; see --launch")
                )
                return
            logger.error("replica %d %s; restarting it in %g s", index, problem, pause)
            await asyncio.sleep(pause)
            has_lived = time.monotonic() - started > LIVED_LONG
            pause = FIRST_PAUSE if has_lived else min(LONGEST_PAUSE, 2 * pause)

    def _give_up(self, error: ConfigError) -> None:
        self.failure = self.failure or error
        for event in self._is_ready:
            event.set()
        self.on_failure()

    async def _run_once(self, index: int, fleet: Fleet) -> int:
        """Run a process from start to end; return its exit code."""
        plan = self._plan
        with private_directory(plan.home) if plan.has_private_events or plan.home else contextlib.nullcontext() as own:
            return await self._run_in(own, index, fleet)

    async def _run_in(self, directory: Path | None, index: int, fleet: Fleet) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._plan.command(directory if self._plan.has_private_events else None),
            env=self._plan.environment(index),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,  # Ctrl-C reaches only the coordinator, which lets requests end first
            preexec_fn=_end_with_parent if self._plan.home is None else None,
        )
        self.pids[index] = process.pid
        logger.info("replica %d is being started, as process %d", index, process.pid)
        urls: list[str] = []

        def heard(line: str) -> None:
            found = _READY.match(line)
            if found is not None:
                urls.append(found[1])
                self._record(directory, index, process.pid, found[1])
                fleet.add(found[1], Source.LAUNCH, directory)
                self._is_ready[index].set()

        assert process.stdout is not None, "it is a pipe"
        assert process.stderr is not None, "it is a pipe"
        telling = asyncio.gather(
            _tell(index, process.stdout, sys.stdout, heard), _tell(index, process.stderr, sys.stderr)
        )
        try:
            self._record(directory, index, process.pid)
            code = await process.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await within(1.0, telling)
            return code
        finally:
            await self._end(process)
            telling.cancel()
            self.pids.pop(index, None)
            for url in urls:
                if url in fleet.members:
                    fleet.remove(url)

    def _record(self, directory: Path | None, index: int, pid: int, url: str | None = None) -> None:
        """Record a process for the next coordinator, if it outlives this one."""
        if directory is not None and self._plan.home is not None:
            with contextlib.suppress(ProcessLookupError):
                LaunchRecord(index, pid, start_of(pid), self._plan.fingerprint(index), url).write(directory)

    async def _end(self, process: asyncio.subprocess.Process | FoundReplica) -> None:
        """Terminate a process; kill it after its grace period."""
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            await within(self._plan.shutdown_timeout + LAST_SECONDS, process.wait())
        except asyncio.TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _tell(
    index: int, stream: asyncio.StreamReader, to: object, heard: Callable[[str], None] = lambda line: None
) -> None:
    """Copy the output of a replica line by line, with its number."""
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # the line is longer than the limit
            continue
        if not line:
            return
        text = line.decode(errors="replace").rstrip("\n")
        print(f"replica {index}: {text}", file=to, flush=True)  # type: ignore[call-overload]  # a stream of text
        heard(text)


def plan_of(settings: CoordinatorSettings, program: tuple[str, ...] = SERVER, home: Path | None = None) -> LaunchPlan:
    """Return a plan for this machine.

    Args:
        settings: Settings of the coordinator and its replicas.
        program: See `LaunchPlan`.
        home: See `LaunchPlan`.

    Raises:
        ConfigError: The machine has GPUs, but too few; or the directory for KV event sockets cannot be created.
    """
    config = settings.coordinator
    if settings.has_private_events:
        with private_directory(home):  # fails before any process is started
            pass
    return LaunchPlan(
        program,
        settings.replica_flags,
        config.launch,
        settings.replica_world,
        config.api_key,
        config.shutdown_timeout + settings.replica_drain_seconds,
        visible_devices(),
        settings.has_private_events,
        home,
    )
