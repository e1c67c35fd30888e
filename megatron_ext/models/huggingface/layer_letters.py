"""Layer kinds of a decoded `config.json`, as letters of a pattern."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, size_or


def listed_letters(fields: Fields, name: str, letters: Mapping[str, str]) -> str:
    """Return the letters of a list of layer kinds.

    Args:
        fields: A decoded `config.json`.
        name: Name of the list, which is present.
        letters: Layer kind -> letter.

    Raises:
        ConfigError: The field is not a list, or has a kind that is not supported.
    """
    listed, known = fields[name], ", ".join(letters)
    problem = f"{name} = {listed!r} is not supported; it must be a list of {known}"
    if not isinstance(listed, list):
        raise ConfigError(f"config.json: {problem}")
    for kind in listed:
        if not isinstance(kind, str) or kind not in letters:
            raise ConfigError(f"config.json: {name} has {kind!r}: {problem}")
    return "".join(letters[kind] for kind in listed)


def listed_indices(fields: Fields, name: str, count: int) -> frozenset[int]:
    """Return the layer numbers in a list; empty if it is null or absent.

    Args:
        fields: A decoded `config.json`.
        name: Name of the list.
        count: Number of layers.

    Raises:
        ConfigError: The field is not a list of layer numbers.
    """
    listed = fields.get(name)
    if listed is None:
        return frozenset()
    if not isinstance(listed, list) or any(type(index) is not int or not 0 <= index < count for index in listed):
        raise ConfigError(
            f"config.json: {name} = {listed!r} is not supported; it must be a list of layers, 0 to {count - 1}"
        )
    return frozenset(listed)


def check_count(count: object, letters: str, source: str) -> None:
    """Raise unless `num_hidden_layers` equals the number of letters from the field `source`."""
    if count != len(letters):
        raise ConfigError(f"config.json: num_hidden_layers {count!r} contradicts the {len(letters)} layers of {source}")


def is_singled_out(fields: Fields, name: str, index: int, default: tuple[int, int]) -> bool:
    """Return whether `NAME_offset` and `NAME_period` select layer `index`.

    Args:
        fields: A decoded `config.json`.
        name: Common prefix of both fields.
        index: Layer number, from 0.
        default: Offset and period if absent.

    Raises:
        ConfigError: The offset is not a layer number below the period.
    """
    offset, period = fields.get(f"{name}_offset", default[0]), size_or(fields, f"{name}_period", default[1])
    if type(offset) is not int or not 0 <= offset < period:
        raise ConfigError(
            f"config.json: {name}_offset = {offset!r} is not supported; it must be at least 0 and less than "
            f"{name}_period = {period}"
        )
    return index % period == offset
