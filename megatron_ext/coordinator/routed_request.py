"""Parts of a request that decide where it runs."""

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
    """Prompt of a request, for the router.

    Attributes:
        tokens: Packed token ids.
        salt: Salt as replicas publish it; None without.
        is_shared: Whether another request may find the prompt cached.
    """

    tokens: array[int]
    salt: str | None
    is_shared: bool
    prompt: Prompt = field(compare=False)

    @classmethod
    def of(cls, tokens: Iterable[int], salt: str | None) -> RoutedPrompt:
        """Return a prompt whose tokens are known.

        Raises:
            OverflowError: A token id is out of range.
            TypeError: A token id is not an integer.
        """
        packed, published = packed_tokens(tokens), None if salt is None else event_salt(salt)
        return cls(packed, published, True, Prompt(packed, published))

    @classmethod
    def private(cls, tokens: Iterable[int] = ()) -> RoutedPrompt:
        """Return an unshared or unknown prompt, which is routed to the replica with the least load."""
        packed, salt = packed_tokens(tokens) or packed_tokens((0,)), uuid.uuid4().hex
        return cls(packed, salt, False, Prompt(packed, salt))

    @property
    def extra_keys(self) -> list[list[str]] | None:
        """Extra keys of the first block's hash, in the form of KV events."""
        return None if self.salt is None else [[self.salt]]


@dataclass(frozen=True)
class RoutedRequest:
    """Generation request.

    Attributes:
        path: Path of the route.
        headers: Headers for the replica.
        body: Body for the replica.
        is_stream: Whether the answer is streamed.
        new_tokens: Maximum number of generated tokens, as far as the body says.
        prompt: Prompt for the router.
        group: Name of the group of replicas; None if there is at most one.
        owner: URL of the only replica that can answer; None if all of the group can.
        samples: Group of samples, whose answers come from one version of the weights; None without one.
    """

    path: str
    headers: Headers
    body: bytes
    is_stream: bool
    new_tokens: int
    prompt: RoutedPrompt
    group: str | None = None
    owner: str | None = None
    samples: str | None = None
