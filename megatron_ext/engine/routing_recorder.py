"""Routing recorder: collects the routing indices of requests, cached tokens included.

A request has a row for every token that a step computed for it, and takes the rows of skipped tokens from the data kept
with cached blocks (`prefix_cache/kept_data.py`). A fork takes its source's rows.
"""

from __future__ import annotations

from megatron_ext.engine.result import StepResult
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.prefix_cache.kept_data import DataKind
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.plan import Admission
from megatron_ext.scheduling.routing_indices import RoutingIndices


class RoutingError(RuntimeError):
    """Error: routing indices of a request are missing."""


def take_cached_rows(admission: Admission, cache: PrefixCache, block_size: int) -> None:
    """Begin the rows of an admitted request with the rows of its skipped tokens, while their blocks are cached."""
    request, chunk = admission.request, admission.chunk
    request.output.routing, request.output.cached_routing = None, b""
    if DataKind.ROUTING in request.kept.kinds and chunk.source is None:
        blocks = -(-chunk.start // block_size)
        request.output.cached_routing = cache.kept.rows(request.block_hashes[:blocks])


def note_rows(chunk: Chunk, result: StepResult, cache: PrefixCache, block_size: int) -> None:
    """Add the rows of a committed chunk to its request, and keep the rows of completed blocks with the cache.

    Args:
        chunk: Chunk of the step. A fork comes after its source.
        result: Result of the step; without routing indices nothing is noted.
        cache: Cache of the request.
        block_size: Tokens of a block.

    Raises:
        RoutingError: Rows of tokens before the chunk are missing.
    """
    request, start = chunk.request, chunk.start
    source = request if chunk.source is None else chunk.source.request
    rows = result.routing.get(source.request_id)
    if rows is None:
        return
    output, size = request.output, rows.token_bytes
    if chunk.source is not None:
        assert source.output.routing is not None, "its chunk was noted before"
        taken, added = source.output.routing.data[: start * size], b""
        output.routing = RoutingIndices(bytearray(taken), rows.layers, rows.topk)
    else:
        added = bytes(rows.data)
        if output.routing is None:  # the first chunk since the request was admitted
            output.routing = RoutingIndices(bytearray(output.cached_routing), rows.layers, rows.topk)
            output.cached_routing = b""
    data = output.routing.data
    assert isinstance(data, bytearray), "a request's own rows grow"
    if len(data) < start * size:
        raise RoutingError(f"routing indices of tokens {len(data) // size} to {start} are missing")
    del data[start * size :]  # drafts that were not accepted, or the rest of the last cached block
    data += added
    of_block = block_size * size
    for block_hash, number in request.kept.new.items():
        cache.kept.store_rows(block_hash, bytes(data[number * of_block : (number + 1) * of_block]))
