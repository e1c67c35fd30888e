"""KV-3, HY-4: an engine gives the same to the bit wherever blocks and snapshots lie: in dense pools, or in an arena."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest

from tests.unit_tests.support.models import CONFIGS, build_slow_decay
from tests.unit_tests.support.parallel_contexts import Lived, Script, assert_same
from tests.unit_tests.support.pools_in_pieces import pools_in_pieces
from tests.unit_tests.support.scenario import assert_meets_everything, everything, live_poisoned, with_vocabulary
from tests.unit_tests.support.spread import whole_parameters


def lived_in(kind: str, script: Script, *, in_pieces: bool) -> Lived:
    config = with_vocabulary(CONFIGS[kind])
    with pools_in_pieces() if in_pieces else nullcontext():
        (lived,) = live_poisoned(None, config, whole_parameters(build_slow_decay(config)), [script])
    return lived


@pytest.mark.parametrize(
    ("kind", "cache", "graphs"),
    [
        pytest.param("hybrid", "align", "none", marks=pytest.mark.long),
        ("gated_delta_net", "kernel", "local"),
        *(
            pytest.param(kind, "kernel", "none", marks=pytest.mark.long)
            for kind in ("hybrid", "mamba1", "attention_only", "attention_free")
        ),
    ],
)
def test_a_whole_life(kind: str, cache: str, graphs: str):
    script = everything(cache)
    script = dataclasses.replace(script, batching={**script.batching, "cuda_graph_impl": graphs})
    dense = lived_in(kind, script, in_pieces=False)
    assert_same(lived_in(kind, script, in_pieces=True), dense, atol=0.0)
    assert_meets_everything(dense, CONFIGS[kind], cache)
