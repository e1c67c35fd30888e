"""Deployment of Ray Serve whose replicas each own an engine and serve OpenAI's routes.

A replica is an actor with the engine client in its process. Ray's proxy calls the application of `server/app.py` in it,
so routes, keys, limits, streams, errors and metrics are those of `tools/run_server.py`; there is no second server.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ray import serve
from ray.serve import Application

from megatron_ext.ray_serve.settings import AppSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "megatron_ext"


class Replica:
    """Replica of one process.

    Args:
        words: Command line of `tools/run_server.py`.

    Raises:
        ConfigError: The settings cannot be satisfied on this machine.
    """

    def __init__(self, words: Sequence[str]) -> None:
        from arguments import parse_server_arguments
        from megatron_ext.console.start import check_machine, limit_spinning, say_start
        from megatron_ext.memory.host_limits import check_address_space
        from megatron_ext.server.log import set_up_logging

        settings = parse_server_arguments(words)
        set_up_logging(settings.server.log_level)
        os.environ.update(settings.start.environment)
        limit_spinning()
        check_address_space()
        say_start(settings.start)
        check_machine(settings.parallel)

        from megatron_ext.mcore import platform
        from megatron_ext.server.run import loaded_serving

        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as resources:  # released if loading fails
            resources.callback(platform.shut_down)
            platform.initialize(settings.parallel)
            self._serving = resources.enter_context(loaded_serving(settings))
            self._resources = resources.pop_all()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application that Ray's proxy calls; its lifespan starts and stops the engine's thread."""
        from megatron_ext.server.app import create_app

        return create_app(self._serving)

    def check_health(self) -> None:
        """Raise while steps fail or other ranks are lost: Ray then replaces this replica.

        Raises:
            RuntimeError: The replica is not healthy.
        """
        if not self._serving.requests.is_healthy:
            raise RuntimeError(f"steps fail; errors so far: {self._serving.requests.error_count}")

    def __del__(self) -> None:
        """Free the model; the application's lifespan has ended."""
        if hasattr(self, "_resources"):
            self._resources.close()


def deploy(settings: AppSettings) -> Application:
    """Return the application of settings."""
    wanted = settings.deployment
    deployment = serve.deployment(
        name=NAME,
        num_replicas=wanted.num_replicas,
        max_ongoing_requests=wanted.max_ongoing_requests,
        ray_actor_options=wanted.actor_options,
        graceful_shutdown_timeout_s=settings.server.server.shutdown_timeout,
    )(serve.ingress()(Replica))
    return deployment.bind(list(settings.words))
