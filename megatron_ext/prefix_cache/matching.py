"""From matched blocks to the one position where computing begins: every clamp is here."""

from __future__ import annotations


def resume_position(length: int, matched_tokens: int) -> int:
    """Tokens of a sequence of `length` that need not be computed, in a model without recurrent layers.

    The last token is always computed, because the next one is sampled from its logits; if its block is shared, its KV
    is not written.

    Args:
        length: Known tokens, at least 1.
        matched_tokens: Tokens in the run of cached blocks from the start.
    """
    return min(matched_tokens, length - 1)
