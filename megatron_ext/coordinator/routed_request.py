"""What a client asks for, as far as it matters for where it runs."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron_ext.coordinator.replica_client import Headers
from megatron_ext.prefix_cache.hash_chain import packed_tokens
from megatron_ext.prefix_cache.public_hash import event_salt
from megatron_ext.routing.prompt import Prompt


@dataclass(frozen=True)
class RoutedPrompt:
    """The prompt of a request, for the router.

    Attributes:
        tokens: Ids, packed.
        salt: As replicas publish it; None without.
        is_shared: Whether anybody may find it cached.
    """

    tokens: array[int]
    salt: str | None
    is_shared: bool
    prompt: Prompt = field(compare=False)

    @classmethod
    def of(cls, tokens: Iterable[int], salt: str | None) -> RoutedPrompt:
        """A prompt whose tokens are known.

        Raises:
            OverflowError: One is no token id.
            TypeError: The same.
        """
        packed, published = packed_tokens(tokens), None if salt is None else event_salt(salt)
        return cls(packed, published, True, Prompt(packed, published))

    @classmethod
    def private(cls, tokens: Iterable[int] = ()) -> RoutedPrompt:
        """One that nobody shares, or of which nothing is known: it goes where the load is least."""
        packed, salt = packed_tokens(tokens) or packed_tokens((0,)), uuid.uuid4().hex
        return cls(packed, salt, False, Prompt(packed, salt))

    @property
    def extra_keys(self) -> list[list[str]] | None:
        """What its first block depends on beside its tokens, as events say it."""
        return None if self.salt is None else [[self.salt]]


@dataclass(frozen=True)
class RoutedRequest:
    """A request that generates.

    Attributes:
        path: Of the route.
        headers: For the replica.
        body: The same.
        is_stream: Whether the answer comes in parts.
        new_tokens: That it may generate at most, as far as it says.
        prompt: For the router.
    """

    path: str
    headers: Headers
    body: bytes
    is_stream: bool
    new_tokens: int
    prompt: RoutedPrompt
