"""Events of the parser of tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """Beginning of a call; the arguments follow in `Arguments`."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """Next piece of the JSON text of the latest call's arguments."""

    text: str


Event = Content | CallBegun | Arguments
