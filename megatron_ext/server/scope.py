"""Keys of the ASGI scope that this package sets, and the path that routes see."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from starlette.types import Scope

HANDED_ON = "megatron_ext.prompt_tokens"


def handed_on_tokens(scope: Scope) -> Sequence[array[int]]:
    """Return the token ids of a request's prompts that a router has handed on; none if they are to be tokenized."""
    tokens: Sequence[array[int]] = scope.get(HANDED_ON, ())
    return tokens


def route_path(scope: Scope) -> str:
    """Return the path that routes are compared with: without the prefix that a proxy before the application adds."""
    path: str = scope["path"]
    prefix = scope.get("root_path", "")
    rest = path.removeprefix(prefix)
    return path if rest[:1] not in ("", "/") else rest or "/"
