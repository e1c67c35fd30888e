"""Keys of the ASGI scope that this package sets, and the path that routes see."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

if TYPE_CHECKING:
    from megatron_ext.server.openai.answer_memory import Remember
    from megatron_ext.server.openai.chat_prompt import ChatPrompt

_HANDED_ON = "megatron_ext.handed_on"


@dataclass(frozen=True)
class HandedOn:
    """Parts of a request that a router has had read.

    Attributes:
        tokens: Token ids of the prompts; none if they are to be tokenized.
        chat: Prompt of a conversation; None if it is to be tokenized.
        remember: Remembers answers of chats for the router; None without a router.
    """

    tokens: Sequence[array[int]] = ()
    chat: ChatPrompt | None = None
    remember: Remember | None = None


_NOTHING = HandedOn()


def hand_on(scope: Scope, given: HandedOn) -> None:
    """Hand parts of a request on to its route."""
    scope[_HANDED_ON] = given


def handed_on_to(scope: Scope) -> HandedOn:
    """Return the parts of a request that a router has handed on."""
    given: HandedOn = scope.get(_HANDED_ON, _NOTHING)
    return given


def route_path(scope: Scope) -> str:
    """Return the path that routes are compared with: without the prefix that a proxy before the application adds."""
    path: str = scope["path"]
    prefix = scope.get("root_path", "")
    rest = path.removeprefix(prefix)
    return path if rest[:1] not in ("", "/") else rest or "/"
