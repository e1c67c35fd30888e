"""MF-9: the experts of every token of a request, in the order of the tokens."""

from __future__ import annotations

from array import array

import pytest

from megatron_ext.config import EvictionPolicyName
from megatron_ext.engine.result import StepResult
from megatron_ext.engine.routing_recorder import RoutingError, note_rows
from megatron_ext.prefix_cache.cache import PrefixCache
from megatron_ext.scheduling.chunk import Chunk
from megatron_ext.scheduling.routing_indices import RoutingIndices
from tests.unit_tests.scheduling.builders import request_of


def noted(*chunks: tuple[int, list[int]]) -> list[list[list[int]]]:
    """Rows of a request after chunks at these positions with an expert for each token."""
    cache, request = PrefixCache(4, EvictionPolicyName.LRU), request_of(0, range(3))
    for start, experts in chunks:
        routing = {0: RoutingIndices(array("i", experts).tobytes(), 1, 1)}
        chunk = Chunk(request, start, start + len(experts))
        note_rows(chunk, StepResult({}, {}, {}, {}, routing=routing), cache, 4)
    return request.output.routing.to_lists()


def test_rows_of_rejected_drafts_are_replaced():
    """The next chunk begins where the accepted tokens end, here before two drafts."""
    found = noted((0, [1, 2, 3]), (3, [4, 5, 6]), (4, [7]))
    assert found == [[[1]], [[2]], [[3]], [[4]], [[7]]]


def test_missing_rows_are_an_error():
    """Rows of other tokens would take their places."""
    with pytest.raises(RoutingError, match="routing indices of tokens 2 to 3 are missing"):
        noted((0, [1, 2]), (3, [4]))
