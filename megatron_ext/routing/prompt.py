"""Prompts as the router knows them: chained keys of their complete blocks.

A router cannot know the roots of its replicas' block hashes (model, weights, version), so it has keys of its own, over
salt and tokens, and learns from events which of a replica's hashes stands for which. A key is Python's hash of 64 bits,
made with a secret of the process: two prefixes with one key would cost a bad choice, never a wrong answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from struct import iter_unpack

from megatron_ext.prefix_cache.hash_chain import packed_tokens

ROOT = 0  # the key before the first block
_TOKEN_BYTES = packed_tokens(()).itemsize


def packed(tokens: Iterable[int]) -> array[int]:
    """Token ids where they can be sliced as bytes.

    Raises:
        ValueError: One is no integer of 32 bits.
    """
    try:
        return tokens if isinstance(tokens, array) and tokens.typecode == "I" else packed_tokens(tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from None


def chained_keys(
    parent: int, tokens: array[int], block_size: int, extras: Sequence[Hashable] | None = None
) -> list[int]:
    """Keys of the complete blocks of `tokens`, the first of which follows the block of `parent`.

    Args:
        parent: `ROOT` at the start of a sequence.
        tokens: Packed.
        block_size: Tokens.
        extras: What blocks depend on beside their tokens, for each block, or None; fewer than blocks: nothing for the
            rest. A salt is `(salt,)` at the first block of a sequence.
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


def extras_of(salt: str | None) -> tuple[Hashable, ...] | None:
    """What the first blocks of a sequence with this salt depend on."""
    return None if salt is None else ((salt,),)


def frozen_extras(extra_keys: Iterable[object] | None) -> list[Hashable] | None:
    """The extra keys of an event, as they came out of a message, as things that can be hashed."""
    return None if extra_keys is None else [None if not one else _frozen(one) for one in extra_keys]


def _frozen(value: object) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple(zip(value.keys(), map(_frozen, value.values()), strict=True))
    return value if isinstance(value, Hashable) else repr(value)


class Prompt:
    """A prompt, whose keys are made once, however often it is routed.

    Args:
        tokens: Ids; kept as they are if they are packed.
        salt: As replicas publish it (`prefix_cache.shown.event_salt`); None without.
    """

    def __init__(self, tokens: Iterable[int], salt: str | None = None) -> None:
        self._tokens = packed(tokens)
        self._salt = salt
        self._keys: dict[int, list[int]] = {}  # by block size

    def __len__(self) -> int:
        return len(self._tokens)

    def keys(self, block_size: int) -> list[int]:
        """Of its complete blocks."""
        if block_size not in self._keys:
            self._keys[block_size] = chained_keys(ROOT, self._tokens, block_size, extras_of(self._salt))
        return self._keys[block_size]
