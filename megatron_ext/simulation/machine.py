"""Cost model of a step: simulated seconds from operations and bytes at the rates of a machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_ext.config.costs import EntryCosts
from megatron_ext.scheduling.chunk import Chunk


@dataclass(frozen=True)
class Machine:
    """Measured or assumed rates of a machine.

    Attributes:
        flops: Operations per second of a prefill.
        bytes: Bytes per second of memory reads in decode: parameters once a step, KV of each request.
        parameter_bytes: Parameter bytes read in every step.
        overhead: Constant seconds of a step.
    """

    flops: float = 4e14
    bytes: float = 3e12
    parameter_bytes: float = 1.6e10
    overhead: float = 2e-3

    def seconds(self, chunks: Iterable[Chunk], costs: EntryCosts, decodes: int = 0, positions: int = 0) -> float:
        """Return the seconds of a step: the maximum of computing and reading, plus the overhead.

        Args:
            chunks: Chunks of the step.
            costs: Costs of tokens and bytes.
            decodes: Number of requests that decode a token each besides.
            positions: Sum of the positions of these tokens.
        """
        operations, read = self._decode_costs(costs, decodes, positions)
        for chunk in chunks:
            operations += costs.flops(chunk.start, chunk.end)
            if chunk.is_decode:
                read += chunk.end / costs.block_size * costs.block_bytes + costs.state_bytes
        return self.overhead + max(operations / self.flops, read / self.bytes)

    def decoding(self, decodes: int, positions: int, costs: EntryCosts) -> Iterator[float]:
        """Yield seconds of successive steps in which so many requests decode a token each; endless.

        Args:
            decodes: Number of requests.
            positions: Sum of the positions of the first step's tokens.
            costs: Costs of tokens and bytes.
        """
        operations, read = self._decode_costs(costs, decodes, positions)
        while True:
            yield self.overhead + max(operations / self.flops, read / self.bytes)
            operations += decodes * costs.position_flops
            read += decodes * costs.block_bytes / costs.block_size

    def _decode_costs(self, costs: EntryCosts, decodes: int, positions: int) -> tuple[float, float]:
        """Return operations and bytes of a step in which so many requests decode, parameters included."""
        operations = decodes * costs.token_flops + positions * costs.position_flops
        of_tokens = (positions + decodes) / costs.block_size * costs.block_bytes
        return operations, self.parameter_bytes + of_tokens + decodes * costs.state_bytes
