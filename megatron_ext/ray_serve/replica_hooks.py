"""Hooks of a replica for scaling and change: its load, for Ray's autoscaler and for routers, and new weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError
from megatron_ext.ray_serve.autoscaling import ReplicaLoad
from megatron_ext.ray_serve.cache_log import LoadReport
from megatron_ext.ray_serve.settings import WEIGHTS, weights_of

if TYPE_CHECKING:
    from megatron_ext.server.serving import Serving

logger = logging.getLogger(__name__)

STARTED = time.time()  # of this process
_PERIOD = 1.0  # seconds; the engine's thread measures between two steps


class ReplicaHooks:
    """Methods of a replica that Ray Serve and routers call; `_serving` is the replica's."""

    _serving: Serving
    _user_config: Mapping[str, object] | None = None
    _measured: tuple[float, ReplicaLoad] | None = None

    async def load_report(self, sender: str, patience: float) -> LoadReport:
        """Return the current load, as soon as there are no requests of other routers.

        Args:
            sender: Id of the router that asks.
            patience: Maximum wait in seconds.
        """
        load, requests = await self._load(), self._serving.requests
        await requests.wait_for_others(sender, patience)
        return LoadReport(load, requests.load_of_others(sender))

    async def _load(self) -> ReplicaLoad:
        """Return a load that is a second old at most, however many routers ask."""
        from ray import get_runtime_context

        if self._measured is None or self._measured[0] + _PERIOD < time.monotonic():
            requests, engine = self._serving.requests, self._serving.engine
            waiting, statistics = await asyncio.wrap_future(engine.measure_load())
            load = ReplicaLoad(
                "",
                waiting,
                requests.living,
                engine.max_running_requests,
                statistics.counters.skipped_tokens,
                STARTED,
                get_runtime_context().get_node_id(),
            )
            self._measured = time.monotonic(), load
        return self._measured[1]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaling policy reads; see `WaitingTokensPolicy`."""
        fields = asdict(await self._load())
        del fields["name"]
        return fields | {"node": float(int(fields["node"][:12], 16))}  # exact, as a float

    async def reconfigure(self, user_config: Mapping[str, object] | None) -> None:
        """Read the weights that `user_config` names, between two steps; other settings need a new replica.

        Args:
            user_config: `{"weights": DIR}`: a checkpoint below `weights_root`, as for `/update_weights_from_disk`.

        Raises:
            ConfigError: The configuration is not of this form, or the weights do not fit; nothing has changed.
        """
        if user_config == self._user_config:  # Ray calls this for a new rank of the replica, too
            return
        path = weights_of(user_config)
        serving = self._serving
        if serving.updater is None:
            raise ConfigError(f"{WEIGHTS}={path}: this server cannot read new weights; give weights_root")
        await serving.updater.update(path)
        serving.weights_hash = serving.updater.weights_hash
        self._user_config = user_config
