"""DC-4: replicas of `--launch` keep their caches in one directory, each in a slot of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from megatron_ext.prefix_cache.disk.slot import take_slot
from tests.priority import TestPriority
from tests.unit_tests.server.test_restart import served
from tests.unit_tests.server.test_run_server import ROOT, TINY
from tests.unit_tests.support.server import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.priority(TestPriority.HIGH)]

COUNT = 2


@contextmanager
def launched(directory: Path) -> Iterator[list[str]]:
    """Replicas of a coordinator in a process of its own: their URLs."""
    command = [sys.executable, "tools/run_coordinator.py", "--port", "0", "--launch", str(COUNT), *TINY]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [*command, "--prefix-cache-dir", str(directory), "--prefix-cache-disk-gb", "0.01"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            ready = (line.split() for line in process.stdout if line.startswith("replica ") and " ready: " in line)
            yield [words[-1] for words in islice(ready, COUNT)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_replicas_find_what_they_left(tmp_path):
    """The slot that another process holds is left alone; the replica that lacks one begins anew."""
    directory = tmp_path / "cache"
    with launched(directory) as urls:
        cold, cached = served(urls[0])
        assert (cached, served(urls[1])) == (0, (cold, 0))
    assert sorted(os.listdir(directory)) == ["prefix_cache_marker", "slot-0", "slot-1"]
    held = take_slot(directory)
    before = (directory / "slot-0" / "data").stat().st_mtime_ns
    with launched(directory) as urls:
        assert sorted(served(url) for url in urls) == [(cold, 0), (cold, 64)]
    assert sorted(os.listdir(directory)) == ["prefix_cache_marker", "slot-0", "slot-1", "slot-2"]
    assert (directory / "slot-0" / "data").stat().st_mtime_ns == before
    held.close()
