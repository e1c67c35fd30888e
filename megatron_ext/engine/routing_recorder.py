"""Routing recorder: collects the routing indices of requests, those of cached tokens included."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ext.engine.result import StepResult
from megatron_ext.prefix_cache.block_pool import BlockId
from megatron_ext.scheduling.request import Request
from megatron_ext.scheduling.routing_indices import RoutingIndices
from megatron_ext.scheduling.step import ScheduledChunk, ScheduledStep


class RoutingRecorder:
    """Recorder of one replica's routing indices.

    A request has the rows of every token that a step computed for it. Rows are also kept for each KV block, as the keys
    and values are: a request that skips cached tokens takes theirs. Entries of a block that is used again are
    overwritten, so the memory is bounded by the pool.

    Args:
        block_size: Tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: dict[BlockId, bytearray] = {}

    def note(self, requests: Iterable[Request], step: ScheduledStep, result: StepResult) -> None:
        """Record the rows of a committed step.

        Args:
            requests: Request of each chunk, in the order of the message.
            step: Message of the step.
            result: Result of the step; without routing indices nothing is recorded.
        """
        if not result.routing:
            return
        for request, chunk in zip(requests, step.chunks, strict=True):
            rows = result.routing.get(chunk.request_id if chunk.source is None else chunk.source.request_id)
            if rows is None:
                continue
            if chunk.source is not None:  # a fork computes nothing; it takes all rows from blocks
                rows = RoutingIndices(b"", rows.layers, rows.topk)
                if chunk.source.block_copy is not None:
                    source, target = chunk.source.block_copy
                    self._blocks[target] = bytearray(self._blocks[source])
            self._note(request, chunk, rows)

    def _note(self, request: Request, chunk: ScheduledChunk, rows: RoutingIndices) -> None:
        size = rows.token_bytes
        if request.output.routing is None:
            request.output.routing = RoutingIndices(bytearray(), rows.layers, rows.topk)
        data = request.output.routing.data
        assert isinstance(data, bytearray), "a request's own rows grow"
        if len(data) < chunk.start * size:
            data += self._cached(chunk, len(data) // size, size)
        del data[chunk.start * size :]  # drafts that were not accepted, or tokens computed again
        data += rows.data
        self._keep(chunk, rows, size)

    def _cached(self, chunk: ScheduledChunk, first: int, size: int) -> bytes:
        """Return the rows of tokens [first, chunk.start), which the request skipped."""
        block = first // self._block_size
        blocks = chunk.block_ids[block : -(-chunk.start // self._block_size)]
        before = block * self._block_size
        return b"".join(self._blocks[one] for one in blocks)[(first - before) * size : (chunk.start - before) * size]

    def _keep(self, chunk: ScheduledChunk, rows: RoutingIndices, size: int) -> None:
        """Keep the rows of tokens whose keys and values the step wrote."""
        for position in range(max(chunk.start, chunk.shared_end), chunk.end):
            index, place = divmod(position, self._block_size)
            block = self._blocks.setdefault(chunk.block_ids[index], bytearray(self._block_size * size))
            begin = (position - chunk.start) * size
            block[place * size : (place + 1) * size] = rows.data[begin : begin + size]
