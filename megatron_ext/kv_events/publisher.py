"""The thread that publishes what changes in a cache, and replays it to who asks.

ZeroMQ PUB, three frames: topic, sequence number (8 bytes, big endian, from 0), payload. Batches of both topics are
numbered together, so that who reads the prefix of both sees no gap. Number 0 says that nothing is cached. A subscriber
that does not read loses batches, sees the gap, and asks a second socket (ROUTER) for what it lacks: `start` in a
request, batches as `number, payload` in the reply, number -1 without payload at its end. In place of what is not kept
any more comes one batch, or one of each topic, that clears everything and has the present index, with the number of the
last batch.
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

STATES_TOPIC = ".states"  # behind the topic's name
MAX_UNREAD = 1_000  # batches that wait for one subscriber; beyond them it loses some
_SPARE_REPLIES = 8  # that may wait for one asker beside a whole replay
_LAST_WORDS = 1.0  # seconds for the thread to end


class Publisher:
    """Publishes one cache; its `changes` are the cache's observer.

    Addresses are taken at once, so that one that cannot be had is known before anything is loaded.

    Args:
        config: With an endpoint.
        rank: Of the replica in its world: it goes into every batch, and is added to ports.

    Raises:
        ConfigError: An address cannot be had.
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
                self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is said, not thrown away in silence
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = None if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread: threading.Thread | None = None

    def start(self, mirror: Mirror) -> None:
        """Begin; from now on the sockets belong to the thread.

        Args:
            mirror: Of an empty cache.
        """
        self._thread = threading.Thread(target=self._run, args=(mirror,), name=f"kv-events-{self._rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what has not been sent is not waited for."""
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
            return  # it has more to wake up to than it can hear
        except OSError:
            return  # the thread has ended

    def _run(self, mirror: Mirror) -> None:
        try:
            self._publish(Told([AllBlocksCleared()], []))
            while not self._is_closing:
                self._turn(mirror)
        except Exception:  # steps go on without events; routers see the replica as one that tells nothing
            logger.exception("KV events are off: the thread that publishes them has failed")
        finally:
            self.changes.stop()
            self._leave()

    def _turn(self, mirror: Mirror) -> None:
        """Wait for changes and for askers, and serve both."""
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
        """Send what an asker lacks; one that does not read gets no more."""
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
    """Refuse the path of a file, or of a socket in use: libzmq deletes what is there before it listens.

    Raises:
        ConfigError: Something is there that is not a socket of a process that has ended.
    """
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # nothing is there, or nothing can be; libzmq says which
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{flag}: {path} exists and is not a socket; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except OSError:  # a full queue is of a process that listens
            pass
    raise ConfigError(f"{flag}: {path} is in use by another process; give another path")
