"""Hooks of a replica for routers and change: the load that other routers give it, and new weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_ext.errors import ConfigError
from megatron_ext.ray_serve.settings import WEIGHTS, weights_of

if TYPE_CHECKING:
    from megatron_ext.server.serving import Serving

logger = logging.getLogger(__name__)


class ReplicaHooks:
    """Methods of a replica that Ray Serve and routers call; `_serving` is the replica's."""

    _serving: Serving
    _user_config: Mapping[str, object] | None = None

    async def load_report(self, sender: str, patience: float) -> tuple[int, int, int]:
        """Wait for other routers' requests to end, and return their load; see `RequestManager.load_of_others`.

        Args:
            sender: Id of the router that asks.
            patience: Maximum wait in seconds.
        """
        requests = self._serving.requests
        await requests.wait_for_others(sender, patience)
        return requests.load_of_others(sender)

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
