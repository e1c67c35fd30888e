"""A server that is stopped by a signal and started again finds its prefix cache."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.unit_tests.server.test_run_server import ROOT, TINY
from tests.unit_tests.support.server import PATIENCE

PROMPT = [7] * 30 + list(range(40))


SLOW = """
import runpy, sys, time
from megatron_ext.prefix_cache.disk.data_file import DataFile
write = DataFile.write
DataFile.write = lambda *arguments: (time.sleep(0.5), write(*arguments))[1]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextmanager
def server(directory: Path, *first: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """The tool in a process of its own, and its URL; Python's arguments before it."""
    command = [
        sys.executable,
        *first,
        "tools/run_server.py",
        *TINY,
        "--port",
        "0",
        "--prefix-cache-dir",
        str(directory),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--prefix-cache-disk-gb", "0.01"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            url = next(line for line in process.stdout if line.startswith("ready: "))
            yield process, url.split()[1]
        finally:
            process.kill()


def served(url: str, salt: str | None = None) -> tuple[str, int]:
    """The text of a completion, and its cached tokens."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | ({"cache_salt": salt} if salt else {})
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_first_request_after_a_restart_hits(tmp_path):
    """DC-1, SE-3: SIGTERM writes the cache, each tenant's apart; a process that is killed leaves it as it was."""
    directory = tmp_path / "cache"
    with server(directory) as (process, url):
        cold, cached = served(url)
        assert cached == 0
        assert served(url) == (cold, 64)
        assert served(url, "a tenant") == (cold, 0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        log = process.stderr.read()
        found = re.search(r"prefix cache on disk: (\d+) entries kept, \1 written, 0 left out", log)
        assert found is not None, log
        entries = int(found[1])
    with server(directory) as (process, url):
        shown = httpx.get(f"{url}/prefix_cache", timeout=PATIENCE).json()["disk"]
        assert (shown["loaded"], shown["blocks"] + shown["snapshots"], shown["drops"]) == (entries, entries, {})
        assert served(url, "another tenant") == (cold, 0)
        assert served(url, "a tenant") == served(url) == (cold, 64)
        process.kill()
    with server(directory) as (process, url):
        assert served(url) == (cold, 64)
        assert httpx.post(f"{url}/reset_prefix_cache", timeout=PATIENCE).status_code == 200
        process.kill()
    with server(directory) as (_, url):
        assert served(url) == (cold, 0)


@pytest.mark.long
def test_a_second_signal_ends_the_writing(tmp_path):
    """DC-1: what was not written is counted, and what was written is found."""
    directory = tmp_path / "cache"
    with server(directory, "-c", SLOW) as (process, url):
        cold, _ = served(url)
        process.send_signal(signal.SIGTERM)
        log = ""
        while "shutdown begins" not in log:
            log += process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        log += process.stderr.read()
        found = re.search(r"(\d+) entries kept, \1 written, (\d+) left out", log)
        assert found is not None, log
        assert int(found[2]) > 0
    with server(directory) as (_, url):
        assert httpx.get(f"{url}/prefix_cache", timeout=PATIENCE).json()["disk"]["loaded"] == int(found[1])
        assert served(url)[0] == cold
