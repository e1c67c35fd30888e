"""Configuration that Ray Serve passes to running replicas, without replacing them."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.config.checks import require

WEIGHTS = "weights"


def weights_of(user_config: Mapping[str, object] | None) -> str:
    """Return the directory of weights that a configuration names: `{"weights": DIR}`.

    Raises:
        ConfigError: The configuration is not of this form.
    """
    given = dict(user_config or {})
    path = given.pop(WEIGHTS, None)
    require(isinstance(path, str) and not given, f'user_config={user_config} is not of the form {{"{WEIGHTS}": DIR}}')
    return str(path)
