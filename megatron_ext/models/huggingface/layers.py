"""Which layers a decoded `config.json` asks for, as letters of a pattern."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.errors import ConfigError
from megatron_ext.models.huggingface.fields import Fields, size_or


def listed_letters(fields: Fields, name: str, letters: Mapping[str, str]) -> str:
    """The letters of a list of kinds of layers.

    Args:
        fields: A decoded `config.json`.
        name: Of the list, which is there.
        letters: Kinds to letters.

    Raises:
        ConfigError: It is no list, or has a kind that is not supported.
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
    """The numbers of layers in a list; none if it is null or absent.

    Args:
        fields: A decoded `config.json`.
        name: Of the list.
        count: How many layers there are.

    Raises:
        ConfigError: It is no list of numbers of layers.
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
    """`num_hidden_layers` says what the letters from the field `source` say."""
    if count != len(letters):
        raise ConfigError(f"config.json: num_hidden_layers {count!r} contradicts the {len(letters)} layers of {source}")


def is_singled_out(fields: Fields, name: str, index: int, default: tuple[int, int]) -> bool:
    """Whether layer `index` is one of those that `NAME_offset` and `NAME_period` single out.

    Args:
        fields: A decoded `config.json`.
        name: Of both fields, without their ends.
        index: From 0.
        default: Offset and period where the file does not say.

    Raises:
        ConfigError: An offset that is none, or is not below the period.
    """
    offset, period = fields.get(f"{name}_offset", default[0]), size_or(fields, f"{name}_period", default[1])
    if type(offset) is not int or not 0 <= offset < period:
        raise ConfigError(
            f"config.json: {name}_offset = {offset!r} is not supported; it must be at least 0 and less than "
            f"{name}_period = {period}"
        )
    return index % period == offset
