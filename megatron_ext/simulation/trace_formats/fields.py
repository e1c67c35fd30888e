"""Checked values of a trace's objects."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.simulation.trace import MAX_IDS

FIRST_SYNTHETIC_ID = MAX_IDS // 2  # explicit token ids are below

JsonObject = Mapping[str, object]


def list_of(value: object) -> list[int]:
    """Return a list whose elements the caller uses as keys or checks itself.

    Raises:
        TypeError: Not a list.
    """
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} is not a list")
    return value


def objects_of(value: object) -> list[JsonObject]:
    """Return a list of objects.

    Raises:
        TypeError: Not a list of objects.
    """
    found: list[JsonObject] = []
    for one in list_of(value):
        if not isinstance(one, dict):
            raise TypeError(f"{str(one)[:40]!r} is not an object")
        found.append(one)
    return found


def count_of(value: object, name: str, minimum: int = 1) -> int:
    """Return a number of tokens or blocks.

    Raises:
        ValueError: Not a whole number, less than `minimum`, or too large.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < FIRST_SYNTHETIC_ID:
        raise ValueError(f"{name} {str(value)[:40]} must be a whole number of {minimum} or more")
    return value


def time_of(value: object, name: str = "time") -> float:
    """Return a time in the file's unit.

    Raises:
        ValueError: Not a number of zero or more.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise ValueError(f"{name} {str(value)[:40]} must be a number of zero or more")
    return float(value)
