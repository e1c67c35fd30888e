"""Clients of applications under Ray Serve, and the processes of their replicas."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import psutil

from tests.ray.conftest import PATIENCE

DEPLOYMENT = "megatron_ext_replicas"
PAUSE = 0.1  # seconds between two requests of a client, so that replicas that start are not kept waiting


def tokens(first: int, count: int) -> list[int]:
    """A prompt that has nothing in common with those of other first tokens."""
    return [first + i % 7 for i in range(count)]


class Stream:
    """A stream of a completion.

    Args:
        client: Client of the application.
        prompt: Token ids.
        count: Number of generated tokens.
        fields: Other fields of the body.
    """

    def __init__(self, client: httpx.Client, prompt: list[int], count: int, **fields: object) -> None:
        self.count = count
        body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "stream": True}
        options = {"stream_options": {"include_usage": True}}
        self._open = client.stream("POST", "/v1/completions", json=body | options | fields)
        self._lines = iter(())

    def __enter__(self) -> Stream:
        answer = self._open.__enter__().raise_for_status()
        self._lines = (line for line in answer.iter_lines() if line)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(*error)

    def read(self, count: int) -> None:
        """Wait for a number of events."""
        for _ in range(count):
            next(self._lines)

    def check_rest(self) -> None:
        """Read to the end, which must be that of a complete answer."""
        *_, usage, last = self._lines
        assert last == "data: [DONE]", last
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == self.count


@contextmanager
def traffic(url: httpx.URL) -> Iterator[list[str]]:
    """Streams and other requests, one after the other in each of two threads; yields what went wrong."""
    is_over = threading.Event()
    wrong: list[str] = []
    counts = [0, 0]

    def work(number: int) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE) as client:
            while not is_over.wait(PAUSE):
                try:
                    if number:
                        with Stream(client, tokens(1000 + counts[number], 40), 60) as stream:
                            stream.check_rest()
                    else:
                        body = {"prompt": tokens(2000 + counts[number], 40), "max_tokens": 4, "ignore_eos": True}
                        answer = client.post("/v1/completions", json=body).raise_for_status().json()
                        assert answer["usage"]["completion_tokens"] == 4
                    counts[number] += 1
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(counts))]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert all(counts)


def pids() -> set[int]:
    """Processes of the replicas in this test's cluster."""
    workers = psutil.Process().children(recursive=True)
    return {one.pid for one in workers if DEPLOYMENT in "".join(command_line(one))}


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
