"""How settings refuse."""

from __future__ import annotations

from megatron_ext.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise a `ConfigError` with `message` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def flag_of(field: str) -> str:
    """The flag that sets a field, where it has the field's name."""
    return "--" + field.replace("_", "-")
