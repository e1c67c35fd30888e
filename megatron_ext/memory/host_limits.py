"""Host memory available to this process: free memory, limited by control groups and `ulimit`."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from megatron_ext.errors import ConfigError, MachineError

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# KiB of the libraries before a model is loaded (code, stacks and arenas of threads), measured with torch's CPU build
# and one thread, hence a lower bound. Then KiB that are enough for the embedded model with default settings.
BARE = {"-v": 1_300_000, "-d": 860_000}
ENOUGH = {"-v": 3_500_000, "-d": 3_000_000}
# Texts of failed allocations that do not raise `MemoryError`: torch on either device, C++, threads.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Resource temporarily unavailable",
)
# By version of control groups: the files with the limit and the usage, and the count of droppable file pages.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def available_bytes() -> int:
    """Return the bytes that this process can still allocate on the host, by the tightest of its limits."""
    return max(0, min([psutil.virtual_memory().available, *group_capacities(), *process_capacities()]))


def group_capacities(root: Path = CGROUPS, membership: Path = MEMBERSHIP) -> list[int]:
    """Return the bytes left by each control group with a limit: this process's and its parents, of either version.

    Args:
        root: Mount point of the control groups.
        membership: File that lists this process's control groups, such as `/proc/self/cgroup`.
    """
    try:
        lines = membership.read_text("utf-8").splitlines()
    except OSError:  # no control groups
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
    """Iterate over the group's folder, its parents, and the mount, which in a container often is the group itself."""
    parts = [part for part in group.split("/") if part]
    if ".." not in parts:  # a path outside the mount
        yield from (mount.joinpath(*parts[:count]) for count in range(len(parts), 0, -1))
    yield mount


def _capacity(folder: Path, version: int) -> int | None:
    """Return the bytes that one control group leaves; None if it has no limit."""
    limit_file, usage_file, droppable = _FILES[version]
    try:
        limit, usage = (folder / limit_file).read_text().strip(), int((folder / usage_file).read_text())
        statistics = (folder / "memory.stat").read_text()
    except OSError:  # the root of version 2 has no such files, and some groups are not visible
        return None
    if limit == "max":
        return None
    counts = dict(line.split() for line in statistics.splitlines())
    return int(limit) - usage + int(counts.get(droppable, 0))


def process_capacities() -> list[int]:
    """Return the bytes left by `ulimit -v` and `ulimit -d`; a limit that is not set has no entry."""
    taken = psutil.Process().memory_info()
    # Some systems do not count data; they have no limit on it either.
    by_limit = ((resource.RLIMIT_AS, taken.vms), (resource.RLIMIT_DATA, getattr(taken, "data", None)))
    capacities = []
    for limit, used in by_limit:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and used is not None:
            capacities.append(soft - used)
    return capacities


def enough_for_the_embedded_model() -> str:
    """Return a text with `ulimit` values that are enough for the embedded model."""
    return " and ".join(f"ulimit {flag} {kilobytes}" for flag, kilobytes in ENOUGH.items()) + " are enough"


def check_address_space() -> None:
    """Check that the libraries can be loaded, before the first one is.

    Raises:
        MachineError: `ulimit -v` or `ulimit -d` is too low for them.
    """
    for flag, limit in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < BARE[flag] * 1024:
            raise MachineError(
                f"ulimit {flag} {soft // 1024} is too small: the libraries alone take {BARE[flag]} KiB; "
                f"for the embedded model {enough_for_the_embedded_model()}"
            )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed: on the host, in torch's allocator of either device, or of a thread."""
    is_named = isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    return is_named or isinstance(error, MemoryError)


@contextmanager
def allocating(purpose: str, advice: Callable[[], str]) -> Iterator[None]:
    """Turn an allocation that fails in this context into a `ConfigError` with advice.

    Args:
        purpose: Description of the allocation, with its size.
        advice: Function that returns settings that would fit; called after a failure only.

    Raises:
        ConfigError: The memory cannot be allocated, although it was counted as free.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(f"not enough memory for {purpose}, although enough seemed to be free; {advice()}") from error
