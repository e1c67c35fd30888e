"""Sampled tokens that stay on the device from one step to the next (CU-6).

A step writes its sampled tokens, row by row, into the output after the inputs of captured steps. The next graph reads
the token of each decoding row from there or from the host's input, as an index in its inputs says. Rows may move
between the two steps, and the graph is the same for both sources. The next eager step copies the tokens from there to
its own inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_ext.runner.cuda_graphs.buckets import Bucket
from megatron_ext.runner.cuda_graphs.input_buffers import InputBuffers
from megatron_ext.runner.layout import Layout
from megatron_ext.scheduling.step import LAST_SAMPLED, ScheduledChunk


class PrevSampledTokenIds:
    """Rows of the tokens that the last step left on the device.

    Args:
        buffers: Static buffers of the graphs.
    """

    def __init__(self, buffers: InputBuffers) -> None:
        self._buffers = buffers
        self._rows: Mapping[int, int] | None = None  # by request id

    @property
    def are_on_device(self) -> bool:
        """True if the tokens of the last launched step are on the device."""
        return self._rows is not None

    def note(self, rows: Sequence[tuple[int, int]]) -> None:
        """Record that a step was launched that samples for these requests in these rows."""
        self._rows = dict(rows)

    def forget(self) -> None:
        """Discard the recorded rows: another step has run since, or no step has used these buffers."""
        self._rows = None

    def places_of(self, decodes: Sequence[ScheduledChunk], layout: Layout) -> list[int]:
        """Return the index of each decoding row's token, counted from the start of the whole buffer."""
        first_id = layout.first("input_ids")
        return [
            self.place_of(chunk.request_id) if chunk.token_ids[0] == LAST_SAMPLED else first_id + row
            for row, chunk in enumerate(decodes)
        ]

    def place_of(self, request_id: int) -> int:
        """Return the index of a request's token in the whole buffer."""
        assert self._rows is not None, "no step has left its tokens"
        return self._buffers.first_token + self._rows[request_id]

    def write_to(self, input_ids: Tensor, places: Tensor, tokens: Tensor) -> None:
        """Copy tokens from the buffer into the token ids of an eager step.

        Args:
            input_ids: Token ids [T] of the packed axis.
            places: Places of the tokens on that axis, [n].
            tokens: Indices of the tokens in the whole buffer, [n].
        """
        input_ids.index_copy_(0, places, self._buffers.gather(tokens))

    # Captured code.

    def fill_in(self, bucket: Bucket, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the token ids of a step, [T]: decoding rows from their indexed source, prefills from the host."""
        decoding = self._buffers.gather(parts["token_places"])
        if not bucket.prefills:
            return decoding
        return torch.cat([decoding, parts["input_ids"][bucket.decodes :]])
