"""Data kept with cached blocks: requests that need it resume where it ends, and add their own.

Of the matched blocks, [0, shared_end), the blocks up to `known_end` have all data that the request needs. The request
resumes there, or before it where there are no states, and keeps new data with the blocks after it. Which blocks have
data follows from plans and commits alone, so that all ranks agree on it.

The log-prob of the token at `known_end` is computed from the hidden state at the position before it: kept with the
block if the request resumes there, else computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.scheduling.request import Request


def usable_blocks(request: Request, matched: int, cache: PrefixCache) -> int:
    """Return how many of the first `matched` blocks, which are cached, a request need not compute.

    Without recurrent layers these are skipped; with them, the blocks up to the last snapshot. A request that needs data
    kept with blocks can use only blocks that have it.
    """
    return cache.kept.run(request.block_hashes[:matched], needed) if (needed := request.needed_data) else matched


def lacking_data(request: Request, matched: int, cache: PrefixCache) -> DataKind | None:
    """Return the data for which a request computes blocks among the first `matched`, which are cached; None if none."""
    usable = usable_blocks(request, matched, cache)
    if usable == matched:
        return None
    following = request.block_hashes[usable : usable + 1]
    return next(kind for kind in request.needed_data if not cache.kept.run(following, (kind,)))


def note_kept(request: Request, before: Sequence[BlockId], cache: PrefixCache, block_size: int) -> None:
    """Note the blocks whose data the last step has completed; they are published by now.

    Routing rows are kept with all blocks. Log-probs are kept with the blocks of the prompt, unless another request has
    published equal blocks before: then they lie in the rows of blocks that are not indexed.

    Args:
        request: Request that the step has computed a chunk of.
        before: Block table in that step.
        cache: Prefix cache.
        block_size: Tokens of a block.
    """
    kept = request.kept
    kept.new = {}
    needed = request.needed_data
    if not needed or request.cache_epoch != cache.epoch:
        return
    for kind in needed:
        is_scored = kind is DataKind.LOG_PROBS
        end = min(request.computed_end, request.prompt_length) if is_scored else request.computed_end
        completed = {
            request.block_hashes[number]: number
            for number in range(kept.blocks, end // block_size)
            if not is_scored or request.block_table[number] == before[number]
        }
        kept.new |= {one: completed[one] for one in cache.kept.keep(kind, completed)}
    kept.blocks = max(kept.blocks, request.computed_end // block_size)
