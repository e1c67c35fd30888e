"""Publisher thread: publishes the changes of a cache, and replays them on request.

ZeroMQ PUB, three frames: topic, sequence number (8 bytes, big endian, from 0), payload. Batches of both topics share
one numbering, so that a subscriber to their common prefix sees no gap. Batch 0 says that the cache is empty. A
subscriber that does not read loses batches, sees the gap, and requests the missing ones from a second socket (ROUTER):
`start` in the request, batches as `number, payload` in the reply, number -1 without payload at its end. If batches are
no longer kept, the reply is one batch, or one of each topic, that clears the index and contains the current one, with
the number of the last batch.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator

import zmq

from megatron_ext.config.kv_events import Endpoint, IpcEndpoint, KvEventsConfig
from megatron_ext.errors import ConfigError
from megatron_ext.kv_events.changes import Changes
from megatron_ext.kv_events.events import AllBlocksCleared, Event
from megatron_ext.kv_events.mirror import Mirror, Told
from megatron_ext.kv_events.wire import END_OF_REPLAY, SEQUENCE_BYTES, encode

logger = logging.getLogger(__name__)

STATES_TOPIC = ".states"  # appended to the topic's name
MAX_UNREAD = 1_000  # queued batches per subscriber; further ones are lost
_SPARE_REPLIES = 8  # queued replies per client, in addition to a whole replay
_LAST_WORDS = 1.0  # seconds for the thread to end


class Publisher:
    """Publisher of one cache's events; its `changes` are the cache's observer.

    The constructor binds the addresses, so that an unavailable one is reported before the model is loaded.

    Args:
        config: Settings of KV events, with an endpoint.
        rank: Rank of the replica in its world; part of every batch, and added to ports.

    Raises:
        ConfigError: An address is not available.
    """

    def __init__(self, config: KvEventsConfig, rank: int = 0) -> None:
        assert config.endpoint is not None, "events are off"
        self._topic = config.kv_events_topic.encode()
        self._rank = rank
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.kv_events_buffer_steps)
        self._next = 0  # sequence number
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._is_closing = False
        self.changes = Changes(self._wake)
        self._context = zmq.Context()
        try:
            self._events = self._socket(zmq.PUB, MAX_UNREAD, "--kv-events-endpoint", config.endpoint)
            self._replay = None
            if config.replay_endpoint is not None:
                most = config.kv_events_buffer_steps + _SPARE_REPLIES
                self._replay = self._socket(zmq.ROUTER, most, "--kv-events-replay-endpoint", config.replay_endpoint)
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue raises an error, not a silent loss
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread: threading.Thread | None = None

    def start(self, mirror: Mirror) -> None:
        """Start the thread, which owns the sockets from now on.

        Args:
            mirror: Mirror of an empty cache.
        """
        self._thread = threading.Thread(target=self._run, args=(mirror,), name=f"kv-events-{self._rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread without waiting for unsent batches."""
        self.changes.stop()
        if self._thread is None:
            self._leave()
            return
        self._is_closing = True
        self._wake()
        self._thread.join(_LAST_WORDS)

    def _leave(self) -> None:
        self._context.destroy(linger=0)
        self._bell.close()
        self._ear.close()

    def _socket(self, kind: int, most: int, flag: str, endpoint: Endpoint) -> zmq.Socket[bytes]:
        address = endpoint.of_replica(self._rank)
        if isinstance(endpoint, IpcEndpoint):
            _check_free(flag, address.removeprefix("ipc://"))
        one = self._context.socket(kind)
        one.setsockopt(zmq.SNDHWM, most)
        one.setsockopt(zmq.LINGER, 0)
        one.setsockopt(zmq.IPV6, int("[" in address))
        try:
            (one.bind if endpoint.is_bound else one.connect)(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{flag}: {address} cannot be had: {error.strerror}; give another") from None
        return one

    def _wake(self) -> None:
        try:
            self._bell.send(b"!")
        except BlockingIOError:
            return  # the socket is full, so the thread wakes up anyway
        except OSError:
            return  # the thread has ended

    def _run(self, mirror: Mirror) -> None:
        try:
            self._publish(Told([AllBlocksCleared()], []))
            while not self._is_closing:
                self._turn(mirror)
        except Exception:  # steps go on without events; routers receive nothing more
            logger.exception("KV events are off: the thread that publishes them has failed")
        finally:
            self.changes.stop()
            self._leave()

    def _turn(self, mirror: Mirror) -> None:
        """Wait for changes and replay requests, and handle both."""
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        ready = {one for one, _ in poller.poll()}
        if self._ear.fileno() in ready:
            self._ear.recv(1 << 16)
        delta = self.changes.take()
        if delta is not None:
            self._publish(mirror.apply(delta))
        if self._replay is not None and self._replay in ready:
            self._answer(self._replay, mirror)

    def _publish(self, told: Told) -> None:
        for topic, payload in self._payloads(told):
            number = self._next.to_bytes(SEQUENCE_BYTES, "big")
            self._events.send_multipart([topic, number, payload], zmq.NOBLOCK, copy=False)
            self._kept.append((self._next, payload))
            self._next += 1

    def _payloads(self, told: Told) -> Iterator[tuple[bytes, bytes]]:
        now = time.time()
        parts: list[tuple[bytes, list[Event]]] = [
            (self._topic, [*told.blocks]),
            (self._topic + STATES_TOPIC.encode(), [*told.states]),
        ]
        for topic, events in parts:
            if events:
                yield topic, encode(now, events, self._rank)

    def _answer(self, replay: zmq.Socket[bytes], mirror: Mirror) -> None:
        """Answer a replay request with the missing batches; stop if the client does not read."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            logger.warning("a request for KV events that is none: %d frames", len(frames))
            return
        asker, start = frames[0], int.from_bytes(frames[2], "big")
        try:
            for number, payload in self._lacking(start, mirror):
                replay.send_multipart([asker, b"", number.to_bytes(SEQUENCE_BYTES, "big"), payload], zmq.NOBLOCK)
            replay.send_multipart([asker, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("KV events from %d on were not replayed to the end: %s", start, error)

    def _lacking(self, start: int, mirror: Mirror) -> Iterator[tuple[int, bytes]]:
        oldest = self._kept[0][0]
        if oldest <= start <= self._next:
            yield from ((number, payload) for number, payload in self._kept if number >= start)
        else:
            yield from ((self._next - 1, payload) for _, payload in self._payloads(mirror.present()))


def _check_free(flag: str, path: str) -> None:
    """Check that a socket path is free, or a stale socket: libzmq deletes any file there before it binds.

    Raises:
        ConfigError: The path is a file, or a socket in use.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # no file, or an invalid path, which libzmq reports
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{flag}: {path} exists and is not a socket; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except OSError:  # such as a full queue: a process listens
            pass
    raise ConfigError(f"{flag}: {path} is in use by another process; give another path")
