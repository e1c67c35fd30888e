"""Channel of KV events: a socket that publishes numbered batches, and one that replays them.

A batch is a msgpack array `[timestamp, events, data_parallel_rank]`, an event a map with its name under `type`.

ZeroMQ PUB, three frames: topic, sequence number (8 bytes, big endian, from 0), payload. A subscriber that does not read
loses batches, sees the gap, and requests the missing ones from the second socket (ROUTER): `start` in the request,
batches as `number, payload` in the reply, number -1 without payload at its end. If batches are no longer kept, the
reply is the current contents, in batches whose numbers increase up to the last published number; the first of them
begins with the event that clears an index.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgpack
import zmq

from megatron_ext.config.kv_events import BATCH_BYTES, BUFFER_BYTES, MAX_REQUEST_BYTES, Endpoint, IpcEndpoint
from megatron_ext.errors import ConfigError
from megatron_ext.kv_events.events import AllBlocksCleared, AllStatesCleared, BlockStored, Event

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

logger = logging.getLogger(__name__)

MAX_UNREAD = 1_000  # queued batches per subscriber; further ones are lost
_CONTENTS_BATCHES = 4_096  # queued replies per client, in addition to all batches that are kept: 1 GB of contents


def encode_batches(timestamp: float, events: Iterable[Event], data_parallel_rank: int) -> Iterator[bytes]:
    """Encode events as batches of bounded size, each event separately so that other threads can run in between."""
    packer = msgpack.Packer()
    packed: list[bytes] = []
    size = 0
    for event in events:
        one = packer.pack(_map_of(event))
        if packed and size + len(one) > BATCH_BYTES:
            yield _batch(timestamp, packed, data_parallel_rank)
            packed, size = [], 0
        packed.append(one)
        size += len(one)
    if packed:
        yield _batch(timestamp, packed, data_parallel_rank)


def _batch(timestamp: float, packed: Sequence[bytes], data_parallel_rank: int) -> bytes:
    packer = msgpack.Packer()
    head = [packer.pack_array_header(3), packer.pack(timestamp), packer.pack_array_header(len(packed))]
    return b"".join([*head, *packed, packer.pack(data_parallel_rank)])


def _map_of(event: Event) -> dict[str, object]:
    name = type(event).__name__
    if isinstance(event, AllBlocksCleared | AllStatesCleared):
        return {"type": name}
    if not isinstance(event, BlockStored):
        return {"type": name, "block_hashes": event.hashes, "medium": event.medium}
    stored: dict[str, object] = {
        "type": name,
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": list(event.tokens),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": event.medium,
        "lora_name": None,
    }
    return stored if event.extra_keys is None else {**stored, "extra_keys": event.extra_keys}


class Channel:
    """One stream of events. The thread that calls `publish` owns the sockets.

    Args:
        context: ZeroMQ context.
        endpoints: Endpoints by flag, for all channels.
        flags: Flags of this channel's endpoint and of its replays.
        topic: First frame of every batch.
        rank: Rank of the replica in its world; part of every batch, and added to ports.
        buffer_steps: Batches that are kept for replays; fewer if they exceed `BUFFER_BYTES`.

    Raises:
        ConfigError: An address is not available.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: dict[str, Endpoint],
        flags: tuple[str, str],
        topic: str,
        rank: int,
        buffer_steps: int,
    ) -> None:
        self._topic, self._rank = os.fsencode(topic), rank
        self._kept: deque[tuple[int, bytes]] = deque()
        self._max_kept, self._kept_bytes = buffer_steps, 0
        self._next = 0  # sequence number
        self._complaints: set[str] = set()
        self._events = _socket(context, zmq.PUB, MAX_UNREAD, flags[0], endpoints[flags[0]], rank)
        self.endpoint = self._events.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        if flags[1] in endpoints:
            max_messages = buffer_steps + _CONTENTS_BATCHES
            self.replay = _socket(context, zmq.ROUTER, max_messages, flags[1], endpoints[flags[1]], rank)
            self.replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue raises an error, not a silent loss
            self.replay_endpoint = self.replay.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, events: Iterable[Event]) -> None:
        """Publish events, in as few batches as their size allows; none if there are no events."""
        for payload in encode_batches(time.time(), events, self._rank):
            number = self._next.to_bytes(SEQUENCE_BYTES, "big")
            self._events.send_multipart([self._topic, number, payload], zmq.NOBLOCK, copy=False)
            self._keep(payload)

    def _keep(self, payload: bytes) -> None:
        self._kept.append((self._next, payload))
        self._next += 1
        self._kept_bytes += len(payload)
        while len(self._kept) > self._max_kept or (self._kept_bytes > BUFFER_BYTES and len(self._kept) > 1):
            self._kept_bytes -= len(self._kept.popleft()[1])

    def answer(self, contents: Callable[[], Iterable[Event]]) -> None:
        """Answer a replay request with the missing batches; stop if the client does not read.

        Args:
            contents: Returns events that describe the current contents, the first of which clears an index.
        """
        assert self.replay is not None, "a request has come in"
        frames = self.replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            self._complain("invalid requests for KV events, the first of %d frames", len(frames))
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        try:
            for number, payload in self._missing(start, contents):
                reply = [client, b"", number.to_bytes(SEQUENCE_BYTES, "big"), payload]
                self.replay.send_multipart(reply, zmq.NOBLOCK, copy=False)
            self.replay.send_multipart([client, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._complain("KV events were not replayed to the end: %s", error)

    def _complain(self, message: str, detail: object) -> None:
        """Log the first warning of its kind that a client has caused; more of them could fill the log."""
        if message not in self._complaints:
            self._complaints.add(message)
            logger.warning(message, detail)

    def _missing(self, start: int, contents: Callable[[], Iterable[Event]]) -> Iterator[tuple[int, bytes]]:
        if self._kept[0][0] <= start <= self._next:
            return ((number, payload) for number, payload in self._kept if number >= start)
        payloads = list(encode_batches(time.time(), contents(), self._rank))
        lowest = start if start < self._next else 0
        first = self._next - len(payloads)
        return ((max(lowest, first + place), payload) for place, payload in enumerate(payloads))


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, max_messages: int, flag: str, endpoint: Endpoint, rank: int
) -> zmq.Socket[bytes]:
    address = endpoint.of_replica(rank)
    if isinstance(endpoint, IpcEndpoint):
        _check_free(flag, address.removeprefix("ipc://"))
    one = context.socket(kind)
    one.setsockopt(zmq.SNDHWM, max_messages)
    one.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    one.setsockopt(zmq.LINGER, 0)
    one.setsockopt(zmq.IPV6, int("[" in address))
    try:
        (one.bind if endpoint.is_bound else one.connect)(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"{flag}: {address} cannot be used: {error.strerror}; give another address") from None
    return one


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
