"""Publisher thread: publishes the changes of a cache on two channels, and replays them on request.

Blocks and states have a channel each, with numbers of their own (`channel.py`). Number 0 of each says that nothing is
cached.
"""

from __future__ import annotations

import logging
import socket
import threading

import zmq

from megatron_ext.config.kv_events import KvEventsConfig
from megatron_ext.errors import ConfigError
from megatron_ext.kv_events.changes import Changes
from megatron_ext.kv_events.channel import Channel
from megatron_ext.kv_events.mirror import CacheEvents, Mirror

logger = logging.getLogger(__name__)

_LAST_WORDS = 1.0  # seconds for the thread to end
_LINGER = 250  # milliseconds to send the last messages


class Publisher:
    """Publisher of one cache's events; its `changes` are the cache's observer.

    The constructor binds the addresses, so that an unavailable one is reported before the model is loaded.

    Args:
        config: Settings of KV events, with an endpoint.
        rank: Rank of the replica in its world; part of every batch, and added to ports.

    Attributes:
        blocks: Channel of blocks.
        states: Channel of states; None if they are not published.

    Raises:
        ConfigError: An address is not available.
    """

    def __init__(self, config: KvEventsConfig, rank: int = 0) -> None:
        assert config.kv_events_endpoint is not None, "events are off"
        self._rank = rank
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._is_closing = False
        self.changes = Changes(self._wake)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.blocks = self._channel(config, "--kv-events-endpoint", "--kv-events-replay-endpoint")
            self.states = None
            if config.kv_events_states_endpoint is not None:
                flags = "--kv-events-states-endpoint", "--kv-events-states-replay-endpoint"
                self.states = self._channel(config, *flags)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread: threading.Thread | None = None

    def _channel(self, config: KvEventsConfig, *flags: str) -> Channel:
        publishing, replaying = flags
        return Channel(
            self._context,
            config.endpoints(),
            (publishing, replaying),
            config.kv_events_topic,
            self._rank,
            config.kv_events_buffer_steps,
        )

    def start(self, mirror: Mirror) -> None:
        """Start the thread, which owns the sockets from now on.

        Args:
            mirror: Mirror of an empty cache.
        """
        self._thread = threading.Thread(target=self._run, args=(mirror,), name=f"kv-events-{self._rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the last changes and end the thread; unsent batches are given a moment only."""
        if self._thread is None:
            self._leave()
            return
        self._is_closing = True
        self._wake()
        self._thread.join(_LAST_WORDS)

    def _leave(self) -> None:
        self.changes.stop()
        self._context.destroy(linger=_LINGER)
        self._bell.close()
        self._ear.close()

    def _wake(self) -> None:
        try:
            self._bell.send(b"!")
        except BlockingIOError:
            return  # the socket is full, so the thread wakes up anyway
        except OSError:
            return  # the thread has ended

    def _run(self, mirror: Mirror) -> None:
        try:
            self._publish(mirror.present())
            while not self._is_closing:
                self._turn(mirror)
            self._publish_changes(mirror)  # entries that were written to disk at the end
        except Exception:  # steps go on without events; routers receive nothing more
            logger.exception("KV events are off: the thread that publishes them has failed")
        finally:
            self._leave()

    def _turn(self, mirror: Mirror) -> None:
        """Wait for changes and replay requests, and handle both."""
        poller = zmq.Poller()
        poller.register(self._ear, zmq.POLLIN)
        for channel in (self.blocks, self.states):
            if channel is not None and channel.replay is not None:
                poller.register(channel.replay, zmq.POLLIN)
        ready = {one for one, _ in poller.poll()}
        if self._ear.fileno() in ready:
            self._ear.recv(1 << 16)
        self._publish_changes(mirror)
        if self.blocks.replay in ready:
            self.blocks.answer(lambda: mirror.present().blocks)
        if self.states is not None and self.states.replay in ready:
            self.states.answer(lambda: mirror.present().states)

    def _publish_changes(self, mirror: Mirror) -> None:
        delta = self.changes.take()
        if delta is not None:
            self._publish(mirror.apply(delta))

    def _publish(self, pending: CacheEvents) -> None:
        self.blocks.publish(pending.blocks)
        if self.states is not None:
            self.states.publish(pending.states)
