"""Excerpts: text around a position in a list of tokens, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron_ext.text.detokenizer import INCOMPLETE, LONGEST_CHARACTER

SHOWN = 40  # characters on each side
_TOKENS = SHOWN * LONGEST_CHARACTER + LONGEST_CHARACTER  # enough where each token is a byte


def excerpt(tokens: Sequence[int], place: int | None, detokenize: Callable[..., str]) -> tuple[str, str] | None:
    """Return up to 40 characters before and after a place; one that tokens before and after share is after it.

    Args:
        tokens: Token ids.
        place: Number of tokens before the place; None for no excerpt.
        detokenize: Token ids, and `skip_special_tokens`, to text.

    Raises:
        ConfigError: The tokenizer cannot decode the tokens.
    """
    if place is None:
        return None
    start, end = max(0, place - _TOKENS), min(len(tokens), place + _TOKENS)
    whole = detokenize(list(tokens[start:end]), skip_special_tokens=False)
    first = detokenize(list(tokens[start:place]), skip_special_tokens=False)
    first = first.rstrip(INCOMPLETE)
    same = zip(first, whole, strict=False)
    length = next((i for i, (one, other) in enumerate(same) if one != other), min(len(first), len(whole)))
    before, after = whole[max(0, length - SHOWN) : length], whole[length : length + SHOWN]
    return before.lstrip(INCOMPLETE) if start else before, after.rstrip(INCOMPLETE) if end < len(tokens) else after
