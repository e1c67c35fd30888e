"""Mooncake's traces (FAST 25): a request a line, with hashes of blocks of 512 tokens that all requests share.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds.
"""

from __future__ import annotations

from megatron_ext.simulation.trace import Ids, Turn
from megatron_ext.simulation.trace_formats.block_tokens import BlockTokens
from megatron_ext.simulation.trace_formats.fields import FIRST_SYNTHETIC_ID, JsonObject, count_of, list_of, time_of

BLOCK_SIZE = 512  # tokens, unless a line has a `block_size`


class MooncakeFormat:
    """Reader of Mooncake's format; every request is a session of its own."""

    def __init__(self) -> None:
        self._blocks = BlockTokens(Ids(FIRST_SYNTHETIC_ID))
        self._read = 0

    def read(self, line: JsonObject) -> list[Turn]:
        """Return the request of a line."""
        size = count_of(line.get("block_size", BLOCK_SIZE), "block_size")
        length = count_of(line["input_length"], "input_length")
        prompt = self._blocks.prompt(list_of(line["hash_ids"]), length, size)
        answer = self._blocks.ids.take(max(1, count_of(line["output_length"], "output_length", minimum=0)))
        session, self._read = self._read, self._read + 1
        return [Turn(session, time_of(line["timestamp"], "timestamp") / 1000, prompt, answer)]
