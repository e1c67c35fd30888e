"""KV events of a server: one publisher for each replica, attached to that replica's cache on rank 0."""

from __future__ import annotations

import logging
import os
from types import TracebackType

from megatron_ext.config.kv_events import Endpoint, IpcEndpoint, KvEventsConfig
from megatron_ext.kv_events.mirror import Mirror
from megatron_ext.kv_events.publisher import Publisher
from megatron_ext.models.llm_engine import LLMEngine

logger = logging.getLogger(__name__)


class CacheEvents:
    """KV event publishers; empty without an endpoint. Binds addresses at once; a context manager that releases them.

    Args:
        config: Publisher settings, among them the endpoint.
        replicas: Number of data-parallel replicas.

    Raises:
        ConfigError: An address cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, replicas: int = 1) -> None:
        self.publishers: list[Publisher] = []
        self._config = config
        if config.endpoint is None:
            return
        try:
            for rank in range(replicas):
                self.publishers.append(Publisher(config, rank))
        except BaseException:
            self.close()
            raise
        for endpoint in config.endpoints().values():
            _warn(endpoint)

    def __enter__(self) -> CacheEvents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def attach(self, engine: LLMEngine) -> None:
        """Publish the blocks that an engine's replicas store from now on, those put back, and those on disk."""
        if not self.publishers:
            return
        for publisher in self.publishers:
            publisher.start(Mirror(engine.limits.block_size, has_states=engine.is_hybrid))
        changes = [publisher.changes for publisher in self.publishers]
        engine.observe_caches(changes, [one.disk for one in changes])
        for publisher in self.publishers:
            for what, channel in (("blocks", publisher.blocks), ("states", publisher.states)):
                if channel is not None:
                    replay = channel.replay_endpoint or "no address"
                    logger.info("KV events of %s at %s, replayed at %s", what, channel.endpoint, replay)
        if engine.is_hybrid and self._config.states_endpoint is None:
            logger.info(
                "the positions at which requests can resume are not published: there is no --kv-events-states-endpoint"
            )

    def close(self) -> None:
        """Close all publishers."""
        for publisher in self.publishers:
            publisher.close()


def _warn(endpoint: Endpoint | None) -> None:
    """Warn about the other users and machines that can read an address."""
    if endpoint is None:
        return
    address = endpoint.of_replica(0)
    if isinstance(endpoint, IpcEndpoint):
        directory = os.path.dirname(endpoint.path)
        if not os.stat(directory).st_mode & 0o077:
            return
        where, remedy = f"{address} is in a directory that other users can enter", f"chmod 700 {directory}"
    elif endpoint.is_loopback:
        where = f"every user of this machine can connect to {address}"
        remedy = "ipc:///PATH in a directory of mode 0700"
    else:
        where, remedy = f"{address} is reachable from other machines", "a loopback address, or ipc:///PATH"
    logger.warning(
        "KV events contain the token ids of all cached prompts and outputs, and %s; to keep them private: %s",
        where,
        remedy,
    )
