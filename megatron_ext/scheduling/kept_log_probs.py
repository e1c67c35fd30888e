"""Prompt log-probs that are kept with cached blocks: requests for them resume where these end, and add their own.

Of the matched blocks, [0, shared_end), those up to `known_end` have log-probs, which the first step reads. The
request resumes there, or before it where there are no states. The token at `known_end` is scored from the hidden
state at the position before it: kept with the block if the request resumes there, else computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.request import Request


def usable_blocks(request: Request, matched: int, cache: PrefixCache) -> int:
    """Return how many of the first `matched` blocks, which are cached, a request need not compute.

    Without recurrent layers these are skipped; with them, those up to the last snapshot. A request for the log-probs of
    its prompt needs those of the blocks, too.
    """
    return cache.log_probs.run(request.block_hashes[:matched]) if request.needs_log_probs else matched


def lacks_log_probs(request: Request, matched: int, cache: PrefixCache) -> bool:
    """Return whether a request computes blocks among the first `matched`, which are cached, for their log-probs."""
    return usable_blocks(request, matched, cache) < matched


def note_scored(request: Request, before: Sequence[BlockId], cache: PrefixCache, block_size: int) -> None:
    """Note the blocks of a prompt whose log-probs the last step has completed; they are published by now.

    Args:
        request: Request that the step has computed a chunk of.
        before: Block table in that step, whose blocks have the log-probs.
        cache: Prefix cache.
        block_size: Tokens of a block.
    """
    sequence, scores = request.sequence, request.scores
    scores.new = []
    if not request.needs_log_probs or sequence.cache_epoch != cache.epoch:
        return
    first, end = scores.blocks, min(sequence.computed_end, sequence.prompt_length) // block_size
    own = zip(sequence.block_hashes[first:end], sequence.block_table[first:end], before[first:end], strict=True)
    scores.new = cache.log_probs.keep(one for one, block, scored in own if block == scored)
    scores.blocks = max(first, end)
