"""SE-4: limits of control groups and `ulimit` are known, and a failed allocation is one line with a number."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.memory import host_limits
from megatron_ext.memory.host_limits import allocating, available_bytes, group_capacities, process_capacities
from tests.unit_tests.support.source import ROOT

MIB = 2**20
UNLIMITED = 9_223_372_036_854_771_712  # as version 1 writes it


def write_group(folder: Path, version: int, limit: object, usage: int, files: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, usage_name, key = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{key} {files}\nactive_file 7\n")


def membership(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "cgroup"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_version_2_counts_the_group_and_those_above_it(tmp_path: Path):
    """512 MiB less 100 used, of which 30 are files that can be dropped; above it 300 less 250."""
    write_group(tmp_path / "a/b", 2, 512 * MIB, 100 * MIB, 30 * MIB)
    write_group(tmp_path / "a", 2, 300 * MIB, 250 * MIB, 0)
    assert group_capacities(tmp_path, membership(tmp_path, "0::/a/b")) == [442 * MIB, 50 * MIB]


@pytest.mark.parametrize("group", ["/", "/docker/0123", "/../elsewhere"])
def test_a_container_sees_its_group_as_the_mount(tmp_path: Path, group: str):
    write_group(tmp_path, 2, 64 * MIB, 60 * MIB, 0)
    write_group(tmp_path.parent / "elsewhere", 2, MIB, 0, 0)  # not to be found by going up
    assert group_capacities(tmp_path, membership(tmp_path, f"0::{group}")) == [4 * MIB]


def test_version_1_beside_a_version_2_that_has_no_memory(tmp_path: Path):
    write_group(tmp_path / "memory/jobs/one", 1, 100 * MIB, 90 * MIB, 20 * MIB)
    write_group(tmp_path / "memory", 1, UNLIMITED, 500 * MIB, 0)
    (tmp_path / "unified").mkdir()
    lines = ("9:cpu,cpuacct:/jobs", "4:memory:/jobs/one", "1:name=systemd:/a:b", "0::/")
    capacities = group_capacities(tmp_path, membership(tmp_path, *lines))
    assert capacities == [30 * MIB, UNLIMITED - 500 * MIB]


def test_the_narrowest_decides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=11))
    for groups, process, expected in (([5, 9], [7], 5), ([9], [7], 7), ([], [-3], 0)):
        monkeypatch.setattr(host_limits, "group_capacities", lambda groups=groups: groups)
        monkeypatch.setattr(host_limits, "process_capacities", lambda process=process: process)
        assert available_bytes() == expected
    monkeypatch.setattr(host_limits, "process_capacities", lambda: [])
    assert available_bytes() == 11


@pytest.mark.parametrize(("limit", "kind"), [("RLIMIT_AS", "vms"), ("RLIMIT_DATA", "data")])
def test_ulimit(monkeypatch: pytest.MonkeyPatch, limit: str, kind: str):
    assert process_capacities() == []
    used = getattr(psutil.Process().memory_info(), kind)
    soft = {getattr(resource, limit): used + 700 * MIB}
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft.get(which, unlimited), unlimited))
    (capacity,) = process_capacities()
    assert abs(capacity - 700 * MIB) < 50 * MIB


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError("CUDA out of memory.")],
)
def test_an_allocation_that_fails_is_one_line(error: Exception):
    with pytest.raises(ConfigError) as caught, allocating("what", lambda: "set 5"):
        raise error
    assert str(caught.value) == "not enough memory for what, although enough seemed to be free; set 5"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not keep to these limits")
@pytest.mark.parametrize(("tool", "flag"), [("run_inference", "-v"), ("run_server", "-d")])
def test_the_tools_say_when_not_even_the_libraries_fit(tool: str, flag: str):
    """The tool fails cleanly under a real limit in a new process, before importing torch ends in a traceback."""
    command = f"ulimit {flag} 400000; exec {sys.executable} tools/{tool}.py"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{tool}.py: error: ulimit {flag} 400000 is too small: the libraries alone take ")
    assert done.stderr.endswith("are enough\n")
    assert done.stderr.count("\n") == 1
