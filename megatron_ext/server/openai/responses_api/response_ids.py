"""Ids of responses and their items: random, with the tag of the process that may have stored them.

The tag lets a router send a follow-up to the process with the conversation. It is the beginning of the process's
`instance` id.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping

RANDOM_BYTES = 16
TAG_DIGITS = 8  # hexadecimal
_ID = re.compile(rf"[a-z]+_[0-9a-f]{{{2 * RANDOM_BYTES}}}([0-9a-f]{{{TAG_DIGITS}}})")


def tag_of(instance: str) -> str:
    """Return the tag of a process by its instance id."""
    return instance[:TAG_DIGITS]


def new_id(prefix: str, tag: str) -> str:
    """Return a new id with 128 random bits."""
    return f"{prefix}_{secrets.token_hex(RANDOM_BYTES)}{tag}"


def owner_tag(identifier: object) -> str | None:
    """Return the tag in an id; None if it is no such id."""
    found = _ID.fullmatch(identifier) if isinstance(identifier, str) else None
    return None if found is None else found[1]


def owner_named(body: Mapping[str, object]) -> str | None:
    """Return the tag in the first id of a stored response or item that a body names; None without one."""
    return next((tag for one in _named(body) if (tag := owner_tag(one)) is not None), None)


def _named(body: Mapping[str, object]) -> Iterator[object]:
    yield body.get("previous_response_id")
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping) and item.get("type") in (None, "item_reference") and "role" not in item:
            yield item.get("id")
