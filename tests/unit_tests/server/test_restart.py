"""A server that is stopped by a signal and started again finds its prefix cache."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe, connection, context
from pathlib import Path

import httpx
import pytest

from megatron_ext.commands import prefix_cache
from tests.forked import fork
from tests.unit_tests.server.test_run_server import TINY
from tests.unit_tests.support.server import PATIENCE

PROMPT = [7] * 30 + list(range(40))


def serve(directory: Path, log: Path, parent: connection.Connection) -> None:
    """The tool in a process of its own, which tells its parent its URL; its log is a file."""
    from megatron_ext.commands.serve import main
    from megatron_ext.server import run

    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), sys.stderr.fileno())
    run.announce = parent.send
    cache = ["--prefix-cache-dir", str(directory), "--prefix-cache-disk-gb", "0.01"]
    sys.exit(main([*TINY, "--port", "0", *cache, "--prefix-cache-drain-seconds", str(PATIENCE)]))


@contextmanager
def server(directory: Path) -> Iterator[tuple[context.Process, str, Path]]:
    """The process, its URL, and its log."""
    ours, theirs = Pipe()
    log = directory.with_suffix(".log")
    process = fork(serve, directory, log, theirs)
    try:
        assert ours.poll(PATIENCE), "the server does not start"
        yield process, ours.recv(), log
    finally:
        process.kill()
        process.join()


def ended(process: context.Process, log: Path) -> str:
    """The log of a server that has ended well."""
    process.join(PATIENCE)
    assert process.exitcode == 0
    return log.read_text()


def served(url: str, salt: str | None = None) -> tuple[str, int]:
    """The text of a completion, and its cached tokens."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | ({"cache_salt": salt} if salt else {})
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def listed(directory: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Number of entries that the tool finds in a directory."""
    assert prefix_cache.main([str(directory), "list"]) == prefix_cache.DONE
    return int(re.search(r": (\d+) entries of ", capsys.readouterr().out)[1])


def test_the_first_request_after_a_restart_hits(tmp_path, capsys):
    """DC-1, SE-3: SIGTERM writes the cache, each tenant's apart; a process that is killed leaves it as it was."""
    directory = tmp_path / "cache"
    with server(directory) as (process, url, log):
        cold, cached = served(url)
        assert cached == 0
        assert served(url) == (cold, 64)
        assert served(url, "a tenant") == (cold, 0)
        process.terminate()
        said = ended(process, log)
        found = re.search(r"prefix cache on disk: (\d+) entries kept, \1 written, 0 left out", said)
        assert found is not None, said
        entries = int(found[1])
    with server(directory) as (process, url, _):
        shown = httpx.get(f"{url}/prefix_cache", timeout=PATIENCE).json()["disk"]
        assert (shown["loaded"], shown["blocks"] + shown["snapshots"], shown["drops"]) == (entries, entries, {})
        assert served(url, "another tenant") == (cold, 0)
        assert served(url, "a tenant") == served(url) == (cold, 64)
        process.kill()
    assert listed(directory, capsys) == entries
    with server(directory) as (process, url, _):
        assert served(url) == (cold, 64)
        assert httpx.post(f"{url}/reset_prefix_cache", timeout=PATIENCE).status_code == 200
        process.kill()
    assert listed(directory, capsys) == 0
