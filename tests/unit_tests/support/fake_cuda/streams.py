"""Events and streams of the fake device: it computes at once; copies that do not wait arrive with their event."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from tests.unit_tests.support.fake_cuda import watching


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self._copies: int | None = None
        self._time = 0.0
        self._is_timed = enable_timing

    def record(self, stream: object = None) -> None:
        self._copies, self._time = torch.ops.pretended.last_copy(), time.perf_counter()

    def synchronize(self) -> None:
        if watching.STATE.is_capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (pretended: an event)")
        if self._copies is not None:
            watching.complete(self._copies)

    def wait(self, stream: object = None) -> None:
        return

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        if not (self._is_timed and end._is_timed) or self._copies is None or end._copies is None:
            raise RuntimeError("CUDA error: both events must be recorded, with enable_timing=True (pretended)")
        return 1e3 * (end._time - self._time)


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = id(self)

    def __enter__(self) -> Stream:
        _streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams.pop()

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        synchronize()

    def query(self) -> bool:
        return True


_streams = [Stream()]


def current_stream(device: object = None) -> Stream:
    return _streams[-1]


def default_stream(device: object = None) -> Stream:
    return _streams[0]


@contextlib.contextmanager
def stream(one: Stream | None) -> Iterator[None]:
    with one if one is not None else contextlib.nullcontext():
        yield


def synchronize(device: object = None) -> None:
    """Run all enqueued work."""
    if watching.STATE.is_capturing:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing (pretended: synchronize)")
    watching.complete(torch.ops.pretended.last_copy())
