"""Cost model of a step: simulated seconds from operations and bytes at the rates of a machine."""

from __future__ import annotations

from collections.abc import Iterable
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

    def seconds(self, chunks: Iterable[Chunk], costs: EntryCosts) -> float:
        """Return the seconds of a step: the maximum of computing and reading, plus the overhead."""
        operations, read = 0.0, self.parameter_bytes
        for chunk in chunks:
            operations += costs.flops(chunk.start, chunk.end)
            if chunk.is_decode:
                read += chunk.end / costs.block_size * costs.block_bytes + costs.state_bytes
        return self.overhead + max(operations / self.flops, read / self.bytes)
