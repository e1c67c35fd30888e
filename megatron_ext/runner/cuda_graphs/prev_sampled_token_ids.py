"""Tokens that stay on the device from one captured step to the next (CU-6).

A program writes what it samples into its answer, behind the places of its step, row by row. The one behind it takes the
token of each decoding row from there, or from where the host wrote it, as a number in its places says: rows may move
between the two, and a step is the same program wherever its tokens come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_ext.runner.cuda_graphs.buckets import Bucket
from megatron_ext.runner.cuda_graphs.input_buffers import InputBuffers, Layout
from megatron_ext.scheduling.step import LAST_SAMPLED, ScheduledChunk


class PrevSampledTokenIds:
    """Whose token the last step left in which row.

    Args:
        places: Where programs find what they compute.
    """

    def __init__(self, buffers: InputBuffers) -> None:
        self._buffers = buffers
        self._rows: Mapping[int, int] | None = None  # by request id

    @property
    def are_there(self) -> bool:
        """Whether the step that was launched last has left its tokens."""
        return self._rows is not None

    def note(self, rows: Sequence[tuple[int, int]]) -> None:
        """A step has been launched, which samples for these requests in these rows."""
        self._rows = dict(rows)

    def forget(self) -> None:
        """What lies there is of no use: another step has been computed since, or none was in these places."""
        self._rows = None

    def places_of(self, decodes: Sequence[ScheduledChunk], layout: Layout) -> list[int]:
        """Where each decoding row finds its token, counted from the start of all places."""
        first_id = layout.first("input_ids")
        return [
            self._place(chunk.request_id) if chunk.token_ids[0] == LAST_SAMPLED else first_id + row
            for row, chunk in enumerate(decodes)
        ]

    def _place(self, request_id: int) -> int:
        assert self._rows is not None, "no step has left its tokens"
        return self._buffers.first_token + self._rows[request_id]

    # What is captured

    def fill_in(self, bucket: Bucket, parts: Mapping[str, Tensor]) -> Tensor:
        """The token ids of a step, [T]: those that decode from where they lie, those of prefills from the host."""
        decoding = self._buffers.gather(parts["token_places"])
        if not bucket.prefills:
            return decoding
        return torch.cat([decoding, parts["input_ids"][bucket.decodes :]])
