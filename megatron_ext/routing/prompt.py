"""Prompts in the router: chained keys of their complete blocks.

A router cannot know the root hashes of its replicas (model, weights, version), so it computes keys of its own over salt
and tokens, and maps each replica's hashes to them by events. A key is Python's 64-bit hash, with a secret of the
process: a collision of two prefixes would cost a bad routing decision, never a wrong output.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from struct import iter_unpack
from typing import TypeAlias

from megatron_ext.prefix_cache.hash_chain import packed_tokens

ExtraKeys: TypeAlias = Iterable[Iterable[str] | None]  # of blocks besides their tokens, None for a block without

ROOT = 0  # the key before the first block
_TOKEN_BYTES = packed_tokens(()).itemsize


def packed(tokens: Iterable[int]) -> array[int]:
    """Return token ids as a packed array, which can be sliced as bytes.

    Raises:
        ValueError: An id is not an unsigned 32-bit integer.
    """
    try:
        return tokens if isinstance(tokens, array) and tokens.typecode == "I" else packed_tokens(tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from None


def chained_keys(
    parent: int, tokens: array[int], block_size: int, extras: Sequence[Hashable] | None = None
) -> list[int]:
    """Return the keys of the complete blocks of `tokens`, the first of which continues `parent`.

    Args:
        parent: Key of the block before; `ROOT` at the start of a sequence.
        tokens: Packed token ids.
        block_size: Tokens of a block.
        extras: Extra keys of the first blocks besides their tokens, None for a block without; further blocks have none.
            A salt is `(salt,)` at the first block of a sequence.
    """
    stride, key = block_size * _TOKEN_BYTES, parent
    data = memoryview(tokens).cast("B")
    blocks = iter_unpack(f"{stride}s", data[: len(data) // stride * stride])
    keys = []
    for extra in extras or ():
        for (block,) in islice(blocks, 1):
            key = hash((key, block) if extra is None else (key, block, extra))
            keys.append(key)
    return keys + [key := hash((key, block)) for (block,) in blocks]


def frozen_extras(extra_keys: ExtraKeys | None) -> list[Hashable] | None:
    """Convert the extra keys of an event to hashable values."""
    return None if extra_keys is None else [None if not one else tuple(one) for one in extra_keys]


class Prompt:
    """Prompt to route, whose keys are computed once per block size.

    Args:
        tokens: Token ids; kept without a copy if they are packed (`hash_chain.packed_tokens`).
        salt: Salt in its published form (`prefix_cache.public_hash.event_salt`); None without a salt.
        is_cached: Whether the prompt uses caches; if not, it has no keys, and load alone decides.

    Raises:
        ValueError: A token id is invalid, or the prompt is empty.
    """

    def __init__(self, tokens: Iterable[int], salt: str | None = None, *, is_cached: bool = True) -> None:
        self._tokens = packed(tokens)
        if not len(self._tokens):
            raise ValueError("a prompt has at least one token")
        self._is_cached = is_cached
        self._salt = salt
        self._keys: dict[int, list[int]] = {}  # by block size

    def __len__(self) -> int:
        return len(self._tokens)

    def keys(self, block_size: int) -> list[int]:
        """Return the keys of the prompt's complete blocks."""
        if block_size not in self._keys:
            tokens = self._tokens if self._is_cached else self._tokens[:0]
            extras = None if self._salt is None else [(self._salt,)]
            self._keys[block_size] = chained_keys(ROOT, tokens, block_size, extras)
        return self._keys[block_size]
