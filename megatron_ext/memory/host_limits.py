"""How much memory this process may still take: what is free, and what control groups and `ulimit` leave of it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from megatron_ext.errors import ConfigError, MachineError

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# KiB that the libraries take before a model is there, code and threads' stacks and arenas: measured with torch's CPU
# build and one thread, so that less cannot do. Then what is enough for the embedded model with default settings.
BARE = {"-v": 1_300_000, "-d": 860_000}
ENOUGH = {"-v": 3_500_000, "-d": 3_000_000}
# How libraries say that an allocation failed, where it is no `MemoryError`: torch on either device, C++, threads.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "Resource temporarily unavailable")
# By version of control groups: the limit, what counts towards it, and which of that are files that can be dropped.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes() -> int:
    """Bytes that this process could still allocate on the host, by the narrowest of its limits."""
    return max(0, min([psutil.virtual_memory().available, *group_capacities(), *process_capacities()]))


def group_capacities(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """What each control group with a limit leaves, in bytes: this process's and those above it, of either version.

    Args:
        root: Where control groups are mounted.
        membership: Which of them are this process's, as `/proc/self/cgroup` says.
    """
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:  # there are none here
        return []
    capacities = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            capacities += [
                _capacity(folder, 2) for mount in (root, root / "unified") for folder in _upwards(mount, group)
            ]
        elif "memory" in controllers.split(","):
            capacities += [_capacity(folder, 1) for folder in _upwards(root / "memory", group)]
    return [capacity for capacity in capacities if capacity is not None]


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """The group's folder, those above it, and the mount; a container often sees its own group as the mount alone."""
    parts = [part for part in group.split("/") if part]
    if ".." not in parts:  # it would lead out of what is mounted here
        yield from (mount.joinpath(*parts[:count]) for count in range(len(parts), 0, -1))
    yield mount


def _capacity(folder: Path, version: int) -> int | None:
    """Bytes that one control group leaves; None if it has no limit."""
    limit_file, usage_file, droppable = _FILES[version]
    try:
        limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:  # the root of version 2 has none of these, nor has a group that is not visible from here
        return None
    if limit == "max":
        return None
    counts = dict(line.split() for line in statistics.splitlines())
    return int(limit) - usage + int(counts.get(droppable, 0))


def process_capacities() -> list[int]:
    """What `ulimit -v` and `ulimit -d` leave, in bytes; nothing for one that is not set."""
    taken = psutil.Process().memory_info()
    # Not every system counts data, and those that do not have no such limit on it either.
    by_limit = ((resource.RLIMIT_AS, taken.vms), (resource.RLIMIT_DATA, getattr(taken, "data", None)))
    capacities = []
    for limit, used in by_limit:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and used is not None:
            capacities.append(soft - used)
    return capacities


def enough_for_the_embedded_model() -> str:
    """Limits that would do."""
    return " and ".join(f"ulimit {flag} {kilobytes}" for flag, kilobytes in ENOUGH.items()) + " would do"


def check_address_space() -> None:
    """See that the libraries can be loaded at all, before one of them is.

    Raises:
        MachineError: `ulimit -v` or `ulimit -d` is too low for them.
    """
    for flag, limit in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < BARE[flag] * 1024:
            raise MachineError(
                f"ulimit {flag} {soft // 1024} is too little: the libraries alone take {BARE[flag]} KiB; "
                f"for the embedded model {enough_for_the_embedded_model()}"
            )


@contextmanager
def allocating(what: str, advice: Callable[[], str]) -> Iterator[None]:
    """What is allocated in this block may turn out not to be there, whatever was counted before.

    Args:
        what: Is being allocated, with its size.
        advice: Says what would do; asked once the allocation has failed.

    Raises:
        ConfigError: It cannot be had.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        words = str(error)
        if not isinstance(error, MemoryError) and not any(sign in words for sign in _OUT_OF_MEMORY):
            raise
        raise ConfigError(f"there is no memory for {what}, although it seemed to be free; {advice()}") from error
