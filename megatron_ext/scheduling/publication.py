"""Publication of blocks: from when they have been written, other requests can find them."""

from __future__ import annotations

from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.hash_chain import BlockHash
from megatron_ext.prefix_cache.observer import PublishedRun
from megatron_ext.scheduling.kept_data import note_kept
from megatron_ext.scheduling.prefix_wait.prefix_leaders import PendingBlocks
from megatron_ext.scheduling.prefix_wait.waiting_queue import WaitingQueue
from megatron_ext.scheduling.request import Request


def publish_blocks(
    request: Request, block_size: int, cache: PrefixCache, pending_blocks: PendingBlocks, waiting: WaitingQueue
) -> None:
    """Publish the blocks that a request has completed, unless it was admitted in an earlier cache epoch.

    Log-probs and routing rows that it has computed are kept with the newly published blocks.
    """
    table = request.block_table
    first, complete = request.published_blocks, request.computed_end // block_size
    if request.chain is not None and complete > first and request.cache_epoch == cache.epoch:
        block_hashes, own = request.block_hashes[first:complete], table[first:complete]
        parent = request.block_hashes[first - 1] if first else None
        shared = cache.publish(block_hashes, own, parent)
        if shared != own:  # another request has published equal blocks before
            request.block_table = (*table[:first], *shared, *table[complete:])
        end, salt = complete * block_size, request.params.cache_salt
        pending_blocks.published(request.request_id, block_hashes)
        run = PublishedRun(block_hashes, parent, request.tokens, block_size, end, salt)
        tell_published(run, request.chain.root, cache, waiting)
        request.published_blocks = complete
    note_kept(request, table, cache, block_size)


def tell_published(run: PublishedRun, root: BlockHash, cache: PrefixCache, waiting: WaitingQueue) -> None:
    """Note the tokens of blocks that have become findable, and tell observers and waiting requests.

    Args:
        run: The blocks.
        root: Root of their hashes.
        cache: Cache that they are in.
        waiting: Queue with requests that may wait for them.
    """
    if cache.cached_token_ids is not None:
        cache.cached_token_ids.keep_run(run.block_hashes, run.parent or root, run.tokens, run.block_size, run.end)
    for observer in cache.observers:
        observer.on_blocks_stored(run)
    waiting.published(run.block_hashes)
