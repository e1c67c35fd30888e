"""Keys of the ASGI scope that this package sets."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from starlette.types import Scope

HANDED_ON = "megatron_ext.prompt_tokens"


def handed_on_tokens(scope: Scope) -> Sequence[array[int]]:
    """Return the token ids of a request's prompts that a router has handed on; none if they are to be tokenized."""
    tokens: Sequence[array[int]] = scope.get(HANDED_ON, ())
    return tokens
