"""Replicas under Ray Serve: `serve run megatron_ext.ray_serve:app model=DIR`; see docs/ray.md.

Importing this package imports neither Ray nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application

    from megatron_ext.ray_serve.settings import Setting


def app(arguments: Mapping[str, str]) -> Application:
    """Build the application of `serve run megatron_ext.ray_serve:app NAME=VALUE ...`; see `build_app`."""
    return build_app(**arguments)


def build_app(**settings: Setting) -> Application:
    """Build an application for `ray.serve.run`.

    Args:
        settings: `model`, a checkpoint's directory or "embedded"; `num_replicas`, `num_cpus`, `num_gpus`,
            `max_ongoing_requests`; and the flags of `megatron-ext serve` by name, as in `load_engine`.

    Raises:
        ConfigError: A setting is unknown, of the wrong type, or cannot work; or Ray is not installed.
    """
    from megatron_ext.errors import MachineError

    try:
        from megatron_ext.ray_serve.deployment import deploy
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise MachineError("ray cannot be imported; install the package with its extra [ray]") from None
    from megatron_ext.ray_serve.settings import read_app_settings

    return deploy(read_app_settings(settings))
